"""Why one strategy is slower than another: the difference of two steps by category of time."""

from collections import defaultdict
from collections.abc import Mapping

from stagec.answers.time.table import difference_text

Seconds = Mapping[str, float]
_EXPOSED = "exposed "
_COMPUTE = ("matrix products", "attention", "element-wise", "launch gaps", "interference")
#: Differences below this share of the step are left out.
_LEAST = 0.002
_MOST = 3


def grouped(breakdown: Seconds, levels: Mapping[str, str]) -> dict[str, float]:
    """A breakdown with all computations as one category, and communication by axis; `levels` names
    the level of the network that each axis crosses."""
    parts: defaultdict[str, float] = defaultdict(float)
    for part, seconds in breakdown.items():
        if part in _COMPUTE:
            parts["computation"] += seconds
        elif part.startswith(_EXPOSED):
            axes, _, kind = part.removeprefix(_EXPOSED).partition(" ")
            level = next((levels[a] for a in axes.split(",") if a in levels), "")
            parts[f"exposed {axes} {kind}{f' over {level}' if level else ''}"] += seconds
        else:
            parts[part] += seconds
    return dict(parts)


def limits(breakdown: Seconds, levels: Mapping[str, str]) -> str:
    """`computation 71%, bubble 14%`: the largest categories of a step."""
    parts = grouped(breakdown, levels)
    total = sum(parts.values()) or 1.0
    most = sorted(parts.items(), key=lambda p: (-p[1], p[0]))[:_MOST]
    return ", ".join(f"{name} {time / total:.0%}" for name, time in most if time / total >= 0.01)


def reason(
    mine: Seconds, best: Seconds, levels: Mapping[str, str], best_levels: Mapping[str, str]
) -> str:
    """`+1.2 s (+11.0%): exposed tp all_gather over infiniband +8.1%, bubble +3.0%`: the time of a
    step beyond the best one, largest differences first, in percent of the best step."""
    total = sum(best.values()) or 1.0
    more = sum(mine.values()) - total
    one, other = grouped(mine, levels), grouped(best, best_levels)
    changes = {n: one.get(n, 0.0) - other.get(n, 0.0) for n in {**one, **other}}
    order = sorted(changes.items(), key=lambda c: (-abs(c[1]), c[0]))
    largest = [f"{n} {d / total:+.1%}" for n, d in order[:_MOST] if abs(d) / total >= _LEAST]
    ahead = f"{difference_text(more)} ({more / total:+.1%})"
    because = ", ".join(largest) or "no part differs by as much as 0.2%"
    return f"{ahead}: {because}"
