"""The format of Perfetto, which ui.perfetto.dev opens."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from stagec.formats.base import TraceJob
from stagec.formats.perfetto.encode import perfetto_trace
from stagec.formats.timeline.ranks import TimelineFormat
from stagec.program.nodes import Ints


@dataclass(frozen=True)
class PerfettoFormat(TimelineFormat):
    """Track events of Perfetto: one file with the chosen ranks."""

    name: ClassVar[str] = "perfetto"
    node_bytes: ClassVar[int] = 110

    def files(self, job: TraceJob, ranks: Ints | None) -> Iterator[tuple[str, Iterable[bytes]]]:
        yield f"{job.name}.pftrace", perfetto_trace(self.timeline(job, ranks))


PERFETTO = PerfettoFormat()
