"""`stagec time` of several pods that wait for each other: the parts of a model, or a draft model
and the one that verifies. The step of all together, and of each by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import StringIO
from typing import TYPE_CHECKING, Any

from stagec.driver.job.planned import Planned
from stagec.driver.job.pod_options import pod_names
from stagec.driver.job.pods import lower_pods, strategies
from stagec.driver.output.common import write_output
from stagec.driver.output.tables import console
from stagec.driver.request.accepted import Accepted
from stagec.driver.request.measurements import measurements
from stagec.driver.request.options import JobOptions
from stagec.driver.time.files import draws
from stagec.driver.time.table import accepted_text, print_time, seconds_text
from stagec.driver.time.timed import report_of, served
from stagec.ir.expr import const, evaluate
from stagec.ir.module import Module
from stagec.pipeline.instrument import BUFFERS, STATED, Hooks
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.analysis.model_flops import ModelFlops


def time_parts(options: JobOptions, given: Mapping[str, Any], accepted: Accepted) -> int:
    """`time` of several pods: one waits for what another one sends. Raises `DiagnosticError`."""
    from stagec.analysis.footprint import peak_bytes
    from stagec.analysis.model_flops import model_flops, step_tokens
    from stagec.time.pods import IssuedPods
    from stagec.time.step import Issued, step_time

    if options.print_strategy:
        write_output(strategies(options), given["output"])
        return 0
    if draws(given):
        raise error(
            "pictures and traces of time are of one pod, and the job has several",
            remedy="leave them out",
        )
    machine, how = given["machine"], {"overlap": given["overlap"], "graphs": given["graphs"]}
    measured = measurements(given["measured"], given["kernels_from"], given["machine"])
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
        levers=given["levers"],
        measured=measured,
    )
    alone = {
        pod: step_time(each, machine, **how, measured=measured).seconds
        for pod, each in issued.items()
    }
    text = StringIO()
    if given["as_json"]:
        told = {**report.as_json(), **served(options, report, accepted), "alone_seconds": alone}
        text.write(json.dumps(told, indent=1) + "\n")
    else:
        print_time(report, text)
        each = ", ".join(f"{pod} {seconds_text(time)}" for pod, time in alone.items())
        console(text).print(f"Without waiting for other pods: {each}", markup=False)
        text.write(accepted_text(report.step_seconds, accepted))
    write_output(text.getvalue(), given["output"])
    return 0


def _sum(models: Mapping[str, tuple[ModelFlops | None, Module]]) -> ModelFlops | None:
    """The FLOPs of several models, each in the sizes of its own module; None if one is open."""
    from stagec.analysis.model_flops import ModelFlops

    sums = [0, 0]
    for found, module in models.values():
        if found is None:
            return None
        sums = [n + evaluate(part, module.env) for n, part in zip(sums, found, strict=True)]
    return ModelFlops(*map(const, sums))
