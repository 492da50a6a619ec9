"""Padding of parameters whose sizes do not divide over the ranks that shard them, and views without
the padding."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Quoted, Region, Value
from stagec.ir.expr import ONE, Expr, call, evaluate, product
from stagec.ir.module import Module
from stagec.ir.queries import Divides, IsPositive, ask
from stagec.ir.rewrite import carried, enclosing, uses_of_weight
from stagec.ir.rule import letters, parse_rule
from stagec.ir.traits import Accumulates, Recasts, Repeats
from stagec.ir.types import AxisUse, Dim, TensorType, axis_size
from stagec.ir_spec.ops.contraction import Einsum
from stagec.ir_spec.ops.convolution import Convolution
from stagec.sharding.shard import AT_REST
from stagec.sharding.strategy import read_strategy


@dataclass(frozen=True)
class PaddedShard:
    """Adjacent dimensions of a parameter that are sharded as one, of `size` elements. If ranks have
    parts of the first of them already, these are a dimension of their own, of `parts` elements,
    before that one, and `size` is that of a part."""

    dims: tuple[int, ...]
    size: Expr
    parts: Expr | None = None

    def at(self, *, depth: int = 0) -> int:
        """The sharded dimension of the parameter, or of a slice of it in `depth` repeats."""
        return self.dims[0] - depth + (self.parts is not None)

    def type_of(self, type_: TensorType, *, depth: int = 0) -> TensorType:
        """The type of the parameter, or of a slice of it in `depth` repeats, with one dimension
        instead of these, or two if they are split already."""
        first, last = self.dims[0] - depth, self.dims[-1] - depth
        split = () if self.parts is None else (Dim(self.parts, type_.dims[first].split),)
        behind = type_.dims[last + 1 :]
        return replace(type_, dims=(*type_.dims[:first], *split, Dim(self.size), *behind))


def padded_shard(
    param: Value, ranks: Expr, env: Mapping[str, int], rule: str
) -> PaddedShard | None:
    """The dimensions of a parameter that are padded so that shards over `ranks` are equal. None if
    a dimension divides anyway, if sizes have no values, or if a rank has a part of the padded rows
    that is smaller than `ranks`, as of experts. The rule `dim0` pads rows; `flat` pads all
    dimensions, or in a split parameter the longest run of unsplit ones."""
    uses = uses_of_weight(param)
    depth = min((d for *_, d in uses), default=0)
    by_rows = uses and rule == "dim0"  # without uses, layers and rows cannot be distinguished
    dims = _rows(param, uses) if by_rows else _whole_dimensions(param.tensor, depth, env)
    shape = param.tensor.dims
    if not dims or any(shape[i].split for i in dims[1:]):
        return None
    parts = axis_size(shape[dims[0]].axes) if shape[dims[0]].split else None
    rows = product(shape[i].size for i in dims) / (parts or ONE)
    if not (rows.symbols | ranks.symbols) <= env.keys():
        return None
    if parts is not None and not ask(IsPositive(rows - ranks + 1), env):
        return None
    behind = (dim.size for dim in shape[depth:] if not dim.split)
    if ask(Divides(ranks, rows), env) and any(ask(Divides(ranks, n), env) for n in behind):
        return None
    return PaddedShard(dims, ranks * call("ceildiv", [rows, ranks]), parts)


def _whole_dimensions(type_: TensorType, depth: int, env: Mapping[str, int]) -> tuple[int, ...]:
    """Adjacent unsplit dimensions after those of repeats: the first run with the most elements."""
    runs: list[tuple[int, ...]] = [()]
    for i in range(depth, type_.rank):
        runs = [*runs, ()] if type_.dims[i].split else [*runs[:-1], (*runs[-1], i)]

    def elements(run: tuple[int, ...]) -> int:
        return evaluate(product(type_.dims[i].size for i in run), env) if run else 0

    if len(runs) == 1:
        return runs[0]
    known = type_.elements.symbols <= env.keys()
    return max(runs, key=elements) if known else ()


def _rows(param: Value, uses: list[tuple[Operation, int, int]]) -> tuple[int, ...]:
    """The dimensions that form the first dimension of the weight of a module: for a product those
    of its result, or the experts if they come first; for a convolution its outputs, which are last;
    for a table or a vector the first one."""
    for op, index, depth in uses:
        if isinstance(op.definition, Convolution):
            return (param.tensor.rank - 1,)
        if isinstance(op.definition, Einsum) and len(op.operands) == 2:
            shapes, (out,) = parse_rule(op.text("spec"))
            weight, x = shapes[index], shapes[1 - index]
            dims = list(enumerate(weight, depth))
            kept = tuple(i for i, g in dims if g in out)
            experts = any(g in x and g in out for g in weight[:1])
            rows = kept[:1] if experts else kept
            if rows and rows == tuple(range(rows[0], rows[-1] + 1)):
                return rows
    depth = min((d for *_, d in uses), default=0)
    return (depth,) if depth < param.tensor.rank else ()


def pad_parameter(module: Module, param: Value, shard: PaddedShard, axes: tuple[str, ...]) -> None:
    """Give a parameter the type of its padded shards, and its users views without padding, in
    place."""
    whole = shard.type_of(param.tensor)
    padded = Dim(shard.size, tuple(AxisUse(axis, AT_REST) for axis in axes))
    _view_users(module, param, shard, param.tensor, 0)
    param.type = replace(whole.with_dim(shard.at(), padded), placed=True)


def _view_users(
    module: Module, value: Value, shard: PaddedShard, shape: TensorType, depth: int
) -> None:
    """Add views for the users of a parameter, or of its slices in `depth` repeats; `shape` is that
    of the whole parameter. A cast to the type of `stg.dtypes[compute]` is part of the gather, and
    includes the padding."""
    compute = read_strategy(module).dtypes.compute
    direct: list[tuple[Operation, int]] = []
    for op, index in list(value.uses):
        if op.region is not None:
            arg = op.body.args[index]
            inside = depth + (op.has(Repeats) and index >= carried(op))
            _view_users(module, arg, shard, shape, inside)
            arg.type = shard.type_of(arg.tensor, depth=inside)
        elif op.has(Recasts) and op.text("to") == compute:
            _view(module, op.result, list(op.result.uses), shard, shape, depth)
            op.result.type = shard.type_of(op.result.tensor, depth=depth)
        else:
            direct.append((op, index))
    _view(module, value, direct, shard, shape, depth)


def _view(
    module: Module,
    value: Value,
    users: list[tuple[Operation, int]],
    shard: PaddedShard,
    shape: TensorType,
    depth: int,
) -> None:
    if not users:
        return
    b = Builder.before(module.registry, _first([op for op, _ in users], value.region))
    padded = replace(shard.type_of(value.tensor.inner, depth=depth), role="")
    at, own = shard.at(depth=depth), replace(value.tensor.inner, role="")
    sizes = [shape.dims[i].size for i in shard.dims]
    sizes[0] = sizes[0] / (shard.parts or ONE)
    part = padded.with_dim(at, Dim(product(sizes)))
    attrs: dict[str, RawAttr] = {"dim": at, "size": product(sizes), "again": True}
    view = b.value("stg.slice", [value], attrs, type=part, hint=f"{value.name}_own")
    if own.rank != padded.rank or shard.parts is not None:
        row = letters(padded.rank + len(sizes) - 1)
        inner, before, behind = row[at : at + len(sizes)], row[:at], row[at + len(sizes) :]
        split = (
            row
            if shard.parts is None
            else f"{row[: at - 1]}({row[at - 1 : at + 1]}){row[at + 1 :]}"
        )
        joined = f"({inner})" if len(sizes) > 1 else inner
        given: dict[str, RawAttr] = {"spec": Quoted(f"{before}{joined}{behind}->{split}")}
        given |= {"again": True}
        if len(sizes) > 1:
            given |= {"factors": tuple(inner[:-1]), "sizes": tuple(sizes[:-1])}
        view = b.value("stg.reshape", [view], given, type=own, hint=f"{value.name}_parts")
    value.replace_with(view, users)


def _first(users: list[Operation], region: Region) -> Operation:
    """The first op of a region that is or contains a user; in an accumulation, the first such op
    inside it."""
    first = min((enclosing(op, region) for op in users), key=Operation.position)
    return _first(users, first.body) if first.has(Accumulates) else first
