"""hand-over: what sequences keep goes from the pod that prefills to the pod that decodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stagec.api import (
    Builder,
    Module,
    Operation,
    Pass,
    Phase,
    Value,
    const,
    error,
    evaluate,
    made_by,
    parse_module,
    symbol,
)
from stagec.ir.builder import RawAttr
from stagec.ir.rewrite import uses_inside
from stagec.ir.serving import PAST
from stagec.ir.traits import Terminates
from stagec.ir_spec.ops.pods import message_bytes
from stagec.ir_spec.ops.serving import rows_of
from stagec.program.handover import Crossing, NoHandoverError, crossings
from stagec.support.diagnostics import NotAnIntegerError
from stagec.support.texts import read_text

PASS = "hand-over"


@dataclass(frozen=True)
class HandOver(Pass):
    """Hand the caches of a step of prefill over to the pod that decodes, or take them over from the
    pod that has prefilled.

    A cache goes to the cache of the same name in the other pod, and to the placement that it has
    there; each rank that holds a part gets each byte of it once. It is handed over where the step
    has brought it up to date, layer by layer, and taken over before the step uses it. `module` is a
    text of the other pod in the phase `partitioned`. Sizes have to be known.
    """

    name = PASS
    needs = Phase.PARTITIONED

    to: str = field(default="", metadata={"help": "hand over to the pod of this name"})
    source: str = field(default="", metadata={"help": "take over from the pod of this name"})
    module: str = field(default="", metadata={"help": "the file of the other pod's module"})

    def run(self, module: Module) -> None:
        if not self.module or bool(self.to) == bool(self.source):
            raise error(
                "expected 'to' or 'source', and the module of the other pod",
                remedy="as in hand-over{to=decode,module=decode.stg}",
            )
        other = parse_module(read_text(self.module), module.registry)
        hand_over(module, other, to=self.to, source=self.source)


def hand_over(module: Module, other: Module, *, to: str = "", source: str = "") -> None:
    """Hand the caches of a module over to another pod, or take them over from it, in place.

    Raises `DiagnosticError` for caches that the other pod does not have, sizes that are open, and
    placements whose parts do not fall together.
    """
    pods = (module, other) if to else (other, module)
    try:
        found = crossings(*pods)
    except NoHandoverError as what:
        raise error(
            f"caches cannot go from one pod to the other: {what}, neither of which divides the "
            "other",
            module.main.loc,
            remedy="choose degrees of the two pods that are multiples of each other",
        ) from None
    args = {a.name: a for a in module.main.body.args}
    rows = {a.name: _rows(pods[1], a) for a in pods[1].main.body.args if a.name in found}
    for stream, (name, crossing) in enumerate(found.items()):
        attrs: dict[str, RawAttr] = {"stream": stream, "streams": len(found), **rows[name]}
        cache = _Cache(module, args[name])
        if to:
            cache.send({"to": to, **attrs}, crossing)
        else:
            cache.receive({"source": source, **attrs}, crossing)


def _rows(decode: Module, cache: Value) -> dict[str, RawAttr]:
    """The dimension of tokens, without those of layers, and how many rows it has of the tokens
    before the step; nothing for state of fixed size."""
    found = rows_of(cache)
    if found is None:
        return {}
    depth = max(depth for _, _, depth in uses_inside(cache))
    held = found.held(symbol(PAST))
    if lacking := sorted(held.symbols - decode.env.keys()):
        raise error(
            f"no value for {', '.join(lacking)}: the rows of %{cache.name} that cross",
            cache.loc,
            remedy=decode.how_to_set(lacking),
        )
    return {"dim": found.dim - depth, "rows": const(evaluate(held, decode.env))}


class _Cache:
    """A cache of a pod, where the step uses it: in the function, or in a repeat of layers."""

    def __init__(self, module: Module, arg: Value) -> None:
        self._module = module
        uses = [(op, index) for op, index, _ in uses_inside(arg) if not op.has(Terminates)]
        if not uses:
            raise error(
                f"the step does not use the cache %{arg.name}",
                arg.loc,
                remedy="hand over what 'to-serving' has made",
            )
        self._op, self._index = uses[0]
        self.value = self._op.operands[self._index]

    def send(self, attrs: Mapping[str, RawAttr], crossing: Crossing) -> None:
        """Send what the step makes of it, as soon as that is there."""
        op, way = self._op, crossing.way
        made = [r for r in op.results if op.definition.reuses(op, r.index) == self._index]
        if not made:
            raise error(
                f"'{op.name}' does not bring the cache %{self.value.name} up to date",
                op.loc,
                remedy="hand over what 'to-serving' has made",
            )
        b = Builder.after(self._module.registry, op, loc=made_by(PASS, op.loc))
        more = {"first": crossing.to, "ways": len(way.to), "pieces": way.pieces}
        self._check(b.op("stg.hand_over", made[:1], {**attrs, **more}))

    def receive(self, attrs: Mapping[str, RawAttr], crossing: Crossing) -> None:
        """Receive it before the step uses it."""
        users, way = list(self.value.uses), crossing.way
        b = Builder.before(self._module.registry, self._op, loc=made_by(PASS, self._op.loc))
        more = {"first": crossing.of, "ways": len(way.of), "pieces": len(way.of)}
        name = f"{self.value.name}_taken"
        types = [self.value.tensor]
        taken = b.op("stg.take_over", [self.value], {**attrs, **more}, types=types, names=[name])
        self._check(taken)
        for user, index in users:
            user.set_operand(index, taken.result)

    def _check(self, op: Operation) -> None:
        """Raises `DiagnosticError` for messages without a whole number of bytes."""
        try:
            evaluate(message_bytes(op), self._module.env)
        except NotAnIntegerError as found:
            raise error(
                f"%{self.value.name} crosses in {op.integer('pieces')} pieces, which are not "
                f"whole: {found}",
                op.loc,
                remedy="choose a number of tokens that the degrees of both pods divide",
            ) from None
