"""Helpers of op definitions: pointwise rules, gradients by a single op, derived ops."""

from collections.abc import Iterable, Mapping
from textwrap import fill
from typing import ClassVar, TypeVar, cast

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Attr, Operation, Value
from stagec.ir.expr import Expr, product
from stagec.ir.opdef import Grads, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule, parse_rule, shape_text
from stagec.ir.traits import Fusible, Trait

SPEC = Param("spec", "str", 'the index rule, such as "bsd,dhk->bshk"', positional=True)

ADAPTER_STEPS = Param("steps", "flag", "part of an adapter in fp32 that PyTorch runs op by op")

STATE = Param(
    "state",
    "flag",
    "a last operand is what is kept of the tokens before; what is kept of these too is a result",
)


def no_gradient(op: Operation) -> None:
    """Raises `DiagnosticError` for the gradient of an op that continues from a state."""
    if op.flag("state"):
        raise op.error(
            f"'{op.name}' with a state has no gradient",
            remedy="leave out 'state': a training step sees whole sequences",
        )


def pointwise(op: Operation, results: int = 1, *, scalars: int = 0, linear: bool = False) -> Rule:
    """The rule of an op whose operands and results all have the shape of operand 0, but for its
    last operands, which are `scalars` scalars."""
    text, count = letters(op.operands[0].tensor.rank), len(op.operands) - scalars
    left, joint = [text] * count + [""] * scalars, range(count) if linear else ()
    return make_rule(",".join(left) + "->" + ",".join([text] * results), linear=joint)


def dimension(op: Operation, x: Value, default: int, most: int) -> int:
    """The dimension `dim` that the op states, one of `most`. Raises `DiagnosticError` if x does not
    have it."""
    dim = op.integer("dim", default)
    if not 0 <= dim < most:
        raise op.error(
            f"'{op.name}' works along dimension {dim}, but %{x.name} is {x.type}",
            remedy=f"choose dim from 0 to {most - 1}",
        )
    return dim


def work(n: Sizes, per_element: int, rule: Rule) -> Expr:
    """The FLOPs of an op with `per_element` FLOPs for each point of the rule's index space."""
    return product(n[f] for f in rule.factors) * per_element


def stated(op: Operation, params: Iterable[Param]) -> dict[str, Attr]:
    """The attributes of an op for those of these parameters that it states."""
    names = {p.name for p in params}
    return {name: value for name, value in op.attrs.items() if name in names}


def present(grad: Value | None) -> Value:
    """A gradient that cannot be None: `grad` is called only if a result has one."""
    if grad is None:
        raise ValueError("an op is asked for gradients of its operands if a result has one")
    return grad


def gradients(
    b: Builder,
    op: Operation,
    operands: Grads,
    attrs: Mapping[str, RawAttr] | None = None,
    *,
    by: str = "",
) -> Grads:
    """The gradients of the first operands from a single op, `by` or `<name>_grad`; the other
    operands get none.

    The op gets these operands, the parameters that both ops have, and `attrs`, without those that
    are False.
    """
    name = by or f"{op.name}_grad"
    every = {**stated(op, b.registry[name].params), **(attrs or {})}
    given = {n: v for n, v in every.items() if v is not False}
    names = [v.prefixed("d_") for v in op.operands]
    made = b.op(name, [present(v) for v in operands], given, names=names).results
    return [*made, *[None] * (len(op.operands) - len(made))]


def backwards(op: Operation) -> str:
    """The inverse of the op's rule, from the result to the operand."""
    (left,), (right,) = parse_rule(op.text("spec"))
    return f"{shape_text(right)}->{shape_text(left)}"


class Elementwise(OpDef):
    """Base class of ops whose operands and result have one shape; one FLOP per element by
    default."""

    flops_per_point: ClassVar[int] = 1
    linear: ClassVar[bool] = False
    operands: ClassVar[tuple[str, ...]] = ("x",)
    traits: ClassVar[tuple[Trait, ...]] = (Fusible(),)

    def rule(self, op: Operation) -> Rule:
        return pointwise(op, linear=self.linear)


def need_result(op: Operation, index: int, name: str) -> Value:
    """Result `index` of an op whose trailing results are optional; it is added if it does not exist
    yet."""
    while len(op.results) <= index:
        types = op.definition.infer(op)
        op.add_result(f"{op.results[0].name}_{name}", types[len(op.results)])
    return op.results[index]


_Op = TypeVar("_Op", bound=OpDef)


def derive(
    base: type[_Op], of: OpDef, suffix: str, doc: str, example: str, /, **attributes: object
) -> _Op:
    """An op `<name>_<suffix>` that is derived from another one: a new class with a base,
    documentation, which is wrapped like a docstring, an example and further attributes."""
    given: dict[str, object] = {
        "__module__": type(of).__module__,
        "__doc__": fill(doc, 96, initial_indent='"""')[3:],
        "name": f"{of.name}_{suffix}",
        "example": example,
        **attributes,
    }
    return cast("type[_Op]", type(f"{type(of).__name__}_{suffix}", (base,), given))()
