"""What `compile` and `analyze` share: their options, and the module with its strategy that they
make.

Command-line shorthands are written as a `stg.strategy` text and parsed like any other, so there is
one way in for strategies; `--print-strategy` shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from stagec.driver.common import read_source, remember, report
from stagec.ir.core import Operation
from stagec.ir.expr import MAX_INTEGER, const
from stagec.ir.module import Module
from stagec.ir.types import TensorType
from stagec.models import library
from stagec.pipeline.instrument import DumpDir, Instrument, PrintAfter, Reproducer, Timing
from stagec.pipeline.manager import PassManager
from stagec.pipeline.plugins import Loaded, load_plugins
from stagec.pipeline.spec import PIPELINE as SPEC
from stagec.sharding.strategy import read_strategy
from stagec.support.diagnostics import Diagnostic, DiagnosticError, did_you_mean, error, note
from stagec.support.source import Source
from stagec.text.build import parse_module, parse_op
from stagec.text.printer import print_op

F = TypeVar("F", bound=Callable[..., Any])
AXES = ("pp", "dp", "cp", "tp")
SHORTHANDS = (
    "sp",
    "zero",
    "microbatches",
    "no_vocab_parallel",
    "tp_inputs",
    "param_dtype",
    "grad_dtype",
    "reduce_dtype",
    "master_dtype",
    "ddp_bucket",
    "recompute",
)
SHORTHAND = "<strategy of the command line>"
TRAIN, FORWARD = "train", "forward"


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


@dataclass(frozen=True)
class JobOptions:
    """The options of a job, as click gives them."""

    model: str
    strategy: str | None = None
    sizes: Mapping[str, int | None] = field(default_factory=dict[str, "int | None"])
    mesh: Mapping[str, int | None] | None = None
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    sp: bool = False
    zero: int = 0
    microbatches: int = 1
    no_vocab_parallel: bool = False
    tp_inputs: str = "regather"
    param_dtype: str = "bf16"
    grad_dtype: str = "f32"
    reduce_dtype: str = "f32"
    master_dtype: str = "f32"
    ddp_bucket: int = 0
    recompute: str = "none"
    pipeline: str | None = None
    print_strategy: bool = False
    print_after: tuple[str, ...] = ()
    dump_dir: Path | None = None
    time_passes: bool = False
    reproducer: Path | None = None
    check_numerics: bool = False
    plugin: tuple[Path, ...] = ()


_DTYPES = click.Choice(["f32", "bf16", "f16"])
_COUNT = click.IntRange(min=1)
_OPTIONS = (
    click.argument("model"),
    click.argument("strategy", required=False),
    click.option(
        "--set",
        "sizes",
        type=Sizes(),
        default="",
        help="Sizes of symbols; B is the global batch in sequences.",
    ),
    click.option(
        "--mesh",
        type=Sizes(open_names=True),
        help="Mesh axes, slowest first: pp=2,dp=4,tp=8 (a name alone is left open).",
    ),
    click.option("--dp", type=_COUNT, default=1, help="Data-parallel ranks."),
    click.option("--tp", type=_COUNT, default=1, help="Tensor-parallel ranks."),
    click.option("--pp", type=_COUNT, default=1, help="Pipeline stages (only 1 yet)."),
    click.option("--cp", type=_COUNT, default=1, help="Context-parallel ranks (only 1 yet)."),
    click.option("--ep", type=_COUNT, default=1, help="Expert-parallel ranks (only 1 yet)."),
    click.option("--sp", is_flag=True, help="Sequence parallelism between the blocks, over tp."),
    click.option(
        "--zero", type=click.IntRange(0, 3), default=0, help="ZeRO stage over dp; 3 is FSDP."
    ),
    click.option(
        "--microbatches",
        type=_COUNT,
        default=1,
        help="Microbatches whose gradients are accumulated.",
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
        "--ddp-bucket",
        type=click.IntRange(min=0),
        default=0,
        metavar="BYTES",
        help="Cut gradient reductions into calls of this size (0: one call).",
    ),
    click.option(
        "--recompute",
        type=click.Choice(["none", "selective", "full", "full-replay"]),
        default="none",
        help="Activations that backward computes again.",
    ),
    click.option(
        "--pipeline",
        metavar="PASSES",
        help="Passes to run (default: train; forward if there is no loss to differentiate).",
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
    """Move the shared options out of what click gave."""
    return JobOptions(**{f.name: given.pop(f.name) for f in fields(JobOptions)})


class JobBuilder:
    """Turns options into a module with mesh and strategy, and runs the pipeline on it."""

    def __init__(self, options: JobOptions, *, symbolic: bool = False) -> None:
        self.options, self._symbolic = options, symbolic
        self.loaded: Loaded = load_plugins(options.plugin)
        self.model_name = (
            Path(options.model).stem if _is_file_name(options.model) else options.model
        )
        self.module = self._load()

    # -- the model ---------------------------------------------------------------------------------

    def _load(self) -> Module:
        models = library()
        entry = models.get(self.options.model)
        if entry is None and not _is_file_name(self.options.model):
            raise error(
                f"no model '{self.options.model}' in the library, and no file of that name",
                remedy=did_you_mean(self.options.model, models) or "'stagec models' lists them",
            )
        source = (
            remember(Source(entry.text_name, entry.text))
            if entry
            else read_source(self.options.model)
        )
        module = parse_module(source, self.loaded.registry)
        set_symbols(module, dict(entry.values) if entry else {})
        set_symbols(module, {n: v for n, v in self.options.sizes.items() if v is not None})
        self._check_axes()
        self._add_strategy(module)
        self._default_batch(module)
        return module

    def _check_axes(self) -> None:
        options = self.options
        for axis, what in (("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
            if getattr(options, axis) > 1:
                raise error(
                    f"--{axis} {getattr(options, axis)}: {what} parallelism is not there yet",
                    remedy=f"leave --{axis} at 1",
                )
        if options.mesh is not None and (options.dp, options.tp) != (1, 1):
            raise error(
                "--mesh and --dp or --tp both give the mesh", remedy="give the axes in one of them"
            )
        if options.sp and options.tp == 1 and options.mesh is None:
            report(Diagnostic("--sp has no effect without --tp", severity="warning"))

    # -- the strategy ------------------------------------------------------------------------------

    def _axes(self) -> dict[str, int | None]:
        if self.options.mesh is not None:
            return dict(self.options.mesh)
        return {a: getattr(self.options, a) for a in AXES if getattr(self.options, a) > 1}

    def _add_strategy(self, module: Module) -> None:
        """Put mesh and strategy in front of the functions; a strategy in the model's own text
        stays."""
        given: list[Operation] = []
        if self.options.strategy is not None:
            given = self._from_file(self.options.strategy)
        if not module.ops("stg.mesh") and not any(op.name == "stg.mesh" for op in given):
            sizes = self._axes()
            text = ", ".join(a if n is None else f"{a} = {n}" for a, n in sizes.items())
            given.insert(0, self._parse(f"stg.mesh @pod{f'[{text}]' if text else ''}"))
        elif self.options.mesh is not None or (self.options.dp, self.options.tp) != (1, 1):
            self._resize_mesh(module, given)
        if module.ops("stg.strategy") or any(op.name == "stg.strategy" for op in given):
            self._refuse_shorthands()
        else:
            given.append(self._parse(strategy_text(self.options, self._axes())))
        body = module.root.body
        first = next((i for i, op in enumerate(body.ops) if op.name == "stg.func"), len(body.ops))
        for number, op in enumerate(given):
            body.insert(first + number, op)

    def _refuse_shorthands(self) -> None:
        """A strategy in a text says it all; flags beside it would be lost."""
        default = JobOptions("")
        flags = [n for n in SHORTHANDS if getattr(self.options, n) != getattr(default, n)]
        if flags:
            names = ", ".join("--" + n.replace("_", "-") for n in flags)
            raise error(
                f"{names} and a strategy text both say how to parallelize",
                remedy="write it into the text ('--print-strategy' shows how flags are written)",
            )

    def _parse(self, text: str) -> Operation:
        return parse_op(remember(Source(SHORTHAND, text)), self.loaded.registry)

    def _from_file(self, path: str) -> list[Operation]:
        op = parse_op(read_source(path), self.loaded.registry)
        found = [op] if op.name == "stg.strategy" else list(op.region.ops) if op.region else []
        wanted = [o for o in found if o.name in ("stg.strategy", "stg.mesh", "stg.assume")]
        if not any(o.name == "stg.strategy" for o in wanted):
            raise error(
                f"{path} holds no 'stg.strategy'",
                op.loc,
                remedy="write 'stg.strategy @name { ... }'",
            )
        for o in wanted:
            if o.parent:
                o.parent.ops.remove(o)
        return wanted

    def _resize_mesh(self, module: Module, given: list[Operation]) -> None:
        """Sizes on the command line win over those of a mesh in a text, axis by axis."""
        mesh = next(op for op in (*given, *module.ops("stg.mesh")) if op.name == "stg.mesh")
        for axis, size in self._axes().items():
            if axis not in mesh.attrs:
                raise error(
                    f"the mesh has no axis '{axis}'",
                    mesh.loc,
                    remedy=f"its axes are: {', '.join(mesh.attrs) or 'none'}",
                )
            mesh.attrs[axis] = True if size is None else const(size)

    def _default_batch(self, module: Module) -> None:
        """Without a batch size: one sequence per data-parallel rank and microbatch."""
        strategy = read_strategy(module)
        if self._symbolic or module.symbols.get(strategy.batch, 1) is not None:
            return
        mesh = module.mesh
        over = {a for rule in strategy.splits if strategy.batch in rule.dims for a in rule.over}
        batch = strategy.microbatches
        for axis, size in dict(mesh.sizes if mesh else {}).items():
            batch *= (size or 1) if axis in over else 1
        set_symbols(module, {strategy.batch: batch})

    # -- compiling ---------------------------------------------------------------------------------

    def lower(self) -> Module:
        """Run the pipeline up to the lowered module. Raises `DiagnosticError`."""
        pipeline = self.loaded.pipeline(self.pipeline_text())
        known = self.loaded.passes.values()
        PassManager(pipeline, self._instruments(pipeline.passes), known=known).run(self.module)
        for diagnostic in self.module.diagnostics.items:
            report(diagnostic)
        return self.module

    def _instruments(self, passes: tuple[Any, ...]) -> list[Instrument]:
        options = self.options
        found: list[Instrument] = []
        if options.print_after:
            found.append(PrintAfter(options.print_after, sys.stderr))
        if options.dump_dir is not None:
            found.append(DumpDir(options.dump_dir))
        if options.reproducer is not None:
            found.append(Reproducer(options.reproducer, passes))
        if options.check_numerics:
            from stagec.interp.check import NumericCheck

            found.append(NumericCheck())
        if options.time_passes:
            found.append(Timing(sys.stderr))
        return found

    def pipeline_text(self) -> str:
        """The passes to run: as asked for, else those that fit what the model computes."""
        if self.options.pipeline is not None:
            return remember(Source(SPEC, self.options.pipeline)).text
        trains = any(
            op.name == "stg.func" and _has_parameters(op) for op in self.module.root.body.ops
        )
        if not trains:
            report(
                Diagnostic("no argument is a 'param': compiling forward only", severity="remark")
            )
        return TRAIN if trains else FORWARD

    def strategy(self) -> str:
        """The text of mesh and strategy: a file that can be given as STRATEGY."""
        ops = [*self.module.ops("stg.mesh"), *self.module.ops("stg.strategy")]
        body = "".join("  " + line + "\n" for op in ops for line in print_op(op).splitlines())
        return f"stg.module @strategy {{\n{body}}}\n"


def set_symbols(module: Module, values: Mapping[str, int]) -> None:
    """Give symbols their values. Raises `DiagnosticError` for a name that the module does not
    declare."""
    declared = {name: op for op in module.ops("stg.symbols") for name in op.attrs}
    for name, value in values.items():
        if name not in declared:
            notes = [note("symbols are declared here", op.loc) for op in module.ops("stg.symbols")]
            raise error(
                f"the model has no symbol '{name}'",
                notes=notes,
                remedy=did_you_mean(name, declared) or f"its symbols are: {', '.join(declared)}",
            )
        declared[name].attrs[name] = const(value)


def strategy_text(options: JobOptions, axes: Mapping[str, int | None]) -> str:
    """The strategy that the shorthands stand for."""
    lines: list[str] = []
    if "dp" in axes:
        lines.append("stg.split[B, over = dp]")
    if "tp" in axes:
        lines.append("stg.split[(H, G, F, V), over = tp]")
        if options.sp:
            lines.append("stg.split[S, over = tp, at = rest]")
        if options.no_vocab_parallel:
            lines.append("stg.gather[V]")
        lines.append(f"stg.tp_inputs[{options.tp_inputs.replace('-', '_')}]")
    if options.zero and "dp" in axes:
        lines.append(f"stg.shard_params[over = dp, zero = {options.zero}]")
    if options.microbatches > 1:
        lines.append(f"stg.microbatches[count = {options.microbatches}]")
    if options.recompute != "none":
        lines.append(f"stg.recompute[{options.recompute.replace('-', '_')}]")
    if options.ddp_bucket:
        lines.append(f"stg.bucket[bytes = {options.ddp_bucket}]")
    lines.append(
        f"stg.dtypes[param = {options.param_dtype}, grad = {options.grad_dtype}, "
        f"reduce = {options.reduce_dtype}, master = {options.master_dtype}]"
    )
    lines.append("stg.optimizer[adamw, clip = 1]")
    return (
        "stg.strategy @shorthand[mesh = @pod] {\n" + "".join(f"  {line}\n" for line in lines) + "}"
    )


def _has_parameters(func: Operation) -> bool:
    types = [a.type for a in func.body.args]
    return any(isinstance(t, TensorType) and t.role == "param" for t in types)


def _is_file_name(name: str) -> bool:
    return name == "-" or name.endswith(".stg") or Path(name).exists()


__all__ = [
    "DiagnosticError",
    "JobBuilder",
    "JobOptions",
    "job_options",
    "set_symbols",
    "strategy_text",
    "take_options",
]
