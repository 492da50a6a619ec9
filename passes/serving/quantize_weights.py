"""quantize-weights: stores the weights of blocks in few bits."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import field, replace
from math import gcd

from stagec.api import (
    Builder,
    Expr,
    Module,
    Operation,
    Pass,
    Phase,
    Relation,
    Value,
    const,
    evaluate,
    product,
    read_strategy,
)
from stagec.ir.builder import RawAttr
from stagec.ir.rewrite import is_chosen_by, replace_op, slice_into, uses_inside
from stagec.ir.rule import Group, Shape, parse_rule, shape_text
from stagec.ir.traits import Chooses, Recasts
from stagec.ir.types import CACHED, DTYPE_BYTES
from stagec.ir_spec.ops.attention_base import AttentionWork
from stagec.ir_spec.ops.contraction import Add, Einsum, cast_to
from stagec.ir_spec.ops.quantized import (
    ACTIVATIONS,
    FEED_FORWARD,
    FORMATS,
    OUTPUTS,
    ROUTED,
    WeightFormat,
)
from stagec.ir_spec.ops.scan_base import ScanOp
from stagec.ir_spec.strategy.axes import HEADS
from stagec.ir_spec.strategy.weights import AUTO, WIDE, WeightsRule

#: Blocks have at least the size of the format divided by this number.
_SMALLEST = 8
_LETTERS = "wvuzyxtsrqponmlkjihgfedcba"
#: Sizes that are numbers of heads.
_COUNTS = frozenset(HEADS) - {"I"}


class QuantizeWeights(Pass):
    """Store the weights of the blocks in few bits, with scales for blocks of elements.

    `stg.weights[format = ...]` of a strategy, or the option, asks for it. It applies to parameters
    that a single product in a repeat uses, in the `parts` of the model that the statement names.
    Routers, embeddings, the head, norms, and matrices of less than half a block keep their type.
    With blocks of columns, so do matrices with one column per head: engines refuse ranks with a
    part of a block (SGLang, layers/quantization/fp8.py: validate_block_quant_shapes). A block does
    not cross dimensions of a weight: along heads of 64 or 192 elements it has 64 elements.

    Before:
        stg.strategy @s {
          stg.weights[int4]
        }
        stg.func @f(%x: bf16[B, D], %W: bf16[L, D, D | param]) {
          %y = stg.repeat[count = L] (%h: bf16[B, D] = %x, %w: bf16[D, D] = %W) {
            %u = stg.einsum["bd,de->be"](%h, %w) : bf16[B, D]
            stg.yield(%u)
          } : bf16[B, D]
          stg.return(%y)
        }
    After:
        stg.strategy @s {
          stg.weights[int4]
        }
        stg.assume[D % 128 == 0]
        stg.func @f(%x: bf16[B, D], %W: i4[L, D, D | param],
            %W_scales: bf16[L, D/128, D | scale], %W_zeros: i4[L, D/128, D | scale]) {
          %y = stg.repeat[count = L] (%h: bf16[B, D] = %x, %w: i4[D, D] = %W,
              %W_scales_i: bf16[D/128, D] = %W_scales, %W_zeros_i: i4[D/128, D] = %W_zeros) {
            %u = stg.scaled_einsum["b(dw),(dw)e,de,de->be", to = bf16](
                %h, %w, %W_scales_i, %W_zeros_i) : bf16[B, D]
            stg.yield(%u)
          } : bf16[B, D]
          stg.return(%y)
        }
    """

    needs = Phase.SHAPED

    format: str = field(
        default="",
        metadata={"help": "fp8, int8, int4, mxfp4, nvfp4 or nf4 (default: of the strategy)"},
    )
    block: int = field(default=0, metadata={"help": "elements of a block along a dimension"})

    def applies(self, module: Module) -> bool:
        rule = read_strategy(module).one(WeightsRule)
        return (self.format or rule.format) in FORMATS or rule.routers == WIDE

    def run(self, module: Module) -> None:
        rule = read_strategy(module).one(WeightsRule)
        if rule.routers == WIDE:
            widen_routers(module)
        name = self.format or rule.format
        if name not in FORMATS:
            return
        format_ = FORMATS[name]
        if rule.activations != AUTO:
            format_ = replace(format_, compute=ACTIVATIONS[rule.activations])
        if not format_.compute:
            module.diagnostics.remark(
                f"products cast weights of {name} to the type of the activations and run at "
                f"its rate (W{8 * DTYPE_BYTES[format_.dtype]}A16)",
                rule.loc,
            )
        quantize_weights(module, format_, self.block or rule.block, rule.parts)


def quantize_weights(
    module: Module, format_: WeightFormat, block: int = 0, parts: str = AUTO
) -> None:
    """Store the weights of products inside of repeats in a format, in place.

    `block` is the number of elements of a block along a dimension (0: that of the format), `parts`
    names parts of the model. Raises `DiagnosticError` for a size that has no whole blocks.
    """
    if block:
        rows = format_.rows and block
        format_ = replace(format_, rows=rows, columns=block if format_.columns > 1 else 1)
    place = {op: i for i, op in enumerate(module.main.body.walk())}
    serves = any(a.tensor.role in CACHED for a in module.main.body.args)
    stored = module.parameters()
    if not serves and len(module.trainable()) < len(stored):
        stored = [param for param in stored if param.tensor.role == "frozen"]
    weights = [param for param in stored if _is_weight(param)]
    chosen = _of_parts(module, weights, format_.parts if parts == AUTO else parts, parts == AUTO)
    large = [param for param in chosen if _is_large(module, format_, param)]
    large.sort(key=lambda param: place[uses_inside(param)[0][0]])  # the first use casts activations
    if not large:
        module.diagnostics.remark(
            "no block has a product with a parameter, so no weights are stored in few bits"
        )
    for param in large:
        _Weight(module, format_, param).store()


def widen_routers(module: Module) -> None:
    """Store the weights of routers in 32 bits, and cast what they multiply, in place."""
    for param in module.parameters():
        uses = [use for use in uses_inside(param) if isinstance(use[0].definition, Einsum)]
        if len(uses) != 1 or not is_chosen_by(uses[0][0].result):
            continue
        ((op, index, _),) = uses
        build = module.before(op, by=QuantizeWeights.name)
        weight = _retyped(param, op, WIDE)
        x = cast_to(build, op.operands[1 - index], WIDE)
        operands = (weight, x) if index == 0 else (x, weight)
        logits = build.value(op.name, operands, dict(op.attrs), hint=op.result.name)
        choose = all(user.has(Chooses) for user, _ in op.result.uses)
        replace_op(op, [logits if choose else cast_to(build, logits, op.result.tensor.dtype)])


def _retyped(weight: Value, op: Operation, dtype: str) -> Value:
    """The slice of a parameter that an op uses, after all of its slices have an element type."""
    while True:
        weight.type = replace(weight.tensor, dtype=dtype)
        (user, index), *_ = weight.uses
        if user is op:
            return weight
        weight = user.body.args[index]


def _is_weight(param: Value) -> bool:
    """Whether a single product in a repeat uses a parameter, and it is not that of a router."""
    uses = uses_inside(param)
    products = [op for op, _, depth in uses if depth and isinstance(op.definition, Einsum)]
    return len(uses) == len(products) == 1 and not is_chosen_by(products[0].result)


def _of_parts(module: Module, weights: Sequence[Value], parts: str, auto: bool) -> list[Value]:
    """The weights of these parts of the model; with `auto` all, if it has no experts."""
    products = {param: uses_inside(param)[0][0] for param in weights}
    routed = {param for param, op in products.items() if any(map(_is_routed, op.operands))}
    if parts == ROUTED and (routed or not auto):
        return [param for param in weights if param in routed]
    if parts in (FEED_FORWARD, OUTPUTS) and (routed or not auto):
        attention = _attention(module, outputs=parts == FEED_FORWARD)
        return [param for param in weights if products[param] not in attention]
    return list(weights)


def _is_routed(value: Value) -> bool:
    """Whether a router distributes the rows of a value."""
    return any(dim.routed or dim.load for dim in value.tensor.dims)


def _attention(module: Module, *, outputs: bool) -> set[Operation]:
    """Attention and scans with the ops on which they depend and those that use their results, up to
    the residual sums; the last products among these only with `outputs`."""
    mixers = (AttentionWork, ScanOp)
    waiting = [op for op in module.main.body.walk() if isinstance(op.definition, mixers)]
    behind: set[Operation] = set()
    while waiting:
        if (op := waiting.pop()) not in behind:
            behind.add(op)
            users = (user for result in op.results for user, _ in result.uses)
            waiting += [user for user in users if user.results and not _is_sum(user)]
    waiting, attention = list(behind), set[Operation]()
    while waiting:
        if (op := waiting.pop()) not in attention:
            attention.add(op)
            makers = (v.producer for v in op.operands)
            waiting += [each for each in makers if each is not None and not _is_sum(each)]
    return attention if outputs else {op for op in attention if not _is_last(op, behind)}


def _is_last(op: Operation, behind: Set[Operation]) -> bool:
    """Whether no product of the ops `behind` attention depends on this one of them."""
    users = {user for result in op.results for user, _ in result.uses} & behind
    return op in behind and all(
        not isinstance(user.definition, Einsum) and _is_last(user, behind) for user in users
    )


def _is_sum(op: Operation) -> bool:
    """Whether an op adds values of one shape, such as a residual sum."""
    return isinstance(op.definition, Add) and len({v.tensor.shape for v in op.operands}) == 1


def _is_large(module: Module, format_: WeightFormat, param: Value) -> bool:
    """Whether the matrix of a weight has at least half a block of rows and of columns. The 64
    columns of rotated keys beside a latent are enough, since checkpoints have them in one matrix
    with it. With blocks of columns, a matrix with one column per head is not large. Sizes without
    values count as large."""
    ((op, index, _),) = uses_inside(param)
    shapes, (out,) = parse_rule(op.text("spec"))
    weight, x = shapes[index], shapes[1 - index]
    sizes = dict(zip(weight, op.operands[index].tensor.shape, strict=True))
    kept = [size for group, size in sizes.items() if group not in x]
    if format_.columns > 1 and all(size.symbol_name in _COUNTS for size in kept):
        return False
    rows = product(size for group, size in sizes.items() if group not in out)
    columns = product(kept)
    sides = ((rows, format_.rows), (columns, format_.columns))
    known = [(side, block or 1) for side, block in sides if side.symbols <= module.env.keys()]
    return all(evaluate(side, module.env) >= block / 2 for side, block in known)


class _Weight:
    """Stores a parameter in few bits, for the product that uses it."""

    def __init__(self, module: Module, format_: WeightFormat, param: Value) -> None:
        self._module, self._format, self._param = module, format_, param
        ((self._op, self._index, self._depth),) = uses_inside(param)

    def store(self) -> None:
        """Change the type, add arguments for scales and zeros, and replace the product."""
        type_ = self._param.tensor
        blocks = _Blocks(self._module, self._format, self._op, self._index)
        dims = (*type_.dims[: self._depth], *blocks.dims)
        scale, weight, added = replace(type_, dims=dims, role="scale"), self._param, list[Value]()
        for name, dtype in (("scales", self._format.scale), ("zeros", self._format.zero)):
            if dtype:
                own = f"{weight.name}_{name}", replace(scale, dtype=dtype), weight.loc
                added.append(self._module.main.body.add_arg(*own))
        while True:
            weight.type = replace(weight.tensor, dtype=self._format.dtype)
            (user, index), *_ = weight.uses
            if user is self._op:
                break
            weight, added = user.body.args[index], [slice_into(user, v) for v in added]
        self._multiply(weight, added, blocks)

    def _multiply(self, weight: Value, shared: Sequence[Value], blocks: _Blocks) -> None:
        op, x = self._op, self._op.operands[1 - self._index]
        build = self._module.before(op, by=QuantizeWeights.name)
        if self._format.compute and x.tensor.dtype != self._format.compute:
            x = self._cast(build, x)
        to = op.result.tensor.dtype
        attrs: dict[str, RawAttr] = {"spec": blocks.spec, "to": to}
        if self._format.decoded:
            attrs["decoded"] = True
            if x.tensor.dtype == WIDE:
                x = cast_to(build, x, self._format.decoded)
                attrs["to"] = self._format.decoded
        if self._format.table:
            attrs["table"] = self._format.table
        names = [op.result.name, f"{weight.name}_decoded"]
        made = build.op("stg.scaled_einsum", [x, weight, *shared], attrs, names=names)
        replace_op(op, [cast_to(build, made.results[0], to)])

    def _cast(self, build: Builder, x: Value) -> Value:
        """The activations in the type in which the product computes, cast once for all products of
        a region: a cast in another region, such as that of other layers, is not visible."""
        of = self._op.parent
        users = (u for u, _ in x.uses if u.parent is of and u.has(Recasts))
        casts = (u for u in users if u.text("to") == self._format.compute)
        if (there := next(casts, None)) is not None:
            return there.result
        to = self._format.compute
        return build.value("stg.cast", [x], {"to": to}, hint=f"{x.name}_{to[:2]}")


class _Blocks:
    """The division of a weight into blocks: `dims` are the dimensions of its scales, and `spec` is
    the rule of the product with scales.

    | product       | blocks                  | rule                                |
    |---------------|-------------------------|-------------------------------------|
    | bsd,df->bsf   | 128 along d             | bs(dw),(dw)f,df->bsf                |
    | bsd,df->bsf   | 128 along d, 128 along f| bs(dw),(dw)(fv),df->bs(fv)          |
    | bsd,dhk->bshk | all of d                | bsd,dhk,hk->bshk                    |
    """

    def __init__(self, module: Module, format_: WeightFormat, op: Operation, index: int) -> None:
        self._module, self._op = module, op
        shapes, (out,) = parse_rule(op.text("spec"))
        weight, x = shapes[index], shapes[1 - index]
        type_ = op.operands[index].tensor
        sizes = dict(zip(weight, type_.dims, strict=True))
        contracted = [g for g in weight if g not in out]
        kept = [g for g in weight if g not in x]
        used = {f for s in (weight, x, out) for g in s for f in g}
        letters = (f for f in _LETTERS if f not in used)
        inner: dict[Group, Group] = {}
        length: dict[Group, Expr] = {}
        for groups, block in ((contracted, format_.rows), (kept, format_.columns)):
            if block is None or block == 1 or not groups:
                continue
            last = groups[-1]
            length[last] = self._block(sizes[last].size, block)
            inner[last] = (*last, next(letters))
        shared = [g for g in weight if format_.rows is not None or g not in contracted]
        self.dims = [
            replace(sizes[g], size=sizes[g].size / length[g]) if g in length else sizes[g]
            for g in shared
        ]

        def opened(shape: Shape) -> str:
            return shape_text(tuple(inner.get(g, g) for g in shape))

        more = f",{shape_text(tuple(shared))}" * (2 if format_.zero else 1)
        self.spec = f"{opened(x)},{opened(weight)}{more}->{opened(out)}"

    def _block(self, size: Expr, block: int) -> Expr:
        """The elements of a block along a dimension: all if it has fewer, else the largest divisor
        that blocks of the format allow (64 along 192). A size without a value is assumed to have
        whole blocks.

        Raises `DiagnosticError` for blocks of less than an eighth of the size of the format.
        """
        env = self._module.env
        if size.symbols <= env.keys():
            number = evaluate(size, env)
            whole = gcd(number, block)
            if number > block and whole * _SMALLEST < block:
                raise self._op.error(
                    f"dimension {size} = {number} of a weight is not a multiple of the block size "
                    f"{block}",
                    remedy="choose another block size or format",
                )
            block = whole if number > block else number
        if size.symbols:
            self._module.assume(Relation(size, "==", const(0), const(block)), self._op.loc)
        return const(block)
