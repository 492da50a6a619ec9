"""`stagec memory --limit`: whether what ranks hold fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagec.analysis.memory_fit import MemoryFit
from stagec.driver.output.common import report
from stagec.driver.output.streams import tell
from stagec.driver.request.limit import Limit


def judge(
    result: dict[str, Any], limit: Limit, given: Mapping[str, Any], of: str = ""
) -> Mapping[str, Any] | None:
    """Note in a footprint whether it fits the limit; the class that holds most, if it does not.
    The table begins with the verdict; where none is printed it is told, with `of` before the name
    of the class."""
    from stagec.driver.output.tables import fit_text

    for remark in limit.remarks(result["mesh"]):
        report(remark)
    worst = max(result["classes"], key=lambda c: c["peak"])
    fit = MemoryFit(worst["peak"], limit.room(result["mesh"]))
    result["fit"] = {"class": worst["name"], **fit.as_json()}
    if given["as_json"] or given["output"]:
        tell(f"{of}{worst['name']}: {fit_text(fit)}")
    return None if fit.fits else dict(worst)
