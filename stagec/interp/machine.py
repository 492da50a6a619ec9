"""Runs a function numerically, on all ranks in lockstep, with collectives on numpy arrays.

With all axes of size 1, this is a single device. All values are float64: element types affect only
sizes. Ranks that should agree are compared, so a missing or wrong collective is an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product as combinations
from math import prod

import numpy as np

from stagec.interp.data import filled
from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import evaluate
from stagec.ir.layers import LayerStack, in_order
from stagec.ir.module import Module
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array
from stagec.ir.own_gathers import own_gathers
from stagec.ir.types import TensorType
from stagec.ir_spec.ops.comm import Collective, Movement
from stagec.ir_spec.ops.pod_crossings import PodOp
from stagec.ir_spec.ops.structure import joined_dim

Locals = list[Array]
_TOLERANCE = 1e-8


@dataclass(frozen=True, slots=True)
class Meeting:
    """The point where a value is sent to another pod or received from it: the coordinates of the
    ranks, the layer in the whole model, and the microbatch."""

    ranks: Sequence[Mapping[str, int]]
    layer: int
    microbatch: int


#: Executes a send or receive between pods: takes the parts of its operand, if it has one, and
#: returns those of its result.
Meet = Callable[[Operation, Meeting, Locals], Locals]


class DisagreementError(Exception):
    """Ranks have different numbers for the same value: a collective is missing or wrong."""


class Interpreter:
    """All ranks of a mesh, or those at the coordinates `at`. `env` has the values of symbols and
    the sizes of axes. `meet` represents the other pod; without it, a pod runs alone."""

    def __init__(
        self,
        module: Module,
        env: Mapping[str, int],
        at: Mapping[str, int] | None = None,
        meet: Meet | None = None,
    ) -> None:
        self._meet_pod = meet
        mesh = module.mesh
        self.axes = mesh.axes if mesh else ()
        self.env = {**dict.fromkeys(self.axes, 1), **env}
        fixed = at or {}
        sizes = [[fixed[a]] if a in fixed else range(self.env[a]) for a in self.axes]
        self.ranks = [dict(zip(self.axes, c, strict=True)) for c in combinations(*sizes)]
        self._zigzag = module.zigzag
        self._values: dict[Value, Locals] = {}
        self._iteration = 0
        self._microbatch: tuple[str, int, int] | None = None

    def run(self, func: Operation, inputs: Mapping[str, Array]) -> list[Array]:
        """Run a function, and return its results as whole arrays. Inputs without the padding of
        their shards are filled with zeros. Raises `DisagreementError`."""
        for arg in func.body.args:
            self._values[arg] = self.scatter(inputs[arg.name], arg.tensor)
        self._region(func.body)
        end = func.body.terminator
        return [self.gather(self._values[v], v.tensor, v.name) for v in end.operands]

    # -- whole arrays and parts --------------------------------------------------------------------

    def scatter(self, whole: Array, type_: TensorType) -> Locals:
        """The part of a whole array on each rank, after padding; zeros of buffers."""
        if type_.role == "bucket":
            local = [evaluate(s, self.env) for s in type_.local_shape]
            return [np.broadcast_to(0.0, local) for _ in self.ranks]
        shape = [evaluate(s, self.env) for s in type_.shape]
        if whole.size < prod(shape):
            whole = filled(whole, shape)
        return [whole[self._window(type_, coords)] for coords in self.ranks]

    def _window(self, type_: TensorType, coords: Mapping[str, int]) -> tuple[Array, ...]:
        """The indices of a rank's part in the whole array."""
        ctx = NumericContext(self.env, coords, zigzag=self._zigzag)
        return np.ix_(*(np.asarray(ctx.positions(d), dtype=int) for d in type_.dims))

    def gather(self, parts: Locals, type_: TensorType, name: str) -> Array:
        """The whole array from the parts of all ranks. Raises `DisagreementError` if replicas
        differ."""
        whole = np.full([evaluate(s, self.env) for s in type_.shape], np.nan)
        parts = self._reduce(parts, type_)
        for coords, part in zip(self.ranks, parts, strict=True):
            window = self._window(type_, coords)
            there = whole[window]
            if there.shape != np.shape(part):
                raise DisagreementError(
                    f"%{name} has local shape {np.shape(part)}, expected {there.shape}"
                )
            known = ~np.isnan(there)
            if not np.allclose(
                there[known], np.asarray(part)[known], rtol=_TOLERANCE, atol=_TOLERANCE
            ):
                raise DisagreementError(f"ranks disagree on %{name}: {type_}")
            whole[window] = part
        return whole

    def _reduce(self, parts: Locals, type_: TensorType) -> Locals:
        if not type_.partial:
            return parts
        reduced: Locals = list(parts)
        for group in self.groups(type_.partial.axes):
            together = [parts[i] for i in group]
            whole = (
                np.max(together, axis=0)
                if type_.partial.kind == "max"
                else np.sum(together, axis=0)
            )
            for i in group:
                reduced[i] = whole
        return reduced

    def groups(self, over: Sequence[str]) -> list[list[int]]:
        """Groups of indices of ranks that differ along `over` only, each in the order of these
        axes, major first."""
        groups: dict[tuple[int, ...], list[int]] = {}
        order = sorted(range(len(self.ranks)), key=lambda r: [self.ranks[r][a] for a in over])
        for r in order:
            key = tuple(v for a, v in self.ranks[r].items() if a not in over)
            groups.setdefault(key, []).append(r)
        return list(groups.values())

    # -- operations --------------------------------------------------------------------------------

    def _region(self, region: Region) -> list[Locals]:
        for step in in_order(region):
            self._run(step)
        return [self._values[v] for v in region.terminator.operands]

    def _run(self, step: Operation | LayerStack) -> None:
        if isinstance(step, LayerStack):
            self._stack(step)
        else:
            self._op(step)

    def _op(self, op: Operation) -> None:
        operands = [self._values[v] for v in op.operands]
        if op.region is not None:
            outputs = self._accumulate(op, op.region, operands)
        elif isinstance(op.definition, Movement):
            outputs = self._movement(op, op.definition, operands)
        elif isinstance(op.definition, PodOp) and self._meet_pod is not None:
            microbatch = self._microbatch[1] if self._microbatch is not None else 0
            where = Meeting(self.ranks, self._iteration, microbatch)
            outputs = [self._meet_pod(op, where, operands[0] if operands else [])]
        elif not op.results:
            return
        else:
            outputs = self._local(op, operands)
        self._give(op, outputs)

    def _give(self, op: Operation, outputs: list[Locals]) -> None:
        for value, parts in zip(op.results, outputs, strict=False):
            self._check_shapes(op, value, parts)
            self._values[value] = parts

    def _check_shapes(self, op: Operation, value: Value, parts: Locals) -> None:
        expected = tuple(evaluate(d.local, self.env) for d in value.tensor.dims)
        if np.shape(parts[0]) != expected:
            raise DisagreementError(
                f"'{op.name}' gives %{value.name} of local shape {np.shape(parts[0])}, its type "
                f"{value.type} says {expected}"
            )

    def _local(self, op: Operation, operands: list[Locals]) -> list[Locals]:
        operands = self._gathered(op, operands)
        per_rank: list[Sequence[Array]] = []
        for r, coords in enumerate(self.ranks):
            ctx = NumericContext(self.env, coords, self._iteration, self._microbatch, self._zigzag)
            per_rank.append(op.definition.reference(op, ctx, *(parts[r] for parts in operands)))
        return [list(parts) for parts in zip(*per_rank, strict=True)]

    def _gathered(self, op: Operation, operands: list[Locals]) -> list[Locals]:
        """The operands, after the gathers that the op does itself."""
        rule = op.definition.rule(op)
        gathered = list(operands)
        for own in own_gathers(op, rule) if rule is not None else ():
            parts = gathered[own.operand]
            gathered[own.operand] = [*parts]
            for group in self.groups(own.over):
                whole = np.concatenate([parts[r] for r in group], axis=own.dim)
                for r in group:
                    gathered[own.operand][r] = whole
        return gathered

    def _movement(
        self, op: Operation, definition: Movement, operands: list[Locals]
    ) -> list[Locals]:
        outputs: list[Locals] = []
        for index, parts in enumerate(operands):
            if not isinstance(definition, Collective):
                outputs.append(self._slice(op, index, parts))
                continue
            result: Locals = list(parts)
            for over, exchange in definition.stages(op, index, self.env):
                for group in self.groups(over):
                    new = exchange([result[i] for i in group])
                    for r, part in zip(group, new, strict=True):
                        result[r] = part
            outputs.append(result)
        return outputs

    def _slice(self, op: Operation, index: int, parts: Locals) -> Locals:
        """The part of each rank, cut from a larger part that it already has."""
        have, want = op.operands[index].tensor, op.results[index].tensor
        new: Locals = []
        for coords, part in zip(self.ranks, parts, strict=True):
            ctx = NumericContext(self.env, coords, zigzag=self._zigzag)
            places = [
                np.searchsorted(ctx.positions(h), ctx.positions(w))
                for w, h in zip(want.dims, have.dims, strict=True)
            ]
            new.append(part[np.ix_(*places)])
        return new

    def _stack(self, stack: LayerStack) -> None:
        members, carry, outer = stack.members, stack.carried, self._iteration
        carried = [self._values[v] for v in stack.inputs]
        sliced = [[self._values[v] for v in op.operands[carry:]] for op in members]
        yields: list[dict[int, list[Locals]]] = [{} for _ in members]
        first = [self.first_iteration(op) for op in members]
        for _, m, i in stack.turns(evaluate(members[0].expr("count"), self.env)):
            self._iteration = first[m] + i
            values = carried + [[part[i] for part in parts] for parts in sliced[m]]
            self._values.update(zip(members[m].body.args, values, strict=True))
            yielded = self._region(members[m].body)
            carried, yields[m][i] = yielded[:carry], yielded[carry:]
        self._iteration = outer
        for op, rows in zip(members, yields, strict=True):
            stacked = [
                [np.stack([rows[i][k][r] for i in sorted(rows)]) for r in range(len(self.ranks))]
                for k in range(len(op.results) - carry)
            ]
            self._give(op, carried + stacked)

    def first_iteration(self, op: Operation) -> int:
        """The number of the first iteration of a repeat in the whole model."""
        return 0

    def _accumulate(self, op: Operation, region: Region, operands: list[Locals]) -> list[Locals]:
        count, split = evaluate(op.expr("count"), self.env), op.text("split")
        rounds: list[list[Locals]] = []
        for i in range(count):
            self._bind_microbatch(op, region, operands, split, i, count)
            rounds.append(self._region(region))
        self._microbatch = None
        yielded = zip(region.terminator.operands, zip(*rounds, strict=True), strict=True)
        return [together(op, value, parts) for value, parts in yielded]

    def _bind_microbatch(
        self,
        op: Operation,
        region: Region,
        operands: list[Locals],
        split: str,
        part: int,
        count: int,
    ) -> None:
        """Bind the arguments of an accumulation to their parts for one microbatch."""
        self._microbatch = (split, part, count)
        for arg, value, parts in zip(region.args, op.operands, operands, strict=True):
            along = [d for d, dim in enumerate(value.tensor.dims) if split in dim.size.symbols]
            self._values[arg] = [
                np.split(p, count, axis=along[0])[part] if along else p for p in parts
            ]


def together(op: Operation, value: Value, parts: Sequence[Locals]) -> Locals:
    """Combine the values of microbatches: concatenate them along the batch, or add them. `parts`
    has for each microbatch the values of all ranks."""
    d = joined_dim(op, value.tensor)
    if d is None:
        return [sum(mine[1:], start=mine[0]) for mine in zip(*parts, strict=True)]
    return [np.concatenate(mine, axis=d) for mine in zip(*parts, strict=True)]


def run_module(
    module: Module, env: Mapping[str, int], inputs: Mapping[str, Array], meet: Meet | None = None
) -> list[Array]:
    """Run the main function. Raises `DiagnosticError` if a symbol has no value."""
    missing = {
        s for a in module.main.body.args for d in a.tensor.dims for s in d.size.symbols
    } - env.keys()
    if missing:
        raise module.main.error(
            f"no value for {', '.join(sorted(missing))}",
            remedy=f"give them: --set {','.join(f'{m}=4' for m in sorted(missing))}",
        )
    return Interpreter(module, env, meet=meet).run(module.main, inputs)
