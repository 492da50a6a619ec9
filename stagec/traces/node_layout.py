"""The nodes of turns in their order, and what they wait for by rule.

F0 F1 B0 F2 B1 B2 sum    `sum` is fixed behind the last B; it waits for what was made last in a
                         role of B, and B for what was made in roles of F for its microbatch
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stagec.program.nodes import Ints
from stagec.traces.decomposition import Decomposition, Run, runs
from stagec.traces.turns import Turn

#: What a node waits for: what was `made` in a role, or in any role of that `name`, the `fixed` node
#: of a number, or the computation so many `back`.
Rule = tuple[str, int]
#: A role in a context, or as (None, -1 - number) a fixed node.
Key = tuple[Hashable, int]
NOTHING = 0
NO_NODES: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class NodeLayout:
    """Nodes in order: the role of each or -1, its microbatch or -1, the number of its fixed node or
    -1, and the number of its context."""

    decomposed: Decomposition
    role: Ints
    microbatch: Ints
    fixed: Ints
    context: Ints
    contexts: Sequence[Hashable]

    @cached_property
    def which(self) -> Ints:
        """The prototype of each node."""
        roles = np.array([*self.decomposed.roles, 0], dtype=np.int64)[self.role]
        fixed = np.array([*self.decomposed.fixed, 0], dtype=np.int64)[self.fixed]
        return np.where(self.role >= 0, roles, fixed)

    @cached_property
    def computations(self) -> Ints:
        """The identifiers of computations."""
        computes = np.array([n.is_computation for n in self.decomposed.labels.nodes])
        return np.flatnonzero(computes[self.which]) + 1

    @cached_property
    def of_role(self) -> dict[int, Ints]:
        """The identifiers of the nodes of each role, in order."""
        order = np.argsort(self.role, kind="stable")
        roles, starts = np.unique(self.role[order], return_index=True)
        parts = np.split(order + 1, starts[1:])
        return {int(r): part for r, part in zip(roles, parts, strict=True) if r >= 0}

    def named(self, role: int) -> Ints:
        """The identifiers of the nodes of all roles of the name of a role, in order."""
        return self._of_name.get(self._names[role], NO_NODES)

    @cached_property
    def _names(self) -> list[str]:
        return [self.decomposed.labels.nodes[which].name for which in self.decomposed.roles]

    @cached_property
    def _of_name(self) -> dict[str, Ints]:
        parts_of: dict[str, list[Ints]] = {}
        for role, nodes in self.of_role.items():
            parts_of.setdefault(self._names[role], []).append(nodes)
        return {name: np.sort(np.concatenate(parts)) for name, parts in parts_of.items()}

    @cached_property
    def place(self) -> Ints:
        """The identifiers of fixed nodes."""
        places = np.zeros(len(self.decomposed.fixed), dtype=np.int64)
        there = np.flatnonzero(self.fixed >= 0)
        places[self.fixed[there]] = there + 1
        return places

    @cached_property
    def keys(self) -> dict[Key, Ints]:
        """The identifiers of nodes that wait for the same."""
        keys: dict[Key, Ints] = {
            (None, -1 - f): self.place[f : f + 1] for f in range(len(self.place))
        }
        for number, context in enumerate(self.contexts):
            inside = self.context == number
            for role, nodes in self.of_role.items():
                mine = nodes[inside[nodes - 1]]
                if len(mine):
                    keys[context, role] = mine
        return keys

    def key(self, identifier: int) -> Key:
        """What a node waits as."""
        i = identifier - 1
        role = int(self.role[i])
        if role >= 0:
            return (self.contexts[int(self.context[i])], role)
        return (None, -1 - int(self.fixed[i]))

    def targets(self, rule: Rule, sources: Ints) -> Ints:
        """What nodes wait for by a rule; 0 where there is none."""
        kind, value = rule
        if kind == "fixed":
            return np.full(len(sources), self.place[value])
        if kind == "back":
            at = np.searchsorted(self.computations, sources) - value
            return np.where(at >= 0, self.computations[at], NOTHING)
        nodes = self.named(value) if kind == "name" else self.of_role.get(value, NO_NODES)
        if not len(nodes):
            return np.full(len(sources), NOTHING)
        numbers = self.microbatch[nodes - 1]
        mine = np.zeros(int(max(numbers.max(), self.microbatch.max())) + 2, dtype=np.int64)
        mine[numbers] = nodes
        own = mine[self.microbatch[sources - 1]]  # of no microbatch: the last place, which is 0
        latest = np.searchsorted(nodes, sources) - 1
        made = np.where(latest >= 0, nodes[latest], NOTHING)
        return np.where((own > 0) & (own < sources), own, made)


def lay_out(decomposed: Decomposition, turns: Sequence[Turn]) -> NodeLayout:
    """The nodes of turns in order, and the fixed ones where they belong."""
    contexts: dict[Hashable, int] = {None: 0}
    columns: list[Ints] = [np.zeros((3, 0), dtype=np.int64)]
    made: dict[Run, Ints] = {}
    for run, turn in runs(turns):
        if run not in made:
            template = decomposed.template(run)
            context = contexts.setdefault(template.context, len(contexts))
            rows = template.roles, template.slots, [context] * len(template.roles)
            made[run] = np.array(rows, dtype=np.int64).reshape(3, -1)
        part = made[run].copy()
        part[1] = np.array(turn.microbatches, dtype=np.int64)[part[1]]
        columns.append(part)
    role, number, within = np.concatenate(columns, axis=1)
    last = {int(r): i + 1 for i, r in enumerate(role.tolist())}
    places = [0 if a is None else last.get(a, len(role)) for a in decomposed.after]
    fixed = np.insert(np.full(len(role), -1), places, np.arange(len(places)))
    role, number = (np.insert(column, places, -1) for column in (role, number))
    return NodeLayout(decomposed, role, number, fixed, np.insert(within, places, 0), [*contexts])
