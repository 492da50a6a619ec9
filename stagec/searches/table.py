"""The answer of a search as JSON, as tables and as CSV."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from stagec.analysis.memory_fit import MemoryFit
from stagec.answers.intervals import interval_row
from stagec.answers.time.table import interval_text, seconds_text
from stagec.jobs.builder import model_name
from stagec.jobs.request.command_line import job_words
from stagec.machines.placement import crossed
from stagec.output.report import csv_text
from stagec.output.tables import NARROW, bytes_text, console, table
from stagec.searches.explore.branch import Ranked, beats
from stagec.searches.explore.reasons import limits, reason
from stagec.searches.main_pod import with_batch_option
from stagec.searches.merge_messages import merge_messages
from stagec.searches.serving_space import without_step
from stagec.searches.stack import as_written
from stagec.time.cautions import cautions

if TYPE_CHECKING:
    from stagec.jobs.request.options import JobOptions
    from stagec.machines import Machine
    from stagec.searches.jobs import Evaluated
    from stagec.searches.run import Answer

SCHEMA = 1
_MOST_NEAR, _MOST_CUT, _LONG = 16, 10, 60
#: The most bounds of points that were not evaluated in the answer, for charts.
_MOST_BOUNDS = 1_000


def command_of(options: JobOptions, number: int | str) -> str:
    """The command that compiles a job into a folder with this number."""
    folder = f"{model_name(options)}-{number}"
    words = _words(with_batch_option(options))
    return shlex.join(["stagec", "compile", *words, "-o", folder])


def _words(options: JobOptions) -> list[str]:
    return list(job_words(as_written(options.changed(ranks=None))))


def strategy_of(options: JobOptions) -> str:
    """The flags of the strategy of a job."""
    return shlex.join(_words(without_step(options.changed(model="", sizes={})))) or "one rank"


def levels_of(machine: Machine, mesh: Mapping[str, int]) -> dict[str, str]:
    """The level of the network that each axis crosses."""
    return {a: level.name for a, level in crossed(machine, mesh).items() if level is not None}


def rows(answer: Answer, *, several: bool = False) -> list[dict[str, Any]]:
    """The best strategies as JSON. With `several` searches this is one of them."""
    return [_row(answer, point, n, several=several) for n, point in enumerate(answer.best, 1)]


def _row(answer: Answer, best: Ranked[Evaluated], number: int, *, several: bool) -> dict[str, Any]:
    what, machine = best.what, answer.question.machine
    options = answer.job(best)
    seconds = what.seconds or 0.0
    ranks = answer.question.all_ranks
    counted = answer.question.sampled(what.tokens)
    tokens = None if counted is None else counted / seconds / ranks
    return {
        "command": command_of(options, number),
        "strategy": strategy_of(options),
        "step_seconds": seconds,
        **interval_row(options.stack, machine, options.serve, seconds),
        "memory_peak": what.peak,
        "mfu": what.mfu,
        "limits": limits(what.breakdown or {}, levels_of(machine, what.mesh)),
        "reason": _reason(answer, best, several=several),
        "tokens_per_second_per_rank": tokens,
        "head_room": None if what.room is None else what.room - what.peak,
        "ranks": ranks,
        "batch": answer.question.batch,
        "cost": answer.question.cost(seconds),
        "machine": machine.given,
        "mesh": what.mesh_of_all,
        "memory": dict(what.memory),
        "fit": None if what.room is None else MemoryFit(what.peak, what.room).as_json(),
        "cautions": list(cautions(machine, what.meshes)),
        "breakdown": dict(what.breakdown or {}),
    }


def _reason(answer: Answer, row: Ranked[Evaluated], *, several: bool) -> str:
    best = answer.best[0]
    if row is best:
        return _proof(answer, several=several)
    one, other = row.what, best.what
    levels, best_levels = (levels_of(answer.question.machine, e.mesh) for e in (one, other))
    why = reason(_parts(answer, one), _parts(answer, other), levels, best_levels)
    if answer.question.objective == "memory":
        why += f"; holds {bytes_text(max(0, one.peak - other.peak))} more"
    return why


def _parts(answer: Answer, what: Evaluated) -> dict[str, float]:
    """The breakdown of a step; that of each group of ranks if groups have steps of their own."""
    parts = what.breakdown or {}
    return {n: answer.question.per_group(s, what.tokens) for n, s in parts.items()}


def _proof(answer: Answer, *, several: bool) -> str:
    if answer.interrupted:
        return f"the best so far: {answer.left:,} points may be better"
    asked = answer.question
    where = f" on {asked.all_ranks} ranks of {asked.machine.given} with B = {asked.batch}"
    of = f"the best of the {len(answer.job_list.jobs):,} legal points of this space"
    how = "all were evaluated" if asked.exhaustive else "no lower bound of another one is below it"
    return f"{of}{where if several else ''}: {how}"


def as_json(answers: Sequence[Answer]) -> dict[str, Any]:
    """The object of `--json`: the best strategies of all searches, and a row for each search."""
    first = answers[0]
    table: dict[str, Any] = {
        "schema": SCHEMA,
        "model": model_name(first.question.base),
        "objective": first.question.objective,
        "priced": first.question.price is not None,
        "points": sum(a.job_list.points for a in answers),
        "legal": sum(len(a.job_list.jobs) for a in answers),
        "evaluated": sum(a.evaluated for a in answers),
        "timed": sum(a.timed for a in answers),
        "seconds": sum(a.seconds for a in answers),
        "bound_seconds": sum(a.bound_seconds for a in answers),
        "proven": not any(a.interrupted for a in answers),
        "left": sum(a.left for a in answers),
        "cut": dict(sum((a.cut for a in answers), Counter[str]())),
        "refused": merge_messages(sum((a.job_list.refused for a in answers), Counter[str]())),
        "same": sum(a.job_list.same for a in answers),
    }
    wanted = first.question.wanted
    several = len(answers) > 1
    ranked = [
        each for a in answers for each in zip(_values(a), rows(a, several=several), strict=True)
    ]
    if first.question.pareto:
        ranked = _front(ranked, first.question.pareto)
    else:
        ranked = sorted(ranked, key=lambda each: each[0])[:wanted]
    best = [row for _, row in ranked]
    for number, row in enumerate(best, 1):
        row["command"] = row["command"].rsplit("-", 1)[0] + f"-{number}"
    table["best"] = best
    of_machines = (text for a in answers for text in cautions(a.question.machine))
    of_best = (text for row in best for text in row["cautions"])
    table["cautions"] = list(dict.fromkeys([*of_machines, *of_best]))
    if len(answers) > 1:
        table["searches"] = [_search(a) for a in answers]
    points = [_point(a, n, a.known[n]) for a in answers for n in sorted(a.known)]
    table["evaluations"] = [p for p in points if p is not None]
    bounds = [bound for a in answers for bound in _bounds(a)]
    bounds = bounds[:: -(-len(bounds) // _MOST_BOUNDS) or 1]
    table["bounds"] = {"seconds": [s for s, _ in bounds], "memory": [h for _, h in bounds]}
    return table


def _bounds(answer: Answer) -> Iterator[tuple[float, int]]:
    """The lower bounds of points that were not evaluated, to four digits."""
    seconds, memory = answer.bounds or ((), ())
    for number, (time, size) in enumerate(zip(seconds, memory, strict=True)):
        if number not in answer.known and time > 0 and size > 0:
            yield float(f"{time:.4g}"), int(float(f"{size:.4g}"))


def _values(answer: Answer) -> list[float]:
    """The values by which the best strategies of several searches are compared: seconds and cost
    are those of a sequence."""
    asked = answer.question
    factor = asked.all_ranks if asked.objective == "tokens-per-rank" else 1
    latency = asked.base.serve is not None and asked.objective == "time"
    each = 1 if latency or asked.objective == "memory" else asked.batch
    return [f.value * factor / each for f in answer.best]


def least(answer: Answer) -> float:
    """The best value of an answer, for comparison with other answers. It has at least one."""
    return _values(answer)[0]


def _front(
    ranked: list[tuple[float, dict[str, Any]]], respects: Sequence[str]
) -> list[tuple[float, dict[str, Any]]]:
    """The Pareto front over all searches."""
    names = {"time": "step_seconds", "memory": "memory_peak", "ranks": "ranks"}
    points = [tuple(row[names[r]] for r in respects) for _, row in ranked]
    front = [
        each
        for each, point in zip(ranked, points, strict=True)
        if not any(beats(other, point) for other in points)
    ]
    return sorted(front, key=lambda each: each[1]["step_seconds"])


def _search(answer: Answer) -> dict[str, Any]:
    best = rows(answer, several=True)[0] if answer.best else None
    return {
        "machine": answer.question.machine.given,
        "ranks": answer.question.all_ranks,
        "batch": answer.question.batch,
        "legal": len(answer.job_list.jobs),
        "evaluated": answer.evaluated,
        "best": best,
    }


def _point(answer: Answer, number: int, evaluated: Evaluated | str) -> dict[str, Any] | None:
    """An evaluated point for pages and files; None if the compiler refuses it."""
    if isinstance(evaluated, str):
        return None
    options = answer.job_list.jobs[number]
    levels = levels_of(answer.question.machine, evaluated.mesh)
    return {
        "strategy": strategy_of(options),
        "command": command_of(options, number),
        "machine": answer.question.machine.given,
        "ranks": answer.question.all_ranks,
        "step_seconds": evaluated.seconds,
        "memory_peak": evaluated.peak,
        "memory": dict(evaluated.memory),
        "room": evaluated.room,
        "mfu": evaluated.mfu,
        "limits": limits(evaluated.breakdown or {}, levels),
        "breakdown": dict(evaluated.breakdown or {}),
        "flags": {n: _plain(getattr(options, n)) for n in answer.job_list.jobs.differing()},
    }


def _plain(value: Any) -> int | str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, int | str) else str(value)


def best_csv(answer: Mapping[str, Any]) -> str:
    """The best strategies as CSV."""
    names = [
        *("strategy", "ranks", "machine", "step_seconds", "tokens_per_second_per_rank", "mfu"),
        *("memory_peak", "head_room", "limits", "reason", "command", "cautions"),
    ]
    rows = ({**row, "cautions": "; ".join(row["cautions"])} for row in answer["best"])
    return csv_text(names, ({n: row[n] for n in names} for row in rows))


def print_answer(answer: Mapping[str, Any], stream: TextIO) -> None:
    """Print the best strategies and why each is behind, further reports, and the counts of what was
    left out."""
    out = console(stream, 160)
    best = answer["best"]
    kept = ", kept from before" if answer.get("cached") else ""
    out.print(
        f"{answer['model']}: {answer['points']:,} points, {answer['legal']:,} legal, "
        f"{answer['evaluated']:,} evaluated, {answer['seconds']:.1f} s{kept}"
    )
    if best:
        narrow = out.width < NARROW  # then the limits of a strategy are below the table
        out.print(_table(best, "searches" in answer, answer["priced"], limits=not narrow))
        for number, row in enumerate(best, 1):
            why = f"{row['limits']}; " if narrow else ""
            out.print(f"[{number}] {why}{row['reason']}")
        for number, row in enumerate(best, 1):
            out.print(f"[{number}] {row['command']}")
        if known := best[0].get("interval"):
            said = f"{known['measured']:,} measured ones of this stack"
            out.print(f"[1] {interval_text(known, said)}")
    if "searches" in answer:
        out.print(_curve(answer["searches"]))
    if "tried" in answer:
        _print_tried(answer["tried"], out)
    if answer.get("neighbours"):
        out.print(_neighbours(answer["neighbours"]))
    if answer.get("sensitivity"):
        out.print(_sensitivity(answer["sensitivity"]))
    _print_cut(answer, out)


def _table(rows: Sequence[Mapping[str, Any]], several: bool, priced: bool, *, limits: bool) -> Any:
    where = ("on",) if several else ()
    more = ("cost",) if priced else ()
    made = table(
        "Best strategies",
        *("", "strategy", *where, "step", *more, "tokens/s/rank", "MFU", "memory", "room"),
        *(["limited by"] if limits else []),
        text_columns=2,
    )
    made.columns[-1].justify = "left" if limits else "right"
    for number, row in enumerate(rows, 1):
        made.add_row(
            f"[{number}]",
            row["strategy"],
            *([f"{row['ranks']} {row['machine']}, B {row['batch']}"] if several else []),
            seconds_text(row["step_seconds"]),
            *([_number(row["cost"], ",.4g")] if priced else []),
            _number(row["tokens_per_second_per_rank"], ",.0f"),
            _number(row["mfu"], ".1%"),
            bytes_text(row["memory_peak"]),
            "" if row["head_room"] is None else bytes_text(row["head_room"]),
            *([row["limits"]] if limits else []),
        )
    return made


def _curve(searches: Sequence[Mapping[str, Any]]) -> Any:
    """The best strategy for each machine, number of ranks and batch."""
    made = table(
        "By ranks",
        *("machine", "ranks", "batch", "step", "tokens/s/rank", "MFU", "strategy"),
        text_columns=1,
    )
    made.columns[-1].justify = "left"
    for each in searches:
        best = each["best"]
        cells = ["", "", "", "nothing fits"]
        if best is not None:
            cells = [
                seconds_text(best["step_seconds"]),
                _number(best["tokens_per_second_per_rank"], ",.0f"),
                _number(best["mfu"], ".1%"),
                best["strategy"],
            ]
        made.add_row(each["machine"], str(each["ranks"]), str(each["batch"]), *cells)
    return made


def _neighbours(rows: Sequence[Mapping[str, Any]]) -> Any:
    made = table("One flag away from [1]", "change", "step", "memory", text_columns=1)
    for row in rows[:_MOST_NEAR]:
        more = row["note"] if row["more"] is None else f"{row['note']} {row['more']:+.1%}".strip()
        memory = row.get("memory_peak")
        made.add_row(row["change"], more[:_LONG], "" if memory is None else bytes_text(memory))
    return made


def _print_tried(answer: Mapping[str, Any], out: Any) -> None:
    """Print the jobs beyond the space that are better than the best of it, with their commands."""
    rows = answer["better"][:_MOST_NEAR]
    others = f"{answer['count']:,} other values of flags that keep the numerics"
    if not rows:
        out.print(f"beyond the space: none of {others} makes [1] better")
        return
    title = f"Beyond the space: better than [1], of {others}"
    made = table(title, "", "change", "step", "memory", text_columns=2)
    for row in rows:
        name = f"[{row['name']}]"
        step = f"{seconds_text(row['step_seconds'])} {row['more']:+.1%}"
        made.add_row(name, row["change"], step, bytes_text(row["memory_peak"]))
    out.print(made)
    for row in rows:
        out.print(f"[{row['name']}] {row['command']}")


def _sensitivity(rows: Sequence[Mapping[str, Any]]) -> Any:
    made = table(
        "What the place of [1] depends on", "figure", "times", "best then", "step", "step of [1]"
    )
    for row in rows:
        made.add_row(
            row["figure"],
            f"{row['factor']:g}",
            f"[{row['best']}]",
            seconds_text(row["step_seconds"]),
            seconds_text(row["step_of_winner"]),
        )
    return made


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _print_cut(answer: Mapping[str, Any], out: Any) -> None:
    cut: Mapping[str, int] = {**answer["refused"], **answer["cut"]}
    shown = sorted(((n, why) for why, n in cut.items() if n), reverse=True)
    if answer["same"]:
        shown.append((answer["same"], "the same job as another point"))
    if shown:
        out.print("left out:")
    for count, why in shown[:_MOST_CUT]:
        out.print(f"  {count:,}: {why}")
    if not answer["proven"]:
        out.print(f"interrupted: {answer['left']:,} points may still be better")
