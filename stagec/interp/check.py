"""A numeric check around passes: a program must compute the same results before and after a
pass."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import TypeAlias

import numpy as np

from stagec.interp.data import filled, random_inputs, tiny_sizes
from stagec.interp.machine import DisagreementError
from stagec.interp.pipeline import run_named
from stagec.ir.core import Operation, Value
from stagec.ir.expr import evaluate
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.ir.traits import PicksOne, Repeats
from stagec.ir.types import CACHED, TensorType
from stagec.ir_spec.ops.layout import Workspace
from stagec.ir_spec.ops.parts import Arrive, Depart
from stagec.ir_spec.ops.pod_crossings import TakeOver
from stagec.sharding.stages import stage_functions
from stagec.support.diagnostics import error
from stagec.support.source import Loc, Source
from stagec.text.build import parse_module
from stagec.text.printer import print_module

_TOLERANCE = 1e-7
#: The most elements of a tensor that a check computes; its products take some seconds.
_MOST_NUMBERS = 1 << 20
#: The location and the scope of an argument.
_Origin: TypeAlias = tuple[Loc, str]
_LOCKSTEP = ("partitioned", "planned")


class NumericCheck:
    """An instrument for the pass manager: runs the program on small random inputs around every
    pass.

    Before collectives are explicit, the program runs on one device; afterwards all ranks run in
    lockstep on a mesh with axes of size 2. Both runs have the same inputs and the same sizes, which
    satisfy all assumptions after the pass. The loss (result 0) must not change, and neither may the
    other results if their number does not. Parameters that a pass cuts from a packed one have its
    numbers; padding is zero, and so are arguments that it adds, as adapters begin. Programs are not
    compared if the pass is not `exact`, replaces their symbols or other arguments, or makes a
    serving step of a forward pass.
    """

    def __init__(self) -> None:
        self._before: Module | None = None
        self._origins: Mapping[str, _Origin] = {}  # of the arguments before
        self.checked: list[str] = []

    def before_pass(self, pass_: object, module: Module) -> None:
        """Keep a copy of the program, unless it has pipeline stages and an earlier copy without
        them exists."""
        if stage_functions(module) and self._before is not None:
            return
        self._before = None
        if _runs(module) and not stage_functions(module):
            source = Source("<before>", print_module(module))
            self._before = parse_module(source, module.registry, allow_unregistered=True)
            self._origins = {a.name: _origin(a) for a in module.main.body.args}

    def after_pass(self, pass_: object, module: Module) -> None:
        """Compare the results. Raises `DiagnosticError` if they differ, or if ranks disagree."""
        name = str(getattr(pass_, "name", pass_))
        if not getattr(pass_, "exact", True):
            self._before = None
        before = self._before
        if before is None or not _runs(module) or before.symbols.keys() != module.symbols.keys():
            return
        if _serves(module) and not _serves(before):
            return
        if not stage_functions(module) and not _same_arguments(module, before):
            return
        if _samples(module) and not _samples(before):
            return
        if before.phase not in _LOCKSTEP and _in_parts(before):
            return
        sizes = tiny_sizes(module, 2, _stages(module, before))
        _expect_small(module, sizes)
        whole = _env(before, sizes)
        inputs = random_inputs(before.functions[0].body.args, whole, 0)
        if not stage_functions(module):
            inputs |= _parts_of(before, self._origins, module, inputs)
        args = [a for func in module.functions for a in func.body.args if a.tensor.part is None]
        fresh = {a.name: a.tensor.shape for a in args if a.name not in inputs}
        for each, shape in fresh.items():
            inputs[each] = np.broadcast_to(0.0, [evaluate(s, whole) for s in shape])
        expected = _run(before, sizes, inputs, f"before pass '{name}'")
        _compare(name, module, expected, _run(module, sizes, inputs, f"after pass '{name}'"))
        self.checked.append(name)


def _expect_small(module: Module, sizes: Mapping[str, int]) -> None:
    """Raises `DiagnosticError`, at the largest value, for a program that is large although its
    symbols are small, because sizes are literal. Buffers whose numbers nothing reads do not count.
    """
    env = dict.fromkeys(module.mesh.axes if module.mesh else (), 1) | dict(sizes)
    worst, where = 0, module.root.loc
    for func in module.functions:
        values = [(a, func.loc) for a in func.body.args if a.tensor.role != "bucket"]
        ops = (op for op in func.body.walk() if not isinstance(op.definition, Workspace))
        values += [(r, op.loc) for op in ops for r in op.results]
        for value, loc in values:
            if isinstance(value.type, TensorType):
                count = prod(evaluate(d.size, env) for d in value.type.dims)
                worst, where = max((worst, where), (count, loc), key=lambda each: each[0])
    if worst > _MOST_NUMBERS:
        raise error(
            f"--check-numerics would compute a tensor of {worst:,} numbers, of at most "
            f"{_MOST_NUMBERS:,}: its sizes are literal, and only symbols become small",
            where,
            remedy="name the sizes, as in stg.symbols[D = 4096], and write D in place of 4096",
        )


def _runs(module: Module) -> bool:
    """Whether the module can run: all values have types, and no values come from another pod."""
    if not (len(module.functions) == 1 or stage_functions(module)):
        return False
    if any(map(_is_of_pods, module.walk())):
        return False
    bodies = [func.body for func in module.functions]
    values = [v for b in bodies for v in (*b.args, *(r for op in b.walk() for r in op.results))]
    return all(v.type is not None for v in values)


def _is_of_pods(op: Operation) -> bool:
    """Whether an op exchanges values with another pod."""
    return isinstance(op.definition, Depart | Arrive) or (
        isinstance(op.definition, TakeOver) and not op.operands
    )


def _serves(module: Module) -> bool:
    """Whether the module is a serving step."""
    return any(a.tensor.role in CACHED for func in module.functions for a in func.body.args)


def _same_arguments(module: Module, before: Module) -> bool:
    """Whether arguments with the same name have the same shape in both modules."""
    shapes = {a.name: a.tensor.shape for a in before.main.body.args}
    args = module.main.body.args
    return all(shapes.get(a.name, a.tensor.shape) == a.tensor.shape for a in args)


def _in_parts(module: Module) -> bool:
    """Whether an argument has a dimension of the parts of ranks, which one device does not have."""
    axes = frozenset(module.mesh.axes if module.mesh else ())
    sizes = (s for a in module.main.body.args for s in a.tensor.shape)
    return any(size.symbol_name in axes for size in sizes)


def _samples(module: Module) -> bool:
    """Whether a serving step returns tokens instead of logits."""
    bodies = [func.body for func in module.functions] if module.serving else []
    returned = [v.producer for body in bodies for v in body.terminator.operands]
    return any(op is not None and op.has(PicksOne) for op in returned)


def _stages(module: Module, before: Module) -> dict[str, int]:
    """The sizes that cannot become small in a module with pipeline stages: the number of stages,
    and the number of layers if the functions were cut at literal layers."""
    if not stage_functions(module):
        return {}
    fixed = {func.text("over"): module.env[func.text("over")] for func in module.functions}
    counts = [op.expr("count") for op in module.walk() if op.has(Repeats)]
    if all(count.symbols for count in counts):
        return fixed
    whole = (op.expr("count") for op in before.walk() if op.has(Repeats))
    return fixed | {s: module.env[s] for count in whole for s in count.symbols if s in module.env}


def _parts_of(
    before: Module, origins: Mapping[str, _Origin], module: Module, inputs: Mapping[str, Array]
) -> Mapping[str, Array]:
    """The inputs for arguments that a pass cut from packed ones, such as gate and up: they have
    the location and the scope of the packed one, and lack a dimension of it."""
    parts: dict[str, Array] = {}
    args = module.main.body.args
    for packed in before.main.body.args:
        fresh = [a for a in args if a.name not in inputs and _origin(a) == origins[packed.name]]
        if any(a.name == packed.name for a in args) or not fresh:
            continue
        sizes, own = packed.tensor.shape, fresh[0].tensor.shape
        at = next(d for d, size in enumerate(sizes) if size != (*own, None)[d])
        cut = np.moveaxis(inputs[packed.name], at, 0)
        parts |= zip((a.name for a in fresh), cut, strict=False)
    return parts


def _origin(arg: Value) -> _Origin:
    return arg.loc, arg.name.rpartition("/")[0]


def _env(module: Module, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of a run: on one device, unless collectives are explicit."""
    alone = module.mesh.axes if module.mesh and module.phase not in _LOCKSTEP else ()
    return dict(sizes) | dict.fromkeys(alone, 1)


def _run(
    module: Module, sizes: Mapping[str, int], inputs: Mapping[str, Array], when: str
) -> dict[str, Array]:
    try:
        return run_named(module, _env(module, sizes), inputs)
    except DisagreementError as e:
        raise module.functions[0].error(
            f"{when} {e}", remedy="a collective is missing or wrong; see the module with --dump-dir"
        ) from None


def _compare(
    name: str, module: Module, before: Mapping[str, Array], after: Mapping[str, Array]
) -> None:
    for i, (one, y) in enumerate(_pairs(before, after, staged=bool(stage_functions(module)))):
        x = filled(one, y.shape) if y.size > one.size else one
        if x.shape == y.shape and np.allclose(x, y, rtol=_TOLERANCE, atol=_TOLERANCE):
            continue
        gap = float(np.max(np.abs(x - y))) if x.shape == y.shape else float("nan")
        raise module.functions[0].error(
            f"pass '{name}' changes what the program computes: result {i} is off by {gap:.3g}",
            remedy="compare the module before and after the pass with --dump-dir; a pass that does "
            "so on purpose states 'exact = False'",
        )


def _pairs(
    before: Mapping[str, Array], after: Mapping[str, Array], *, staged: bool
) -> Iterator[tuple[Array, Array]]:
    """Pairs of results to compare, the loss first: by position, or by name with pipeline stages."""
    if not staged and len(before) == len(after) and before.keys() != after.keys():
        yield from zip(before.values(), after.values(), strict=True)
        return
    losses = [next(iter(results)) for results in (before, after)]
    yield before[losses[0]], after[losses[1]]
    for name in before:
        if name in after and name not in losses:
            yield before[name], after[name]
