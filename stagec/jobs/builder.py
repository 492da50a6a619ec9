"""Builds the module of a job, with mesh and strategy, from its options, and runs its pipeline.

Flags are written as a `stg.strategy` text and parsed like any other, so that strategies have one
form; `--print-strategy` shows it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from math import prod
from pathlib import Path

from stagec.analysis.repeated import RepeatedWork
from stagec.importers.library import model_source
from stagec.ir.core import Operation
from stagec.ir.expr import const
from stagec.ir.module import Module
from stagec.ir.queries import Queries, plain
from stagec.ir.types import TensorType
from stagec.ir_spec.strategy.axes import AXES, REPLICAS, TENSOR_AXES, known_key_heads
from stagec.ir_spec.strategy.flag_values import FlagValues
from stagec.ir_spec.strategy.machine import MachineRule
from stagec.ir_spec.strategy.offload import OffloadOp
from stagec.ir_spec.strategy.part import MAIN
from stagec.ir_spec.strategy.redundant_experts import CopiesRule
from stagec.ir_spec.strategy.weights import WeightsRule
from stagec.jobs.instruments import instruments
from stagec.jobs.request.combine import (
    check,
    check_ranks,
    check_sequence,
    complete,
    replicated_state,
)
from stagec.jobs.request.configurations import (
    check_parsed,
    check_texts,
    configuration_name,
    import_configuration,
    is_configuration,
    is_file_name,
    quantized_checkpoint,
)
from stagec.jobs.request.experts import check_experts, mesh_axes, parts_of_data
from stagec.jobs.request.flags import FLAGS, SHORTHANDS, strategy_text
from stagec.jobs.request.machine import remark_of, settled
from stagec.jobs.request.options import IDEAL, JobOptions, find_preset, request, with_step
from stagec.jobs.request.serving_flags import Serving, over_limit, read_serving, refuse_training
from stagec.jobs.request.tensor_parts import Parts, tensor_parts
from stagec.jobs.session import Session
from stagec.jobs.stack import StackLine, apply_stack, needed_flags, of_other_steps, read_stack
from stagec.models import library
from stagec.pipeline.instrument import STATED, Instrument
from stagec.pipeline.manager import PassManager
from stagec.pipeline.passes import Pass
from stagec.pipeline.plugins import Loaded, load_plugins
from stagec.pipeline.spec import PIPELINE as SPEC
from stagec.sharding.strategy import Strategy, read_strategy
from stagec.support.diagnostics import DiagnosticError, error, note
from stagec.support.source import Source, file_loc
from stagec.support.suggest import did_you_mean
from stagec.text.build import parse_module, parse_op
from stagec.text.printer import print_op

SHORTHAND = "<strategy of the command line>"
MESH, ASSUMED = "<mesh of the command line>", "<assumption of the command line>"
TRAIN, FORWARD = "train", "forward"
_FORM = "write 'stg.strategy @name { ... }'; --print-strategy prints that of flags"


class JobBuilder:
    """Turns options into a module with mesh and strategy, and runs the pipeline on it. Diagnostics
    go to the session, if there is one."""

    def __init__(
        self,
        options: JobOptions,
        session: Session | None = None,
        *,
        symbolic: bool = False,
        pod: str = "",
    ) -> None:
        self.session, self._pod = session or Session(), pod
        self._preset = find_preset(options) if options.preset else None
        if self._preset is not None:
            options = with_step(options).changed(model=options.model or self._preset.model)
        if (remark := remark_of(options)) is not None:
            self.session.report(remark)
        self.options, self._symbolic = complete(settled(options)), symbolic
        self._tensor_parts: Parts = {}
        self._assumed: list[Operation] = []
        self._origins: Mapping[Operation, str] = {}
        self.repeated = RepeatedWork()
        #: The sizes that the checks of the options read.
        self.decisions = Queries()
        self.from_texts = False  # whether the strategy is given by a text, not by flags
        self.loaded: Loaded = load_plugins(options.plugin)
        self.model_name = model_name(options)
        self.module = self._load()

    # -- the model ---------------------------------------------------------------------------------

    def _load(self) -> Module:
        check_texts(self.options.model, self.options.strategy)
        entry = library().get(self.options.model)
        source = self.session.remember(model_source(entry)) if entry else self._read_model()
        module = parse_module(source, self.loaded.registry)
        module.decisions = self.decisions
        set_symbols(module, dict(entry.values) if entry else {})
        set_symbols(module, dict(self._preset.values) if self._preset else {})
        set_symbols(module, {n: v for n, v in self.options.sizes.items() if v is not None})
        self.serving = self._serving(module, entry.positions if entry else None)
        self._tensor_parts = self._parts_of_tp(module)
        self.from_texts = bool(
            self.options.strategy or self._preset is not None or module.ops("stg.strategy")
        )
        if self.from_texts:
            self._refuse_shorthands()
        else:
            check_experts(self.options, module.symbols)
            check_sequence(self.options, module.sequences)
        flags = self._request(module)
        self._check_options(flags)
        self._add_strategy(module, flags)
        strategy = read_strategy(module)
        if self.serving is not None:
            refuse_training(module)
            self._warn_of_quantized(strategy)
        self._check_redundant_experts(strategy)
        if self.options.ranks is not None:
            self._match_ranks(module, self.options.ranks)
        if self.serving is None and (remark := replicated_state(module, strategy)):
            self.session.report(remark)
        self._default_batch(module, strategy)
        module.decisions = None
        return module

    def _serving(self, module: Module, positions: int | None) -> Serving | None:
        """The step of serving of the options, if any; sets its sizes in the module."""
        serving = read_serving(self.options, module, positions, symbolic=self._symbolic)
        if serving is not None:
            warning = over_limit(serving)
            if warning is not None:
                self.session.report(warning)
            serving.declare(module, split=self.options.dcp > 1)
        return serving

    def _check_redundant_experts(self, strategy: Strategy) -> None:
        """Raise `DiagnosticError` for redundant experts in a step of training."""
        rule = strategy.one(CopiesRule)
        if rule.count and self.serving is None:
            raise rule.error(
                "redundant experts need a step of serving: training would give each copy weights "
                "of its own",
                remedy="add --serve, or leave out stg.redundant_experts (--redundant-experts)",
            )

    def _read_model(self) -> Source:
        """The text of a file, or of an imported configuration."""
        model = self.options.model
        if not is_configuration(model):
            return self.session.read(model)
        return self.session.remember(
            import_configuration(model, self.session, plugins=self.options.plugin)
        )

    def _warn_of_quantized(self, strategy: Strategy) -> None:
        """Warn if the checkpoint has quantized weights, but the job does not."""
        model, rule = self.options.model, strategy.one(WeightsRule)
        if model in library() or not is_configuration(model) or rule.format != "bf16":
            return
        if (warning := quantized_checkpoint(model, self.session)) is not None:
            self.session.report(warning)

    def _match_ranks(self, module: Module, ranks: int) -> None:
        """Fill in the one open axis of a mesh, and check that it has this number of ranks."""
        sizes: Mapping[str, int | None] = module.mesh.sizes if module.mesh else {}
        unsized = [a for a, n in sizes.items() if n is None]
        if len(unsized) == 1:
            sizes = complete(JobOptions("", mesh=sizes, ranks=ranks)).mesh or {}
            module.ops("stg.mesh")[0].attrs[unsized[0]] = const(sizes[unsized[0]] or 1)
        check_ranks(ranks, sizes)

    def _check_options(self, flags: FlagValues) -> None:
        """Report flags without effect. Raises `DiagnosticError` for a combination that a rule
        refuses."""
        problems = check(flags)
        errors = [d for d in problems if d.severity == "error"]
        if errors:
            raise DiagnosticError(*errors)
        for diagnostic in problems:
            self.session.report(diagnostic)

    def _request(self, module: Module) -> FlagValues:
        """The values of flags, with the flags of the stack that they need."""
        needed = needed_flags(self._stack, self._given) if self._stack else {}
        options = self.options.changed(**needed)
        return request(options, self._axes(), module.symbols, module.sequences)

    @cached_property
    def _stack(self) -> Sequence[StackLine]:
        """The lines of the stack."""
        if self.options.stack == IDEAL:
            return ()
        return read_stack(self.options.stack, self.session, self.loaded.registry)

    @cached_property
    def _given(self) -> frozenset[str]:
        """The names of the flags that are given."""
        flags = (f for f in FLAGS.values() if not f.is_default(getattr(self.options, f.name)))
        return self.options.explicit | {f.name for f in flags}

    def _parts_of_tp(self, module: Module) -> Parts:
        """The axes that replace `tp`; none if a mesh or a strategy is stated. Raises
        `DiagnosticError` for `--dcp` then."""
        texts = self.options.strategy or self._preset or module.ops("stg.strategy")
        if self.options.mesh is not None or texts:
            if self.options.dcp > 1:
                raise error(
                    "--dcp divides the ranks of --tp, found a mesh or a strategy that states them",
                    remedy="give --tp alone, or state 'stg.split[past, over = AXES]'",
                )
            return {}
        return tensor_parts(self.options, module.symbols, self.session.report)

    def _whole_key_heads(self, module: Module) -> list[str]:
        """The assumptions that each rank has one of the key/value heads that some ranks share."""
        axes = [a for a in TENSOR_AXES if a in self._tensor_parts]
        sizes = [self._tensor_parts[a] or 1 for a in axes]
        if REPLICAS not in axes:
            return []
        counts = {
            prod(sizes[:n]): [a for a, s in zip(axes[:n], sizes[:n], strict=True) if s > 1]
            for n in range(1, len(axes))
        }
        kinds = known_key_heads(module.symbols)
        return [f"{n} == {'*'.join(counts[s]) or 1}" for n, s in kinds.items() if s in counts]

    # -- the strategy ------------------------------------------------------------------------------

    def _axes(self) -> dict[str, int | None]:
        if self.from_texts and self.options.mesh is None:
            # the axes are those of the text, with the sizes that flags give
            given = {a: int(getattr(self.options, a)) for a in AXES}
            return {a: n for a, n in given.items() if n > 1 or a in self.options.explicit}
        parts = {"tp": self._tensor_parts, **parts_of_data(self.options)}  # in place of these axes
        return {
            axis: size
            for name, whole in mesh_axes(self.options).items()
            for axis, size in (parts.get(name) or {name: whole}).items()
        }

    def _add_strategy(self, module: Module, flags: FlagValues) -> None:
        """Insert mesh and strategy before the functions; those in the model's own text stay."""
        given: list[Operation] = []
        if self.options.strategy is not None:
            given = self._from_text(
                self.session.read_part(self.options.strategy, "stg.strategy", _FORM)
            )
        elif self._preset is not None:
            given = self._from_text(
                self.session.remember(Source(self._preset.strategy_name, self._preset.text))
            )
        if not module.ops("stg.mesh") and not any(op.name == "stg.mesh" for op in given):
            sizes = self._axes()
            text = ", ".join(a if n is None else f"{a} = {n}" for a, n in sizes.items())
            given.insert(0, self._parse(f"stg.mesh @pod{f'[{text}]' if text else ''}", MESH))
        elif self._axes():
            self._resize_mesh(module, given)
        if not (module.ops("stg.strategy") or any(op.name == "stg.strategy" for op in given)):
            if equal := self._whole_key_heads(module):
                given.append(self._parse(f"stg.assume[{', '.join(equal)}]", ASSUMED))
            text = strategy_text(flags)
            given.append(self._parse(text, SHORTHAND))
        self._assumed = [op for op in given if op.name == "stg.assume"]
        body = module.root.body
        first = next((i for i, op in enumerate(body.ops) if op.name == "stg.func"), len(body.ops))
        for number, op in enumerate(given):
            body.insert(first + number, op)
        self._check_machine(module)
        self._add_stack(module)

    def _check_machine(self, module: Module) -> None:
        """Raise `DiagnosticError` for a machine that a text names: memory, and the types of
        products, follow the flags of a part."""
        rule = read_strategy(module).one(MachineRule)
        if rule.name != self.options.on_machine:
            raise rule.error(
                "a strategy text cannot name the machine, expected it in flags",
                remedy="give --machine for the whole job, or --part 'NAME=VALUE: "
                f"on-machine={rule.name}' for a part",
            )

    def _add_stack(self, module: Module) -> None:
        """Add the defaults of the stack, which flags and texts override."""
        lines, given = self._stack, None if self.from_texts else self._given
        names = {n for op in module.declaring("symbols", "axes") for n in op.attrs}
        strategy, serves = module.ops("stg.strategy")[0], self.serving is not None
        self.session.report(*of_other_steps(self.options.stack or "", lines, serves=serves))
        added = apply_stack(strategy, lines, given=given, serves=serves, names=names)
        whose = {op: self._origin(op) for op in strategy.body.ops if op not in added}
        self._origins = {**whose, **added} if lines else {}

    def _origin(self, op: Operation) -> str:
        """The origin of a statement of the strategy, for comments: `flags`, or a line of a text."""
        place = file_loc(op.loc)
        if place is None or not self.from_texts:
            return "flags"
        return f"{place.file}:{place.line}"

    def _refuse_shorthands(self) -> None:
        """Raise `DiagnosticError` for flags of the strategy, which a text would override."""
        given = [n for n in SHORTHANDS if not FLAGS[n].is_default(getattr(self.options, n))]
        if given:
            names = ", ".join(FLAGS[n].option for n in given)
            text = f", here '{self.options.strategy}'" if self.options.strategy else ""
            raise error(
                f"{names} cannot be used with a strategy text{text}: both say how to parallelize",
                remedy="write these flags into the text; '--print-strategy' shows the statements "
                "of flags",
            )

    def _parse(self, text: str, name: str) -> Operation:
        if self._pod:  # the names of texts distinguish pods
            name = name.replace("command line", f"pod '{self._pod}'")
        return parse_op(self.session.remember(Source(name, text)), self.loaded.registry)

    def _from_text(self, source: Source) -> list[Operation]:
        op = parse_op(source, self.loaded.registry)
        ops = [op] if op.name == "stg.strategy" else list(op.region.ops) if op.region else []
        wanted = [o for o in ops if o.name in ("stg.strategy", "stg.mesh", "stg.assume")]
        if not any(o.name == "stg.strategy" for o in wanted):
            raise op.error(f"{source.name} has no 'stg.strategy'", remedy=_FORM)
        for o in wanted:
            if o.parent:
                o.parent.ops.remove(o)
        return wanted

    def _resize_mesh(self, module: Module, given: list[Operation]) -> None:
        """Set the sizes of axes that the command line gives in the mesh of a text."""
        mesh = next(op for op in (*given, *module.ops("stg.mesh")) if op.name == "stg.mesh")
        for axis, size in self._axes().items():
            if axis not in mesh.attrs:
                raise mesh.error(
                    f"the mesh has no axis '{axis}'",
                    remedy=f"its axes are: {', '.join(mesh.attrs) or 'none'}",
                )
            mesh.attrs[axis] = True if size is None else const(size)

    def _default_batch(self, module: Module, strategy: Strategy) -> None:
        """Set the batch size if it is open: one sequence for each data-parallel rank, microbatch
        and half batch."""
        if self._symbolic or plain(module.symbols).get(strategy.batch, 1) is not None:
            return  # whether it is open follows from the names of the sizes that are given
        batch = strategy.turns * strategy.ranks_of(strategy.batch, module.mesh)
        set_symbols(module, {strategy.batch: batch})

    # -- compiling ---------------------------------------------------------------------------------

    def lower(
        self,
        until: str | None = None,
        watching: Iterable[Instrument] = (),
        *,
        without: Collection[str] = (),
        verify: bool = True,
    ) -> Module:
        """Run the whole pipeline, or up to the pass `until`, with further instruments `watching`.
        Without `verify` the module is not verified after each pass. The passes `without`, whose
        results are not needed, are left out, unless the pipeline was given or is observed.

        Raises `DiagnosticError`."""
        for _ in self.passes(until, watching, without=without, verify=verify):
            pass
        return self.module

    def passes(
        self,
        until: str | None = None,
        watching: Iterable[Instrument] = (),
        *,
        text: str | None = None,
        without: Collection[str] = (),
        verify: bool = True,
    ) -> Iterator[Pass]:
        """Run the passes of `lower`, or of the pipeline `text`, and yield each pass before it runs.
        Raises `DiagnosticError`."""
        pipeline = self.loaded.pipeline(self.pipeline_text if text is None else text)
        names = [p.name for p in pipeline.passes]
        if until in names:
            end = names.index(until) + 1
            pipeline = replace(pipeline, passes=pipeline.passes[:end], locs=pipeline.locs[:end])
        shown = instruments(self.options, pipeline, self.loaded, self.session)
        if without and not shown and self.options.pipeline is None:
            pipeline = pipeline.without(without)
        known = self.loaded.passes.values()
        own = [] if self._symbolic else [self.repeated]
        manager = PassManager(pipeline, [*shown, *watching, *own], known=known, verify=verify)
        yield from manager.one_by_one(self.module)
        for diagnostic in (*self.module.diagnostics.items, *self.repeated.remarks()):
            self.session.report(diagnostic)

    @cached_property
    def pipeline_text(self) -> str:
        """The pipeline to run: the given one, or else that of the kind of step."""
        if self.options.pipeline is not None:
            return self.session.remember(Source(SPEC, self.options.pipeline)).text
        check_parsed(self.module)
        if self.options.part:
            return self._pipeline_of_part()
        if self.serving is not None:
            return self.serving.passes
        trains = _trains(self.module)
        if not trains:
            self.session.remark("the model has no 'param': only the forward pass is compiled")
        return TRAIN if trains else FORWARD

    def _pipeline_of_part(self) -> str:
        """The pipeline of a pod with one part of the model. Raises `DiagnosticError`."""
        rest = f",rest={self.options.rest}" if self.options.rest != MAIN else ""
        cut = f"cut-part{{keep={self.options.keep}{rest}}}"
        if self.serving is not None:
            last = [name for name in STATED if name in self.serving.passes][-1]
            return f"{self.serving.passes},+after({last}):{cut}"
        if not _trains(self.module):
            raise error(
                "--part needs a step of training or of serving, but the model has no 'param' to "
                "train",
                remedy="leave --part out, or add --serve prefill",
            )
        return f"{TRAIN},+after(infer-shapes):{cut},+after(add-optimizer):run-ahead"

    def strategy(self) -> str:
        """The text of mesh and strategy, which can be given as STRATEGY."""
        ops = [*self.module.ops("stg.mesh"), *self._assumed, *self.module.ops("stg.strategy")]
        body = "".join(f"  {line}\n" for op in ops for line in self._lines(op))
        return f"stg.module @strategy {{\n{body}}}\n"

    def _lines(self, op: Operation) -> Iterator[str]:
        """The text of an op; with a stack, each statement with its origin."""
        inner = op.region.ops if op.region is not None else ()
        origins = ["", *(self._origins.get(each, "") for each in inner), ""]
        for line, origin in zip_longest(print_op(op).splitlines(), origins):
            if line is not None:
                yield f"{line}  // {origin}" if origin else line


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


def count_copies(module: Module) -> None:
    """Make the copies between device and host nodes, since they take time."""
    for strategy in module.ops("stg.strategy"):
        for op in strategy.body.ops:
            if isinstance(op.definition, OffloadOp):
                op.attrs["nodes"] = True


def _trains(module: Module) -> bool:
    """Whether the model has parameters to train, as arguments or as ops that declare them."""
    stated = [op.result.type for op in module.walk() if op.definition.declares == "parameter"]
    if any(isinstance(t, TensorType) and t.role in ("", "param") for t in stated):
        return True
    types = [a.type for func in module.functions for a in func.body.args]
    return any(isinstance(t, TensorType) and t.role == "param" for t in types)


def model_name(options: JobOptions) -> str:
    """The name of the model of a job, in the library or by its file. Raises `DiagnosticError` if no
    model is given."""
    if not (options.model or options.preset):
        raise error(
            "no model is given", remedy="give the name of a library model, a file, or a --preset"
        )
    model = options.model or find_preset(options).model
    if is_configuration(model):
        return configuration_name(model)
    return Path(model).stem if is_file_name(model) else model
