"""The pass manager: checks the order of passes, runs them, updates the phase, and calls
instruments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stagec.ir.core import NotATensorError
from stagec.ir.module import Module
from stagec.ir_spec.phases import Phase
from stagec.pipeline.blame import plugin_of
from stagec.pipeline.instrument import Hooks, Instrument, Verification
from stagec.pipeline.passes import Pass
from stagec.pipeline.spec import Pipeline
from stagec.pipeline.verify import phase_of
from stagec.support.diagnostics import error
from stagec.support.source import UNKNOWN, Loc


class PassManager:
    """A pipeline with the instruments around it.

    `known` are all existing passes, for the remedy of an error about an impossible order.
    """

    def __init__(
        self,
        passes: Sequence[Pass] | Pipeline,
        instrumentation: Iterable[Instrument] = (),
        *,
        known: Iterable[type[Pass]] = (),
        verify: bool = True,
    ) -> None:
        pipeline = passes if isinstance(passes, Pipeline) else Pipeline(tuple(passes))
        self.passes = pipeline.passes
        self._locs = pipeline.locs or (UNKNOWN,) * len(self.passes)
        self._known = [*known, *map(type, self.passes)]
        self._instruments = [*([Verification()] if verify else []), *instrumentation]

    def run(self, module: Module) -> None:
        """Run all passes on the module, in place.

        Raises `DiagnosticError` before anything runs if the order is impossible, and later for
        errors that the passes and the verifier find. Other exceptions are bugs of a pass or an op;
        they propagate unchanged.
        """
        for _ in self.one_by_one(module):
            pass

    def one_by_one(self, module: Module) -> Iterator[Pass]:
        """Run the passes like `run`, and yield before each of them."""
        self.check_order(phase_of(module))
        for hooks in self._hooks():
            hooks.start(module)
        for pass_ in self.passes:
            yield pass_
            self._run_one(pass_, module)
        for hooks in self._hooks():
            hooks.finish(module)

    def check_order(self, phase: Phase) -> Phase:
        """The phase after all passes, for a module in phase `phase`.

        Raises `DiagnosticError` for the first pass that cannot run at its place.
        """
        for pass_, loc in zip(self.passes, self._locs, strict=True):
            if not pass_.runs_in(phase):
                raise _impossible(pass_, loc, phase, self._known)
            phase = pass_.gives or phase
        return phase

    def _run_one(self, pass_: Pass, module: Module) -> None:
        try:
            for instrument in self._instruments:
                instrument.before_pass(pass_, module)
            applies = pass_.applies(module)
            if applies:
                _run(pass_, module)
            if pass_.gives is not None:
                module.phase = pass_.gives.label
            for instrument in self._instruments:
                if applies or not isinstance(instrument, Hooks):
                    instrument.after_pass(pass_, module)
                else:
                    instrument.after_idle(pass_, module)
            module.notes.clear()
        except Exception as e:
            for hooks in self._hooks():
                hooks.on_error(pass_, module, e)
            raise

    def _hooks(self) -> list[Hooks]:
        return [i for i in self._instruments if isinstance(i, Hooks)]


def _run(pass_: Pass, module: Module) -> None:
    try:
        pass_.run(module)
    except NotATensorError as e:
        if plugin_of(type(pass_).__module__):
            raise
        value = e.value
        raise error(
            f"pass '{pass_.name}' works on tensors, but %{value.name} is not a tensor",
            value.loc,
            remedy="ops without a definition may give other values only where no pass reads them",
        ) from None


def _impossible(pass_: Pass, loc: Loc, phase: Phase, known: Iterable[type[Pass]]) -> Exception:
    until = pass_.until or pass_.needs
    wanted = pass_.needs.label if until is pass_.needs else f"{pass_.needs.label} to {until.label}"
    message = f"pass '{pass_.name}' needs a module that is {wanted}, but here it is {phase.label}"
    return error(message, loc, remedy=_way_out(type(pass_), phase, known))


def _way_out(pass_type: type[Pass], phase: Phase, known: Iterable[type[Pass]]) -> str:
    if not phase <= pass_type.needs:
        return f"run '{pass_type.name}' earlier"
    missing = _leading_to(pass_type, phase, [p for p in known if p.gives is not None])
    if not missing:
        return f"start from a module whose phase is {pass_type.needs.label}"
    before = f"run '{','.join(p.name for p in missing)}' before it"
    more = "; 'stagec passes' lists the pipelines that do so, with all that a job may need"
    return before + (more if len(missing) > 1 else "")


def _leading_to(
    pass_type: type[Pass], phase: Phase, givers: Sequence[type[Pass]]
) -> tuple[type[Pass], ...]:
    """The shortest sequence of passes from a phase to one in which the pass may run; empty if no
    sequence does."""
    ways: dict[Phase, tuple[type[Pass], ...]] = {phase: ()}
    left = [phase]
    for here in left:
        if pass_type.runs_in(here):
            return ways[here]
        for giver in givers:
            if giver.gives is not None and giver.gives not in ways and giver.runs_in(here):
                ways[giver.gives] = (*ways[here], giver)
                left.append(giver.gives)
    return ()
