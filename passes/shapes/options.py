"""Options of blocks, which are resolved while 'inline' copies a function to its call.

stg.option @bias[no, yes]                         (bias = yes)
stg.statics @rope[base = theta]                   (rope = (base = 100))
%y = stg.when[bias](%x) {                         %b = stg.param : bf16[D]
  %b = stg.param : bf16[D]                        %a = stg.add["bd,d->bd"](%x, %b)
  %a = stg.add["bd,d->bd"](%x, %b)                %r = stg.rope[base = 100](%a)
  stg.yield(%a)
}
%r = stg.rope[statics = rope](%y)
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stagec.api import Attr, Expr, Loc, Operation, Value, note
from stagec.ir.clone import Copier, sized
from stagec.ir.options import Choice, handed_on, holds
from stagec.ir.param import STATICS, convert_param
from stagec.ir.signature import misfits
from stagec.ir.traits import Conditional, HasRegion
from stagec.ir_spec.ops.functions import CallOp


@dataclass(frozen=True, slots=True)
class ChosenCopier(Copier):
    """Copies the operations of a function with these values of its options. A value that they leave
    out is `nothing`: it is dropped from operands, but keeps its place in a call. `call` is the
    location of the call."""

    options: Mapping[str, Choice]
    nothing: Value
    call: Loc

    def copies(self, op: Operation) -> list[Operation]:
        """The copies of an operation. Raises `DiagnosticError` if the options leave out an operand
        that it needs, and for static parameters that it does not have."""
        if op.definition.declares in ("option", "statics"):
            return []
        if op.has(Conditional):
            return self._opened(op) if holds(op, self.options) else self._passed(op)
        new = self.copy(op)
        if isinstance(op.definition, CallOp):
            self._hand_on(new)
        elif self.nothing in new.operands or STATICS in new.attrs:
            self._complete(op, new)
        return [new]

    def given(self, value: Value, user: Operation) -> Value:
        """The copy of a value. Raises `DiagnosticError` if it is left out."""
        copied = self.values.get(value, value)
        if copied is self.nothing:
            raise user.error(
                f"'{user.name}' needs %{value.name}, which the options of the call leave out",
                remedy="choose other options, or give its stg.when another value",
                notes=[note("the call is here", self.call)],
            )
        return copied

    # -- stg.when ----------------------------------------------------------------------------------

    def _passed(self, op: Operation) -> list[Operation]:
        """Drop a `stg.when` that does not hold: its results are its operands."""
        operands = [self.values.get(v, v) for v in op.operands]
        passed = operands or [self.nothing] * len(op.results)
        self.values.update(zip(op.results, passed, strict=True))
        return []

    def _opened(self, op: Operation) -> list[Operation]:
        """Copy the operations in the region of a `stg.when` that holds."""
        made = [each for inner in op.body.ops[:-1] for each in self.copies(inner)]
        for result, yielded in zip(op.results, op.body.terminator.operands, strict=True):
            value = self.values.get(yielded, yielded)
            value.type = value.type or sized(result.type, self.sizes)
            self.values[result] = value
        return made

    # -- operations --------------------------------------------------------------------------------

    def _hand_on(self, call: Operation) -> None:
        """Replace options of this function in the attributes of a call by their values."""
        for name, value in call.attrs.items():
            own = value.symbol_name if isinstance(value, Expr) else None
            if own is not None and own in self.options:
                call.attrs[name] = handed_on(self.options[own])

    def _complete(self, op: Operation, new: Operation) -> None:
        """Give an operation its static parameters, and drop operands that are left out."""
        if new.has(HasRegion):
            for value in op.operands:
                self.given(value, op)
        new.set_operands([v for v in new.operands if v is not self.nothing])
        if STATICS in new.attrs:
            new.attrs |= self._statics(new, new.text(STATICS))
            del new.attrs[STATICS]
        for misfit in misfits(new):
            raise op.error(
                misfit.message,
                remedy=misfit.remedy,
                notes=[note("the call whose options it has is here", self.call)],
            )

    def _statics(self, op: Operation, name: str) -> dict[str, Attr]:
        """The static parameters that an option has, converted for the op."""
        chosen = self.options[name]
        known = op.definition.params_by_name
        converted: dict[str, Attr] = {}
        for key, value in chosen.items() if isinstance(chosen, Mapping) else ():
            try:
                converted[key] = convert_param(known[key], value) if key in known else value
            except ValueError:
                converted[key] = value  # the signature check reports it
        return converted
