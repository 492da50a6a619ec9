"""expand-kernels: replaces ops that have no fused kernel by the operations that run instead."""

from collections.abc import Iterator
from functools import partial

from stagec.api import Module, Operation, Pass, Phase, Strategy, read_strategy
from stagec.ir.rewrite import replace_op
from stagec.ir_spec.ops.gated import IN_PLACE
from stagec.ir_spec.ops.layout import PartOf, Unbind
from stagec.ir_spec.strategy.kernels import KernelsRule
from stagec.ir_spec.strategy.selective import SelectiveRule
from stagec.models import is_shipped
from stagec.passes.strategy.local_sizes import is_on_rank
from stagec.passes.strategy.unpack import unpack_product
from stagec.support.suggest import did_you_mean


class ExpandKernels(Pass):
    """Replace the ops that `stg.kernels` names by those that PyTorch runs without a compiler.

    Each op defines these operations. Gate and up in one product get products, and parameters, of
    their own, like those of modules, unless model code has one module (`joined`); statements that
    name the packed parameter then name these. This also applies to `gate_in_place` where recompute
    counts products. A remark reports a model without these ops, unless a built-in stack names them.
    `stg.part_of` stays if `part_of` is named and no axis splits the heads of some parts only; else
    it is removed.

    Before:
        stg.strategy @s {
          stg.kernels[eager = swiglu]
        }
        stg.func @f(%u: bf16[B, 2, S, F]) -> bf16[B, S, F] {
          %m = stg.swiglu(%u) : bf16[B, S, F]
          stg.return(%m)
        }
    After:
        stg.strategy @s {
          stg.kernels[eager = swiglu]
        }
        stg.func @f(%u: bf16[B, 2, S, F]) -> bf16[B, S, F] {
          %u_gate, %u_up = stg.unbind[dim = 1, count = 2](%u) : (bf16[B, S, F], bf16[B, S, F])
          %u_act = stg.silu(%u_gate) : bf16[B, S, F]
          %m = stg.mul(%u_act, %u_up) : bf16[B, S, F]
          stg.return(%m)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return bool(read_strategy(module).one(KernelsRule).eager) or any(_parts(module))

    def run(self, module: Module) -> None:
        expand_kernels(module, read_strategy(module))


def expand_kernels(module: Module, strategy: Strategy) -> None:
    """Replace the ops that the statement names, in place.

    Raises `DiagnosticError` for names of ops that are single kernels, or do not exist.
    """
    rule = strategy.one(KernelsRule)
    _leave_out_parts(module, strategy)
    known = {name for definition in module.registry for name in definition.eager_forms()}
    for name in rule.eager:
        if name not in known:
            names = ", ".join(sorted(known))
            raise rule.error(
                f"'{name}' cannot run operation by operation, expected {names}",
                remedy=did_you_mean(name, known)
                or "leave it out: all other ops are single kernels",
            )
    expanded, counts = False, _counts_products(strategy)
    for op in list(module.main.body.walk()):
        forms = op.definition.eager_forms()
        for name in _named(rule, op, counts=counts):
            expanded = True
            b = module.before(op, by=ExpandKernels.name)
            made = forms[name](b, op, partial(is_on_rank, module, strategy))
            operands = list(op.operands)
            if made is None:
                continue
            replace_op(op, made)
            for user in [user for value in operands for user, _ in value.uses]:
                if isinstance(user.definition, Unbind) and not user.flag("joined"):
                    unpack_product(module, user)
            break
    if rule.eager and not expanded and not is_shipped(rule.loc):
        remark = "'eager' of 'stg.kernels' changes nothing: the model has none of these ops"
        module.diagnostics.remark(remark, rule.loc)


def _counts_products(strategy: Strategy) -> bool:
    """Whether recompute counts products, so that each module has its own."""
    what, selective = strategy.recompute, strategy.one(SelectiveRule)
    return what.products > 0 or (what.policy == "selective" and selective.what == "products")


def _named(rule: KernelsRule, op: Operation, *, counts: bool) -> Iterator[str]:
    """The names of the forms that an op has, in its order. If recompute `counts` products, gate and
    up are two products, and the values computed from them are always recomputed."""
    for name in op.definition.eager_forms():
        if name in rule.eager:
            yield op.name.partition(".")[2] if name == IN_PLACE and counts else name


def _parts(module: Module) -> Iterator[Operation]:
    """The values that are computed as parts of one product."""
    return (op for op in module.main.body.walk() if isinstance(op.definition, PartOf))


def _leave_out_parts(module: Module, strategy: Strategy) -> None:
    asked = "part_of" in strategy.one(KernelsRule).eager
    for op in list(_parts(module)):
        if not asked or _is_split(op, strategy):
            replace_op(op, op.operands)


def _is_split(op: Operation, strategy: Strategy) -> bool:
    """Whether a strategy splits a dimension that only some of the parts have, such as heads that
    share keys, which one axis would split twice."""
    shapes = [{*value.tensor.shape} for value in op.operands]
    own = {size for shape in shapes for size in shape if any(size not in s for s in shapes)}
    names = {name for size in own for name in size.symbols}
    return any(names & {*rule.dims} for rule in strategy.splits)
