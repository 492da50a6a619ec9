"""What an analysis says of a job on a machine: whether it fits, and what to know of the machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stagec.jobs.session import Session

if TYPE_CHECKING:
    from stagec.machines import Machine


def verdict_on(
    machine: Machine, mesh: Mapping[str, Any], peak: int | None, session: Session
) -> dict[str, Any]:
    """`fit` and `cautions` of a job with such a peak, which is None while sizes are open. What to
    know is reported as well."""
    from stagec.analysis.memory_fit import memory_fit
    from stagec.time.cautions import cautions

    fit = None if peak is None else memory_fit(machine, mesh, peak).as_json()
    warnings = cautions(machine, [] if peak is None else [mesh])
    session.remark(*warnings)
    return {"fit": fit, "cautions": list(warnings)}
