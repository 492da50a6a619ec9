"""The parts of a sequence that is split over ranks: views of its values, and states that pass from
one part to the next."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule, parse_rule
from stagec.ir.types import axis_size
from stagec.ir_spec.ops.base import STATE


class CarryStates(OpDef):
    """The states before each part of a sequence, from what the parts add and what they leave.

    The rule is one step from a part to the next one, `z` counts parts; before the first one the
    state is 0, or with `state` the last operand, and then the one behind the last part is a result
    too. With `reverse` it goes from the last part to the first one. FLOPs are those of n steps.
    """

    name = "stg.carry_states"
    operands = ("states", "keeps", "first*")
    results = ("result", "end?")
    params = (
        Param("spec", "str", "the step, an einsum", required=True, positional=True),
        Param("reverse", "flag", "from the last part to the first"),
        STATE,
    )
    flops_per_point = 2
    example = '%h0 = stg.carry_states["bzhkv,bzh->bzhkv"](%hs, %keeps) : f32[B, 4, H, K, K]'

    def rule(self, op: Operation) -> Rule:
        rule = make_rule(op.text("spec"))
        inner = rule.contracted(0)
        out = {f for g in rule.results[0] for f in g}
        had = {f for g in rule.operands[0] for f in g}
        text, whole = op.text("spec"), "".join({"z", *inner, *(out - had)})
        if op.flag("state"):
            left, _, right = text.partition("->")
            text = f"{left},{left.split(',')[0].replace('z', '')}->{right},{right.replace('z', '')}"
        return make_rule(text, whole=whole)

    def verify(self, op: Operation) -> Iterator[str]:
        (states, keeps), _ = parse_rule(op.text("spec"))
        if any(("z",) not in shape for shape in (states, keeps)):
            yield f"expects a rule along 'z', found '{op.text('spec')}'"
        elif op.results[0].tensor.shape != op.operands[0].tensor.shape:
            yield f"expects a rule that keeps the shape of the state, found '{op.text('spec')}'"
        elif op.flag("state") and op.flag("reverse"):
            yield "expects 'state' or 'reverse', found both"

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        states, keeps, *first = args
        spec = op.text("spec").replace("z", "")
        place = op.text("spec").index("z")
        before = first[0] if first else np.zeros_like(states.take(0, place))
        out, count = list[Array](), states.shape[place]
        for i in range(count)[::-1] if op.flag("reverse") else range(count):
            out.append(before)
            before = np.einsum(spec, before, keeps.take(i, place)) + states.take(i, place)
        starts = np.stack(out[::-1] if op.flag("reverse") else out, place)
        return [starts, before][: len(op.results)]


def to_parts(b: Builder, v: Value, text: str, over: Sequence[str]) -> Value:
    """A view of a value with its sequence `s` cut in parts, a new dimension behind the batch."""
    if "s" not in text:
        return v
    spec = f"{text.replace('s', '(zs)')}->{text.replace('s', 'zs')}"
    attrs: dict[str, RawAttr] = {
        "spec": plain(spec),
        "factors": ("z",),
        "sizes": (axis_size(over),),
    }
    return b.value("stg.reshape", [v], attrs, hint=f"{v.name}_parts")


def from_parts(b: Builder, v: Value, text: str, hint: str) -> Value:
    """The value again, its parts one sequence."""
    if "s" not in text:
        return v
    spec = f"{text.replace('s', 'zs')}->{text.replace('s', '(zs)')}"
    return b.value("stg.reshape", [v], {"spec": plain(spec)}, hint=hint)


def plain(spec: str) -> str:
    """The rule with heads as one factor."""
    return spec.replace("(gr)", "h")


def carry(
    b: Builder,
    own: Sequence[Value],
    how: Mapping[str, RawAttr],
    over: Sequence[str],
    names: Sequence[str],
) -> list[Value]:
    """What each part gets, of states and what parts keep of them; a third one is the first state,
    then the last one is a result too."""
    along: dict[str, RawAttr] = {"dim": 1, "over": tuple(over)}
    both, first = own[:2], own[2:]
    every = b.op("stg.all_gather", both, along, names=[f"{v.name}s" for v in both]).results
    state: dict[str, RawAttr] = {"state": True} if first else {}
    given = [*every, *first]
    states = b.op("stg.carry_states", given, {**how, **state}, names=[f"{names[0]}s", *names[1:]])
    mine = b.value("stg.all_slice", states.results[:1], along, hint=names[0])
    return [mine, *states.results[1:]]
