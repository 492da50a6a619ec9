"""Low-rank adapters beside products: the parameters that have one, the types of adapters, and the
rules of the products with them."""

from collections.abc import Sequence
from dataclasses import replace

from stagec.api import DiagnosticError, Dim, Module, Operation, TensorType, Value, const
from stagec.ir.rewrite import uses_inside
from stagec.ir.rule import Shape, parse_rule, shape_text
from stagec.ir_spec.ops.contraction import Einsum
from stagec.ir_spec.ops.gated import is_joined
from stagec.ir_spec.strategy.lora import ALL_LINEAR, LoraRule
from stagec.support.suggest import did_you_mean

_PACKED = (2, 3)  # gate and up; query, key and value
_LETTERS = "rabcdefghijklmnopqstuvwxyz"


def adapted_parameters(module: Module, rule: LoraRule) -> list[Value]:
    """The parameters with adapters. Raises `DiagnosticError` for a rank below 1, for a name that no
    parameter has, and for a parameter without products."""
    params = module.parameters()
    if rule.rank < 1:
        raise rule.error(f"an adapter has a rank of 1 or more, found {rule.rank}")
    unknown = [n for n in rule.targets if not any(p.is_called(n) for p in params)]
    if problems := [_unknown(n, params, rule) for n in unknown if n != ALL_LINEAR]:
        raise DiagnosticError(*(d for each in problems for d in each.diagnostics))
    named = [param for param in params if rule.adapts(param)]
    adapted = [param for param in named if uses_inside(param)] or named  # a step may lack towers
    for param in adapted:
        if not _products(param):
            raise rule.error(
                f"parameter %{param.name} is not used in a product, expected a stg.einsum "
                "for an adapter",
                remedy="choose a parameter that is multiplied",
            )
    return adapted


def _unknown(name: str, params: Sequence[Value], rule: LoraRule) -> DiagnosticError:
    """The error of a name that no parameter has. The parameter of a module that transformers calls
    `q_proj` or `q_a_proj` is `wq` or `wq_a`, that of `up_proj` is `w_up` or `w_gate_up`."""
    known = sorted({p.name.rpartition("/")[2] for p in params if _products(p)})
    module = name.removesuffix("_proj")
    near = [n for n in known if n == f"w{module}" or module in n.split("_")[1:]]
    meant = f"did you mean {' or '.join(map(repr, near))}?" if near else did_you_mean(name, known)
    remedy = meant or f"choose some of {', '.join(known)}"
    return rule.error(f"the model has no parameter '%{name}'", remedy=remedy)


def _products(value: Value) -> list[tuple[Operation, int, int]]:
    """The products that use a parameter, in the form of `uses_inside`."""
    return [use for use in uses_inside(value) if isinstance(use[0].definition, Einsum)]


def low_rank_types(
    param: Value, rank: int, *, slots: Sequence[Dim] = ()
) -> tuple[TensorType, TensorType]:
    """The types of A and B of a parameter, from its first product and the repeats around it;
    `slots` is the dimension of several adapters, if there is one."""
    op, index, depth = _products(param)[0]
    cut, type_ = LowRankCut(op, index), param.tensor
    dims = dict(zip(cut.weight, type_.dims[depth:], strict=True))
    low = Dim(const(rank))
    lead = (*type_.dims[:depth], *slots, *(dims[g] for g in cut.batch))
    a = (*lead, *(dims[g] for g in (*cut.contracted, *cut.packed)), low)
    b = (*lead, low, *(dims[g] for g in (*cut.packed, *cut.kept)))
    return replace(type_, dims=a), replace(type_, dims=b)


class LowRankCut:
    """The rule of a product, cut in two at the rank r.

    | product         | down           | up              |
    |-----------------|----------------|-----------------|
    | bsd,dhk->bshk   | bsd,dr->bsr    | bsr,rhk->bshk   |
    | ebcd,edf->ebcf  | ebcd,edr->ebcr | ebcr,erf->ebcf  |
    | bsd,dzf->bzsf   | bsd,dzr->zbsr  | zbsr,rzf->bzsf  |

    The second product is that of experts; the parameter of the third one packs several matrices.
    """

    def __init__(self, op: Operation, index: int) -> None:
        operands, (out,) = parse_rule(op.text("spec"))
        self.weight, x = operands[index], operands[1 - index]
        sizes = dict(zip(self.weight, op.operands[index].tensor.shape, strict=True))
        several = () if is_joined(op) else _PACKED
        packed = tuple(g for g in self.weight if g not in x and sizes[g].value in several)
        self.batch = tuple(g for g in self.weight if g in x and g in out)
        self.contracted = tuple(g for g in self.weight if g not in out)
        self.kept = tuple(g for g in self.weight if g not in (*x, *packed) and g in out)
        used = {f for shape in (*operands, out) for g in shape for f in g}
        letter = next(f for f in _LETTERS if f not in used)
        slots = next(f for f in reversed(_LETTERS) if f not in used)
        rank: Shape = ((letter,),)
        self.x, self.out, self.slots = x, out, (slots,)
        self.low = (*packed, *(g for g in x if g in out), *rank)
        self.packed, each = packed, (*packed, *x)
        self.packed_sizes = tuple(sizes[g].value or 0 for g in packed)
        self.copied = f"{shape_text(x)}->{shape_text(each)}"
        self.into = (*self.batch, *self.contracted, *packed, *rank)
        self.out_of = (*self.batch, *rank, *packed, *self.kept)
        self.down, self.down_of_each = (_spec(s, self.into, self.low) for s in (x, each))
        self.up = _spec(self.low, self.out_of, out)


def _spec(left: Shape, right: Shape, out: Shape) -> str:
    return f"{shape_text(left)},{shape_text(right)}->{shape_text(out)}"
