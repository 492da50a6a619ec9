"""The verdict of an analysis on a job on a machine: whether it fits, and cautions about the
machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stagec.jobs.session import Session

if TYPE_CHECKING:
    from stagec.machines import Machine


def verdict_on(
    machine: Machine, mesh: Mapping[str, Any], peak: int | None, session: Session
) -> dict[str, Any]:
    """The entries `fit` and `cautions` for a job with this peak in bytes, which is None if sizes
    are open. Cautions are also reported as remarks."""
    from stagec.analysis.memory_fit import memory_fit
    from stagec.time.cautions import cautions

    fit = None if peak is None else memory_fit(machine, mesh, peak).as_json()
    warnings = cautions(machine, [] if peak is None else [mesh])
    session.remark(*warnings)
    return {"fit": fit, "cautions": list(warnings)}
