"""`stagec time --serve disaggregated`: the step of each pod, and the caches on their way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from stagec.driver.job.compile_pods import handed_over
from stagec.driver.job.pods import lower_pods, options_of_pod, strategies
from stagec.driver.output.common import reports_once, write_output
from stagec.driver.output.tables import bytes_text, console
from stagec.driver.request.machine import captured
from stagec.driver.request.measurements import measurements
from stagec.driver.request.options import JobOptions
from stagec.driver.request.serving import PODS
from stagec.driver.time.files import draws
from stagec.driver.time.table import print_time, seconds_text
from stagec.driver.time.timed import time_job
from stagec.ir.serving import DECODE, PREFILL
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport
    from stagec.machines import Level, Machine
    from stagec.time.step import Issued

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class TransferTime:
    """The caches of a step on their way.

    `bytes` and `messages` are those of all ranks. `alone_seconds` are those of the rank that sends
    most, if it did nothing else; `exposed_seconds` are what is left of them behind the step of
    prefill, since layers are sent as they finish. `level` is the level of the network between the
    pods.
    """

    bytes: int
    messages: int
    level: str
    alone_seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True)
class PodsTime:
    """The steps of both pods, each by itself, and the transfer between them."""

    pods: Mapping[str, TimeReport]
    transfer: TransferTime

    @property
    def ttft(self) -> float:
        """Seconds from a prompt to its first token and its caches where they are decoded."""
        return self.pods[PREFILL].step_seconds + self.transfer.exposed_seconds

    @property
    def tpot(self) -> float:
        """Seconds for each further token."""
        return self.pods[DECODE].step_seconds

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        found: dict[str, Any] = {"schema": SCHEMA}
        found["pods"] = {pod: report.as_json() for pod, report in self.pods.items()}
        found["handover"] = asdict(self.transfer)
        found["serving"] = {
            "mode": "disaggregated",
            "ttft_seconds": self.ttft,
            "tpot_seconds": self.tpot,
        }
        return found


def time_pods(options: JobOptions, given: Mapping[str, Any]) -> int:
    """`time` of two pods. Raises `DiagnosticError`."""
    if options.print_strategy:
        write_output(strategies(options), given["output"])
        return 0
    if draws(given):
        raise error(
            "pictures and traces of time are of one pod, and the job has two",
            remedy="look at one: --serve prefill, or --serve decode",
        )
    with reports_once():
        found = pods_time(options, given["machine"], given)
    if given["as_json"]:
        write_output(json.dumps(found.as_json(), indent=1) + "\n", given["output"])
        return 0
    text = StringIO()
    for pod in PODS:
        print_time(found.pods[pod], text)
    _print(found, text)
    write_output(text.getvalue(), given["output"])
    return 0


def pods_time(options: JobOptions, machine: Machine, given: Mapping[str, Any]) -> PodsTime:
    """The times of both pods, and of the transfer. Raises `DiagnosticError`.

    A pod begins on a node of its own, so messages between pods cross the network. A rank sends one
    after the other over its link; what receives them is taken to have a link for each sender.
    """
    from stagec.time.step import Issued, step_time

    on = captured(machine) if given["graphs"] else machine
    measured = measurements(given["measured"], given["kernels_from"], machine)
    how: dict[str, Any] = {"overlap": given["overlap"], "measured": measured}
    alone = {
        pod: time_job(options_of_pod(pod, options), on, levers=given["levers"], **how).report
        for pod in PODS
    }
    pods = lower_pods(options)
    level = _between(machine, [alone[pod].ranks for pod in PODS])
    issued = Issued.of(pods.modules[PREFILL])
    sending = step_time(issued, on, pods=level, **how)
    result = handed_over(pods)
    exposed = max(0.0, sending.seconds - alone[PREFILL].step_seconds)
    return PodsTime(
        alone,
        TransferTime(
            result.bytes,
            result.messages,
            level.name,
            _alone(issued, on, level),
            exposed,
        ),
    )


def _between(machine: Machine, ranks: list[int]) -> Level:
    """The level of the network between two pods, the second of which begins on a node of its own.
    Raises `DiagnosticError` if there is none."""
    from stagec.time.costs.network import level_between

    node = machine.network[0].ranks or 1
    first, second = ranks
    return level_between(machine, 0, -(-first // node) * node + second - 1)


def _alone(issued: Issued, machine: Machine, level: Level) -> float:
    """Seconds of the messages of the rank that sends most, one after the other."""
    from stagec.program.groups import crosses_pods
    from stagec.time.costs.network import message_seconds

    longest = 0.0
    for runs in issued.runs:
        total = 0.0
        for kind, times in Counter(run.kind for run in runs).items():
            sizes = Counter(n.size for n in kind.nodes if crosses_pods(n.op))
            each = sum(k * message_seconds(machine, size, level) for size, k in sizes.items())
            total += times * each
        longest = max(longest, total)
    return longest


def _print(found: PodsTime, out: StringIO) -> None:
    transfer, shown = found.transfer, console(out)
    shown.print(
        f"From prefill to decode: {bytes_text(transfer.bytes)} of caches in "
        f"{transfer.messages:,} messages over {transfer.level}, "
        f"{seconds_text(transfer.alone_seconds)} alone, "
        f"{seconds_text(transfer.exposed_seconds)} behind prefill",
        markup=False,
    )
    shown.print(
        f"TTFT {seconds_text(found.ttft)}, with the caches where they are decoded; TPOT "
        f"{seconds_text(found.tpot)}",
        markup=False,
    )
