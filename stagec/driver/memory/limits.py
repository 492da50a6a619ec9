"""`stagec memory --limit`: whether what ranks hold fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagec.driver.output.common import report
from stagec.driver.output.streams import tell
from stagec.driver.request.limit import Limit


def beyond(result: Mapping[str, Any], limit: Limit, of: str = "") -> Mapping[str, Any] | None:
    """The class that holds most, if that is more than the limit, and say by how much; else None.
    `of` stands before its name."""
    from stagec.driver.output.tables import bytes_text

    for remark in limit.remarks(result["mesh"]):
        report(remark)
    worst, room = max(result["classes"], key=lambda c: c["peak"]), limit.room(result["mesh"])
    if worst["peak"] <= room:
        return None
    over, needs = bytes_text(worst["peak"] - room), bytes_text(worst["peak"])
    tell(f"{of}{worst['name']} needs {needs}, {over} more than the limit")
    return dict(worst)
