"""A recorded program as turns: which node belongs to which turn, and what turns consist of.

F0 F1 B0 F2 B1 B2 sum    F, B are turns of microbatches 0 to 2, `sum` is a node of no microbatch
x  x  y  x  y  y         a role: the node x of F, once for each microbatch
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from stagec.program.nodes import MICROBATCH, Ints, Node, Program
from stagec.support.diagnostics import DiagnosticError, error
from stagec.traces.stored import stored_seconds
from stagec.traces.turns import Part, Turn

_NAME = re.compile(r"(?P<phase>[^/]+/)mb(?P<number>0|[1-9]\d{0,8})/(?:c(?P<chunk>[1-9]\d{0,3})/)?")
#: Turns that follow each other, of the same nodes of one microbatch: their kinds.
Run = tuple[Hashable, ...]
#: The nodes of a microbatch that a turn takes.
_Token = tuple[Part, int]


def microbatches_of(program: Program) -> int:
    """How many microbatches the names of a program distinguish."""
    return 1 + max((int(m["number"]) for m in _names(program)), default=-1)


def chunks_of(program: Program) -> int:
    """How many chunks the names of a program distinguish."""
    return 1 + max((int(m["chunk"] or 0) for m in _names(program)), default=0)


def _names(program: Program) -> Iterator[re.Match[str]]:
    return filter(None, (_NAME.match(n.name) for n in program.prototypes))


@dataclass(frozen=True)
class Labels:
    """What the nodes of a program are: `nodes` are prototypes without microbatches in their names,
    `which[i]` is that of node i + 1, `microbatch[i]` the number in its name, or -1."""

    nodes: Sequence[Node]
    which: Ints
    microbatch: Ints
    chunk: Sequence[int]

    def name(self, at: int) -> str:
        """The name of the node at a place, counted from 0."""
        name = self.nodes[int(self.which[at])].name
        return name.replace(MICROBATCH[0], str(int(self.microbatch[at])))


def labelled(program: Program, *, chunks: bool) -> Labels:
    """The nodes of a program by what they are; names distinguish chunks if there are several."""
    known: dict[tuple[object, ...], int] = {}
    nodes: list[Node] = []
    chunk: list[int] = []
    which: list[int] = []
    numbers: list[int] = []
    for node in program.prototypes:
        match = _NAME.match(node.name)
        numbers.append(int(match["number"]) if match else -1)
        name = node.name
        if match:
            name = f"{match['phase']}mb{MICROBATCH[0]}{name[match.end('number') :]}"
        work = node.kind, name, node.size, node.flops, stored_seconds(node)
        facts = *work, node.group, node.over, node.by, node.to
        if facts not in known:
            known[facts] = len(nodes)
            nodes.append(replace(node, name=name))
            chunk.append(int(match["chunk"] or 0) if match and chunks else 0)
        which.append(known[facts])
    what, number = (np.array(c, dtype=np.int64)[program.prototype] for c in (which, numbers))
    return Labels(nodes, what, number, chunk)


@dataclass(frozen=True)
class TurnTemplate:
    """What a run of turns consists of: the roles of its nodes, and to which of its microbatches
    each belongs. `context` is the kind of an overlapped pair, whose nodes wait for others."""

    roles: tuple[int, ...]
    slots: tuple[int, ...]
    context: Hashable = None


@dataclass(frozen=True)
class Decomposition:
    """A program as roles and templates of turns. `roles` are the prototypes of roles, `fixed` those
    of nodes of no microbatch, `after[i]` the role whose last node fixed node i stands behind: None
    at the start, -1 behind all."""

    labels: Labels
    roles: Sequence[int]
    fixed: Sequence[int]
    after: Sequence[int | None]
    templates: Mapping[Run, TurnTemplate]

    def template(self, run: Run) -> TurnTemplate:
        """What a run consists of: as recorded, or of runs that were recorded. Raises
        `DiagnosticError` if neither is known."""
        result = self.templates.get(run)
        for cut in range(1, len(run)):
            if result is None and run[:cut] in self.templates and run[cut:] in self.templates:
                one, two = self.templates[run[:cut]], self.templates[run[cut:]]
                result = TurnTemplate(one.roles + two.roles, one.slots + two.slots, one.context)
        if result is None:
            raise error(
                "with more microbatches, actions follow each other that never do so in the traces",
                remedy="record a step with more microbatches",
            )
        return result


def runs(turns: Sequence[Turn]) -> Iterator[tuple[Run, Turn]]:
    """The turns, those whose nodes do not distinguish them together: a backward, and the
    gradients of its weights right behind."""
    for _, same in groupby(turns, lambda t: (t.parts if not t.overlapped else t, t.microbatches)):
        turns_of_run = [*same]
        yield tuple(turn.kind for turn in turns_of_run), turns_of_run[0]


def decompose(program: Program, turns: Sequence[Turn], axis: str, *, chunks: bool) -> Decomposition:
    """The program, which consists of these turns, with stages along an axis. Raises
    `DiagnosticError` if it does not."""
    labels = labelled(program, chunks=chunks)
    there = np.flatnonzero(labels.microbatch >= 0)
    roles, role = _roles(labels)
    tokens = _tokens(program, labels, axis)
    templates: dict[Run, TurnTemplate] = {}
    example: dict[Run, int] = {}
    at = 0
    for run, turn in runs(turns):
        slots = {token: i for i in range(len(turn.parts)) for token in _wanted(turn, i)}
        first = at
        while at < len(there) and tokens[int(there[at])] in slots:
            at += 1
        places: list[int] = there[first:at].tolist()
        template = TurnTemplate(
            tuple(int(role[i]) for i in places),
            tuple(slots[tokens[i]] for i in places),
            turn.kind if turn.overlapped else None,
        )
        known = templates.setdefault(run, template)
        first_place = example.setdefault(run, places[0] if places else -1)
        if known != template:
            where = places[0] if places else int(there[min(at, len(there) - 1)])
            raise _differs(labels, role, (known, first_place), (template, where), places)
    if at < len(there):
        name = labels.name(int(there[at]))
        raise error(
            f"'{name}' is not the action that the schedule has at this place",
            remedy="give the schedule of the traces with --schedule NAME",
        )
    return Decomposition(labels, roles, *_fixed(labels, role), _distinguished(templates))


def _wanted(turn: Turn, i: int) -> Iterator[_Token]:
    """The tokens of the nodes that a turn takes of one of its microbatches."""
    for posted, forward, chunk in turn.parts[i]:
        for phase in (True, False) if forward is None else (forward,):
            yield (posted, phase, chunk), turn.microbatches[i]


def _tokens(program: Program, labels: Labels, axis: str) -> list[_Token]:
    """Which turns a node may belong to. A posted receive comes from another stage, and waits for
    nothing."""
    data = (program.control - program.starts[:-1]).tolist()
    messages = [n.kind == "recv" and n.over == axis for n in labels.nodes]
    forward = [n.name.startswith("forward/") for n in labels.nodes]
    columns = zip(labels.which.tolist(), labels.microbatch.tolist(), data, strict=True)
    return [
        ((messages[which] and not takes, forward[which], labels.chunk[which]), number)
        for which, number, takes in columns
    ]


def _roles(labels: Labels) -> tuple[list[int], Ints]:
    """The prototypes of roles, and the role of each node, or -1: nodes of one prototype in a
    microbatch are distinguished by their order."""
    known: dict[tuple[int, int], int] = {}
    seen: Counter[tuple[int, int]] = Counter()
    role: list[int] = []
    for each in zip(labels.which.tolist(), labels.microbatch.tolist(), strict=True):
        if each[1] < 0:
            role.append(-1)
            continue
        role.append(known.setdefault((each[0], seen[each]), len(known)))
        seen[each] += 1
    return [which for which, _ in known], np.array(role, dtype=np.int64)


def _fixed(labels: Labels, role: Ints) -> tuple[list[int], list[int | None]]:
    """The prototypes of the nodes of no microbatch, and what each stands behind. Raises
    `DiagnosticError` for one in the middle of others."""
    there = np.flatnonzero(role >= 0)
    last = {int(role[i]): int(i) for i in there}
    fixed, after = list[int](), list[int | None]()
    for i in np.flatnonzero(role < 0).tolist():
        fixed.append(int(labels.which[i]))
        before = there[: int(np.searchsorted(there, i))]
        if not len(before) or len(before) == len(there):
            after.append(-1 if len(before) else None)
            continue
        after.append(int(role[before[-1]]))
        if last[int(role[before[-1]])] != int(before[-1]):
            raise error(
                f"'{labels.name(i)}' has no microbatch in its name, but is between microbatches",
                remedy="name nodes by phase and microbatch: 'gradient/mb0/...'",
            )
    return fixed, after


def _distinguished(templates: Mapping[Run, TurnTemplate]) -> dict[Run, TurnTemplate]:
    """Of two turns that were recorded right behind each other, and one of them alone, the other
    one, too."""
    known = dict(templates)
    for run, whole in templates.items():
        for cut in range(1, len(run)):
            head, tail = known.get(run[:cut]), known.get(run[cut:])
            if head is not None and tail is None and whole.roles[: len(head.roles)] == head.roles:
                size = len(head.roles)
                known[run[cut:]] = TurnTemplate(
                    whole.roles[size:], whole.slots[size:], whole.context
                )
            if tail is not None and head is None and len(tail.roles) <= len(whole.roles):
                size = len(whole.roles) - len(tail.roles)
                if whole.roles[size:] == tail.roles:
                    cut_off = whole.roles[:size], whole.slots[:size]
                    known[run[:cut]] = TurnTemplate(*cut_off, whole.context)
    return known


def _differs(
    labels: Labels,
    role: Ints,
    known: tuple[TurnTemplate, int],
    differing: tuple[TurnTemplate, int],
    places: Sequence[int],
) -> DiagnosticError:
    """The error of a turn that does not consist of what such a turn consisted of before."""
    one, two = known[0].roles, differing[0].roles
    at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
    at = min(len(one), len(two)) if at is None else at
    where = places[at] if at < len(places) else differing[1]
    other = int(np.flatnonzero(role == one[at])[0]) if at < len(one) else known[1]
    a, b = labels.nodes[int(labels.which[other])], labels.nodes[int(labels.which[where])]
    what = "different nodes, or another order"
    if a.name == b.name and a.kind == b.kind:
        sizes = (a.size, b.size), (a.flops, b.flops), (stored_seconds(a), stored_seconds(b))
        named = zip(("bytes", "FLOPs", "seconds"), sizes, strict=True)
        what = ", ".join(f"{x:,} and {y:,} {text}" for text, (x, y) in named if x != y) or what
    return error(
        f"microbatches differ: '{labels.name(other)}' and '{labels.name(where)}' have {what}",
        remedy="give traces whose microbatches are equal, and their schedule (--schedule NAME)",
    )
