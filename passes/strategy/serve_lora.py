"""serve-lora: gives each sequence of a step of serving a low-rank adapter of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import ascii_lowercase

from stagec.api import (
    Builder,
    Dim,
    Expr,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    TensorType,
    Value,
    const,
    letters,
    read_strategy,
    symbol,
)
from stagec.ir.builder import RawAttr
from stagec.ir.expr import ONE, ZERO
from stagec.ir.module import BATCH
from stagec.ir.rewrite import carried, slice_into, uses_inside
from stagec.ir.rule import Shape, shape_text
from stagec.ir.traits import Repeats
from stagec.ir_spec.ops.contraction import Add, Einsum
from stagec.ir_spec.strategy.kernels import ALL_MODULES, CLEARED, KernelsRule
from stagec.ir_spec.strategy.lora import ALL_LINEAR, FIRST, SECOND, LoraRule
from stagec.passes.strategy.low_rank import LowRankCut, adapted_parameters, low_rank_types


class ServeLora(Pass):
    """Multiply tokens by the low-rank adapters of their sequences, beside products with the
    parameters of these names.

    Without options it applies `stg.lora`, in a step of serving. Ranks have `slots` adapters of each
    parameter; `%adapter` has the number of the adapter of each token. Products with the same input,
    such as those of queries, keys and values, stay together; then come all products with A, then
    those with B, in the order in which engines launch them. With `stg.kernels[shrink = cleared]` a
    kernel clears buffers for the products with A before, and with `adapters = all` all linear
    modules of layers have slots, even those without adapters. The rank of adapters
    is rounded up to one of `adapter_ranks`.

    Before:
        stg.func @f(%x: bf16[B, S, D], %layers/wq: bf16[L, D, D | frozen]) -> bf16[B, S, D] {
          %y = stg.repeat[count = L, carry = 1](
              %h: bf16[B, S, D] = %x, %w: bf16[D, D] = %layers/wq) {
            %q = stg.einsum["bsd,de->bse"](%h, %w) : bf16[B, S, D]
            stg.yield(%q)
          } : bf16[B, S, D]
          stg.return(%y)
        }
    After (serve-lora{targets=wq, rank=8, slots=4}):
        stg.func @f(%x: bf16[B, S, D], %layers/wq: bf16[L, D, D | frozen],
            %layers/wq_lora_a: bf16[L, 4, D, 8 | frozen],
            %layers/wq_lora_b: bf16[L, 4, 8, D | frozen],
            %adapter: i32[B, S]) -> bf16[B, S, D] {
          %y = stg.repeat[count = L, carry = 1](
              %h: bf16[B, S, D] = %x, %w: bf16[D, D] = %layers/wq,
              %layers/wq_lora_a_i: bf16[4, D, 8] = %layers/wq_lora_a,
              %layers/wq_lora_b_i: bf16[4, 8, D] = %layers/wq_lora_b) {
            %q = stg.einsum["bsd,de->bse"](%h, %w) : bf16[B, S, D]
            %q_low = stg.lora_shrink["bsd,zdr,bs->bsr"](%h, %layers/wq_lora_a_i, %adapter)
                : f32[B, S, 8]
            %q_adapted = stg.lora_expand["bse,bsr,zre,bs->bse"](
                %q, %q_low, %layers/wq_lora_b_i, %adapter) : bf16[B, S, D]
            stg.yield(%q_adapted)
          } : bf16[B, S, D]
          stg.return(%y)
        }
    """

    needs = Phase.SHAPED

    targets: tuple[str, ...] = field(
        default=(), metadata={"help": "names of parameters (default: what the strategy says)"}
    )
    rank: int = field(default=16, metadata={"help": "the rank of the adapters"})
    slots: int = field(default=1, metadata={"help": "the adapters that ranks hold"})

    def applies(self, module: Module) -> bool:
        said = read_strategy(module).one(LoraRule).targets
        return bool(self.targets or (module.serving and said))

    def run(self, module: Module) -> None:
        given, strategy = LoraRule(self.targets, self.rank, slots=self.slots), read_strategy(module)
        rule, kernels = strategy.one(LoraRule), strategy.one(KernelsRule)
        if kernels.adapters == ALL_MODULES:
            rule = replace(rule, targets=(*rule.targets, ALL_LINEAR))
        rank = kernels.adapter_rank(rule.rank)
        if rank is None:
            raise rule.error(
                f"adapters have at most rank {kernels.adapter_ranks[-1]} here, found {rule.rank}",
                remedy=f"lower the rank to {kernels.adapter_ranks[-1]}",
            )
        rule = replace(rule, rank=rank)
        cleared = kernels.shrink == CLEARED
        serve_lora(module, given if self.targets else rule, cleared=cleared)


@dataclass(slots=True)
class _Product:
    """A product with a parameter, and the adapters A and B in its region."""

    op: Operation
    index: int
    a: Value
    b: Value

    @property
    def x(self) -> Value:
        """The other operand of the product."""
        return self.op.operands[1 - self.index]

    @property
    def result(self) -> Value:
        """The result of the product, or of the sum with its bias."""
        y = self.op.result
        users = [user for user, _ in y.uses]
        if len(users) == 1 and isinstance(users[0].definition, Add) and "spec" in users[0].attrs:
            return users[0].result
        return y


def serve_lora(module: Module, rule: LoraRule, *, cleared: bool = False) -> None:
    """Add adapters to the main function, in place. With `cleared` products with A accumulate into
    buffers that a kernel clears, one kernel for all products with the same input.

    Raises `DiagnosticError` for a name that no parameter has, for a parameter without products, and
    if all are matrices of experts.
    """
    body = module.main.body
    products: list[_Product] = []
    for param in _served(module, rule):
        types = low_rank_types(param, rule.rank, slots=[Dim(const(rule.slots))])
        names = [param.name + end for end in (FIRST, SECOND)]
        a, b = (body.add_arg(n, t, param.loc) for n, t in zip(names, types, strict=True))
        products += _products(param, a, b)
    adapters = _Adapters(module)
    for group in list(_groups(products)):
        _adapt(module, adapters, group, cleared=cleared)


def _served(module: Module, rule: LoraRule) -> list[Value]:
    """The parameters that get adapters. Parameters with one matrix per expert or head get none,
    which a remark reports. Raises `DiagnosticError` if there are no others."""
    named = adapted_parameters(module, rule)
    several = [param for param in named if any(cut.batch for cut in _cuts(param))]
    served = [param for param in named if param not in several]
    names = ", ".join(f"%{param.name}" for param in several)
    what = f"adapters of {names} are not served: a matrix for each expert or head"
    if not served:
        cuts = {param.name.rpartition("/")[2]: [*_cuts(param)] for param in module.parameters()}
        known = sorted(n for n, each in cuts.items() if each and not any(c.batch for c in each))
        raise rule.error(what, remedy=f"choose some of {', '.join(known)}")
    if several:
        module.diagnostics.remark(what, rule.loc)
    return served


def _cuts(param: Value) -> Iterator[LowRankCut]:
    """The products of a parameter."""
    for op, index, _ in uses_inside(param):
        if isinstance(op.definition, Einsum):
            yield LowRankCut(op, index)


def _products(w: Value, a: Value, b: Value) -> Iterator[_Product]:
    """The products with a parameter, or with its slices in repeats."""
    for op, index in list(w.uses):
        if op.has(Repeats) and index >= carried(op):
            inner = [slice_into(op, v) for v in (a, b)]
            yield from _products(op.body.args[index], *inner)
        elif isinstance(op.definition, Einsum):
            yield _Product(op, index, a, b)


def _groups(products: Sequence[_Product]) -> Iterator[list[_Product]]:
    """Groups of products with the same input, in program order. No product of a group comes after
    an op that uses the result of another one."""
    by_input: dict[tuple[Region | None, Value], list[_Product]] = {}
    for each in products:
        by_input.setdefault((each.op.parent, each.x), []).append(each)
    for alike in by_input.values():
        group: list[_Product] = []
        for each in sorted(alike, key=lambda p: p.op.position()):
            end = _place(each.result)
            users = [u for p in group for u, _ in p.result.uses if u.parent is each.op.parent]
            if any(user.position() < end for user in users):
                yield group
                group = []
            group.append(each)
        yield group


def _place(value: Value) -> int:
    """The position of the op that makes a value in its region; -1 for arguments."""
    return value.producer.position() if value.producer is not None else -1


def _adapt(
    module: Module, adapters: _Adapters, group: Sequence[_Product], *, cleared: bool
) -> None:
    """y = x w becomes x w + x a b, of each product."""
    last = max((p.result for p in group), key=_place).producer
    assert last is not None
    build = module.after(last, loc=group[0].op.loc, by=ServeLora.name)
    cuts = [LowRankCut(each.op, each.index) for each in group]
    chosen = [adapters.of(each, cut) for each, cut in zip(group, cuts, strict=True)]
    buffers = [list[Value]() for _ in group]
    if cleared:
        buffers = _buffers(build, group, cuts, chosen[0])
    rows = list(zip(group, cuts, chosen, buffers, strict=True))
    low = [_low(build, *row) for row in rows]
    for (each, cut, of, _), value in zip(rows, low, strict=True):
        y = each.result
        b, out = shape_text((cut.slots, *cut.out_of)), shape_text(cut.out)
        spec = f"{out},{shape_text(cut.low)},{b},{shape_text(of.dims)}->{out}"
        attrs = {"spec": spec, **of.attrs}
        operands = [y, value, each.b, of.value]
        hint = f"{y.name}_adapted"
        y.replace_with(build.value("stg.lora_expand", operands, attrs, hint=hint))


def _low(
    build: Builder, each: _Product, cut: LowRankCut, of: _Chosen, buffer: Sequence[Value]
) -> Value:
    """The product with A."""
    a = shape_text((cut.slots, *cut.into))
    spec = f"{shape_text(cut.x)},{a},{shape_text(of.dims)}->{shape_text(cut.low)}"
    attrs = {"spec": spec, **of.attrs}
    operands = [each.x, each.a, of.value, *buffer]
    return build.value("stg.lora_shrink", operands, attrs, hint=f"{each.op.result.name}_low")


def _buffers(
    build: Builder, group: Sequence[_Product], cuts: Sequence[LowRankCut], of: _Chosen
) -> list[list[Value]]:
    """A buffer for each product of a group with A."""
    rows = letters(of.value.tensor.rank)
    fresh, sizes, results = iter(reversed(ascii_lowercase)), dict[str, Expr](), list[str]()
    for each, cut in zip(group, cuts, strict=True):
        known = dict(zip(cut.into, (d.size for d in each.a.tensor.dims[1:]), strict=True))
        names = {dim: next(fresh) for dim in cut.low if dim in known}
        names |= zip((dim for dim in cut.low if dim not in known), rows, strict=True)
        sizes |= {names[dim]: known[dim] for dim in cut.low if dim in known}
        results.append("".join(names[dim] for dim in cut.low))
    attrs: dict[str, RawAttr] = {"factors": tuple(sizes), "sizes": tuple(sizes.values())}
    attrs["spec"] = f"{rows}->{','.join(results)}"
    hints = [f"{each.op.result.name}_zeros" for each in group]
    made = build.op("stg.lora_buffer", [of.value], attrs, names=hints)
    return [[value] for value in made.results]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The value with the adapter numbers of tokens, its dimensions in a rule, and attributes with
    the number of sequences per element of the first dimension."""

    value: Value
    dims: Shape
    attrs: Mapping[str, RawAttr]


@dataclass(slots=True)
class _Adapters:
    """The arguments with the adapter numbers of tokens, one for each shape of tokens."""

    module: Module
    known: dict[tuple[Expr, ...], Value] = field(default_factory=dict[tuple[Expr, ...], Value])

    def of(self, product: _Product, cut: LowRankCut) -> _Chosen:
        """The adapter numbers for the rows of a product. Raises `DiagnosticError` for an input
        without sequences."""
        op, x = product.op, product.x
        rows = [(g, d) for g, d in zip(cut.x, x.tensor.dims, strict=True) if g in cut.out]
        if not rows:
            raise op.error(
                f"adapters of '{op.name}' are not served: its input %{x.name} has no sequences",
                remedy="choose parameters that multiply tokens",
            )
        shape = tuple(d.size for _, d in rows)
        if shape not in self.known:
            dims = tuple(replace(d, split=()) for _, d in rows)
            name = f"adapter_{len(self.known)}" if self.known else "adapter"
            type_ = TensorType("i32", dims)
            self.known[shape] = self.module.main.body.add_arg(name, type_, op.loc)
        count = self._sequences(shape)
        attrs: dict[str, RawAttr] = {} if count == ONE else {"sequences": count}
        return _Chosen(self.known[shape], tuple(g for g, _ in rows), attrs)

    def _sequences(self, shape: Sequence[Expr]) -> Expr:
        """The number of sequences per element of the first dimension. In a mixed step, where this
        dimension counts groups of sequences, it is that of all classes, or one per row for sampled
        rows."""
        known, body = self.module.symbols, self.module.main.body
        if "new0" not in known or shape[0].symbol_name != BATCH:
            return ONE
        counted, index = ZERO, 0
        left = next(t.shape[1] for a in body.args if (t := a.tensor).dtype == "i32" and t.rank > 1)
        if shape[1:] != (left,):
            return shape[1]
        while f"new{index}" in known:
            new, count = symbol(f"new{index}"), symbol(f"count{index}")
            count = count if f"count{index}" in known else left / new
            counted, left, index = counted + count, left - count * new, index + 1
        return counted
