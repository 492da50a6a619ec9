"""The options that say which job to compile."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import click

from stagec.driver.expert_load import ExpertLoads, LoadFile
from stagec.ir.expr import MAX_INTEGER
from stagec.ir_spec.ops.strategy import FP8, MOST_AHEAD, RESHARD

F = TypeVar("F", bound=Callable[..., Any])

#: Axes over which the batch is split.
DATA_AXES = ("dp_replicate", "dp_shard", "dp")
#: Axes over which all gradients are reduced.
REDUCED = (*DATA_AXES, "ep", "cp")
#: What tensor parallelism splits: heads, KV heads, feed-forward widths (dense, of an expert, of
#: shared experts), vocabulary.
TENSOR_PARALLEL = ("H", "G", "F", "M", "F_shared", "V")
#: The part of tensor parallelism over which KV heads are replicated, where there are too few.
REPLICAS = "tpr"
#: Bytes of a call that reduces gradients, as in PyTorch's DDP (`bucket_cap_mb`).
BUCKET = 25 << 20
SHORTHANDS = (
    "etp",
    "capacity_factor",
    "expert_load",
    "cp_mode",
    "cp_order",
    "sp",
    "zero",
    "schedule",
    "chunks",
    "stage_layers",
    "scatter_gather",
    "reshard_after_forward",
    "fsdp_prefetch",
    "microbatches",
    "no_vocab_parallel",
    "tp_inputs",
    "async_tp",
    "param_dtype",
    "grad_dtype",
    "reduce_dtype",
    "master_dtype",
    "fp8",
    "ddp_bucket",
    "recompute",
    "recompute_layers",
    "recompute_every",
    "offload",
    "memory_nodes",
)


class Sizes(click.ParamType[dict[str, int | None]]):
    """`NAME=VALUE,...`; with `open_names`, a name may stand alone."""

    name = "NAME=VALUE,..."

    def __init__(self, *, open_names: bool = False) -> None:
        self._open = open_names

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, int | None]:
        """The values by name."""
        found: dict[str, int | None] = {}
        for part in filter(None, (p.strip() for p in str(value).split(","))):
            name, equals, number = (p.strip() for p in part.partition("="))
            if not name.isidentifier() or not name.isascii():
                self.fail(f"'{part}' is not NAME=VALUE", param, ctx)
            if name in found:
                self.fail(f"{name} is given twice", param, ctx)
            if not equals and self._open:
                found[name] = None
                continue
            digits = number.replace("_", "")
            if (
                not digits.isascii()
                or not digits.isdigit()
                or len(digits) > 19
                or not 0 < int(digits) <= MAX_INTEGER
            ):
                self.fail(
                    f"{name} expects a positive integer below 2^63, found '{number}'", param, ctx
                )
            found[name] = int(digits)
        return found


def merged_sizes(
    ctx: click.Context, param: click.Parameter, given: Sequence[dict[str, int | None]]
) -> dict[str, int | None]:
    """The sizes of several --set; of two for one symbol the later one counts."""
    return {name: value for sizes in given for name, value in sizes.items()}


class Layers(click.ParamType[tuple[int, ...]]):
    """`7,8*14,7`: numbers of layers, each with how often it stands."""

    name = "LAYERS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """One number for each part."""
        if not isinstance(value, str):
            return ()  # the default
        found: list[int] = []
        for part in value.split(","):
            size, star, times = (p.strip() for p in part.partition("*"))
            if not _is_count(size) or (star and not _is_count(times)):
                self.fail(f"'{part}' is not a number of layers, or NUMBER*TIMES", param, ctx)
            found += [int(size)] * (int(times) if star else 1)
        return tuple(found)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 5


class Ratio(click.ParamType[Fraction]):
    """A fraction of at least 1: `5/4` or `1.25`."""

    name = "RATIO"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Fraction:
        """The fraction."""
        text = str(value)
        if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6}|/0*[1-9][0-9]{0,5})?", text):
            self.fail(f"expects a fraction such as 5/4 or 1.25, found '{text}'", param, ctx)
        found = Fraction(text)
        if found < 1:
            self.fail(f"{text} is below 1, which would drop tokens", param, ctx)
        return found


@dataclass(frozen=True)
class JobOptions:
    """The options of a job, as click gives them."""

    model: str
    strategy: str | None = None
    preset: str = ""
    sizes: Mapping[str, int | None] = field(default_factory=dict[str, "int | None"])
    mesh: Mapping[str, int | None] | None = None
    ranks: int | None = None
    pp: int = 1
    dp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    cp_mode: str = "ring"
    cp_order: str = "zigzag"
    ep: int = 1
    etp: int = 0
    capacity_factor: Fraction = Fraction(1)
    expert_load: ExpertLoads = ()
    tp: int = 1
    sp: bool = False
    zero: int = 0
    schedule: str = "1f1b"
    chunks: int = 0
    stage_layers: tuple[int, ...] = ()
    scatter_gather: bool = False
    reshard_after_forward: str = "always"
    fsdp_prefetch: int = 1
    microbatches: int = 0
    no_vocab_parallel: bool = False
    tp_inputs: str = "regather"
    async_tp: bool = True
    param_dtype: str = "bf16"
    grad_dtype: str = "f32"
    reduce_dtype: str = "f32"
    master_dtype: str = "f32"
    fp8: str = "none"
    ddp_bucket: int = BUCKET
    recompute: str = "none"
    recompute_layers: int = 0
    recompute_every: int = 0
    offload: str = ""
    memory_nodes: bool = False
    pipeline: str | None = None
    print_strategy: bool = False
    print_after: tuple[str, ...] = ()
    dump_dir: Path | None = None
    time_passes: bool = False
    reproducer: Path | None = None
    check_numerics: bool = False
    plugin: tuple[Path, ...] = ()
    explicit: frozenset[str] = frozenset()


_DTYPES = click.Choice(["f32", "bf16", "f16"])


_COUNT = click.IntRange(min=1)


_OPTIONS = (
    click.argument("model", required=False, default=""),
    click.argument("strategy", required=False),
    click.option(
        "--preset",
        default="",
        metavar="NAME",
        help="A published run: model, sizes, mesh and strategy ('stagec presets' lists them).",
    ),
    click.option(
        "--set",
        "sizes",
        type=Sizes(),
        multiple=True,
        callback=merged_sizes,
        help="Sizes of symbols; B is the global batch in sequences.",
    ),
    click.option(
        "--mesh",
        type=Sizes(open_names=True),
        help="Mesh axes, slowest first: pp=2,dp=4,tp=8 (a name alone is left open).",
    ),
    click.option(
        "--ranks",
        type=_COUNT,
        metavar="N",
        help="All ranks: fills in the axis left open (--dp if no --mesh), or checks their product.",
    ),
    click.option("--dp", type=_COUNT, default=1, help="Data-parallel ranks."),
    click.option("--tp", type=_COUNT, default=1, help="Tensor-parallel ranks."),
    click.option("--pp", type=_COUNT, default=1, help="Pipeline stages."),
    click.option(
        "--schedule",
        default="1f1b",
        metavar="NAME",
        help="Pipeline schedule: gpipe, 1f1b, interleaved, looped-bfs, zb-h1, interleaved-zb, zbv, "
        "dualpipe, dualpipev, or that of a plug-in.",
    ),
    click.option(
        "--chunks",
        type=click.IntRange(min=0),
        default=0,
        help="Parts of the model per stage (default: the schedule's own).",
    ),
    click.option(
        "--stage-layers",
        type=Layers(),
        default=(),
        metavar="N,N*COUNT,...",
        help="Layers of each part of the model, first to last: 7,8*14,7 (default: evenly).",
    ),
    click.option(
        "--scatter-gather",
        is_flag=True,
        help="Tensor-parallel ranks send a part each of what they hold alike to the next stage, "
        "which gathers it.",
    ),
    click.option(
        "--dp-replicate", type=_COUNT, default=1, help="HSDP: replicas of the shard groups."
    ),
    click.option("--dp-shard", type=_COUNT, default=1, help="HSDP: ranks of a shard group."),
    click.option("--cp", type=_COUNT, default=1, help="Context-parallel ranks."),
    click.option(
        "--cp-mode",
        type=click.Choice(["ring", "ulysses", "all-gather"]),
        default="ring",
        help="How attention sees the whole sequence.",
    ),
    click.option(
        "--cp-order",
        type=click.Choice(["zigzag", "plain"]),
        default="zigzag",
        help="How the sequence lies on the ranks of a ring; zigzag balances the causal mask.",
    ),
    click.option(
        "--ep",
        type=_COUNT,
        default=1,
        help="Expert-parallel ranks, some of the data-parallel ones.",
    ),
    click.option(
        "--etp",
        type=click.IntRange(min=0),
        default=0,
        help="Ranks that split each expert: as many as tp (0, the default), or 1.",
    ),
    click.option(
        "--capacity-factor",
        type=Ratio(),
        default="1",
        help="Rows of the expert buffers over those of balanced load, such as 5/4.",
    ),
    click.option(
        "--expert-load",
        type=LoadFile(),
        default=(),
        help="How many tokens the experts take: JSON, a list, or a list for each layer; or such a "
        "list itself.",
    ),
    click.option("--sp", is_flag=True, help="Sequence parallelism between the blocks, over tp."),
    click.option(
        "--zero", type=click.IntRange(0, 3), default=0, help="ZeRO stage over dp; 3 is FSDP."
    ),
    click.option(
        "--reshard-after-forward",
        type=click.Choice(RESHARD),
        default="always",
        help="ZeRO-3: drop gathered parameters after forward, of all blocks but the last, or not.",
    ),
    click.option(
        "--fsdp-prefetch",
        type=click.IntRange(0, MOST_AHEAD),
        default=1,
        metavar="N",
        help="ZeRO-3: gather parameters this many blocks ahead.",
    ),
    click.option(
        "--microbatches",
        type=click.IntRange(min=0),
        default=0,
        help="Microbatches whose gradients are accumulated (default: 1, or 2 per pipeline stage).",
    ),
    click.option(
        "--no-vocab-parallel",
        is_flag=True,
        help="Gather the logits instead of a vocabulary-parallel loss.",
    ),
    click.option(
        "--tp-inputs",
        type=click.Choice(["regather", "save-gathered"]),
        default="regather",
        help="Gather inputs of split matmuls again in backward, or keep them.",
    ),
    click.option(
        "--async-tp/--no-async-tp",
        default=True,
        help="Let computations overlap collectives of tensor parallelism, but for data, or not.",
    ),
    click.option("--param-dtype", type=_DTYPES, default="bf16", help="Parameters and activations."),
    click.option("--grad-dtype", type=_DTYPES, default="f32", help="Gradients."),
    click.option("--reduce-dtype", type=_DTYPES, default="f32", help="Gradients on the wire."),
    click.option(
        "--master-dtype",
        type=_DTYPES,
        default="f32",
        help="The optimizer's copy of the parameters.",
    ),
    click.option(
        "--fp8",
        type=click.Choice(["none", *FP8]),
        default="none",
        help="8-bit products of the blocks: e4m3 forward, gradients in e5m2 (hybrid) or e4m3.",
    ),
    click.option(
        "--ddp-bucket",
        type=click.IntRange(min=0),
        default=BUCKET,
        metavar="BYTES",
        help="ZeRO 0 and 1: reduce gradients in calls of this size, as soon as they are there "
        "(default 25 MiB; 0: in one call after backward).",
    ),
    click.option(
        "--recompute",
        metavar="none|selective|full|full-replay|OP,...",
        default="none",
        help="Activations that backward computes again: by policy, or the results of these ops.",
    ),
    click.option(
        "--recompute-layers",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Recompute in the first N layers of each stage only (0: in all).",
    ),
    click.option(
        "--recompute-every",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Recompute in every N-th layer only (0: in all).",
    ),
    click.option(
        "--offload",
        metavar="activations,optimizer",
        default="",
        help="Keep what the blocks stash, or the optimizer's state, in host memory.",
    ),
    click.option(
        "--memory-nodes",
        is_flag=True,
        help="Write the copies of --offload as nodes of the trace (MEM_STORE, MEM_LOAD).",
    ),
    click.option(
        "--pipeline",
        metavar="PASSES",
        help="Passes to run (default: train; forward if no argument is a param), such as "
        "'train,+after(infer-shapes):my-pass'.",
    ),
    click.option("--print-strategy", is_flag=True, help="Print the strategy and stop."),
    click.option(
        "--print-after",
        multiple=True,
        metavar="NAME|all|change",
        help="Print the module after passes.",
    ),
    click.option("--dump-dir", type=Path, metavar="DIR", help="Write the module after every pass."),
    click.option("--time-passes", is_flag=True, help="Print the time of each pass."),
    click.option(
        "--reproducer", type=Path, metavar="FILE", help="Where to write a crash reproducer."
    ),
    click.option(
        "--check-numerics",
        is_flag=True,
        help="Compare numbers before and after each pass, on tiny sizes.",
    ),
    click.option("--plugin", multiple=True, type=Path, metavar="FILE", help="Load a plug-in file."),
)


def job_options(function: F) -> F:
    """The shared options, in this order in the help."""
    for decorate in reversed(_OPTIONS):
        function = decorate(function)
    return function


def take_options(given: dict[str, Any]) -> JobOptions:
    """Move the shared options out of what click gave, with the names of those that were given."""
    context = click.get_current_context()
    written = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)
    explicit = frozenset(n for n in given if context.get_parameter_source(n) in written)
    taken = {f.name: given.pop(f.name) for f in fields(JobOptions) if f.name in given}
    return JobOptions(**taken, explicit=explicit)
