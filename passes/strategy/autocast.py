"""autocast: casts the operands of ops of an fp32 model by the kind of the op."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from stagec.api import (
    Builder,
    Module,
    Operation,
    Pass,
    Phase,
    Quoted,
    Region,
    Strategy,
    TensorType,
    Value,
    factor_sizes,
    is_parameter,
    read_strategy,
)
from stagec.ir.builder import RawAttr
from stagec.ir.expr import ZERO
from stagec.ir.rewrite import carried, uses_inside
from stagec.ir.rule import parse_rule, shape_text
from stagec.ir.traits import Free, Repeats, Wide
from stagec.ir.types import FLOATS
from stagec.ir_spec.ops.contraction import Add, Cast, Einsum, Mul, cast_to
from stagec.ir_spec.ops.convolution import Convolution
from stagec.ir_spec.ops.gated import is_joined
from stagec.ir_spec.ops.layout import PartOf
from stagec.ir_spec.ops.norm import NARROW, WithVectors
from stagec.ir_spec.ops.quantized import FORMATS
from stagec.ir_spec.ops.rope import RotaryEmbedding
from stagec.ir_spec.strategy.adapters import AdaptersRule
from stagec.ir_spec.strategy.autocast import AutocastRule
from stagec.ir_spec.strategy.dtypes import computed_in
from stagec.ir_spec.strategy.fusion import COMPILED, FusionRule
from stagec.ir_spec.strategy.lora import FIRST
from stagec.ir_spec.strategy.saved_tensors import SavedTensorsRule
from stagec.ir_spec.strategy.weights import WeightsRule
from stagec.models import is_shipped

#: The element type of parameters and of ops that need 32 bits.
WIDE = "f32"


class Autocast(Pass):
    """Cast the operands of products to the type of `stg.autocast`, those of other ops to f32 where
    they differ. With `experts = cast`, products of experts are cast for where others are not.

    A parameter is cast once per region, an activation once for each product that takes it. Operands
    are cast last to first, so backward casts the gradient of the activation first. The bias of a
    product is cast like its operands, because both are one call. Products that are parts of one
    product share a cast. For a packed parameter the activation is cast once for each parameter in
    it. With `as_weights` model code has cast the activation to fp32 before
    (`T5DenseActDense.forward`). Norms with `code = narrow` are cast like products
    (`NemotronLayerNorm1P`). With `stg.saved_tensors[until = node]` what a norm gives a module is
    there until the module returns. A compiler that fuses element-wise ops (`stg.fusion`) casts each
    value once. In a model that computes in 16 bits, norms, softmax and powers alone take casts, and
    what takes their results.

    Before:
        stg.strategy @s {
          stg.dtypes[param = f32]
          stg.autocast[on]
        }
        stg.func @f(%x: f32[B, S, D], %w: f32[D, D | param]) -> f32[B, S, D] {
          %y = stg.einsum["bsd,de->bse"](%x, %w) : f32[B, S, D]
          %z = stg.add(%x, %y) : f32[B, S, D]
          stg.return(%z)
        }
    After:
        stg.strategy @s {
          stg.dtypes[param = f32]
          stg.autocast[on]
        }
        stg.func @f(%x: f32[B, S, D], %w: f32[D, D | param]) -> f32[B, S, D] {
          %w_bf16 = stg.cast[bf16](%w) : bf16[D, D]
          %x_bf16 = stg.cast[bf16](%x) : bf16[B, S, D]
          %y = stg.einsum["bsd,de->bse"](%x_bf16, %w_bf16) : bf16[B, S, D]
          %y_f32 = stg.cast[f32](%y) : f32[B, S, D]
          %z = stg.add(%x, %y_f32) : f32[B, S, D]
          stg.return(%z)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        rules = strategy.all(AutocastRule)
        if _is_wide(strategy) and any(r.experts == "cast" for r in rules):
            return True
        leaves = _is_left(strategy) or not _is_wide(strategy)
        return any(r.on and not (leaves and is_shipped(r.loc)) for r in rules)

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        once, rule = strategy.one(FusionRule).kind in COMPILED, strategy.one(AutocastRule)
        if rule.experts == "cast" and _is_wide(strategy):
            _Caster(module, rule, once=True, only=_of_experts).region(module.main.body)
        if not rule.on or (_is_left(strategy) and is_shipped(rule.loc)):
            return
        if _is_left(strategy):
            remark = "'stg.autocast' changes nothing: this software leaves casts to its gathers"
            module.diagnostics.remark(remark, rule.loc)
            return
        if _is_left_split(module, strategy):
            remark = (
                "activations are f32: this software casts nothing where ranks split the model, "
                "unless they shard parameters too ('--zero 3')"
            )
            module.diagnostics.remark(remark, rule.loc)
            return
        if rule.sharded == "left" and strategy.zero:
            remark = (
                f"under ZeRO-{strategy.zero} activations are f32: this software computes in "
                f"{strategy.dtypes.compute} where it gathers parameters, with ZeRO-3 "
                "('--zero 3 --reshard-after-forward never' gathers them once)"
            )
            module.diagnostics.remark(remark, rule.loc)
        autocast(module, rule, once=once)


def _is_wide(strategy: Strategy) -> bool:
    """Whether the model computes in fp32."""
    return computed_in(strategy.dtypes, strategy.zero, strategy.dtypes.param) == WIDE


def _of_experts(op: Operation) -> bool:
    """Whether an operation is a product of rows that a router has dealt to experts."""
    return any(dim.routed for value in op.operands for dim in value.tensor.dims)


def _is_left(strategy: Strategy) -> bool:
    """Whether the software does not cast because its parameters are sharded."""
    return strategy.one(AutocastRule).sharded == "left" and strategy.zero == 3


def _is_left_split(module: Module, strategy: Strategy) -> bool:
    """Whether the software does not cast because ranks split parameters, or in a pipeline. Ranks
    that also split the batch, as those with experts of their own, are data parallel."""
    dims = [dim.size for param in module.parameters() for dim in param.tensor.dims]
    names = {name for size in dims for name in size.symbols}
    data = {a for rule in strategy.splits if strategy.batch in rule.dims for a in rule.over}
    rules = (rule for rule in strategy.splits if not data.issuperset(rule.over))
    split = strategy.pipeline is not None or any(names & {*rule.dims} for rule in rules)
    return split and strategy.one(AutocastRule).split == "left"


def autocast(module: Module, rule: AutocastRule, *, once: bool = False) -> None:
    """Insert the casts, in place, with `once` a single one per value. A remark reports a model
    without products in fp32."""
    caster = _Caster(module, rule, once=once)
    caster.region(module.main.body)
    strategy = read_strategy(module)
    if strategy.one(SavedTensorsRule).until == "node" and strategy.pipeline is None and not once:
        for op in [op for op in module.main.body.walk() if op.has(Repeats)]:
            name_inputs(module, op.body)
    if not caster.casts:
        remark = "'stg.autocast' changes nothing: the model has no product in fp32"
        module.diagnostics.remark(remark, rule.loc)


def name_inputs(module: Module, block: Region) -> None:
    """Keep what the modules of a block are given, a norm, until they return, in place: their code
    has a name for it, while backward has casts (`x` of `LlamaMLP.forward`)."""
    for op in [op for op in block.ops if isinstance(op.definition, Add)]:
        for value in op.operands:
            end = _returned(value)
            given = _norm_of(end, block) if end is not None else None
            if end is not None and given is not None:
                b = module.after(end, by=Autocast.name)
                b.op("stg.discard", [given], types=())


def _returned(value: Value) -> Operation | None:
    """The operation whose result a module returns: the last product or sum before a value."""
    op = value.producer
    while op is not None and op.operands and not isinstance(op.definition, Add | Einsum):
        op = op.operands[0].producer
    return op


def _norm_of(end: Operation, block: Region) -> Value | None:
    """The result of a norm of which all that an operation takes of the block's input is made, or
    None."""
    inputs = {*block.args[: carried(block.owner)]}
    left = {*end.operands}
    while left:
        left = {v for v in left if v.producer is not None or v in inputs}
        value = max(left, key=lambda v: v.producer.position() if v.producer else -1, default=None)
        made = value.producer if value is not None else None
        if made is None:
            return None
        if len(left) == 1 and isinstance(made.definition, WithVectors):
            return value
        left = {v for v in left if v is not value} | {*made.operands}
    return None


class _Caster:
    def __init__(
        self,
        module: Module,
        rule: AutocastRule,
        *,
        once: bool,
        only: Callable[[Operation], bool] | None = None,
    ) -> None:
        self._module, self._rule, self._once, self._only = module, rule, once, only
        strategy = read_strategy(module)
        self._wide = _is_wide(strategy)
        decodes = strategy.one(WeightsRule).format in FORMATS
        wide = strategy.one(AdaptersRule).dtype == WIDE and not (once or decodes)
        first = (p for p in module.parameters() if p.name.endswith(FIRST)) if wide else ()
        self._adapters = {op for param in first for op, *_ in uses_inside(param)}
        self._cached: dict[tuple[Region | None, Value], Value] = {}
        self._parts: dict[Operation, Operation] = {}
        for op in module.main.body.walk():
            if isinstance(op.definition, PartOf):
                self._parts.update((part, op) for v in op.operands if (part := _product_of(v)))
        self._together: dict[tuple[Operation, Value], Value] = {}

    @property
    def casts(self) -> bool:
        """Whether a cast was inserted."""
        return bool(self._cached)

    def region(self, region: Region) -> None:
        """Cast the operands of the ops of a region, and of those inside."""
        for op in list(region.ops[:-1]):
            if op.region is not None:
                self._repeat(op)
            elif op.operands and not op.has(Free) | op.flag("to"):
                self._op(op)
            op.infer()
        end = region.terminator
        count = carried(region.owner)
        wanted = [a.type for a in region.args[:count]] if count else [*region.returns]
        for index, type_ in enumerate(wanted):
            if isinstance(type_, TensorType) and type_.dtype in FLOATS:
                self._cast(end, index, type_.dtype)

    def _repeat(self, op: Operation) -> None:
        """Cast the body of a repeat; carried values have the types of its arguments."""
        for arg, value in zip(op.body.args, op.operands, strict=False):
            if value.tensor.dtype != arg.tensor.dtype and arg.tensor.dtype in FLOATS:
                self._cast(op, arg.index, arg.tensor.dtype)
        self.region(op.body)

    def _op(self, op: Operation) -> None:
        rule = op.definition.rule(op)
        if rule is None:
            return
        sizes = factor_sizes(op, rule)
        if op.definition.matmul_flops(op, sizes) != ZERO:
            kernel = op.definition.kernel(op, sizes)
            attends = kernel is not None and kernel.kind == "attention"
            given = attends and self._rule.attention == "given"
            if not given and (self._only is None or self._only(op)):
                self._product(op)
            return
        if op.text("code", "") == NARROW:
            self._product(op)  # it has no part in the list
            return
        if op.flag("steps") and op.flag("wide_scale"):
            self._wide_norm(op)
        if _adds_bias(op):
            self._cast(op, 1, op.operands[0].tensor.dtype)
        kinds = {v.tensor.dtype for v in op.operands} & FLOATS
        turns = isinstance(op.definition, RotaryEmbedding) and not self._wide  # tables in 16 bits
        narrow = op.flag("compiled") or op.flag("complex") or turns  # casts inside, and back
        listed = op.has(Wide) and kinds and not narrow and self._only is None
        if len(kinds) > 1 or listed:
            saves = not listed and isinstance(op.definition, Mul)
            for index, value in enumerate(op.operands):
                if value.tensor.dtype in FLOATS:
                    self._cast(op, index, WIDE, again=saves)

    def _wide_norm(self, op: Operation) -> None:
        """Cast around an unfused norm: it takes its operand in fp32, scales in fp32, and its result
        is cast to the type of the operand."""
        narrow = op.operands[0].tensor.dtype
        if narrow == WIDE:
            return
        self._cast(op, 0, WIDE)
        op.result.type = replace(op.result.tensor, dtype=WIDE)
        product, _ = op.result.uses[0]
        scaled = product.result
        b = self._module.after(product, loc=op.loc, by=Autocast.name)
        made = cast_to(b, scaled, narrow)
        scaled.replace_with(made)

    def _product(self, op: Operation) -> None:
        alone = self._once or not isinstance(op.definition, Einsum)
        packed = {} if alone or is_joined(op) else _packed(op)
        if op in self._adapters:
            self._cast_of_adapter(op)
        if op.attrs.pop("as_weights", False):
            self._cast(op, 0, op.operands[1].tensor.dtype)
        for index, value in reversed([*enumerate(op.operands)]):  # as GCC evaluates arguments
            if value.tensor.dtype == WIDE:
                self._cast(op, index, self._rule.to)
                if packed and not is_parameter(value):
                    self._copy(op, index, packed)

    def _cast_of_adapter(self, op: Operation) -> None:
        """Cast what an adapter takes to its type, before autocast casts it back: its module has
        both until it returns. In a model in 16 bits `add-lora` has cast it."""
        for index, value in enumerate(op.operands):
            made = value.producer
            is_cast = made is not None and isinstance(made.definition, Cast)
            narrow = made.operands[0] if made is not None and is_cast else value
            if narrow.tensor.dtype != WIDE and not is_parameter(narrow):
                last = op
                while not isinstance(last.definition, Add):
                    if len(last.results) != 1 or not last.result.uses:
                        return  # no sum takes what it computes
                    last = last.result.uses[0][0]
                wide = value if is_cast else cast_to(self._before(op), value, WIDE)
                op.set_operand(index, wide)
                self._module.after(last, by=Autocast.name).op("stg.discard", [narrow, wide])

    def _cast(self, op: Operation, index: int, to: str, *, again: bool = False) -> None:
        """Give an op an operand of this type; `again` if its kernel takes and saves the operand as
        it is."""
        value = op.operands[index]
        if value.tensor.dtype == to:
            return
        key, narrows = (op.parent, value), to == self._rule.to
        keeps = narrows and (self._once or is_parameter(value))
        whole = self._parts.get(op)
        if whole is not None and not keeps and (whole, value) in self._together:
            op.set_operand(index, self._together[whole, value])
            return
        if not (keeps and key in self._cached):
            self._cached[key] = cast_to(self._before(op), value, to)
            if again and (made := self._cached[key].producer) is not None:
                made.attrs["again"] = True
        op.set_operand(index, self._cached[key])
        if whole is not None:
            self._together[whole, value] = self._cached[key]

    def _before(self, op: Operation) -> Builder:
        return self._module.before(op, by=Autocast.name)

    def _copy(self, op: Operation, index: int, packed: Mapping[str, int]) -> None:
        """Give a product with a packed parameter one copy of an operand for each packed product."""
        sides, results = parse_rule(op.text("spec"))
        text, new = shape_text(sides[index]), "".join(packed) + shape_text(sides[index])
        b, value = self._before(op), op.operands[index]
        attrs: dict[str, RawAttr] = {"spec": f"{text}->{new}", "sizes": tuple(packed.values())}
        op.set_operand(index, b.value("stg.broadcast", [value], attrs, hint=f"{value.name}_each"))
        left = [new if i == index else shape_text(side) for i, side in enumerate(sides)]
        op.attrs["spec"] = Quoted(f"{','.join(left)}->{shape_text(results[0])}")


def _product_of(value: Value) -> Operation | None:
    """The product that makes a value, possibly with a bias, or None."""
    op = value.producer
    if op is not None and isinstance(op.definition, Add):
        op = op.operands[0].producer
    return op if op is not None and isinstance(op.definition, Einsum) else None


def _adds_bias(op: Operation) -> bool:
    """Whether an operation adds a bias to a product or a convolution, in one call."""
    if not isinstance(op.definition, Add) or len(op.operands) != 2:
        return False
    product, bias = op.operands[0].producer, op.operands[1]
    made = product is not None and isinstance(product.definition, Einsum | Convolution)
    return made and is_parameter(bias) and bias.tensor.rank < op.operands[0].tensor.rank


def _packed(op: Operation) -> dict[str, int]:
    """The dimensions of the products that an einsum packs, with their sizes: dimensions of literal
    size that only the parameter and the result have, except the last one, which is the rank of an
    adapter."""
    params = [i for i, v in enumerate(op.operands) if is_parameter(v)]
    if len(params) != 1 or "spec" not in op.attrs or len(op.operands) != 2:
        return {}
    sides, (result,) = parse_rule(op.text("spec"))
    mine, other, shape = sides[params[0]], sides[1 - params[0]], op.operands[params[0]].tensor.shape
    sizes = {shape_text((g,)): size.value for g, size in zip(mine, shape, strict=True)}
    alone = (g for g in mine[:-1] if g not in other and g in result)
    return {t: n for g in alone if (n := sizes[t := shape_text((g,))]) is not None and n > 1}
