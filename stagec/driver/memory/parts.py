"""`stagec memory --part`: what the ranks of each part of a model hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import StringIO
from typing import Any

from stagec.driver.job.builder import model_name
from stagec.driver.job.planned import Planned
from stagec.driver.job.pod_options import pod_names
from stagec.driver.job.pods import lower_pods, strategies
from stagec.driver.memory.limits import beyond
from stagec.driver.output.common import write_output
from stagec.driver.request.limit import Limit
from stagec.driver.request.options import JobOptions
from stagec.support.diagnostics import error

#: Options that draw one job.
_PICTURES = ("html", "snapshot", "compare")


def memory_of_parts(options: JobOptions, given: Mapping[str, Any]) -> int:
    """`memory` of several parts: 1 if a rank of one holds more than the limit. Raises
    `DiagnosticError`."""
    from stagec.analysis.footprint import footprint
    from stagec.driver.output.tables import print_footprint

    if options.print_strategy:
        write_output(strategies(options), given["output"])
        return 0
    for name in (n for n in _PICTURES if given.get(n)):
        raise error(f"--{name} draws one job, and --part makes several pods", remedy="leave it out")
    name, fit = model_name(options), given["fit"]

    def plan(part: str) -> Planned[dict[str, Any]]:
        return Planned(lambda module: footprint(module, f"{name} ({part})", fit))

    plans = {part: plan(part) for part in pod_names(options)}
    pods = lower_pods(options, {part: [each] for part, each in plans.items()})
    found = {part: each.needed("--part") for part, each in plans.items()}
    text = StringIO()
    if given["as_json"]:
        result = {"schema": 1, "model": pods.name, "pods": found}
        text.write(json.dumps(result, indent=1) + "\n")
    else:
        for each in found.values():
            text.write(f"{each['model']}\n")
            print_footprint(each, text)
    write_output(text.getvalue(), given["output"])
    limit: Limit | None = given["limit"]
    if limit is None:
        return 0
    lacking = [beyond(each, limit, f"{part}/") for part, each in found.items()]
    return 1 if any(lacking) else 0
