"""The neighbours of a job of a search: the jobs that differ from it in one flag."""

from collections.abc import Mapping

from stagec.ir_spec.strategy.axes import DATA_AXES
from stagec.jobs.request.flags import FLAGS
from stagec.jobs.request.options import JobOptions
from stagec.searches.points import Jobs
from stagec.searches.space import microbatch_of, values_text

#: Flags that follow from others for fixed ranks and batch; and the most flags that change together:
#: chunks with a schedule, sp with tp.
_FOLLOW, _MOST_FLAGS = (*DATA_AXES, "microbatches"), 2


def neighbours_of(jobs: Jobs, number: int, sizes: Mapping[str, int]) -> dict[int, str]:
    """The jobs that differ from one in one flag, with the change as text; ranks and batch stay."""
    candidates = jobs.neighbours(number, _FOLLOW, _MOST_FLAGS)
    changes = {n: _change(jobs[number], jobs[n], sizes) for n in candidates}
    return {n: change for n, change in changes.items() if change is not None}


def _change(one: JobOptions, other: JobOptions, sizes: Mapping[str, int]) -> str | None:
    """The one flag in which two jobs differ, as text; None if they differ in none or in several."""
    names = [n for n in FLAGS if n not in _FOLLOW and getattr(one, n) != getattr(other, n)]
    if set(names) == {"schedule", "chunks"}:
        names = ["schedule"]  # the chunks follow from the schedule
    if set(names) == {"sp", "tp"}:
        names = ["tp"]  # without tp there is no sp
    size = microbatch_of(other, sizes)
    same = size == microbatch_of(one, sizes)
    if not names:
        return None if same else f"microbatch-size {size}"
    if len(names) > 1 or not same:
        return None
    value = values_text(names[0], [getattr(other, names[0])])
    return f"{names[0].replace('_', '-')} {value}"
