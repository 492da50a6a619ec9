"""The time of several pods: what each takes alone, and with `--serve disaggregated` the steps of
both and the transfer of caches between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from stagec.answers.time.table import accepted_text, print_time, rate_unit, seconds_text
from stagec.ir.serving_step import DECODE, PREFILL
from stagec.jobs.request.acceptance import Acceptance
from stagec.jobs.request.serving_flags import PODS
from stagec.output.report import Report
from stagec.output.svg_text import SVGText
from stagec.output.tables import bytes_text, console
from stagec.time.streams import PICOSECONDS

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport
    from stagec.answers.time.timed import Timed
    from stagec.time.transfer import TransferTime

SCHEMA = 1


@dataclass(frozen=True)
class PodsTime(Report):
    """The steps of both pods, timed separately, and the transfer between them. `stack` is
    the software, `command` the command line, and `drawn` computes the data of a trace."""

    pods: Mapping[str, TimeReport]
    stack: str
    transfer: TransferTime
    accepted: Acceptance
    command: str
    drawn: Callable[[], Timed] = field(repr=False, compare=False)

    @property
    def ttft(self) -> float:
        """Seconds from a prompt to its first token, with its caches in the pod that decodes."""
        return self.pods[PREFILL].step_seconds + self.transfer.exposed_seconds

    @property
    def tpot(self) -> float:
        """Seconds for each further token."""
        return self.pods[DECODE].step_seconds / self.accepted.tokens

    @property
    def title(self) -> str:
        return f"{self.pods[PREFILL].model} on {self.pods[PREFILL].machine}"

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        answer: dict[str, Any] = {"schema": SCHEMA, "stack": self.stack}
        answer["pods"] = {pod: report.as_json() for pod, report in self.pods.items()}
        answer["handover"] = asdict(self.transfer)
        answer["serving"] = {
            "mode": "disaggregated",
            "ttft_seconds": self.ttft,
            "tpot_seconds": self.tpot,
            **({"accepted": self.accepted.tokens} if self.accepted.speculates else {}),
        }
        return answer

    def rows(self) -> list[dict[str, Any]]:
        """A row for each pod."""
        return [{"pod": pod, **report.as_json()} for pod, report in self.pods.items()]

    def page(self) -> str:
        """The breakdown of the time of both steps, and the effect of better machines."""
        from stagec.answers.time.pods_page import pods_page

        return pods_page(self)

    def plot(self) -> SVGText:
        from stagec.answers.time.pods_page import pods_plot

        return SVGText(pods_plot(self).svg())

    def print(self, stream: TextIO) -> None:
        for pod in PODS:
            unit = rate_unit(self.accepted) if pod == DECODE else "tokens/s"
            print_time(self.pods[pod], stream, self.stack, tokens=unit, pod=pod)
        _print(self, stream)
        stream.write(accepted_text(self.pods[DECODE].step_seconds, self.accepted))


def transfer_of(timed: Timed) -> TransferTime:
    """The time of the transfer of caches. Raises `DiagnosticError`."""
    from stagec.time.costs.network import level_between_pods
    from stagec.time.transfer import transfer_time

    machine, issued = timed.machine, timed.steps[PREFILL].issued
    level = level_between_pods(machine, [job.mesh for job in timed.each.values()])
    return transfer_time(issued, machine, level, timed.step, timed.replay)


def turn_seconds(timed: Timed) -> Mapping[str, float]:
    """The seconds of each of two models that run in turn on the same ranks: first the draft model,
    then the main model. Empty for one model. Raises `DiagnosticError`."""
    from stagec.formats.timeline.ranks import Replay
    from stagec.time.clock.intervals import node_times

    if not timed.pods.guests:
        return {}
    replay, front = Replay.of(timed.issued, timed.step), tuple(f"{g}/" for g in timed.pods.guests)
    times = map(node_times, replay.issued.programs, replay.classes)
    rows = (row for each in times for row in each.spread(replay.span, replay.end).rows())
    nodes = ((row.placed.node, row.end) for row in rows)
    done = max(end for n, end in nodes if n.name.removeprefix(n.scope).startswith(front))
    (guest,), (main,) = timed.pods.guests, timed.pods.builders
    return {guest: done / PICOSECONDS, main: timed.step.seconds - done / PICOSECONDS}


def _print(pods: PodsTime, out: TextIO) -> None:
    transfer, shown = pods.transfer, console(out)
    shown.print(
        f"From prefill to decode: {bytes_text(transfer.bytes)} of caches and tokens in "
        f"{transfer.messages:,} messages over {transfer.level}, "
        f"{seconds_text(transfer.alone_seconds)} alone, "
        f"{seconds_text(transfer.exposed_seconds)} behind prefill"
    )
    shown.print(
        f"TTFT {seconds_text(pods.ttft)}, with the caches where they are decoded; TPOT "
        f"{seconds_text(pods.tpot)}"
    )
