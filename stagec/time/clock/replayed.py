"""A step that is replayed: at once with all that its classes did, or, of a structure that has been
replayed before, when it ends; then classes are replayed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property, partial
from typing import overload

from stagec.time.clock.join import Joined
from stagec.time.clock.order import ReplayOrder, order_of
from stagec.time.clock.pathmaker import paths_of
from stagec.time.clock.paths import PathTimes, StepPaths
from stagec.time.clock.pieces import Piece
from stagec.time.clock.replay import ClassReplay, replay, replay_alone
from stagec.time.clock.shapes import Shape
from stagec.time.clock.weights import NodeNumbers, NumberedCosts
from stagec.time.streams import Cost

#: What tells classes apart whose nodes do not cost the same, and the costs of shapes.
ClassCosts = tuple[Hashable, Callable[[Shape], Sequence[Cost]]]
#: The time at which a structure is asked for from which on it pays to know its longest paths.
PAYS = 4


class Plans(list[Joined]):
    """The plans of all classes of a job; `numbers` tells the nodes of a shape by what they do."""

    def __init__(self, plans: Iterable[Joined] = (), numbers: NodeNumbers | None = None) -> None:
        super().__init__(plans)
        self._numbers, self._asked = numbers, 0
        self._paths: StepPaths | None = None

    @cached_property
    def order(self) -> ReplayOrder:
        """In which order their pieces are replayed. Raises `DiagnosticError` if classes wait for
        each other in a ring."""
        return order_of(self)

    @property
    def paths(self) -> StepPaths | None:
        """The longest paths; None where nodes have no numbers, and the first times: they take as
        long to find as a few replays."""
        self._asked += 1
        if self._asked < PAYS or self._numbers is None:
            return None
        if self._paths is None:
            self._paths = paths_of([each.plan for each in self], self.order, self._numbers)
        return self._paths


class Replayed(Sequence[ClassReplay]):
    """The classes of a step, replayed with these costs: at once, or when one is asked for, if costs
    are `numbered`, the structure has been replayed before, and nothing slows computations down."""

    def __init__(
        self,
        plans: Plans,
        costs: Sequence[ClassCosts],
        slowdown: int = 0,
        *,
        numbered: Sequence[NumberedCosts] | None = None,
    ) -> None:
        self.plans, self._costs, self._slowdown = plans, costs, slowdown
        self._known: dict[tuple[Hashable, Shape], Piece] = {}
        self._times: PathTimes | None = None
        if numbered is not None and not slowdown and (paths := plans.paths) is not None:
            self._times = paths.times(numbered)
        self.ends = self._times.ends if self._times else [each.end for each in self._classes]

    @property
    def end(self) -> int:
        """The end of the step, in picoseconds."""
        return max(self.ends, default=0)

    def alone(self, number: int) -> ClassReplay:
        """One class, without the others if they are not replayed yet. Of what it waits for it knows
        its own nodes."""
        if self._times is None or "_classes" in vars(self):
            return self._classes[number]
        return replay_alone(self._class(number), self.plans.order, self._times)

    def computing(self, number: int) -> int:
        """Picoseconds of all that the compute stream of a class runs, but for what joins classes;
        for that they need no replay."""
        each, found = self.plans[number], 0
        for piece, place, count in each.computed:
            found += self._piece(number, each.shapes[piece]).spans[place] * count
        return found

    def forget(self) -> None:
        """Keep when classes end; they are replayed again if they are asked for."""
        vars(self).pop("_classes", None)
        self._known.clear()

    def __len__(self) -> int:
        return len(self.plans)

    @overload
    def __getitem__(self, number: int) -> ClassReplay: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ClassReplay]: ...
    def __getitem__(self, number: int | slice) -> ClassReplay | Sequence[ClassReplay]:
        return self._classes[number]

    @cached_property
    def _classes(self) -> list[ClassReplay]:
        classes = [*map(self._class, range(len(self.plans)))]
        replay(classes, self._slowdown, self.plans.order)
        return classes

    def _class(self, number: int) -> ClassReplay:
        return ClassReplay(number, self.plans[number], partial(self._piece, number))

    def _piece(self, number: int, shape: Shape) -> Piece:
        """A shape with the costs of a class."""
        key, costs = self._costs[number]
        found = self._known.get((key, shape))
        if found is None:
            found = self._known[key, shape] = Piece(shape, costs(shape))
        return found
