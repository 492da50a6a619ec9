"""The files that `stagec time` can write: a page, and a trace for Perfetto."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stagec.answers.time.timed import Timed
from stagec.formats.timeline.ranks import Replay
from stagec.jobs.request.option import AnyText, CommandOption
from stagec.jobs.request.result import PAGE_OR_PLOT, RESULT
from stagec.jobs.session import Session
from stagec.program.nodes import Events
from stagec.support.diagnostics import error
from stagec.support.files import new_file

#: The options of these files.
TIME_FILES = (
    CommandOption(
        "html",
        PAGE_OR_PLOT,
        "Write a page that shows the step, or with --sweep a plot; FILE.svg, FILE.pdf: its chart.",
    ),
    CommandOption("perfetto", RESULT, "Write a trace for ui.perfetto.dev."),
    CommandOption(
        "perfetto_ranks",
        AnyText(),
        "The ranks of that trace (default: the first of each class).",
        metavar="0-7,64",
    ),
)


def draws(given: Mapping[str, Any]) -> bool:
    """Whether a page or a trace is requested. Raises `DiagnosticError`."""
    if given["perfetto_ranks"] is not None and given["perfetto"] is None:
        raise error("--perfetto-ranks needs --perfetto", remedy="add --perfetto FILE")
    return given["html"] is not None or given["perfetto"] is not None


# -- Perfetto --------------------------------------------------------------------------------------


def write_perfetto(timed: Timed, path: Path, ranks: str | None, session: Session) -> None:
    """Write a trace of these ranks, by default of the first rank of each class, latest end first.
    Raises `DiagnosticError` for ranks that do not exist, and for more nodes than viewers can
    open."""
    from stagec.answers.time.timed import replays_of
    from stagec.formats.perfetto.encode import perfetto_trace
    from stagec.formats.timeline.ranks import replayed_timeline

    replays = replays_of(timed)
    chosen = (
        _first_ranks(timed, replays, session)
        if ranks is None
        else _given_ranks(timed, replays, ranks)
    )
    timeline = replayed_timeline(replays, chosen, "", lambda number: _events(timed, number))
    with new_file(path) as file:
        for part in perfetto_trace(timeline):
            file.write(part)


def _first_ranks(timed: Timed, replays: Sequence[Replay], session: Session) -> dict[int, int]:
    """The first rank of each class, up to the number of nodes that viewers can open."""
    from stagec.formats.timeline import ranks

    first_ranks: dict[int, int] = {}
    room = ranks.MOST_NODES // len(replays)
    for each in replays:
        members = timed.issued.members[each.first :]
        first = ranks.first_ranks(members, each.classes, each.span, room)
        first_ranks |= {rank: each.first + number for rank, number in first.items()}
    classes = len(timed.issued.members)
    if len(first_ranks) < classes:
        text = (
            f"the trace has {len(first_ranks)} of {classes} rank classes, the busiest: more than "
            f"{ranks.MOST_NODES:,} nodes are more than a viewer takes; --perfetto-ranks chooses "
            "others"
        )
        session.remark(text)
    return first_ranks


def _given_ranks(timed: Timed, replays: Sequence[Replay], text: str) -> dict[int, int]:
    from stagec.formats.timeline import ranks
    from stagec.traces.writer import parse_ranges

    of = ranks.classes_of(timed.issued.members)
    wanted: list[int] = parse_ranges(text).tolist()
    missing = [rank for rank in wanted if rank not in of]
    if missing:
        raise error(
            f"--perfetto-ranks {text}: the job has no rank {missing[0]}",
            remedy=f"choose among ranks 0 to {len(of) - 1}",
        )
    counts = [count for each in replays for count in ranks.count_nodes(each.classes)]
    nodes = sum(counts[of[rank]] for rank in wanted)
    if nodes > ranks.MOST_NODES:
        raise ranks.too_many(f"--perfetto-ranks {text}", nodes, len(wanted))
    return {rank: of[rank] for rank in wanted}


def _events(timed: Timed, number: int) -> Events | None:
    if timed.plans is None:
        return None
    each = timed.issued.classes[number]
    return timed.plans.annotate(each, each.program()).events
