"""`stagec time --part`: the step of all parts of a model together, and of each by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import StringIO
from typing import Any

from stagec.driver.job.planned import Planned
from stagec.driver.job.pod_options import pod_names
from stagec.driver.job.pods import lower_pods, strategies
from stagec.driver.output.common import write_output
from stagec.driver.output.tables import console
from stagec.driver.request.machine import captured
from stagec.driver.request.measurements import measurements
from stagec.driver.request.options import JobOptions
from stagec.driver.time.files import draws
from stagec.driver.time.table import print_time, seconds_text
from stagec.driver.time.timed import report_of, served
from stagec.pipeline.instrument import TYPED
from stagec.support.diagnostics import error


def time_parts(options: JobOptions, given: Mapping[str, Any]) -> int:
    """`time` of several parts: one waits for what another one sends. Raises `DiagnosticError`."""
    from stagec.analysis.model_flops import model_flops, step_tokens
    from stagec.time.pods import IssuedPods
    from stagec.time.step import Issued, step_time

    if options.print_strategy:
        write_output(strategies(options), given["output"])
        return 0
    if draws(given):
        raise error(
            "pictures and traces of time are of one job, and --part makes several pods",
            remedy="leave them out",
        )
    machine = captured(given["machine"]) if options.serve and given["graphs"] else given["machine"]
    measured = measurements(given["measured"], given["kernels_from"], given["machine"])
    first = pod_names(options)[0]
    forward = Planned(model_flops, after=TYPED)  # before the cut
    tokens = Planned(step_tokens, after=TYPED)
    pods = lower_pods(options, {first: [forward, tokens]})
    issued = {pod: Issued.of(module) for pod, module in pods.modules.items()}
    report = report_of(
        pods.name,
        pods.modules[first],
        IssuedPods(issued, pods.far),
        machine,
        forward=forward.found,
        tokens=tokens.found,
        overlap=given["overlap"],
        levers=given["levers"],
        measured=measured,
    )
    alone = {
        pod: step_time(each, machine, overlap=given["overlap"], measured=measured).seconds
        for pod, each in issued.items()
    }
    text = StringIO()
    if given["as_json"]:
        told = {**report.as_json(), **served(options, report), "alone_seconds": alone}
        text.write(json.dumps(told, indent=1) + "\n")
    else:
        print_time(report, text)
        each = ", ".join(f"{pod} {seconds_text(time)}" for pod, time in alone.items())
        console(text).print(f"Without waiting for other parts: {each}", markup=False)
    write_output(text.getvalue(), given["output"])
    return 0
