"""The strategy that flags stand for, as the text that could have been given instead of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from stagec.driver.expert_load import load_statements
from stagec.driver.options import DATA_AXES, REDUCED, REPLICAS, TENSOR_PARALLEL, JobOptions
from stagec.ir_spec.ops.strategy import RECOMPUTE


def strategy_text(
    options: JobOptions, axes: Mapping[str, int | None], symbols: Collection[str]
) -> str:
    """The strategy that the shorthands stand for, of a model that has these symbols."""
    lines = [*_layout(options, axes, symbols), *_policies(options, axes)]
    body = "".join(f"  {line}\n" for line in lines)
    return f"stg.strategy @shorthand[mesh = @pod] {{\n{body}}}"


def _layout(
    options: JobOptions, axes: Mapping[str, int | None], symbols: Collection[str]
) -> Iterator[str]:
    """Which dimensions are split over which axes."""
    data = [a for a in DATA_AXES if a in axes]
    if data:
        yield f"stg.split[B, over = {_tuple(data)}]"
    if "ep" in axes:
        yield "stg.split[B, over = ep, weak]"
    experts = _expert_axes(options, axes)
    if experts and "E" in symbols:
        yield f"stg.split[E, over = {_tuple(experts)}, only_with = M]"
    if "cp" in axes:
        yield "stg.split[S, over = cp]"
        into = _tuple(n for n in ("H", "G") if n in symbols)
        yield {
            "ring": f"stg.ring[S, order = {options.cp_order}]",
            "ulysses": f"stg.exchange[S, into = {into}]",
            "all-gather": "stg.gather[S]",
        }[options.cp_mode]
    if "tp" in axes:
        yield from _tensor_parallel(options, axes, symbols)
    shard = [a for a in ("dp", "dp_shard", "ep", "cp") if a in axes]
    if options.zero and shard:
        more = ""
        if options.reshard_after_forward != "always":
            more += f", reshard = {options.reshard_after_forward}"
        if options.fsdp_prefetch != 1:
            more += f", prefetch = {options.fsdp_prefetch}"
        yield f"stg.shard_params[over = {_tuple(shard)}, zero = {options.zero}{more}]"


def _tensor_parallel(
    options: JobOptions, axes: Mapping[str, int | None], symbols: Collection[str]
) -> Iterator[str]:
    """Heads, width and vocabulary over all of it; KV heads over the part that they suffice for."""
    over = _tuple(a for a in ("tp", REPLICAS) if a in axes)
    whole = ("M",) if options.etp == 1 else ()
    dims = [n for n in TENSOR_PARALLEL if n in symbols and n not in whole]
    if REPLICAS in axes and "G" in dims:
        dims.remove("G")
        yield "stg.split[G, over = tp]"
        yield f"stg.defer[over = {REPLICAS}]"
    if dims:
        yield f"stg.split[{_tuple(dims)}, over = {over}]"
    if options.sp:
        yield f"stg.split[S, over = {over}, at = rest]"
    if options.no_vocab_parallel:
        yield "stg.gather[V]"


def _expert_axes(options: JobOptions, axes: Mapping[str, int | None]) -> list[str]:
    """The axes over which experts are spread: whole experts fold over tp too."""
    whole = options.etp == 1 and (options.ep > 1 or "ep" in axes)
    return [a for a in ("ep", *(("tp",) if whole else ())) if a in axes]


def _policies(options: JobOptions, axes: Mapping[str, int | None]) -> Iterator[str]:
    """What is kept, summed up, cut and in which element types."""
    if "tp" in axes:
        yield f"stg.tp_inputs[{options.tp_inputs.replace('-', '_')}]"
    if "tp" in axes and not options.async_tp:
        yield f"stg.blocking[over = {_tuple(a for a in ('tp', REPLICAS) if a in axes)}]"
    count = microbatches(options, axes.get("pp", 1) or 1)
    if count > 1:
        yield f"stg.microbatches[count = {count}]"
    if "pp" in axes:
        yield _pipeline(options, axes)
    if options.capacity_factor != 1:
        yield f"stg.capacity[factor = {options.capacity_factor}]"
    yield from load_statements(options.expert_load)
    if options.recompute != "none":
        yield f"stg.recompute[{', '.join(_recompute(options))}]"
    if options.offload:
        what = _tuple(n.strip() for n in options.offload.split(","))
        yield f"stg.offload[{what}{', nodes' if options.memory_nodes else ''}]"
    if options.ddp_bucket and options.zero < 2 and not axes.keys().isdisjoint(REDUCED):
        yield f"stg.bucket[bytes = {options.ddp_bucket}]"
    fp8 = f", fp8 = {options.fp8}" if options.fp8 != "none" else ""
    yield (
        f"stg.dtypes[param = {options.param_dtype}, grad = {options.grad_dtype}, "
        f"reduce = {options.reduce_dtype}, master = {options.master_dtype}{fp8}]"
    )
    yield "stg.optimizer[adamw, clip = 1]"


def _pipeline(options: JobOptions, axes: Collection[str]) -> str:
    chunks = f", chunks = {options.chunks}" if options.chunks else ""
    layers = ", ".join(map(str, options.stage_layers))
    layers = f", layers = ({layers})" if layers else ""
    scatter = [a for a in ("tp", REPLICAS) if a in axes] if options.scatter_gather else []
    parts = f", scatter = {_tuple(scatter)}" if scatter else ""
    return f'stg.pipeline[over = pp, schedule = "{options.schedule}"{chunks}{layers}{parts}]'


def microbatches(options: JobOptions, stages: int) -> int:
    """How many microbatches a job has, with so many pipeline stages."""
    return options.microbatches or (2 * stages if stages > 1 else 1)


def recomputed(options: JobOptions) -> list[str]:
    """A policy of recompute, or names of ops."""
    policy = options.recompute.replace("-", "_")
    return [policy] if policy in RECOMPUTE else [n.strip() for n in options.recompute.split(",")]


def _recompute(options: JobOptions) -> Iterator[str]:
    names = recomputed(options)
    yield names[0] if names[0] in RECOMPUTE else f"ops = {_tuple(names)}"
    for name in ("layers", "every"):
        if number := getattr(options, f"recompute_{name}"):
            yield f"{name} = {number}"


def _tuple(names: Iterable[str]) -> str:
    """`dp`, or `(dp, cp)`."""
    listed = list(names)
    return listed[0] if len(listed) == 1 else f"({', '.join(listed)})"
