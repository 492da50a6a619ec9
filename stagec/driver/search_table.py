"""The answer of a search: for people, and as plain data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from rich.markup import escape

from stagec.driver.command_line import job_words
from stagec.driver.tables import bytes_text, console, ranks_text, table
from stagec.driver.time_table import seconds_text
from stagec.explore.branch import Found
from stagec.explore.reasons import crossed, limits, reason

if TYPE_CHECKING:
    from stagec.driver.options import JobOptions
    from stagec.driver.search_jobs import Evaluated
    from stagec.driver.search_run import Answer
    from stagec.machines import Machine

SCHEMA = 1


def command_of(options: JobOptions, number: int) -> str:
    """The command that compiles a job, to be pasted."""
    folder = f"{_model(options)}-{number}"
    return shlex.join(["stagec", "compile", *_words(options), "-o", folder])


def _model(options: JobOptions) -> str:
    return options.model.rsplit("/", 1)[-1].removesuffix(".stg")


def _words(options: JobOptions) -> list[str]:
    return list(job_words(options.changed(ranks=None, explicit=frozenset())))


def strategy_of(options: JobOptions) -> str:
    """The flags of its strategy."""
    return shlex.join(_words(options.changed(model="", sizes={}))) or "one rank"


def levels_of(machine: Machine) -> dict[str, int | None]:
    """The ranks that each level of the network joins."""
    return {level.name: level.ranks for level in machine.network}


def rows(answer: Answer) -> list[dict[str, Any]]:
    """The best, each as plain data."""
    return [_row(answer, found, n) for n, found in enumerate(answer.best, 1)]


def _row(answer: Answer, found: Found[Evaluated], number: int) -> dict[str, Any]:
    what, machine = found.what, answer.question.machine
    options = answer.candidate(found).options
    seconds = what.seconds or 0.0
    ranks = answer.question.ranks
    tokens = None if what.tokens is None else what.tokens / seconds / ranks
    return {
        "command": command_of(options, number),
        "strategy": strategy_of(options),
        "step_seconds": seconds,
        "memory_peak": what.peak,
        "mfu": what.mfu,
        "limits": limits(what.breakdown or {}, crossed(what.mesh, levels_of(machine))),
        "reason": _reason(answer, found),
        "tokens_per_second_per_rank": tokens,
        "head_room": None if what.room is None else what.room - what.peak,
        "ranks": ranks,
        "machine": machine.name,
        "mesh": dict(what.mesh),
        "memory": dict(what.memory),
        "breakdown": dict(what.breakdown or {}),
    }


def _reason(answer: Answer, found: Found[Evaluated]) -> str:
    best = answer.best[0]
    if found is best:
        return _proof(answer)
    levels = levels_of(answer.question.machine)
    mine, other = found.what, best.what
    about = crossed(mine.mesh, levels), crossed(other.mesh, levels)
    why = reason(mine.breakdown or {}, other.breakdown or {}, *about)
    if answer.question.objective == "memory":
        why += f"; holds {bytes_text(mine.peak - other.peak)} more"
    return why


def _proof(answer: Answer) -> str:
    if answer.interrupted:
        return f"the best so far: {answer.left:,} points may be better"
    return "the best of all points: no bound of another is below it"


def as_json(answer: Answer) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "schema": SCHEMA,
        "model": _model(answer.question.base),
        "machine": answer.question.machine.name,
        "ranks": answer.question.ranks,
        "objective": answer.question.objective,
        "points": answer.listed.points,
        "legal": len(answer.listed.jobs),
        "evaluated": answer.evaluated,
        "timed": answer.timed,
        "seconds": answer.seconds,
        "proven": not answer.interrupted,
        "left": answer.left,
        "cut": dict(answer.cut),
        "refused": dict(answer.listed.refused),
        "same": answer.listed.same,
        "best": rows(answer),
    }


def print_answer(answer: Answer, stream: TextIO) -> None:
    """The best, why each of them is behind, and what was left out."""
    out = console(stream, 160)
    question, found = answer.question, rows(answer)
    about = f"{_model(question.base)} on {ranks_text(question.ranks)} of {question.machine.name}"
    out.print(
        f"{about}: {answer.listed.points:,} points, {len(answer.listed.jobs):,} legal, "
        f"{answer.evaluated:,} evaluated, {answer.seconds:.1f} s",
        markup=False,
    )
    if not found:
        out.print("no strategy of this space fits", markup=False)
    else:
        out.print(_table(found))
        for number, row in enumerate(found, 1):
            out.print(f"[{number}] {row['reason']}", markup=False)
        for number, row in enumerate(found, 1):
            out.print(f"[{number}] {row['command']}", markup=False)
    _print_cut(answer, out)


def _table(found: list[dict[str, Any]]) -> Any:
    made = table(
        "Best strategies",
        *("", "strategy", "step", "tokens/s/rank", "MFU", "memory", "room", "what limits it"),
        text_columns=2,
    )
    for number, row in enumerate(found, 1):
        made.add_row(
            rf"\[{number}]",
            escape(row["strategy"]),
            seconds_text(row["step_seconds"]),
            _number(row["tokens_per_second_per_rank"], ",.0f"),
            _number(row["mfu"], ".1%"),
            bytes_text(row["memory_peak"]),
            "" if row["head_room"] is None else bytes_text(row["head_room"]),
            row["limits"],
        )
    return made


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _print_cut(answer: Answer, out: Any) -> None:
    cut: Mapping[str, int] = {**answer.listed.refused, **answer.cut}
    shown = sorted(((n, why) for why, n in cut.items() if n), reverse=True)
    if answer.listed.same:
        shown.append((answer.listed.same, "the same job as another point"))
    if shown:
        out.print("left out:", markup=False)
    for count, why in shown[:10]:
        out.print(f"  {count:,}: {why}", markup=False)
    if answer.interrupted:
        out.print(f"interrupted: {answer.left:,} points may still be better", markup=False)
