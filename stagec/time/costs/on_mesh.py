"""The ranks and groups of the classes of a job on a mesh, and which of their nodes cost the same.

These hold for all sizes of a job, and distances for all machines with the same network.
"""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from stagec.machines import Level
from stagec.program.classes import RankClass
from stagec.program.groups import number_groups
from stagec.program.nodes import Ints, Node
from stagec.time.costs.nodes import CostTable, Distances

#: The distances of a class, and the number of a sample.
Costed = tuple[Distances, int]


class OnMesh:
    """What classes have on a mesh, in all sizes: the ranks of each (`members`), and the numbered
    communicator groups."""

    def __init__(self, classes: Sequence[RankClass], mesh: Mapping[str, int]) -> None:
        self._classes, self.mesh = classes, mesh
        self.members = [each.members(mesh) for each in classes]
        used = zip((each.groups for each in classes), self.members, strict=True)
        self.groups = number_groups(mesh, used)
        self._costed: tuple[Sequence[Level], list[Costed], Ints] | None = None

    def costed(
        self, samples: Sequence[Node], numbers: Sequence[tuple[list[int], Ints]], table: CostTable
    ) -> tuple[list[Costed], Ints]:
        """What costs differently on a machine: the numbers of samples, each with the distances of a
        class; and for each prototype of all classes its place among these. `numbers` has for each
        class its samples, and the place of each of its prototypes among these."""
        if self._costed is None or self._costed[0] != table.network:
            known: dict[Hashable, int] = {}
            pairs: list[Costed] = []
            places: list[Ints] = []
            for each, ranks, (used, place) in zip(
                self._classes, self.members, numbers, strict=True
            ):
                far = table.distances(ranks, self.groups, each.groups, each.ways)
                mine = [known.setdefault((i, far.of(samples[i])), len(known)) for i in used]
                pairs += [(far, i) for i, n in zip(used, mine, strict=True) if n >= len(pairs)]
                places.append(np.array(mine)[place])
            self._costed = table.network, pairs, np.concatenate(places)
        return self._costed[1:]
