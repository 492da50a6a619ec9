"""The state that each optimizer keeps per parameter, and the ops of its update.

An update is a generator that yields between two of its kernels, so that a kernel can run for all
parameters before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from math import gcd

from stagec.api import (
    Builder,
    Dim,
    Module,
    Strategy,
    TensorType,
    Value,
    axis_size,
    const,
    evaluate,
    letters,
    product,
)
from stagec.ir.builder import RawAttr
from stagec.ir.rewrite import uses_of_weight
from stagec.ir.rule import parse_rule
from stagec.ir_spec.ops.adam8bit import BLOCK, SMALLEST
from stagec.ir_spec.ops.contraction import Add, Einsum, cast_to
from stagec.ir_spec.strategy.dtypes import of_parameter
from stagec.sharding.assumptions import Assumptions

#: The updated parameter and state, in the order of `TrainedTensor.olds`.
Updated = Generator[None, None, list[Value]]
MASTER = "master"
_PACKED = (2, 3)  # gate and up; query, key and value: matrices of their own


@dataclass(frozen=True)
class Matrix:
    """The dimensions of a parameter that are rows and columns of matrices, and the number of
    repeats that slice it (`depth`). Without columns it is a vector."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    depth: int = 0

    def sliced(self, times: int) -> Matrix:
        """The matrix of a slice, for this number of repeats."""
        rows, columns = (tuple(i - times for i in dims) for dims in (self.rows, self.columns))
        return Matrix(rows, columns, self.depth - times)


def matrix_of(param: Value) -> Matrix:
    """The matrices of a parameter: the contracted by the kept dimensions of the product that uses
    it, else the first dimension by the others. A parameter that a layer adds, such as a bias, is a
    vector."""
    uses = uses_of_weight(param)
    for op, index, depth in uses:
        if not isinstance(op.definition, Einsum) or op.phase != "forward":
            continue
        shapes, (out,) = parse_rule(op.text("spec"))
        weight, x = shapes[index], shapes[1 - index]
        dims = list(enumerate(weight, depth))
        sizes = param.tensor.shape
        packed = {i for i, g in dims if g not in x and sizes[i].value in _PACKED}
        rows = tuple(i for i, g in dims if g not in out)
        columns = tuple(i for i, g in dims if g not in x and i not in packed)
        if rows and columns:
            return Matrix(rows, columns, depth)
    depth = min((d for *_, d in uses), default=0)
    first, *others = range(depth, param.tensor.rank) or (depth,)
    if depth and any(isinstance(op.definition, Add) and op.phase == "forward" for op, *_ in uses):
        return Matrix((first, *others), (), depth)
    return Matrix((first,), tuple(others), depth)


@dataclass(frozen=True, eq=False)
class TrainedTensor:
    """A parameter to update, or a slice of it: its gradient, its state by name (`kept`), and the
    factor that clips gradients."""

    param: Value
    grad: Value
    kept: Mapping[str, Value]
    matrix: Matrix
    clip: Value | None = None

    @property
    def olds(self) -> list[Value]:
        """The parameter and its state, in the order of the updated values."""
        kept = [v for name, v in self.kept.items() if name != MASTER]
        return [self.param, *kept, *([self.kept[MASTER]] if MASTER in self.kept else [])]

    @property
    def clips(self) -> list[Value]:
        """The factor that clips gradients, as a list of at most one value."""
        return [self.clip] if self.clip is not None else []

    @property
    def flags(self) -> dict[str, RawAttr]:
        """The flags of an op that takes all operands of the tensor."""
        given = ((MASTER, MASTER in self.kept), ("clip", self.clip is not None))
        return {name: True for name, there in given if there}


class Optimizer:
    """The state and the update of parameters by the optimizer of a strategy."""

    def __init__(self, module: Module, strategy: Strategy, assumptions: Assumptions) -> None:
        self._module, self._strategy, self._assumptions = module, strategy, assumptions
        rule = strategy.optimizer
        self.kind, self.form, self.loc = rule.kind, rule.form, rule.loc

    @property
    def by_slices(self) -> bool:
        """Whether stacks of layers are updated one layer after the other."""
        return self.form == "for_loop" or self.kind in ("adafactor", "muon")

    def update(self, b: Builder, tensor: TrainedTensor) -> Updated:
        """Build the update of a tensor."""
        kinds: Mapping[str, Callable[[Builder, TrainedTensor], Updated]] = {
            "adamw": self._adamw,
            "adam8bit": self._adam8bit,
            "adafactor": self._adafactor,
            "muon": self._muon,
            "lion": self._lion,
            "sgd": self._sgd,
        }
        return kinds[self.kind](b, tensor)

    # -- state -------------------------------------------------------------------------------------

    def states(self, param: Value, owned: TensorType) -> dict[str, TensorType]:
        """The types of the state of a parameter by name, where `owned` is the share of a rank."""
        dtypes, matrix = self._strategy.dtypes, matrix_of(param)
        moment = replace(owned, dtype=of_parameter(dtypes.moment, param.tensor.dtype))
        states: dict[str, TensorType] = {}
        if dtypes.master not in ("none", param.tensor.dtype):
            states[MASTER] = replace(owned, dtype=dtypes.master)
        match self.kind:
            case "adafactor":
                return states | _means(replace(owned, dtype="f32"), matrix)
            case "adam8bit":
                return states | self._blocks(owned, matrix.depth)
            case "muon" if _is_hidden(matrix):
                return states | {"momentum": moment}
            case "lion":
                return states | {"m": moment}
            case "sgd":
                return states | ({"m": moment} if self._strategy.optimizer.momentum else {})
            case _:
                return states | {"m": moment, "v": moment}

    def _blocks(self, owned: TensorType, depth: int) -> dict[str, TensorType]:
        """Moments in 8 bits with one scale per block; in fp32 for small tensors."""
        elements = product(owned.shape[depth:])
        env = self._module.env
        if elements.symbols <= env.keys() and evaluate(elements, env) < SMALLEST:
            return dict.fromkeys(("m", "v"), replace(owned, dtype="f32"))
        dim, block = self._block(owned, depth)
        whole, parts = owned.dims[dim], const(block) * axis_size(owned.dims[dim].axes)
        self._assumptions.divides(whole.size, parts, self._strategy.loc)
        each = owned.with_dim(dim, replace(whole, size=whole.size / const(block)))
        codes, scales = replace(owned, dtype="u8"), replace(each, dtype="f32")
        return {"m": codes, "v": codes, "m_scale": scales, "v_scale": scales}

    def _block(self, owned: TensorType, depth: int) -> tuple[int, int]:
        """The dimension along which blocks lie, and their number of elements: 256 along the last
        dimension that has whole blocks on each rank, else the largest block of any dimension."""
        best = (depth, 1)
        for i in range(depth, owned.rank):
            size, parts = owned.dims[i].size, axis_size(owned.dims[i].axes)
            if (size.symbols | parts.symbols) <= self._module.env.keys():
                ranks, number = evaluate(parts, self._module.env), evaluate(size, self._module.env)
                whole = gcd(number // ranks, BLOCK) if number % ranks == 0 else 1
            else:
                whole = BLOCK if size.symbols else gcd(size.value or 1, BLOCK)
            if whole >= best[1]:
                best = (i, whole)
        return best

    # -- updates of elements -----------------------------------------------------------------------

    def _adamw(self, b: Builder, t: TrainedTensor) -> Updated:
        if self.form in ("foreach", "for_loop"):
            return self._adam_kernels(b, t)
        return _single(b, "stg.adamw", t, ("m", "v"), t.flags)

    def _lion(self, b: Builder, t: TrainedTensor) -> Updated:
        return _single(b, "stg.lion", t, ("m",), t.flags)

    def _sgd(self, b: Builder, t: TrainedTensor) -> Updated:
        momentum: dict[str, RawAttr] = {"momentum": True} if "m" in t.kept else {}
        return _single(b, "stg.sgd", t, ("m",), t.flags | momentum)

    def _adam8bit(self, b: Builder, t: TrainedTensor) -> Updated:
        if "m_scale" not in t.kept:
            return self._adamw(b, t)
        scale, codes = t.kept["m_scale"].tensor.dims, t.kept["m"].tensor.dims
        dim = next((i for i, (s, c) in enumerate(zip(scale, codes, strict=True)) if s != c), 0)
        block = codes[dim].size / scale[dim].size
        blocks: dict[str, RawAttr] = {"dim": dim, "block": block}
        return _single(b, "stg.adam8bit", t, ("m", "v", "m_scale", "v_scale"), t.flags | blocks)

    def _adam_kernels(self, b: Builder, t: TrainedTensor) -> Updated:
        """torch/optim/adam.py: _multi_tensor_adam and _single_tensor_adam."""
        m, v, name = t.kept["m"], t.kept["v"], t.param.name
        op = b.op("stg.adam_moments", [t.grad, m, v, *t.clips], names=_names(m, v))
        m, v = op.results
        yield
        root = b.value("stg.adam_root", [v], hint=f"{name}_root")
        yield
        place: dict[str, RawAttr] = {"in_place": True} if self.form == "foreach" else {}
        below = b.value("stg.adam_denominator", [root], place, hint=f"{name}_denominator")
        yield
        master = [t.kept[MASTER]] if MASTER in t.kept else []
        names = _names(t.param, *master)
        new, *master = b.op("stg.adam_apply", [t.param, m, below, *master], names=names).results
        return _in_order(t, {"m": m, "v": v}, new, master)

    # -- updates of matrices -----------------------------------------------------------------------

    def _adafactor(self, b: Builder, t: TrainedTensor) -> Updated:
        """transformers/optimization.py: Adafactor.step."""
        yield from ()
        name, type_ = t.param.name, t.param.tensor
        grad = cast_to(b, t.grad, "f32")
        source = [t.kept[MASTER]] if MASTER in t.kept else [cast_to(b, t.param, "f32")]
        square = b.value("stg.adafactor_square", [t.grad, *t.clips], hint=f"{name}_square")
        means, moments, attrs = (_vector if "v" in t.kept else _factors)(b, t, square)
        if t.clip is not None:
            attrs["clip"] = True
        operands = [grad, *moments, *t.clips]
        update = b.value("stg.adafactor_update", operands, attrs, hint=f"{name}_update")
        norm = b.value("stg.squared_norm", [update], hint=f"{name}_update_sq")
        every: dict[str, RawAttr] = {"count": product(type_.shape)}
        update = b.value("stg.adafactor_clip", [update, norm], every, hint=f"{name}_clipped")
        less = b.value("stg.scale", [update], {"by": const(-1)}, hint=f"{name}_less")
        return _applied(b, t, less, means, source, {"lr": const(-1), "decay": const(0)})

    def _muon(self, b: Builder, t: TrainedTensor) -> Updated:
        """torch/optim/_muon.py: _single_tensor_muon."""
        if "momentum" not in t.kept:
            return (yield from self._adamw(b, t))
        name, momentum = t.param.name, t.kept["momentum"]
        given, hint = [t.grad, *t.clips], f"{momentum.name}_new"
        momentum = b.value("stg.muon_momentum", [momentum, *given], hint=hint)
        update = b.value("stg.muon_update", [momentum, *given], hint=f"{name}_update")
        update = cast_to(b, update, "bf16")
        matrix: dict[str, RawAttr] = {"rows": t.matrix.rows, "columns": t.matrix.columns}
        names = [f"{name}_orthogonal", f"{name}_scratch"]
        update = b.op("stg.newton_schulz", [update], matrix, names=names).results[0]
        source = [t.kept[MASTER]] if MASTER in t.kept else []
        return _applied(b, t, update, {"momentum": momentum}, source, {})


def _single(
    b: Builder, op: str, t: TrainedTensor, states: tuple[str, ...], attrs: Mapping[str, RawAttr]
) -> Updated:
    """An update by one op."""
    yield from ()
    kept = [t.kept[name] for name in (*states, MASTER) if name in t.kept]
    operands = [t.param, t.grad, *kept, *t.clips]
    return [*b.op(op, operands, attrs, names=_names(t.param, *kept)).results]


def _applied(
    b: Builder,
    t: TrainedTensor,
    update: Value,
    states: Mapping[str, Value],
    source: list[Value],
    attrs: Mapping[str, RawAttr],
) -> list[Value]:
    """Add an update to a parameter. Returns the updated values in the order of `olds`."""
    master: dict[str, RawAttr] = {MASTER: True} if MASTER in t.kept else {}
    names = _names(t.param, *(source if master else ()))
    source = [] if source == [t.param] else source
    op = b.op("stg.apply_update", [t.param, update, *source], {**master, **attrs}, names=names)
    return _in_order(t, states, op.results[0], op.results[1:])


def _in_order(
    t: TrainedTensor, states: Mapping[str, Value], param: Value, master: list[Value]
) -> list[Value]:
    return [param, *(states[name] for name in t.kept if name != MASTER), *master]


def _names(*values: Value) -> list[str]:
    return [f"{v.name}_new" for v in values]


def _is_hidden(matrix: Matrix) -> bool:
    """Whether Muon updates the parameter: it is a matrix of a layer."""
    return bool(matrix.columns) and matrix.depth > 0


def _means(owned: TensorType, matrix: Matrix) -> dict[str, TensorType]:
    """The types of means over rows and columns of matrices; for vectors, of one moment per
    element."""
    if not matrix.columns:
        return {"v": owned}

    def without(dims: tuple[int, ...]) -> TensorType:
        kept = (d for i, d in enumerate(owned.dims) if i not in dims)
        return replace(owned, dims=tuple[Dim, ...](kept))

    return {"row": without(matrix.columns), "column": without(matrix.rows)}


#: Updated means by name, the operands of the update among them, and the attributes of its rule.
_Moments = tuple[dict[str, Value], list[Value], dict[str, RawAttr]]


def _vector(b: Builder, t: TrainedTensor, square: Value) -> _Moments:
    """The second moment of a vector, per element."""
    full, tail = _spelled(t)
    v = b.value("stg.decayed_mean", [t.kept["v"], square], hint=f"{t.kept['v'].name}_new")
    return {"v": v}, [v], {"spec": f"{full},{full}{tail}->{full}"}


def _factors(b: Builder, t: TrainedTensor, square: Value) -> _Moments:
    """Means over rows and columns, and the sum of the row means."""
    (full, tail), shape = _spelled(t), t.param.tensor.shape
    means: dict[str, Value] = {}
    keep: dict[str, str] = {}
    for name, lost in (("row", t.matrix.columns), ("column", t.matrix.rows)):
        mean, keep[name] = t.kept[name], "".join(f for i, f in enumerate(full) if i not in lost)
        spec, count = f"{full}->{keep[name]}", {"count": product(shape[i] for i in lost)}
        added = b.value("stg.sum", [square], {"spec": spec}, hint=f"{mean.name}_sum")
        means[name] = b.value("stg.decayed_mean", [mean, added], count, hint=f"{mean.name}_new")
    row, each = means["row"], "".join(f for f in keep["row"] if f in keep["column"])
    spec = f"{keep['row']}->{each}"
    every = b.value("stg.sum", [row], {"spec": spec}, hint=f"{row.name}_sum")
    rule = f"{full},{keep['row']},{each},{keep['column']}{tail}->{full}"
    number = product(shape[i] for i in t.matrix.rows)
    return means, [row, every, means["column"]], {"spec": rule, "count": number}


def _spelled(t: TrainedTensor) -> tuple[str, str]:
    """The letters of a tensor in a rule, and the text for the clipping factor after other
    operands."""
    return letters(t.param.tensor.rank), "," if t.clip is not None else ""
