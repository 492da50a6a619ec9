"""The rules of combination of options. Every rule is one function; all are checked before any work.

A rule yields an error that names the constraint and the nearest choices that satisfy it, or a
warning for a flag without effect. `complete` fills in the axis that `--ranks` leaves open.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import isqrt, prod

from stagec.ir.module import Module
from stagec.ir_spec.ops.quantized import FORMATS
from stagec.ir_spec.strategy import STATEMENTS
from stagec.ir_spec.strategy.axes import AXES as ALL_AXES
from stagec.ir_spec.strategy.axes import (
    EXPERTS,
    PARTS,
    SHARDING,
    SHARED_WIDTH,
    TENSOR_AXES,
    known_key_heads,
)
from stagec.ir_spec.strategy.flag_values import SERVE, FlagValues
from stagec.ir_spec.strategy.gradients import STAGED
from stagec.ir_spec.strategy.kernels import CUTLASS, DEVICE
from stagec.ir_spec.strategy.mesh_flags import MESH_ORDER
from stagec.ir_spec.strategy.microbatches import microbatches
from stagec.ir_spec.strategy.split import key_axes
from stagec.ir_spec.strategy.statement import Flag, Need, Statement
from stagec.jobs.request.flags import FLAGS
from stagec.jobs.request.options import JobOptions
from stagec.schedule.registry import SCHEDULES
from stagec.sharding.strategy import Strategy
from stagec.support.diagnostics import Diagnostic, error

#: The axes whose sizes flags give, slowest first; expert parallelism is part of data parallelism.
AXES = tuple(a for a in ALL_AXES if a != "ep")
#: Flags for training of statements that also apply to serving, and why serving refuses them.
TRAINING = {
    "grad_dtype": "there are no gradients",
    "reduce_dtype": "there are no gradients",
    "master_dtype": "there is no optimizer",
    "moment_dtype": "there is no optimizer",
    "host_issue_backward": "there is no backward",
    "tp_inputs": "there is no backward to keep inputs for",
    "cp_inputs": "there is no backward to keep inputs for",
}
Rule = Callable[[FlagValues], Iterator[Diagnostic]]
#: The square of it exceeds any number of ranks.
_LARGEST = 1 << 16


def flag(name: str) -> str:
    """`--dp-shard` for `dp_shard`."""
    return "--" + name.replace("_", "-")


def given_axes(options: JobOptions) -> list[str]:
    """The axes to which flags other than --mesh give a size."""
    return [a for a in AXES if getattr(options, a) > 1]


def nearest(wanted: int, valid: Iterable[int]) -> str:
    """`among 2, 4, 8`: the three valid numbers nearest to the wanted one; `1` for a single one."""
    best = sorted(sorted(valid), key=lambda n: abs(n - wanted))[:3]
    text = ", ".join(map(str, sorted(best))) or "none"
    return f"among {text}" if len(best) > 1 else text


def divisors(number: int) -> list[int]:
    """The divisors of a number, sorted. Those of a number beyond `_LARGEST` squared are the ones up
    to `_LARGEST` and their quotients."""
    small = [n for n in range(1, min(isqrt(number), _LARGEST) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _error(message: str, remedy: str) -> Diagnostic:
    return Diagnostic(message, severity="error", remedy=remedy)


def _warning(message: str) -> Diagnostic:
    return Diagnostic(message, severity="warning")


# -- ranks -----------------------------------------------------------------------------------------


def complete(options: JobOptions) -> JobOptions:
    """The options with a size for the axis that --ranks leaves open: the one of --mesh without a
    size, or else data parallelism. Raises `DiagnosticError` if no size fits."""
    from_text = options.strategy is not None or bool(options.preset)
    if options.ranks is None or (from_text and options.mesh is None):
        return options
    if options.mesh is not None:
        unsized = [a for a, n in options.mesh.items() if n is None]
        if len(unsized) != 1:
            return options
        others = {a: n for a, n in options.mesh.items() if n is not None}
        size = _quotient(options.ranks, unsized[0], others)
        return options.changed(mesh={**options.mesh, unsized[0]: size})
    others = {a: int(getattr(options, a)) for a in given_axes(options)}
    axis = _left_open(others)
    if axis is None:
        return options
    size = _quotient(options.ranks, axis, others)
    return options.changed(**{axis: size})


def _left_open(given: Mapping[str, int]) -> str | None:
    """The data-parallel axis that no flag gives: dp, or the other axis of hybrid sharding."""
    hybrid = [a for a in ("dp_replicate", "dp_shard") if a in given]
    if len(hybrid) == 2 or "dp" in given:
        return None
    if hybrid:
        return "dp_shard" if hybrid == ["dp_replicate"] else "dp_replicate"
    return "dp"


def _quotient(ranks: int, axis: str, others: Mapping[str, int]) -> int:
    taken = prod(others.values())
    if ranks % taken == 0:
        return ranks // taken
    shown = " x ".join(f"{a} {n}" for a, n in others.items())
    shown += f" = {taken}" if len(others) > 1 else ""
    below = ranks // taken * taken
    counts = ", ".join(str(n) for n in (below, below + taken) if n)
    choices = [
        f"{flag(a)} {nearest(n, divisors(ranks * n // taken))}"
        for a, n in others.items()
        if ranks % (taken // n) == 0
    ]
    raise error(
        f"--ranks {ranks} is not a multiple of {shown}, so axis '{axis}' gets no size",
        remedy=f"choose {' or '.join([f'--ranks among {counts}', *choices])}",
    )


def check_ranks(ranks: int | None, mesh: Mapping[str, int | None]) -> None:
    """Raise `DiagnosticError`, with sizes that would fit, if the mesh of a job does not have
    --ranks ranks."""
    sizes = {a: n for a, n in mesh.items() if n is not None}
    product = prod(sizes.values())
    if ranks is None or (len(sizes) == len(mesh) and product == ranks):
        return
    shown = " x ".join(f"{a} {n}" if n else f"{a} open" for a, n in mesh.items()) or "one rank"
    fitting = [
        f"{a} = {ranks * n // product}"
        for a, n in sizes.items()
        if ranks * n % product == 0 and len(sizes) == len(mesh)
    ]
    unsized = [a for a, n in mesh.items() if n is None]
    if len(unsized) > 1:
        raise error(
            f"--ranks {ranks} gives the size of one axis, but {' and '.join(unsized)} have no size",
            remedy="give sizes to all of them but one, as in --mesh dp,tp=8",
        )
    raise error(
        f"--ranks {ranks} differs from the mesh {shown}, which has {product} ranks",
        remedy=f"choose {' or '.join(fitting)}"
        if fitting
        else f"give sizes whose product is {ranks}",
    )


def check_sequence(options: JobOptions, sequences: Collection[str]) -> None:
    """Raise `DiagnosticError` for flags that split a sequence if the model has none."""
    axes = options.mesh or {}
    given = [n for n in ("cp", "sp") if n in axes or getattr(options, n) > (n == "cp")]
    if given and not sequences:
        raise error(
            f"{flag(given[0])}: the model has no sequence dimension to split",
            remedy="leave it out: --tp splits heads and feed-forward widths, --dp the batch",
        )


# -- rules -----------------------------------------------------------------------------------------


def _one_mesh(request: FlagValues) -> Iterator[Diagnostic]:
    if request["dp"] > 1 and request["dp_replicate"] * request["dp_shard"] > 1:
        yield _error(
            "--dp cannot be used with --dp-replicate or --dp-shard",
            "give --dp, or --dp-replicate R --dp-shard N with R*N ranks",
        )
    sized = [a for a in AXES if request[a] > 1]
    if request["mesh"] is not None and sized:
        yield _error(
            f"--mesh and {flag(sized[0])} cannot be used together",
            "give all axes in --mesh, or in flags",
        )
    if request["mesh"] is not None and request[MESH_ORDER.name]:
        yield _error("--mesh and --mesh-order cannot be used together", "leave --mesh-order out")


def _heads(request: FlagValues) -> Iterator[Diagnostic]:
    """With more tensor-parallel ranks than KV heads, every rank still needs a query head."""
    heads, tp = request.sizes.get("H"), request.ranks(*TENSOR_AXES)
    groups = min(known_key_heads(request.sizes).values(), default=0)
    if heads and groups and tp > groups and tp % groups == 0 and heads % tp:
        valid = [n for n in divisors(heads) if n % groups == 0 or groups % n == 0]
        yield _error(
            f"H = {heads} does not divide over tp = {tp}", f"choose --tp {nearest(tp, valid)}"
        )


def _ulysses(request: FlagValues) -> Iterator[Diagnostic]:
    """Ulysses splits the KV heads that tensor parallelism leaves on a rank."""
    cp = request.ranks("cp")
    if request["cp_mode"] != "ulysses" or cp == 1:
        return
    for name, heads in known_key_heads(request.sizes).items():
        tp = request.ranks(*key_axes(request, name))
        if heads % (cp * tp):
            left = heads // tp if heads % tp == 0 else heads
            yield _error(
                f"{name} = {heads} does not divide over tp*cp = {tp * cp}: --cp-mode ulysses "
                "splits the key/value heads over cp",
                f"choose --cp {nearest(cp, divisors(left))}, or --cp-mode all-gather",
            )
            return


def _pipeline(request: FlagValues) -> Iterator[Diagnostic]:
    """ZeRO-3 in a pipeline gathers the parameters of a stage for every microbatch."""
    stages = request.ranks("pp")
    if stages == 1:
        return
    count = microbatches(request["microbatches"], stages)
    sharded = request["zero"] == 3 and request["reshard_after_forward"] != "never"
    if sharded and request.over(*SHARDING):
        yield _warning(
            f"--zero 3 in a pipeline gathers the parameters of a stage {2 * count} times per "
            f"step, in forward and backward of each of {count} microbatches; --zero 1 gathers "
            "them once"
        )


def _recompute(request: FlagValues) -> Iterator[Diagnostic]:
    """Recomputation covers at most as many layers as the model has."""
    layers = request.sizes.get("L")
    for name in ("recompute_layers", "recompute_every"):
        if request["recompute"] != "none" and layers and request[name] > layers:
            yield _error(
                f"{flag(name)} {request[name]}, but the model has L = {layers} layers",
                f"choose {flag(name)} from 1 to {layers}",
            )


def _refused_by(statement: Statement) -> Rule:
    """The rule of the combinations that one statement refuses."""

    def rule(request: FlagValues) -> Iterator[Diagnostic]:
        yield from (_error(*problem) for problem in statement.problems(request))

    return rule


def lacking(request: FlagValues, given: Flag) -> Need | None:
    """The need of a given flag that is not met, or None."""
    needed = () if given.is_default(request[given.name]) else given.needs + given.beside
    return next((need for need in needed if not _is_met(request, need)), None)


def _only_serving(request: FlagValues) -> Iterator[Diagnostic]:
    """Flags that a step of training refuses."""
    if request["dp_attention"]:
        yield _error("--dp-attention needs a step of serving", "add --serve decode, or use --sp")
    if request["afd"] and request.ranks("pp") > 1:
        yield _error(
            "--afd needs a step of serving: training keeps no caches",
            "add --serve decode, or leave it out",
        )
    if request["redundant_experts"]:
        yield _error(
            "--redundant-experts needs a step of serving: training would give each copy "
            "weights of its own",
            "add --serve decode, or leave it out",
        )
    if request["lora"] and request["max_loras"] > 1:
        yield _error(
            "--max-loras needs a step of serving: training trains one adapter",
            "add --serve decode, or leave it out",
        )
    if request["weight_dtype"] != "bf16" and not (request["lora"] or request["freeze"]):
        yield _error(
            f"--weight-dtype {request['weight_dtype']} needs serving or frozen weights: "
            "weights in few bits have no gradient",
            "add --serve decode, freeze the weights with --lora or --freeze, or use --fp8 for "
            "products in 8 bits",
        )


def _serving(request: FlagValues) -> Iterator[Diagnostic]:
    """Flags for training in a step of serving, and the other way round."""
    serve = request.flags.get("serve")
    if not serve:
        yield from _only_serving(request)
        return
    for statement in STATEMENTS:
        for given in statement.flags:
            reason = statement.training or TRAINING.get(given.name, "")
            if reason and not given.is_default(request[given.name]):
                yield _error(
                    f"{given.option} cannot be used with --serve: {reason}", "leave it out"
                )
    schedule = SCHEDULES.get(request["schedule"])
    if schedule is not None and schedule.splits_weight_gradient:
        yield _error(
            f"--schedule {request['schedule']} cannot be used with --serve: it splits backward",
            "choose gpipe, 1f1b or interleaved",
        )
    if serve == "decode" and request["sp"]:
        yield _error(
            "--sp splits the tokens of a sequence, but a step of decode has only a few",
            "leave it out, or split the sequences: --dp-attention",
        )


_WITH_NEEDS = [flag for flag in FLAGS.values() if flag.needs or flag.beside]


def idle(request: FlagValues) -> Iterator[tuple[Flag, Need]]:
    """The flags that are given without something that they need, and the need."""
    for given in _WITH_NEEDS:
        if (need := lacking(request, given)) is not None:
            yield given, need


def without_effect(request: FlagValues) -> Iterator[Diagnostic]:
    """Warnings of flags without effect."""
    for given, need in idle(request):
        shown = f"--no-{given.option[2:]}" if request[given.name] is False else given.option
        if need == "ep" and (ranks := request["ep"]) > 1:
            yield _warning(
                f"{shown} has no effect: the ranks of --ep {ranks} are those of tp, which have all "
                "tokens"
            )
            continue
        yield _warning(f"{shown} has no effect without {flag(_names(need)[0])}")
    yield from _gradients_without_effect(request)
    yield from _formats_without_effect(request)
    if request["fuse_caches"] and not request.flags.get("serve"):
        yield _warning("--fuse-caches has no effect without --serve: training has no caches")
    if request["whole_shared_experts"] and {EXPERTS, SHARED_WIDTH} & {*request.sizes} == {EXPERTS}:
        yield _warning("--whole-shared-experts has no effect: the model has no shared experts")
    schedule = SCHEDULES.get(request["schedule"])
    splits = schedule is not None and schedule.splits_weight_gradient
    if not splits and not FLAGS["stage_graph"].is_default(request["stage_graph"]):
        name = request["schedule"]
        yield _warning(f"--stage-graph has no effect with {name}, which does not split backward")
    if request[MESH_ORDER.name] and in_usual_order(request.axes):
        yield _warning("--mesh-order has no effect: this is the default order")
    data, sharding = request.ranks(*PARTS), request.ranks(*SHARDING)
    if 1 < request["reshard_ranks"] == data == sharding and request["zero"] == 3:
        yield _warning("--reshard-ranks has no effect: these are all ranks that shard")
    if request["scatter_gather"] and request["sp"] and {"pp", "tp"} <= request.axes.keys():
        yield _warning("--scatter-gather has no effect with --sp, which splits messages already")


def _formats_without_effect(request: FlagValues) -> Iterator[Diagnostic]:
    """Warnings of flags for a format that nothing has."""
    kernel, weights = request["expert_kernel"], request["weight_dtype"]
    if not FLAGS["weight_dtype"].is_default(weights) and weights not in _multiplied(kernel):
        yield _warning(f"--expert-kernel {kernel} has no effect with --weight-dtype {weights}")
    moments, kind = request["table_moments"], request["optimizer"]
    if not FLAGS["table_moments"].is_default(moments) and kind != "adam8bit":
        yield _warning("--table-moments has no effect without --optimizer adam8bit")


def _multiplied(kernel: str) -> Collection[str]:
    """The formats of weights of experts that a kernel multiplies (`stg.kernels[experts]`)."""
    if kernel == DEVICE:
        return FORMATS
    return ("nvfp4",) if kernel == CUTLASS else ("fp8",)


def _gradients_without_effect(request: FlagValues) -> Iterator[Diagnostic]:
    """Warnings of flags of gradients without effect."""
    zero, once = request["zero"], "--zero 1, which reduces gradients once"
    sums = microbatches(request["microbatches"], request.ranks("pp")) > 1
    parts = "--zero 2 and 3, which reduce layer by layer" if zero >= 2 else ""
    single = "" if sums else "one microbatch, whose gradients are no sums"
    flat = parts or ("" if request["ddp_bucket"] else "--ddp-bucket 0, which has no buckets")
    views = "--ddp-views, with which gradients are parts of the buckets"
    idle = {
        "ddp_bucket": parts,
        "ddp_copies": flat or (views if request["ddp_views"] else ""),
        "ddp_views": flat,
        "grad_sums": single,
        "grad_collective": "--zero 2 and 3, which reduce the part of each rank" if parts else "",
        "grad_reduction": once if zero == 1 else single if zero else "",
    }
    for name, reason in idle.items():
        if reason and not FLAGS[name].is_default(request[name]):
            yield _warning(f"{flag(name)} has no effect with {reason}")
    if request["grad_reduction"] == STAGED and zero >= 2 and sums and "pp" not in request.axes:
        yield _warning("--grad-reduction staged has no effect without --pp")


def in_usual_order(axes: Iterable[str]) -> bool:
    """Whether the axes of a mesh are in the default order."""
    places = [ALL_AXES.index(a) for a in axes if a in ALL_AXES]
    return places == sorted(places)


def replicated_state(module: Module, strategy: Strategy) -> Diagnostic | None:
    """A remark on a step of training whose context-parallel ranks all have the same optimizer
    state; None if they shard it, or if their number is open."""
    mesh = module.mesh
    ranks = mesh.sizes.get("cp") if mesh is not None else None
    if (ranks or 1) == 1 or (strategy.zero and "cp" in strategy.zero_axes):
        return None
    return Diagnostic(
        "each rank of cp has the whole optimizer state of its parameters; Megatron-LM's "
        "distributed optimizer and FSDP shard it over dp and cp",
        severity="remark",
        remedy="add --zero 1, or stg.shard_params[over = (dp, cp), zero = 1] in a text",
    )


def _is_met(request: FlagValues, need: Need) -> bool:
    """Whether a need of a flag is met. Dimensions of the model are left to `check_experts`."""
    return any(_is_there(request, name) for name in _names(need))


def _names(need: Need) -> tuple[str, ...]:
    return (need,) if isinstance(need, str) else need


def _is_there(request: FlagValues, name: str) -> bool:
    if name == SERVE:
        return bool(request.flags.get(SERVE))
    if name in ALL_AXES:
        return name in request.axes
    return name not in FLAGS or not FLAGS[name].is_default(request[name])


#: All rules of combination; a new one is a function and a line here.
RULES: tuple[Rule, ...] = (
    _one_mesh,
    _heads,
    _ulysses,
    _pipeline,
    _recompute,
    _serving,
    *map(_refused_by, STATEMENTS),
    without_effect,
)


def check(request: FlagValues) -> list[Diagnostic]:
    """The diagnostics of all rules for a job, errors first."""
    diagnostics = [d for rule in RULES for d in rule(request)]
    return sorted(diagnostics, key=lambda d: d.severity != "error")
