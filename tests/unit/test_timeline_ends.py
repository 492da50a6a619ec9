"""What each format says of time, for each kind of job: timelines end with the step that `stagec
time` tells, and computations take as long as on the device, whoever holds up the step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stagec.formats.chakra.nodes import NodeKind
from stagec.formats.chakra.record_files import read_trace
from tests.exported import tiny
from tests.oracle.test_parts import path
from tests.support import TINY, stagec
from tests.unit.test_perfetto import read as read_perfetto

#: Its hosts are slow, and hold up every tiny step that they issue op by op.
MACHINE = ("--machine", "h100-sxm")
FAST = ("--machine", str(Path(__file__).parents[1] / "data" / "fast-host.toml"))
DECODE = ("--serve", "decode", "--batch", "4", "--context", "8")
PODS = ("--serve", "disaggregated", "--prefill", "tp=2", "--batch", "4", "--prompt", "8")
_DRAFT = ",".join(f"{n}={v}" for n, v in TINY["llama3-8b"].items() if n not in "BS")


class Kind(NamedTuple):
    """A kind of job: its words, and which rank of its timeline begins a pod that decodes behind the
    others (0: none does)."""

    words: tuple[str, ...]
    decodes: int = 0


def llama(*words: str, serves: bool = True) -> tuple[str, ...]:
    model, option, sizes, *_ = tiny("llama3-8b")
    kept = (s for s in sizes.split(",") if not serves or s[0] not in "BS")
    return (model, option, ",".join(kept), *words)


KINDS = {
    "decode": Kind(llama(*DECODE, "--tp", "2", *MACHINE)),
    "decode, op by op": Kind(llama(*DECODE, "--tp", "2", *MACHINE, "--no-graphs")),
    "prefill": Kind(llama("--serve", "prefill", "--batch", "4", "--prompt", "8", *MACHINE)),
    "mixed": Kind(llama("--serve", "mixed", "--step", "decode=4x8,prefill=1x8+0", *MACHINE)),
    "stages": Kind(llama(*DECODE, "--pp", "2", "--microbatches", "2", *MACHINE)),
    "draft": Kind(
        llama(*DECODE, "--speculative", "2", "--draft", f"llama3-8b[{_DRAFT}]: tp=2", *MACHINE)
    ),
    "pods": Kind(llama(*PODS, "--decode", "dp=2", *MACHINE), 2),
    "pods, op by op": Kind(llama(*PODS, "--decode", "dp=2", *MACHINE, "--no-graphs"), 2),
    "training": Kind(llama("--tp", "2", "--dp", "2", *FAST, serves=False)),
    "training, slow hosts": Kind(llama("--pp", "2", "--microbatches", "2", *MACHINE, serves=False)),
    "parts": Kind((path("whisper"), "--set", "B=8", "--part", "encoder=e: dp=2", *FAST)),
    "parts, slow hosts": Kind(
        (path("whisper"), "--set", "B=8", "--part", "encoder=e: dp=2", *MACHINE)
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_timelines_end_with_the_step(kind: Kind, tmp_path: Path) -> None:
    asked = ("time", *kind.words, "--no-levers", "--json")
    reported = json.loads(stagec(*asked).out)
    formats = "chrome,kineto,perfetto,chakra"
    done = stagec("compile", *kind.words, "--format", formats, "-o", tmp_path, "--quiet")
    assert done.code == 0, done.err
    chrome = json.loads(next((tmp_path / "chrome").glob("*.trace.json")).read_text())
    nodes = [e for e in chrome["traceEvents"] if e["ph"] == "X"]
    ends = ends_of(kind, [(e["pid"], e["ts"] + e["dur"]) for e in nodes])
    assert ends == pytest.approx(expected(reported), abs=2e-6)
    computing = [e for e in nodes if e["tid"] == 0 and e["args"].get("kernel")]
    assert all(e["dur"] > 0 for e in computing)
    assert in_order(chrome["traceEvents"])
    assert ends_of(kind, kineto_ends(tmp_path / "kineto")) == pytest.approx(ends, abs=2e-6)
    (trace,) = (tmp_path / "perfetto").glob("*.pftrace")
    slices = read_perfetto(trace).slices
    shown = [(int(p.split()[1]), s.end / 1e3) for (p, _), all_ in slices.items() for s in all_]
    assert ends_of(kind, shown) == pytest.approx(ends, abs=2e-3)
    # as long as in traces, which know nothing of hosts
    for file in (tmp_path / "chakra").glob("*.et"):
        rank = int(file.suffixes[-2].lstrip("."))
        mine = sorted(max(1, round(e["dur"])) for e in computing if e["pid"] == rank)
        nodes_there = [n for n in read_trace(file) if n.kind == NodeKind.COMP]
        assert near(sorted(n.duration_micros for n in nodes_there), mine)


def in_order(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether what is on a stream follows each other, and messages come after they are sent."""
    streams: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in (e for e in events if e["ph"] == "X"):
        times = round(1e6 * e["ts"]), round(1e6 * (e["ts"] + e["dur"]))
        streams.setdefault((e["pid"], e["tid"]), []).append(times)
    sent, taken = ({e["id"]: e["ts"] for e in events if e["ph"] == end} for end in "sf")
    return all(sent[i] <= taken[i] for i in sent) and all(
        end <= start for each in streams.values() for (_, end), (start, _) in pairwise(sorted(each))
    )


def near(these: Sequence[int], those: Sequence[int]) -> bool:
    """Whether two lists of times are the same but for how halves are rounded."""
    return len(these) == len(those) and all(
        abs(a - b) <= 1 for a, b in zip(these, those, strict=True)
    )


def expected(reported: Mapping[str, Any]) -> list[float]:
    """When the step ends, in microseconds; of pods when each does."""
    if "handover" not in reported:
        return [1e6 * reported["step_seconds"]]
    first, each = (1e6 * reported["serving"][n] for n in ("ttft_seconds", "tpot_seconds"))
    return [first, first + each]


def ends_of(kind: Kind, ended: Sequence[tuple[int, float]]) -> list[float]:
    """The last end of all ranks, or of those of each pod."""
    last: dict[bool, float] = {}
    for rank, end in ended:
        pod = bool(kind.decodes) and rank >= kind.decodes
        last[pod] = max(last.get(pod, 0.0), end)
    return [end for _, end in sorted(last.items())]


def kineto_ends(folder: Path) -> list[tuple[int, float]]:
    """The ends of the kernels of each rank, none of which takes no time but what moves nothing."""
    actual: list[tuple[int, float]] = []
    for file in folder.glob("*.*.json"):
        trace = json.loads(file.read_text())
        rank = trace["distributedInfo"]["rank"]
        kernels = [e for e in trace["traceEvents"] if "stream" in e.get("args", ())]
        assert all(e["dur"] > 0 for e in kernels if not e["name"].startswith("nccl"))
        actual += [(rank, e["ts"] + e["dur"]) for e in kernels]
    return actual


@pytest.mark.parametrize("hosts", ["--graphs", "--no-graphs"])
def test_steps_that_follow_each_other_take_what_they_take_alone(hosts: str, tmp_path: Path) -> None:
    """On one device, whoever launches: what traces say is the time of devices."""
    words = llama("--serve", "decode", "--batch", "4", *MACHINE)
    done = stagec(
        "compile", *words, "--context", "8", "--steps", "3", hosts, "--quiet", "-o", tmp_path
    )
    assert done.code == 0, done.err
    nodes = list(read_trace(tmp_path / "llama3-8b.0.et"))
    alone = [
        json.loads(stagec("time", *words, "--context", str(8 + i), "--no-levers", "--json").out)
        for i in range(3)
    ]
    expected = 1e6 * sum(each["step_seconds"] for each in alone)
    assert sum(n.duration_micros for n in nodes) == pytest.approx(expected, abs=len(nodes) / 2)
