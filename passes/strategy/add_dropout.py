"""add-dropout: inserts the dropouts that the configuration of the model states."""

from collections.abc import Iterator

from stagec.api import Module, Operation, Pass, Phase, Value, is_parameter, read_strategy
from stagec.ir.builder import RawAttr
from stagec.ir.traits import Repeats
from stagec.ir_spec.ops.contraction import Add, Einsum
from stagec.ir_spec.strategy.dropout import CONFIGURED, EMBEDDING, HIDDEN, RATES, DropoutRule
from stagec.models import is_shipped


class AddDropout(Pass):
    """Apply dropout to the values that layers add to the residual stream (`hidden_dropout` of the
    module) and to the input of the first layer (`embedding_dropout`), as `stg.dropouts` states.

    A layer adds a product, with its bias, to another value. `expand-attention` applies the dropout
    of attention.

    Before:
        stg.module @m[hidden_dropout = 1/10] { ...
          %a = stg.einsum["bd,de->be"](%h, %w) : bf16[B, D]
          %r = stg.add(%h, %a) : bf16[B, D]
    After:
        stg.module @m[hidden_dropout = 1/10] { ...
          %a = stg.einsum["bd,de->be"](%h, %w) : bf16[B, D]
          %a_left, %a_mask = stg.dropout[p = 1/10, seed = 1](%a) : (bf16[B, D], u8[B, D])
          %r = stg.add(%h, %a_left) : bf16[B, D]
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).one(DropoutRule).rates == CONFIGURED

    def run(self, module: Module) -> None:
        rule = read_strategy(module).one(DropoutRule)
        if not is_shipped(rule.loc) and not {*RATES} & module.root.attrs.keys():
            remark = "'stg.dropouts' changes nothing: the model states no rates"
            module.diagnostics.remark(remark, rule.loc)
        add_dropout(module)


def add_dropout(module: Module) -> None:
    """Insert the dropouts that the rates of a module ask for, in place."""
    repeats = [op for op in module.main.body.walk() if op.has(Repeats)]
    if HIDDEN in module.root.attrs:
        for seed, (user, index) in enumerate([u for op in repeats for u in _added(op)]):
            _drop(module, user, index, HIDDEN, seed + 1)
    if EMBEDDING in module.root.attrs:
        for op in repeats:
            if op.operands[0].producer is None or not op.operands[0].producer.has(Repeats):
                _drop(module, op, 0, EMBEDDING, 0)


def _added(repeat: Operation) -> Iterator[tuple[Operation, int]]:
    """The additions of a layer that add a product to another value, and the index of the
    product."""
    for op in repeat.body.ops:
        if isinstance(op.definition, Add) and op.result.type == repeat.body.args[0].type:
            values = [v for v in op.operands if not is_parameter(v)]
            for index, value in enumerate(op.operands):
                if len(values) > 1 and _is_product(value):
                    yield op, index


def _is_product(value: Value) -> bool:
    """Whether a value is a product, to which a bias may have been added."""
    op = value.producer
    if op is not None and isinstance(op.definition, Add) and is_parameter(op.operands[-1]):
        op = op.operands[0].producer
    return op is not None and isinstance(op.definition, Einsum)


def _drop(module: Module, user: Operation, index: int, rate: str, seed: int) -> None:
    """Apply dropout to an operand of an operation."""
    value = user.operands[index]
    names = [f"{value.name}_left", f"{value.name}_mask"]
    b = module.before(user, by=AddDropout.name)
    attrs: dict[str, RawAttr] = {"p": module.root.expr(rate), **({"seed": seed} if seed else {})}
    user.set_operand(index, b.op("stg.dropout", [value], attrs, names=names).results[0])
