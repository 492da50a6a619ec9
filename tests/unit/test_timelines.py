"""The formats of timelines, read by rules of their readers: Kineto's as HolisticTraceAnalysis reads
it, Chrome's, Perfetto's. Sums are those of `stagec analyze`, times those of `stagec time`."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stagec.formats.timeline import ranks as timeline
from tests.exported import WRITTEN, Tried, classes, flops_of, tiny, traffic_of
from tests.support import LONG, stagec

#: A machine whose hosts hold up no step, however small it is.
MACHINE = ("--machine", str(Path(__file__).parents[1] / "data" / "fast-host.toml"))
JOB = tiny("llama3-8b", "--tp", "2", "--pp", "2", "--dp", "2", "--microbatches", "2")
#: Bytes of an element, as PyTorch calls types.
SIZE = {"BFloat16": 2, "Float": 4, "Byte": 1, "Int": 4, "Long": 8, "Half": 2, "Bool": 1}
KINDS = {
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "all_to_allv": "all_to_all",
    "send": "send",
    "recv": "recv",
}
COMPUTED = {"matrix products", "attention", "element-wise", "optimizer", "interference"}
Event = dict[str, Any]


def compiled(
    tmp_path: Path, format_: str, words: Sequence[str], *more: str, machine: Sequence[str] = MACHINE
) -> Path:
    folder = tmp_path / format_.partition("{")[0]
    done = stagec(
        "compile", *words, *machine, "--format", format_, "-o", folder, "--quiet", "--force", *more
    )
    assert done.code == 0, done.err
    return folder


def read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    actual: dict[str, Any] = json.loads(text, parse_float=Decimal)
    return actual


def picoseconds(value: Decimal) -> int:
    actual = value * 1_000_000
    assert actual == int(actual)
    return int(actual)


def spans(events: Iterable[Event]) -> list[tuple[int, int]]:
    actual = [(picoseconds(e["ts"]), picoseconds(e["ts"] + e["dur"])) for e in events]
    return sorted(actual)


def union(intervals: Iterable[tuple[int, int]]) -> int:
    """Time that some interval covers."""
    total, until = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


# -- Kineto ----------------------------------------------------------------------------------------


def kernels(trace: Mapping[str, Any]) -> list[Event]:
    """Work on the device: events with a stream and a duration, as HTA takes them."""
    return [
        e for e in trace["traceEvents"] if "dur" in e and e.get("args", {}).get("stream", -1) >= 0
    ]


def is_communication(event: Event) -> bool:
    return re.match(r"nccl.*Kernel", event["name"]) is not None


def check_kineto(path: Path) -> dict[str, Any]:
    """What a reader relies on; the trace."""
    first = next(
        m for line in path.read_text().splitlines() if (m := re.search(r'"rank":\s+(\d+)', line))
    )
    trace = read(path)
    assert int(first[1]) == trace["distributedInfo"]["rank"]
    launches = {
        e["args"]["correlation"]: e for e in trace["traceEvents"] if e.get("cat") == "cuda_runtime"
    }
    actual = kernels(trace)
    assert sorted(launches) == sorted(e["args"]["correlation"] for e in actual)
    by_stream: defaultdict[int, list[Event]] = defaultdict(list)
    for event in actual:
        launch = launches[event["args"]["correlation"]]
        assert launch["ts"] + launch["dur"] == event["ts"]
        assert event["tid"] == event["args"]["stream"]
        by_stream[event["tid"]].append(event)
    for events in by_stream.values():
        times = spans(events)
        assert all(end <= start for (_, end), (start, _) in pairwise(times))
    (step,) = (e for e in trace["traceEvents"] if e.get("cat") == "user_annotation")
    assert picoseconds(step["dur"]) == max(end for _, end in spans(actual))
    return trace


@WRITTEN
def test_kineto_has_what_analyze_counts(tried_job: Tried, tmp_path: Path) -> None:
    job = tried_job.words
    folder = compiled(tmp_path, "kineto{ranks=classes}", job)
    reported = json.loads(stagec("time", *job, *MACHINE, "--no-levers", "--json").out)
    times = {each["name"]: each["breakdown"] for each in reported["classes"]}
    for each in classes(job):
        trace = check_kineto(folder / f"{tried_job.model}.{each['example_rank']}.json")
        actual = kernels(trace)
        assert sum(e["args"].get("flops", 0) for e in actual) == flops_of(each)
        traffic: dict[tuple[str, str], Counter[str]] = {}
        groups = {g["pg_name"]: g["ranks"] for g in trace["distributedInfo"]["pg_config"]}
        for e in filter(is_communication, actual):
            args, kind = e["args"], KINDS[e["args"]["Collective name"]]
            size = max(args["In msg nelems"], args["Out msg nelems"]) * SIZE[args["dtype"]]
            over = "" if kind in ("send", "recv") else args["Process Group Description"]
            traffic.setdefault((kind, over), Counter()).update(calls=1, bytes=size)
            into = args["In msg nelems"] * (args["Group size"] if kind == "all_gather" else 1)
            scattered = args["Group size"] if kind == "reduce_scatter" else 1
            assert into == args["Out msg nelems"] * scattered
            ranks = groups.get(args["Process Group Name"])
            assert args["Process Group Ranks"] == str(ranks) or kind in ("send", "recv")
            assert each["example_rank"] in json.loads(args["Process Group Ranks"])
            assert len(json.loads(args["Process Group Ranks"])) == args["Group size"]
        assert {k: (v["calls"], v["bytes"]) for k, v in traffic.items()} == traffic_of(each)
        computing = spans(e for e in actual if e["cat"] == "kernel" and not is_communication(e))
        expected = sum(s for part, s in times[each["name"]].items() if part in COMPUTED)
        assert union(computing) == round(expected * 1e12)


def test_overlap_is_that_of_the_replay(tmp_path: Path) -> None:
    """Of the time in which something communicates, that in which something computes too; what HTA
    calls `comp_comm_overlap`, and 25.88% and 54.50% in docs/consumers.md."""
    text = "llama3-8b --pp 2 --tp 2 --dp 2 --zero 1 --microbatches 4 --set L=4,S=2048"
    words = text.split()
    folder = compiled(tmp_path, "kineto", words, machine=("--machine", "h100-sxm"))
    actual: list[float] = []
    for rank in (0, 4):
        events = kernels(read(folder / f"llama3-8b.{rank}.json"))
        sides = [spans(e for e in events if is_communication(e) == side) for side in (True, False)]
        both = union(sides[0]) + union(sides[1]) - union([*sides[0], *sides[1]])
        actual.append(round(100 * both / union(sides[0]), 2))
    assert actual == [25.88, 54.5]


def test_ranks_differ_in_groups_and_peers_only(tmp_path: Path) -> None:
    folder = compiled(tmp_path, "kineto{gzip}", JOB)
    traces = {rank: read(folder / f"llama3-8b.{rank}.json.gz") for rank in range(8)}
    for rank, trace in traces.items():
        for e in filter(is_communication, kernels(trace)):
            assert str(rank) in re.findall(r"\d+", e["args"]["Process Group Ranks"])
        first = 0 if rank < 4 else 4
        assert [bare(e) for e in trace["traceEvents"]] == [
            bare(e) for e in traces[first]["traceEvents"]
        ]


def bare(event: Event) -> Event:
    """An event without what ranks of a class differ in."""
    own = ("Process Group Name", "Process Group Ranks", "name")
    args = {name: v for name, v in event.get("args", {}).items() if name not in own}
    return {**event, "args": args}


def test_measure_reads_what_was_written(tmp_path: Path) -> None:
    """The table that `stagec measure` makes of the traces has the times of collectives that the
    model gave them, so the step is the same with it."""
    folder = compiled(tmp_path, "kineto", JOB)
    table = tmp_path / "table.csv"
    traces = sorted(folder.glob("llama3-8b.*.json"))
    done = stagec("measure", *traces, "-o", table)
    assert done.code == 0, done.err
    asked = ("time", *JOB, *MACHINE, "--no-levers", "--json")
    with_table = json.loads(stagec(*asked, "--measured", table).out)
    without = json.loads(stagec(*asked).out)
    assert with_table["found"]["matched"] >= 1
    assert with_table["step_seconds"] == pytest.approx(without["step_seconds"], rel=1e-4)


def test_measured_times_win(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    plain = read(compiled(tmp_path, "kineto", JOB) / "llama3-8b.0.json")
    sizes = {reduced(e) for e in kernels(plain)}
    table.write_text(f"kind,dtype,extents,microseconds\nall_reduce,,2x{max(sizes)},1000\n")
    folder = compiled(tmp_path, "kineto", JOB, "--measured", str(table))
    slow = read(folder / "llama3-8b.0.json")
    durations = {e["dur"] for e in kernels(slow) if reduced(e) == max(sizes)}
    assert durations == {Decimal(1000)}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert f"--measured {table}" in manifest["command"]
    assert str(table) in manifest["inputs"]


def reduced(event: Event) -> int:
    """Bytes of an all_reduce."""
    args = event["args"]
    is_one = args.get("Collective name") == "allreduce"
    return args["In msg nelems"] * SIZE[args["dtype"]] if is_one else 0


# -- Chrome and Perfetto ---------------------------------------------------------------------------


@WRITTEN
def test_chrome_has_what_analyze_counts(tried_job: Tried, tmp_path: Path) -> None:
    job = tried_job.words
    folder = compiled(tmp_path, "chrome", job, "--memory-events")
    events = read(folder / f"{tried_job.model}.trace.json")["traceEvents"]
    flops: Counter[int] = Counter()
    peaks: Counter[int] = Counter()
    threads: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            threads[e["pid"], e["tid"]].append(e)
            if e["tid"] == 0:  # a blocking collective is on two
                flops[e["pid"]] += e["args"].get("flops", 0)
        elif e["ph"] == "C":
            peaks[e["pid"]] = max(peaks[e["pid"]], e["args"]["bytes"])
    for on_one in threads.values():
        times = spans(on_one)
        assert all(end <= start for (_, end), (start, _) in pairwise(times))
    for each in classes(job):
        assert flops[each["example_rank"]] == flops_of(each)
    for each in json.loads((folder / "manifest.json").read_text())["classes"]:
        assert peaks[each["example_rank"]] == each["memory"]["peak_bytes"]
    sent = {e["id"]: e for e in events if e["ph"] == "s"}
    received = {e["id"]: e for e in events if e["ph"] == "f"}
    assert sent.keys() == received.keys()
    assert all(sent[i]["ts"] <= received[i]["ts"] for i in sent)
    ranks = sum(each["count"] for each in classes(job))
    total = sum(
        e["count"] * row["count"] for e in classes(job) for row in e["p2p"] if row["dir"] == "send"
    )
    assert len(sent) == total
    assert len({pid for pid, _ in threads}) == ranks


def test_perfetto_is_that_of_stagec_time(tmp_path: Path) -> None:
    folder = compiled(tmp_path, "perfetto{ranks=classes}", JOB, "--memory-events")
    file = tmp_path / "step.pftrace"
    assert stagec("time", *JOB, *MACHINE, "--no-levers", "--perfetto", file).code == 0
    assert (folder / "llama3-8b.pftrace").read_bytes() == file.read_bytes()


# -- which ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format_", "more", "ranks"),
    [
        ("kineto", (), range(8)),
        ("kineto{ranks=classes}", (), (0, 4)),
        ("kineto", ("--only-ranks", "1,6-7"), (1, 6, 7)),
    ],
)
def test_ranks_are_chosen(
    format_: str, more: Sequence[str], ranks: Sequence[int], tmp_path: Path
) -> None:
    folder = compiled(tmp_path, format_, JOB, *more)
    assert {p.name for p in folder.iterdir()} == {
        "manifest.json",
        *(f"llama3-8b.{rank}.json" for rank in ranks),
    }


@LONG
def test_large_jobs_write_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say so, and how large the files get, before anything is written."""
    monkeypatch.setattr(timeline, "MOST_NODES", 400)
    words = ("compile", *JOB, *MACHINE, "-o", str(tmp_path / "out"), "--force")
    done = stagec(*words, "--format", "kineto")
    assert "kineto: 2 of 8 ranks, the first of each class (--only-ranks names others)" in done.err
    size = sum(p.stat().st_size for p in (tmp_path / "out").glob("llama*"))
    reported = re.search(r"about ([\d.]+) KiB", done.err)
    assert reported is not None
    assert 0.5 < float(reported[1]) * 1024 / size < 2
    done = stagec(*words, "--format", "chrome", "--only-ranks", "0-7")
    assert (done.code, "but viewers open about" in done.err) == (1, True)
    done = stagec(*words, "--format", "kineto{ranks=all}")
    assert "kineto: 8 of 8 ranks, " in done.err


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--format", "kineto"), "the format 'kineto' needs a machine"),
        (("--format", "chrome{ranks=x}", *MACHINE), "expects all or classes, found 'x'"),
        (("--format", "chrome{rank=x}", *MACHINE), "has no option 'rank'"),
        (("--measured", "x.csv"), "--measured and --kernels-from need --machine"),
    ],
)
def test_what_is_refused(words: Sequence[str], reported: str, tmp_path: Path) -> None:
    done = stagec("compile", *JOB, *words, "-o", tmp_path / "out", "--quiet")
    assert (done.code, reported in done.err) == (1, True), done.err
    assert not (tmp_path / "out").exists()


def test_an_archive_has_no_times(tmp_path: Path) -> None:
    assert stagec("compile", *JOB, "--archive", tmp_path / "job", "--quiet").code == 0
    done = stagec(
        "materialize", tmp_path / "job", "--format", "kineto", *MACHINE, "-o", tmp_path / "out"
    )
    assert (done.code, "needs the model, which an archive does not contain" in done.err) == (
        1,
        True,
    )


def test_pods_are_one_timeline(tmp_path: Path) -> None:
    """Prefill with its messages, then decode: every message has both its ends, sends take the time
    of the network, and pods take what `stagec time` says."""
    pods = ("--prefill", "tp=4,pp=2,microbatches=2", "--decode", "tp=2,dp=2")
    step = ("--serve", "disaggregated", *pods, "--batch", "8", "--prompt", "64")
    words = ("llama3-8b", "--set", "L=2", *step, "--machine", "h100-sxm")
    done = stagec("compile", *words, "--format", "chrome,kineto,perfetto", "-o", tmp_path)
    assert done.code == 0, done.err
    text = (tmp_path / "chrome" / "llama3-8b.trace.json").read_text()
    events = json.loads(text)["traceEvents"]
    sends, takes = ({e["id"]: e for e in events if e["ph"] == end} for end in "sf")
    assert sends.keys() == takes.keys()
    crossing = [i for i, e in sends.items() if e["pid"] < 8 <= takes[i]["pid"]]
    reported = json.loads(stagec("time", *words, "--no-levers", "--json").out)
    assert len(crossing) == reported["handover"]["messages"] == 64 + 16  # and tokens
    assert all(sends[i]["ts"] < takes[i]["ts"] for i in crossing)
    runs = [e for e in events if e["ph"] == "X"]
    ends = [max(e["ts"] + e["dur"] for e in runs if (e["pid"] < 8) is p) for p in (True, False)]
    serving = reported["serving"]
    assert ends[0] == pytest.approx(1e6 * serving["ttft_seconds"], abs=1e-5)
    assert ends[1] - ends[0] == pytest.approx(1e6 * serving["tpot_seconds"], abs=1e-5)
    traces = [json.loads(p.read_text()) for p in sorted((tmp_path / "kineto").glob("*.*.json"))]
    assert len(traces) == 12
    for trace in traces:
        about = trace["distributedInfo"]
        groups = {g["pg_name"]: g["ranks"] for g in about["pg_config"]}
        named = [
            e["args"] for e in trace["traceEvents"] if "Process Group Name" in e.get("args", ())
        ]
        assert named
        for each in named:
            ranks = json.loads(each["Process Group Ranks"])
            assert about["rank"] in ranks
            assert groups.get(each["Process Group Name"], ranks) == ranks
