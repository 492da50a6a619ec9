"""Fits the constants of the collectives of a level (`stagec.machines.efficiency`) to measured
collectives: robust least squares of relative errors.

The fitted model is `costs.network` itself. The coordinates of the search are the logarithms of
constants, and the logits of shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagec.machines import Machine
from stagec.machines.efficiency import NetworkEfficiency, Protocol
from stagec.time.costs.network import ROUNDS, Span, collective_seconds
from stagec.time.fit.search import least_squares

Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

#: Training moves large buffers: errors of buffers of at least `LARGE` bytes have this weight.
LARGE, WEIGHT = 1 << 24, 3.0
_TRIALS = 8
#: The error that counts for a constant of e times its first value. It is negligible where rows
#: determine the constant; where none does, the constant stays.
_PULL = 0.01
#: Bounds before transformation: the smallest constant, and the largest share.
_LEAST, _MOST = 1e-3, 0.9975


@dataclass(frozen=True, slots=True)
class CollectiveRows:
    """The rows of a kind of collective in groups with the same spans: bytes, measured seconds, and
    which of them are fitted."""

    kind: str
    over: tuple[Span, ...]
    size: Floats
    seconds: Floats
    fitted: Mask


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of a level as coordinates: for each protocol start in microseconds, hops and
    share, then `copy` of rings; start and share of multicast; pairs as protocols."""

    like: NetworkEfficiency

    @property
    def names(self) -> list[str]:
        """The names of the coordinates: `protocols.ll.start` and so on."""
        three = ("start", "hops", "share")
        return [
            *(f"protocols.{p}.{n}" for p in self.like.protocols for n in three),
            *("protocols.copy", "multicast.start", "multicast.share"),
            *(f"pairs.{p}.{n}" for p in self.like.pairs for n in three),
            "pairs.copy",
        ]

    def point(self) -> Floats:
        """The coordinates of the constants `like`; all protocols have one `copy`."""

        def three(group: dict[str, Protocol]) -> list[float]:
            numbers = [v for p in group.values() for v in (p.start * 1e6, p.hops, p.share)]
            return [*numbers, next(iter(group.values())).copy_]

        cast = self.like.multicast
        flat = [*three(self.like.protocols), cast.start * 1e6, cast.share, *three(self.like.pairs)]
        values = np.maximum(np.array(flat), _LEAST)
        shares = self._shares()
        values[shares] = np.minimum(values[shares], _MOST)
        values[shares] /= 1 - values[shares]
        point: Floats = np.log(values)
        return point

    def at(self, point: Floats, chosen: Mask | None = None) -> NetworkEfficiency:
        """The constants of a point; coordinates that are not chosen keep their constants."""
        v = np.exp(point)
        v[self._shares()] /= 1 + v[self._shares()]
        known = dict(zip(self.names, v.tolist(), strict=True))
        if chosen is not None:
            known = {n: known[n] for n, c in zip(self.names, chosen, strict=True) if c}

        def one(name: str, old: Protocol, shared: str) -> Protocol:
            us, copied = known.get(f"{name}.start"), known.get(f"{shared}.copy", old.copy_)
            return Protocol.model_construct(
                start=old.start if us is None else us * 1e-6,
                hops=known.get(f"{name}.hops", old.hops),
                share=known.get(f"{name}.share", old.share),
                copy_=copied,
            )

        groups = {
            group: {n: one(f"{group}.{n}", p, group) for n, p in protocols.items()}
            for group, protocols in (("protocols", self.like.protocols), ("pairs", self.like.pairs))
        }
        cast = one("multicast", self.like.multicast, "multicast")
        return self.like.model_copy(update={**groups, "multicast": cast})

    def _shares(self) -> Mask:
        return np.array([n.endswith(".share") for n in self.names])


def with_level(machine: Machine, level: str, efficiency: NetworkEfficiency) -> Machine:
    """The machine with these constants of a level."""
    old = machine.efficiency
    network = {**old.network, level: efficiency}
    return machine.model_copy(update={"efficiency": old.model_copy(update={"network": network})})


def errors_of(machine: Machine, case: CollectiveRows, chosen: Mask | None = None) -> Floats:
    """Logarithms of modelled over measured seconds, for all rows of a case or the chosen ones."""
    rows = slice(None) if chosen is None else chosen
    time = collective_seconds(machine, case.kind, case.size[rows], case.over)
    errors: Floats = np.log(time / case.seconds[rows])
    return errors


def errors(machine: Machine, cases: Sequence[CollectiveRows], *, fitted: bool) -> Floats:
    """The errors of the rows that are fitted, or of the others."""
    return np.concatenate([errors_of(machine, c, c.fitted == fitted) for c in cases])


def decided(machine: Machine, level: str, cases: Sequence[CollectiveRows]) -> dict[str, Mask]:
    """By group of constants (`protocols`, `multicast`, `pairs`), which of `Constants.names` these
    cases determine: those that some kind uses, and hops only where their number differs between
    cases."""
    names = Constants(machine.efficiency.network[level]).names
    rings = {(c.kind, c.over[-1].size) for c in cases if c.kind in ROUNDS}
    pairs = {c.over[-1].size for c in cases if c.kind == "all_to_all"}
    inside = machine.network[0]
    adds = inside.name == level and inside.reductions
    adds = adds and "multicast" in machine.efficiency.collectives
    copies = any(kind != "all_reduce" for kind, _ in rings)
    known = {
        "protocols": bool(rings),
        "multicast": adds and any(kind == "all_reduce" for kind, _ in rings),
        "pairs": bool(pairs),
    }
    hops = {"protocols": len({(ROUNDS[k], n) for k, n in rings}) > 1, "pairs": len(pairs) > 1}

    def tells(name: str, group: str) -> bool:
        if name.endswith(".hops"):
            return hops[group]
        return copies or name != "protocols.copy"

    return {
        group: np.array([n.startswith(f"{group}.") and tells(n, group) for n in names])
        for group, used in known.items()
        if used
    }


def fit(
    machine: Machine,
    level: str,
    cases: Sequence[CollectiveRows],
    first: NetworkEfficiency,
    chosen: Mask | None = None,
) -> NetworkEfficiency:
    """The constants of a level with the least errors on the rows to fit: the best of several
    searches that start around the `first` constants. With `chosen`, only these coordinates change,
    and those that no row determines stay."""
    constants = Constants(first)
    start = constants.point()
    free = np.ones(len(start), bool) if chosen is None else chosen
    rng = np.random.default_rng(0)
    starts = [start, *(start + rng.normal(0, 0.3, len(start)) for _ in range(_TRIALS - 1))]
    weights = np.concatenate([np.where(c.size[c.fitted] < LARGE, 1, WEIGHT) for c in cases])

    def weighted(some: Floats) -> Floats:
        point = start.copy()
        point[free] = some
        tried = with_level(machine, level, constants.at(point, free))
        result: Floats = errors(tried, cases, fitted=True) * weights
        return result if chosen is None else np.append(result, _PULL * (some - start[free]))

    best = min((least_squares(weighted, s[free]) for s in starts), key=lambda pair: pair[0])
    point = start.copy()
    point[free] = best[1]
    return constants.at(point, free)
