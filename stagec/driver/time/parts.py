"""`stagec time --part`: the step of each part of a model by itself."""

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
from stagec.driver.request.measurements import measurements
from stagec.driver.request.options import JobOptions
from stagec.driver.time.files import draws
from stagec.driver.time.table import print_time, seconds_text
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport

#: The pass behind which a module has one part of the model, forward.
_CUT = "cut-part"


def time_parts(options: JobOptions, given: Mapping[str, Any]) -> int:
    """`time` of several parts, each by itself: what comes from another part is there when it is
    asked for. The step takes no less than the longest of them. Raises `DiagnosticError`."""
    from stagec.analysis.model_flops import model_flops, step_flops, step_tokens
    from stagec.analysis.time_report import time_report
    from stagec.time.step import Issued

    if options.print_strategy:
        write_output(strategies(options), given["output"])
        return 0
    if draws(given):
        raise error(
            "pictures and traces of time are of one job, and --part makes several pods",
            remedy="leave them out",
        )
    machine = given["machine"]
    measured = measurements(given["measured"], given["kernels_from"], machine)
    how: dict[str, Any] = {n: given[n] for n in ("overlap", "levers")}
    parts = pod_names(options)
    forward = {part: Planned(model_flops, after=_CUT) for part in parts}
    tokens = {part: Planned(step_tokens, after=_CUT) for part in parts}
    pods = lower_pods(options, {part: [forward[part], tokens[part]] for part in parts})
    reports: dict[str, TimeReport] = {}
    for part, module in pods.modules.items():
        flops = forward[part].found
        reports[part] = time_report(
            f"{pods.name} ({part})",
            Issued.of(module),
            machine,
            module.env,
            model_flops=None if flops is None else step_flops(flops, module.graphs),
            tokens=tokens[part].found,
            measured=measured,
            **how,
        )
    least = max(each.step_seconds for each in reports.values())
    text = StringIO()
    if given["as_json"]:
        told = {part: each.as_json() for part, each in reports.items()}
        result = {"schema": 1, "pods": told, "step_seconds_at_least": least}
        text.write(json.dumps(result, indent=1) + "\n")
    else:
        for each in reports.values():
            print_time(each, text)
        longest = max(reports, key=lambda part: reports[part].step_seconds)
        console(text).print(
            f"Each part by itself, without waiting for the others: the step takes "
            f"{seconds_text(least)} or more, that of '{longest}'",
            markup=False,
        )
    write_output(text.getvalue(), given["output"])
    return 0
