"""`stagec time --serve disaggregated`: the step of each pod, and the caches on their way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

from stagec.driver.job.planned import Planned
from stagec.driver.job.pod_options import pod_names
from stagec.driver.job.pods import lower_pods
from stagec.driver.output.report import Report
from stagec.driver.output.tables import bytes_text, console
from stagec.driver.request.accepted import Accepted
from stagec.driver.request.options import JobOptions
from stagec.driver.request.serving import PODS
from stagec.driver.time.table import accepted_text, print_time, seconds_text
from stagec.driver.time.timed import report_of
from stagec.ir.serving import DECODE, PREFILL
from stagec.pipeline.instrument import BUFFERS, STATED, Hooks

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport
    from stagec.machines import Machine
    from stagec.time.transfer import TransferTime

SCHEMA = 1


@dataclass(frozen=True)
class PodsTime(Report):
    """The steps of both pods, each by itself, and the transfer between them."""

    pods: Mapping[str, TimeReport]
    transfer: TransferTime
    accepted: Accepted

    @property
    def ttft(self) -> float:
        """Seconds from a prompt to its first token and its caches where they are decoded."""
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
        found: dict[str, Any] = {"schema": SCHEMA}
        found["pods"] = {pod: report.as_json() for pod, report in self.pods.items()}
        found["handover"] = asdict(self.transfer)
        found["serving"] = {
            "mode": "disaggregated",
            "ttft_seconds": self.ttft,
            "tpot_seconds": self.tpot,
            **({"accepted": self.accepted.tokens} if self.accepted.speculates else {}),
        }
        return found

    def rows(self) -> list[dict[str, Any]]:
        """A row for each pod."""
        return [{"pod": pod, **report.as_json()} for pod, report in self.pods.items()]

    def print(self, stream: TextIO) -> None:
        for pod in PODS:
            print_time(self.pods[pod], stream)
        _print(self, stream)
        stream.write(accepted_text(self.pods[DECODE].step_seconds, self.accepted))


def pods_time(
    options: JobOptions,
    machine: Machine,
    accepted: Accepted,
    *,
    levers: bool | None,
    **how: Any,
) -> PodsTime:
    """The times of both pods, and of the transfer. Raises `DiagnosticError`.

    Each pod is compiled once. What it takes by itself is its step in which caches take no time on
    their way; that of prefill is one with its parts, which wait for each other. `how` is `overlap`,
    `graphs` and `measured`.
    """
    from stagec.analysis.footprint import peak_bytes
    from stagec.analysis.model_flops import model_flops, step_tokens
    from stagec.time.costs.network import level_between_pods
    from stagec.time.pods import IssuedPods
    from stagec.time.step import Issued, IssuedStep
    from stagec.time.transfer import transfer_time

    flops = {pod: Planned(model_flops, *STATED) for pod in PODS}
    tokens = {pod: Planned(step_tokens, *STATED) for pod in PODS}
    peaks = {pod: Planned(peak_bytes, BUFFERS) for pod in pod_names(options)}
    watching: dict[str, list[Hooks]] = {pod: [each] for pod, each in peaks.items()}
    for pod in PODS:
        watching[pod] += [flops[pod], tokens[pod]]
    pods = lower_pods(options, watching)
    each = {pod: Issued.of(module) for pod, module in pods.modules.items()}
    first = {pod: part for pod, part in each.items() if pod != DECODE}
    prefill = IssuedPods(first, pods.far) if options.part else each[PREFILL]
    issued: dict[str, IssuedStep] = {PREFILL: prefill, DECODE: each[DECODE]}
    alone = {
        pod: report_of(
            pods.name,
            pods.modules[pod],
            issued[pod],
            machine,
            flops=flops[pod].found,
            tokens=tokens[pod].found,
            peaks=[peaks[name].found for name in (first if pod == PREFILL else [pod])],
            levers=levers,
            **how,
        )
        for pod in PODS
    }
    level = level_between_pods(machine, [job.mesh for job in each.values()])
    sent = transfer_time(issued[PREFILL], machine, level, alone[PREFILL].step, **how)
    return PodsTime(alone, sent, accepted)


def _print(found: PodsTime, out: TextIO) -> None:
    transfer, shown = found.transfer, console(out)
    shown.print(
        f"From prefill to decode: {bytes_text(transfer.bytes)} of caches and tokens in "
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
