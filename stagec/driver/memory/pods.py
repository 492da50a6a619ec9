"""`stagec memory` of several pods: what the ranks of each hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import StringIO
from typing import Any

from stagec.driver.job.builder import model_name
from stagec.driver.job.planned import Planned
from stagec.driver.job.pod_options import options_of, pod_names
from stagec.driver.job.pods import lower_pods, strategies
from stagec.driver.memory.limits import judge
from stagec.driver.output.common import write_output
from stagec.driver.request.limit import Limit
from stagec.driver.request.options import JobOptions
from stagec.support.diagnostics import error

#: Options that draw one job.
_PICTURES = ("html", "snapshot", "compare")


def memory_of_pods(options: JobOptions, given: Mapping[str, Any]) -> int:
    """`memory` of several pods: 1 if a rank of one holds more than the limit. Raises
    `DiagnosticError`."""
    from stagec.analysis.footprint import footprint
    from stagec.driver.output.analysis_table import print_footprint

    if options.print_strategy:
        write_output(strategies(options), given["output"])
        return 0
    for name in (n for n in _PICTURES if given.get(n)):
        raise error(f"--{name} draws one job, and this one has several pods", remedy="leave it out")
    fit = given["fit"]

    def plan(pod: str) -> Planned[dict[str, Any]]:
        name = f"{model_name(options_of(pod, options))} ({pod})"
        return Planned(lambda module: footprint(module, name, fit))

    plans = {pod: plan(pod) for pod in pod_names(options)}
    pods = lower_pods(options, {pod: [each] for pod, each in plans.items()})
    found = {pod: each.needed("memory") for pod, each in plans.items()}
    limit: Limit | None = given["limit"]
    judged = found.items() if limit is not None else ()
    lacking = [judge(each, limit, given, f"{pod}/") for pod, each in judged if limit is not None]
    text = StringIO()
    if given["as_json"]:
        result = {"schema": 1, "model": pods.name, "pods": found}
        text.write(json.dumps(result, indent=1) + "\n")
    else:
        for each in found.values():
            text.write(f"{each['model']}\n")
            print_footprint(each, text)
    write_output(text.getvalue(), given["output"])
    return 1 if any(lacking) else 0
