"""`stagec time` of several pods that wait for each other: the parts of a model, or a draft model
and the one that verifies. The step of all together, and of each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stagec.driver.job.planned import Planned
from stagec.driver.job.pod_options import pod_names
from stagec.driver.job.pods import lower_pods
from stagec.driver.request.options import JobOptions
from stagec.driver.time.timed import report_of
from stagec.ir.expr import const, evaluate
from stagec.ir.module import Module
from stagec.pipeline.instrument import BUFFERS, STATED, Hooks

if TYPE_CHECKING:
    from stagec.analysis.model_flops import ModelFlops
    from stagec.analysis.time_report import TimeReport
    from stagec.machines import Machine
    from stagec.time.costs.nodes import Measurements


def parts_time(
    options: JobOptions,
    machine: Machine,
    *,
    levers: bool | None,
    measured: Measurements | None,
    **how: Any,
) -> tuple[TimeReport, Mapping[str, float]]:
    """The step of all pods, each of which waits for what others send, and the seconds of each
    without that. `how` is `overlap` and `graphs`. Raises `DiagnosticError`."""
    from stagec.analysis.footprint import peak_bytes
    from stagec.analysis.model_flops import model_flops, step_tokens
    from stagec.time.pods import IssuedPods
    from stagec.time.step import Issued, step_time

    names = pod_names(options)
    first, tokens = names[0], Planned(step_tokens, *STATED)
    models = names if options.draft is not None else names[:1]  # parts have one model
    flops = {pod: Planned(model_flops, *STATED) for pod in models}
    peaks = {pod: Planned(peak_bytes, BUFFERS) for pod in names}
    watching: dict[str, list[Hooks]] = {pod: [each] for pod, each in peaks.items()}
    for pod, counted in flops.items():
        watching[pod].append(counted)
    watching[first].append(tokens)
    pods = lower_pods(options, watching)
    issued = {pod: Issued.of(module) for pod, module in pods.modules.items()}
    report = report_of(
        pods.name,
        pods.modules[first],
        IssuedPods(issued, pods.far),
        machine,
        flops=_sum({pod: (each.found, pods.modules[pod]) for pod, each in flops.items()}),
        tokens=tokens.found,
        peaks=[peaks[pod].found for pod in issued],
        **how,
        levers=levers,
        measured=measured,
    )
    alone = {
        pod: step_time(each, machine, **how, measured=measured).seconds
        for pod, each in issued.items()
    }
    return report, alone


def _sum(models: Mapping[str, tuple[ModelFlops | None, Module]]) -> ModelFlops | None:
    """The FLOPs of several models, each in the sizes of its own module; None if one is open."""
    from stagec.analysis.model_flops import ModelFlops

    sums = [0, 0]
    for found, module in models.values():
        if found is None:
            return None
        sums = [n + evaluate(part, module.env) for n, part in zip(sums, found, strict=True)]
    return ModelFlops(*map(const, sums))
