"""`stagec simulate`: run ASTRA-sim on a folder of `--format astra-sim`, and print its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

import click

from stagec.driver.shell.show import write_json
from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.json_values import is_list, is_object, object_in
from stagec.support.texts import package_text

if TYPE_CHECKING:
    from stagec.formats.astra_sim.log import Breakdown, RankEnd

#: The number of attempts: ASTRA-sim may corrupt its memory on exit, and then lose its output.
_TRIES = 5
#: Open files in addition to one per rank.
_FILES = 256


@dataclass(frozen=True)
class Simulated:
    """The results of ASTRA-sim: the end of each rank (ns), the breakdown of the slowest one, and
    the peak of local memory in bytes, if the job has tensor names."""

    name: str
    ends: Mapping[int, RankEnd]
    parts: Breakdown | None
    mfu: float | None
    peak_bytes: int | None

    @property
    def slowest(self) -> RankEnd:
        """The rank that ends last."""
        return max(self.ends.values(), key=lambda each: (each.end, -each.rank))

    def as_json(self) -> dict[str, object]:
        """The object of `--json`, in seconds and bytes."""
        fields: dict[str, object] = {
            "job": self.name,
            "ranks": len(self.ends),
            "step_seconds": self.slowest.end / 1e9,
            "slowest_rank": self.slowest.rank,
            "exposed_seconds": self.slowest.exposed / 1e9,
            "mfu": self.mfu,
            "peak_bytes": self.peak_bytes,
            "rank_seconds": [self.ends[rank].end / 1e9 for rank in sorted(self.ends)],
        }
        if self.parts is not None:
            fields["computation_seconds"] = self.parts.computation / 1e9
            fields["idle_seconds"] = self.parts.idle / 1e9
            rows = [asdict(row) for row in self.parts.exposed]
            fields["communication"] = [
                {
                    "collective": row["kind"],
                    "over": row["over"],
                    "calls": row["calls"],
                    "bytes": row["bytes"],
                    "seconds": row["busy"] / 1e9,
                    "exposed_seconds": row["exposed"] / 1e9,
                }
                for row in rows
            ]
        return fields


@click.command("simulate")
@click.argument("folder", type=Path, metavar="DIR")
@click.option(
    "--astra-sim",
    "binary",
    type=Path,
    required=True,
    metavar="BINARY",
    help="ASTRA-sim's program, AstraSim_Analytical_Congestion_Unaware.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--totals",
    is_flag=True,
    help="Print when ranks end, without nodes: for large jobs, whose log takes about 200 "
    "bytes per node and rank.",
)
def command(folder: Path, binary: Path, *, as_json: bool, totals: bool) -> int:
    """Run ASTRA-sim on a folder of stagec compile --format astra-sim: the time of a step, exposed
    communication by collective and group, and MFU.

    If a rank does not end, this is an error, although ASTRA-sim exits with 0.
    """
    simulation = simulated(folder, binary, totals=totals)
    if as_json:
        write_json(simulation.as_json())
    else:
        _print(simulation, sys.stdout)
    return 0


def simulated(folder: Path, binary: Path, *, totals: bool = False) -> Simulated:
    """Run ASTRA-sim on a folder. Raises `DiagnosticError` for a folder without a job, and for ranks
    that do not end."""
    from stagec.formats.astra_sim.log import peaks, rank_ends
    from stagec.formats.astra_sim.system_files import RENDEZVOUS

    about = _about(folder)
    name, ranks = str(about["name"]), int(about["ranks"])
    _check_files(folder, binary, name, ranks)
    with TemporaryDirectory(prefix="stagec-simulate-") as place:
        where = Path(place)
        system = _read_object(folder / "system.json")
        system["trace-enabled"] = int(not totals)
        (where / "system.json").write_text(json.dumps(system))
        logging = "logging_no_nodes.toml" if totals else "logging.toml"
        text = package_text(f"formats/astra_sim/{logging}")
        (where / "logging.toml").write_text(text)
        words = _words(folder.resolve(), binary, name, where)
        words += [RENDEZVOUS] * bool(about.get("rendezvous"))
        text = _run(words, where, ranks)
        ends = rank_ends(text)
        slowest = max(ends.values(), key=lambda each: (each.end, -each.rank))
        parts = None if totals else _parts(folder, where, about, slowest)
        used = peaks(text)
        peak = _peak_bytes(where, max(used, key=lambda r: _bytes(used[r]))) if used else None
    return Simulated(name, ends, parts, _mfu(about, slowest.end / 1e9), peak)


def _mfu(about: Mapping[str, Any], seconds: float) -> float | None:
    """The model FLOPs utilization; None if the FLOPs are not known."""
    flops, peak = about.get("model_flops"), about.get("peak_flops")
    if not isinstance(flops, int) or not isinstance(peak, int | float):
        return None
    available = seconds * int(about["ranks"]) * peak
    return flops / available if available > 0 else None


#: The largest number of ranks of a job.
_MOST_RANKS = 1 << 24


def _about(folder: Path) -> dict[str, Any]:
    """The contents of `stagec.json`. Raises `DiagnosticError` for a folder without it."""
    from stagec.formats.astra_sim.system_files import ABOUT

    given = _read_object(folder / ABOUT)
    ranks, groups = given.get("ranks"), given.get("groups")
    if not isinstance(ranks, int) or not isinstance(given.get("name"), str) or ranks < 1:
        raise _no_job(folder / ABOUT)
    if not is_object(groups) or not all(_is_range(each, ranks) for each in groups.values()):
        raise _no_job(folder / ABOUT)
    return given


def _is_range(given: object, ranks: int) -> bool:
    """Whether a value is a range of group numbers, its first and last one, with at most as many
    groups as ranks."""
    if not is_list(given) or [*map(type, given)] != [int, int]:
        return False
    first, last = list[int](given)
    return first <= last < first + min(ranks, _MOST_RANKS)


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a job. Raises `DiagnosticError` for other text."""
    value = object_in(path)
    if not value:
        raise _no_job(path)
    return value


def _no_job(path: Path) -> DiagnosticError:
    return error(
        f"'{path.parent}' is not a job for ASTRA-sim: it has no readable '{path.name}'",
        remedy="write one: stagec compile MODEL --format astra-sim --machine h100-sxm -o DIR",
    )


def _check_files(folder: Path, binary: Path, name: str, ranks: int) -> None:
    """Refuse inputs on which ASTRA-sim fails without a message. Raises `DiagnosticError`."""
    if not binary.is_file() or not os.access(binary, os.X_OK):
        raise error(
            f"'{binary}' is not an executable program",
            remedy="build ASTRA-sim (docs/consumers.md), and give "
            "AstraSim_Analytical_Congestion_Unaware",
        )
    for rank in range(ranks):
        path = folder / f"{name}.{rank}.et"
        if not path.is_file():
            raise error(
                f"'{path}' is missing: ASTRA-sim needs the traces of all {ranks} ranks",
                remedy="write the job without --only-ranks",
            )
        if not os.access(path, os.W_OK):
            raise error(
                f"'{path}' is not writable, and ASTRA-sim opens traces for appending",
                remedy=f"chmod u+w {folder}/*.et, or simulate a copy",
            )
    _raise_limit(ranks + _FILES)


def _raise_limit(files: int) -> None:
    """Raise the limit of open files of child processes. Raises `DiagnosticError`."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        if hard != resource.RLIM_INFINITY and hard < files:
            raise error(
                f"ASTRA-sim opens a file per rank, {files} in all, but this process may open only "
                f"{hard}",
                remedy=f"raise the hard limit: ulimit -Hn {files}",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def _words(folder: Path, binary: Path, name: str, where: Path) -> list[str]:
    return [
        str(binary.resolve()),
        f"--workload-configuration={folder / name}",
        f"--comm-group-configuration={folder / name}.json",
        f"--system-configuration={where / 'system.json'}",
        f"--network-configuration={folder / 'network.yml'}",
        f"--remote-memory-configuration={folder / 'memory.json'}",
        f"--logging-configuration={where / 'logging.toml'}",
    ]


def _run(words: list[str], where: Path, ranks: int) -> str:
    """The output of the program. Raises `DiagnosticError` if a rank does not end."""
    from stagec.formats.astra_sim.log import rank_ends

    for left in reversed(range(_TRIES)):
        try:
            run = subprocess.run(
                words, check=False, capture_output=True, text=True, errors="replace", cwd=where
            )
        except OSError as problem:
            raise error(
                f"cannot run '{words[0]}': {problem.strerror}",
                remedy="give a program that was built for this machine",
            ) from None
        ended = len(rank_ends(run.stdout).keys() & set(range(ranks)))
        if ended == ranks:
            return run.stdout
        if run.returncode >= 0 or not left:
            text = run.stdout + run.stderr
            if not text.strip():
                raise error(
                    f"'{words[0]}' is not ASTRA-sim: it prints nothing and exits with "
                    f"{run.returncode}",
                    remedy="give AstraSim_Analytical_Congestion_Unaware, see docs/consumers.md",
                )
            raise _stuck(text, ranks, ended, run.returncode)
    raise AssertionError("the last try returns or raises")


def _stuck(text: str, ranks: int, ended: int, code: int) -> DiagnosticError:
    lines = [line for line in text.splitlines() if line.strip()]
    wrong = next((w for w in reversed(lines) if "critical" in w or "rror" in w), None)
    reason = f": {(wrong or lines[-1])[:200]}" if lines else ""
    return error(
        f"ASTRA-sim exits with {code} before {ranks - ended} of {ranks} ranks end{reason}",
        remedy="'stagec check DIR' proves the traces free of deadlock; with one stream for all "
        "communication some pipelines stand still, see docs/simulators.md",
    )


def _parts(folder: Path, where: Path, about: Mapping[str, Any], slowest: RankEnd) -> Breakdown:
    from stagec.formats.astra_sim.log import breakdown, spans_of
    from stagec.formats.chakra.nodes import TraceError
    from stagec.formats.chakra.record_files import read_trace

    over = {
        number: axes
        for axes, (first, last) in about["groups"].items()
        for number in range(first, last + 1)
    }
    try:
        with (where / "nodes.log").open(errors="replace") as lines:
            spans = spans_of(lines, slowest.rank)
        nodes = read_trace(folder / f"{about['name']}.{slowest.rank}.et")
        return breakdown(nodes, spans, over, slowest.end)
    except (OSError, ValueError, TraceError) as problem:
        raise error(
            f"the log of ASTRA-sim does not say when nodes ran: {problem}",
            remedy="add --totals, which needs no times of nodes",
        ) from None


_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * _UNITS[unit]


def _peak_bytes(where: Path, rank: int) -> int | None:
    """The peak of a rank, exactly, from the counter that ASTRA-sim writes in MiB."""
    try:
        trace = json.loads((where / f"local_mem_trace.{rank}.json").read_bytes())
        used: list[float] = [
            e["args"]["Memory_MB"] for e in trace["traceEvents"] if e.get("ph") == "C"
        ]
        return round(max(used) * 2**20)
    except (OSError, ValueError, KeyError, TypeError):
        return None


# -- the printed answer ----------------------------------------------------------------------------


def _print(run: Simulated, out: TextIO) -> None:
    """Print the step, and the breakdown of the slowest rank."""
    from stagec.output.tables import bytes_text

    slowest = run.slowest
    mfu = "" if run.mfu is None else f", MFU {run.mfu:.1%}"
    out.write(f"{run.name}: {len(run.ends)} ranks, a step takes {_ms(slowest.end)}{mfu}\n")
    if run.peak_bytes is not None:
        out.write(f"peak of local memory: {run.peak_bytes:,} bytes\n")
    if run.parts is None:
        out.write(f"rank {slowest.rank}: {_ms(slowest.exposed)} without a computation\n")
        return
    out.write(f"rank {slowest.rank}, the slowest:\n")
    rows = [("computation", "", "", "", run.parts.computation)]
    for row in run.parts.exposed:
        name = f"{row.kind} over {row.over}" if row.over else row.kind
        rows.append((name, f"{row.calls:,}", bytes_text(row.bytes), _ms(row.busy), row.exposed))
    rows.append(("idle", "", "", "", run.parts.idle))
    title = ("", "calls", "bytes", "under way", "exposed", "of the step")
    shown = [(*r[:4], _ms(r[4]), f"{r[4] / max(1, slowest.end):.1%}") for r in rows]
    widths = [max(len(line[i]) for line in (title, *shown)) for i in range(len(title))]
    for line in (title, *shown):
        cells = (
            c.ljust(w) if not i else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        out.write("  ".join(("", *cells)).rstrip() + "\n")


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.3f} ms"
