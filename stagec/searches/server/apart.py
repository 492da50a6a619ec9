"""Workers of a server whose feed-forward has ranks of its own (`--part NAME=feed-forward`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from stagec.ir_spec.strategy.axes import AXES, EXPERTS
from stagec.ir_spec.strategy.part import FEED_FORWARD
from stagec.jobs.pod_options import options_of, read_flags
from stagec.jobs.request.combine import complete
from stagec.jobs.request.experts import mesh_axes
from stagec.jobs.request.flags import PartText
from stagec.jobs.request.options import JobOptions
from stagec.searches.explore.space import Space, doubled
from stagec.searches.space import list_jobs
from stagec.support.diagnostics import error

#: The knobs that ranks with attention alone do not vary.
_OTHERS = {"pp", "ep", "etp", "dp_attention"}


@dataclass(frozen=True)
class ApartSpace:
    """The workers with a part of the feed-forward of all layers: attention has `tp` of the space
    and sequences of its own on the other ranks. Feed-forward has the axes that the part names, or
    else as many experts, or widths, on each rank as ranks allow."""

    part: PartText
    sizes: Mapping[str, int]

    @classmethod
    def of(
        cls, parts: Sequence[PartText], sizes: Mapping[str, int], *, priced: bool
    ) -> ApartSpace | None:
        """The workers with these parts; None without parts. Raises `DiagnosticError` for other
        parts than one of feed-forward, and for a part on a machine without a price."""
        if not parts:
            return None
        if len(parts) > 1 or parts[0].value != FEED_FORWARD:
            raise error(
                "--part cannot be used with --serve server but for feed-forward: the steps of a "
                "worker have no encoder",
                remedy="leave it out, or give --part 'experts=feed-forward'",
            )
        machine = read_flags(f"--part {parts[0].name}", parts[0].flags).on_machine
        if machine and priced:
            raise error(
                f"--price is that of ranks on --machine, but those of the part "
                f"'{parts[0].name}' are on {machine}",
                remedy="leave --price out: costs are then in rank-hours",
            )
        return cls(parts[0], sizes)

    def jobs(
        self, space: Space, base: JobOptions, most: int, refused: Counter[str]
    ) -> Iterator[JobOptions]:
        """The workers on up to `most` ranks, of which those of `base` have attention. Points that
        rules refuse are counted."""
        knobs = {n: v for n, v in space.knobs.items() if n not in _OTHERS}
        flags = base.changed(step="decode=1x1")
        listing = list_jobs(Space({"pp": (1,), **knobs}), flags, self.sizes)
        refused.update(listing.refused)
        for n in range(len(listing.jobs)):
            attention = listing.jobs[n].changed(ranks=None)
            for part in self._parts(most - (base.ranks or 1)):
                job = attention.changed(part=(part,))
                if _ranks(job) <= most - (base.ranks or 1):
                    yield job

    def _parts(self, most: int) -> Iterable[PartText]:
        """The part on up to `most` ranks."""
        given = read_flags("--part", self.part.flags)
        if given.mesh is not None or given.ranks or any(getattr(given, a) > 1 for a in AXES):
            yield self.part
            return
        own = [self.part.flags] if self.part.flags else []
        for ranks in doubled(1, most) if most else ():
            axes = [f"tp={ranks}"] if ranks > 1 else [""]
            if EXPERTS in self.sizes and ranks > 1:
                axes = [f"dp={ranks},ep={ranks}", *axes]
            for each in axes:
                yield replace(self.part, flags=",".join(filter(None, [each, *own])))


def with_two_stages(space: Space, said: Collection[str]) -> Space:
    """The space with the two stages that --afd needs, unless their number is given."""
    if "pp" in said or not any(space.knobs.get("afd", ())):
        return space
    stages = tuple(dict.fromkeys((*space.knobs.get("pp", (1,)), 2)))
    return Space({"pp": stages, **{n: v for n, v in space.knobs.items() if n != "pp"}})


def _ranks(job: JobOptions) -> int:
    """The ranks of the part of a job."""
    part = complete(options_of(job.part[0].name, job.changed(serve="decode")))
    return prod(size or 1 for size in mesh_axes(part).values())
