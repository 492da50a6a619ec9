"""add-lora: adds low-rank adapters beside products with parameters, and freezes all other
parameters."""

from dataclasses import field, replace

from stagec.api import (
    Builder,
    Module,
    Operation,
    Pass,
    Phase,
    Strategy,
    TensorType,
    Value,
    const,
    is_parameter,
    read_strategy,
)
from stagec.ir.builder import RawAttr
from stagec.ir.rewrite import carried, slice_into, uses_inside
from stagec.ir.traits import Repeats
from stagec.ir_spec.ops.contraction import Add, Einsum, cast_to
from stagec.ir_spec.ops.layout import PartOf
from stagec.ir_spec.strategy.adapters import AdaptersRule
from stagec.ir_spec.strategy.dtypes import computed_in
from stagec.ir_spec.strategy.kernels import TORCH, KernelsRule
from stagec.ir_spec.strategy.lora import FIRST, SECOND, LoraRule
from stagec.passes.strategy.low_rank import LowRankCut, adapted_parameters, low_rank_types


class AddLora(Pass):
    """Add low-rank adapters (arXiv 2106.09685) beside products with the parameters of these names,
    and freeze all other parameters.

    Without options it applies `stg.lora` and `stg.adapters` of the strategy. A name is the last
    part of the path of a parameter. A parameter that is used in several products has one adapter. A
    dimension of size 2 or 3 that is not contracted packs matrices (gate and up; query, key and
    value), each of which has an adapter of its own. A bias belongs to the module, so the result of
    the adapter is added to their sum (`Linear.forward` of peft). If `stg.kernels` names `part_of`,
    parameters whose products run as one are one module, whose adapter has a single A.

    Before:
        stg.strategy @s {
          stg.lora[targets = wq, rank = 8]
        }
        stg.func @f(%x: f32[B, D], %layers/wq: f32[L, D, F | param], %g: f32[D | param]) {
          %n = stg.rmsnorm(%x, %g) : f32[B, D]
          %y = stg.repeat[count = L, carry = 1](%h: f32[B, D] = %n, %w: f32[D, F] = %layers/wq) {
            %q = stg.einsum["bd,df->bf"](%h, %w) : f32[B, F]
            %z = stg.einsum["bf,bd->bd"](%q, %h) : f32[B, D]
            stg.yield(%z)
          } : f32[B, D]
          stg.return(%y)
        }
    After:
        stg.strategy @s {
          stg.lora[targets = wq, rank = 8]
        }
        stg.func @f(%x: f32[B, D], %layers/wq: f32[L, D, F | frozen], %g: f32[D | frozen],
            %layers/wq_lora_a: f32[L, D, 8 | param], %layers/wq_lora_b: f32[L, 8, F | param]) {
          %n = stg.rmsnorm(%x, %g) : f32[B, D]
          %y = stg.repeat[count = L, carry = 1](%h: f32[B, D] = %n, %w: f32[D, F] = %layers/wq,
              %layers/wq_lora_a_i: f32[D, 8] = %layers/wq_lora_a,
              %layers/wq_lora_b_i: f32[8, F] = %layers/wq_lora_b) {
            %q = stg.einsum["bd,df->bf"](%h, %w) : f32[B, F]
            %q_low = stg.einsum["bd,dr->br"](%h, %layers/wq_lora_a_i) : f32[B, 8]
            %q_lora = stg.einsum["br,rf->bf"](%q_low, %layers/wq_lora_b_i) : f32[B, F]
            %q_adapted = stg.add(%q, %q_lora) : f32[B, F]
            %z = stg.einsum["bf,bd->bd"](%q_adapted, %h) : f32[B, D]
            stg.yield(%z)
          } : f32[B, D]
          stg.return(%y)
        }
    """

    needs = Phase.SHAPED

    targets: tuple[str, ...] = field(
        default=(), metadata={"help": "names of parameters (default: what the strategy says)"}
    )
    rank: int = field(default=16, metadata={"help": "the rank of the adapters"})
    alpha: int = field(
        default=0, metadata={"help": "their results are times alpha/rank (0: times 1)"}
    )

    def applies(self, module: Module) -> bool:
        stated = read_strategy(module).one(LoraRule).targets
        return not module.serving and bool(self.targets or stated)

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        given = LoraRule(self.targets, self.rank, self.alpha)
        rule = given if self.targets else strategy.one(LoraRule)
        add_lora(module, rule, wide=_in_32_bits(strategy))


def _in_32_bits(strategy: Strategy) -> bool:
    """Whether adapters have 32 bits while parameters are stored and computed in 16."""
    param = strategy.dtypes.param
    narrow = param != WIDE and computed_in(strategy.dtypes, strategy.zero, param) == param
    return narrow and strategy.one(AdaptersRule).dtype == WIDE


WIDE = "f32"


def add_lora(module: Module, rule: LoraRule, *, wide: bool = False) -> None:
    """Add adapters to the main function, in place; with `wide` in fp32.

    Raises `DiagnosticError` for a name that no parameter has, or of a parameter without products.
    """
    adapted = adapted_parameters(module, rule)
    for param in module.parameters():
        param.type = replace(param.tensor, role="frozen")
    for params in _modules(module, adapted):
        _Adapter(module, rule, wide=wide).add(params)


def _modules(module: Module, adapted: list[Value]) -> list[list[Value]]:
    """The parameters with adapters, grouped by module."""
    joined = "part_of" in read_strategy(module).one(KernelsRule).eager
    modules: dict[Value | Operation, list[Value]] = {}
    for param in adapted:
        product = next(o for o, *_ in uses_inside(param) if isinstance(o.definition, Einsum))
        of = _part_of(product.result) if joined else None
        modules.setdefault(of or param, []).append(param)
    return [*modules.values()]


def _part_of(value: Value) -> Operation | None:
    """The `stg.part_of` of a product, to which a bias may be added, or None."""
    for user, _ in value.uses:
        if isinstance(user.definition, PartOf):
            return user
        if isinstance(user.definition, Add):
            return _part_of(user.result)
    return None


def _with_bias(product: Value) -> Value:
    """The sum of a product and its bias; the product itself if it has none."""
    if len(product.uses) != 1:
        return product
    (user, index), *_ = product.uses
    adds = isinstance(user.definition, Add) and len(user.operands) == 2
    return user.result if adds and is_parameter(user.operands[1 - index]) else product


class _Adapter:
    """The adapter of the parameters of a module."""

    def __init__(self, module: Module, rule: LoraRule, *, wide: bool) -> None:
        self._module, self._rule, self._wide = module, rule, wide
        torch = read_strategy(module).one(KernelsRule).elementwise == TORCH
        self._steps: dict[str, RawAttr] = {"steps": True} if wide and torch else {}
        self._slices: dict[Operation, Value] = {}
        self._lows: dict[Value, Value] = {}

    def add(self, params: list[Value]) -> None:
        """Add the parameters A and B, and the products with them."""
        kinds = [low_rank_types(param, self._rule.rank) for param in params]
        a = self._matrix(params[0], FIRST, kinds[0][0])
        for param, (_, type_) in zip(params, kinds, strict=True):
            self._adapt(param, a, self._matrix(param, SECOND, type_))

    def _matrix(self, param: Value, end: str, type_: TensorType) -> Value:
        dtype = WIDE if self._wide else param.tensor.dtype
        type_ = replace(type_, dtype=dtype, role="param")
        return self._module.main.body.add_arg(param.name + end, type_, param.loc)

    def _adapt(self, w: Value, a: Value, b: Value) -> None:
        """Add the adapter to all products with w."""
        for op, index in list(w.uses):
            if op.has(Repeats) and index >= carried(op):
                if op not in self._slices:
                    self._slices[op] = slice_into(op, a)
                self._adapt(op.body.args[index], self._slices[op], slice_into(op, b))
            elif isinstance(op.definition, Einsum):
                self._beside(op, index, a, b)

    def _beside(self, op: Operation, index: int, a: Value, b: Value) -> None:
        """y = x w becomes x w + x a b."""
        cut, y, x = LowRankCut(op, index), _with_bias(op.result), op.operands[1 - index]
        users = list(y.uses)
        build = self._module.after(y.producer or op, by=AddLora.name)
        to = {"to": op.text("to")} if "to" in op.attrs and not self._wide else {}
        low = self._lows.get(x)
        if low is None:
            wide, down = self._cast_input(build, cut, x) if self._wide else (x, cut.down)
            low = build.value("stg.einsum", [wide, a], {"spec": down}, hint=f"{y.name}_low")
            self._lows[x] = low
        up = build.value("stg.einsum", [low, b], {"spec": cut.up, **to}, hint=f"{y.name}_lora")
        if self._rule.alpha not in (0, self._rule.rank):
            by = const(self._rule.alpha) / const(self._rule.rank)
            up = build.value("stg.scale", [up], {"by": by, **self._steps}, hint=f"{y.name}_scaled")
        if (dtype := y.tensor.dtype) != up.tensor.dtype:
            given = {"to": dtype, **self._steps}
            up = build.value("stg.cast", [up], given, hint=f"{up.name}_{dtype}")
        adapted = build.value("stg.add", [y, up], self._steps, hint=f"{y.name}_adapted")
        y.replace_with(adapted, users)

    def _cast_input(self, build: Builder, cut: LowRankCut, x: Value) -> tuple[Value, str]:
        """The input in fp32, with one copy for each adapter that the parameter packs, and the rule
        of the product with A."""
        x = cast_to(build, x, WIDE)
        if not cut.packed:
            return x, cut.down
        given: dict[str, RawAttr] = {"spec": cut.copied, "sizes": cut.packed_sizes}
        return build.value("stg.broadcast", [x], given, hint=f"{x.name}_each"), cut.down_of_each
