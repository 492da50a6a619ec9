"""Messages between pods: each rank gets each byte that it holds once, and the traces of both pods
are one job."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from math import lcm, prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.formats.chakra.nodes import NodeKind, TraceNode
from stagec.formats.chakra.record_files import read_trace
from stagec.program.pod_messages import Layouts, NoHandoverError, handover
from stagec.traces.archive_index import parse_index
from tests.support import examples, stagec

DEGREES = st.sampled_from([1, 2, 4])
HALVES = ",two_batch_overlap"


@st.composite
def layouts(draw: st.DrawFn, prefix: str) -> Layouts:
    """A pod with up to three axes that split up to two dimensions, some of them none."""
    axes = tuple((f"{prefix}{i}", draw(DEGREES)) for i in range(draw(st.integers(1, 3))))
    splits: tuple[list[str], ...] = ([], [])
    for axis, _ in draw(st.permutations(axes)):
        where = draw(st.integers(0, 2))
        if where < 2:
            splits[where].append(axis)
    return Layouts(axes, tuple(map(tuple, splits)))


def kept(layout: Layouts, shape: tuple[int, ...], rank: int) -> set[tuple[int, ...]]:
    """The elements that a rank holds, by the definition of a split."""
    coords = dict(
        zip(layout.mesh, np.unravel_index(rank, tuple(layout.mesh.values())), strict=True)
    )
    ranges: list[range] = []
    for size, axes in zip(shape, layout.splits, strict=True):
        low, high = 0, size
        for axis in axes:
            part = (high - low) // layout.mesh[axis]
            low += part * int(coords[axis])
            high = low + part
        ranges.append(range(low, high))
    return set(product(*ranges))


@given(layouts("a"), layouts("b"))
@examples(200)
def test_each_rank_gets_what_it_holds_once(source: Layouts, target: Layouts) -> None:
    """By sets of elements: the senders of a rank hold all of its part, and pieces of one element
    come from different replicas and make one whole."""
    way = handover(source, target)
    shape = tuple(4 * lcm(s, t) for s, t in zip(source.parts, target.parts, strict=True))
    sent = Counter((src, int(ranks[src])) for ranks in way.to for src in range(source.ranks))
    received = Counter((int(ranks[dst]), dst) for ranks in way.of for dst in range(target.ranks))
    assert sent == received
    assert set(sent.values()) == {1}
    per_message = prod(shape) // prod(source.parts) / way.pieces
    for dst in range(target.ranks):
        mine = kept(target, shape, dst)
        got: Counter[tuple[int, ...]] = Counter()
        for ranks in way.of:
            common = mine & kept(source, shape, int(ranks[dst]))
            assert common, "a sender holds something of it"
            got.update(common)
        replicas = set(got.values())
        assert got.keys() == mine
        assert len(replicas) == 1
        assert len(way.of) * per_message == len(mine)


def test_parts_that_cut_each_other_are_refused() -> None:
    with pytest.raises(NoHandoverError, match="2 parts, and 3"):
        handover(Layouts((("a", 2),), (("a",),)), Layouts((("b", 3),), (("b",),)))


# -- jobs ------------------------------------------------------------------------------------------

SIZES = "L=4,D=64,H=8,G=4,K=8,F=128,V=128"
CASES = (
    ("tp=2,dp=2", "tp=4,dp=2"),
    ("tp=4", "dp=4,tp=2"),
    ("dp=4", "tp=2"),
    ("tp=8", "dp=2,tp=2"),
    ("cp=2,tp=2", "dp=2,tp=2"),
    ("cp=2,pp=2,microbatches=2", "dp=2,tp=2,microbatches=2"),
    ("tp=2,pp=2,microbatches=2", "dp=2,pp=4,microbatches=2"),
    ("pp=4,microbatches=2", "cp=2,pp=2,microbatches=2"),
    ("pp=2,microbatches=2,schedule=interleaved,chunks=2", "pp=4,microbatches=2"),
    ("--pp 3 --stage-layers 2,1,1 --microbatches 2", "pp=2,stage-layers=1,3,microbatches=2"),
    # microbatches of other numbers: what comes is received in the order in which it is sent
    ("tp=2,pp=2,microbatches=4", "tp=4,microbatches=2"),
    ("dp=2", "pp=2,microbatches=4,tp=2"),
    ("pp=2,microbatches=8", "pp=2,microbatches=2,schedule=interleaved,chunks=2"),
)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_both_pods_are_one_job(case: int, tmp_path: Path) -> None:
    """The checker proves it, with sends that wait too. What crosses is what decoding ranks hold of
    caches, and a token of each sequence."""
    prefill, decode = CASES[case]
    batch, prompt = 8, 16
    step = ("--serve", "disaggregated", "--batch", str(batch), "--prompt", str(prompt))
    words = ("llama3-8b", *step, "--set", SIZES, "--prefill", prefill, "--decode", decode)
    ran = stagec("compile", *words, "-o", tmp_path / "job")
    assert ran.code == 0, ran.err
    checked = stagec("check", tmp_path / "job", "--json")
    assert checked.code == 0, checked.out
    assert json.loads(checked.out)["rendezvous"]
    actual = json.loads(stagec("analyze", *words, "--json").out)
    a_token = 2 * 4 * 4 * 8 * 2  # keys and values of four layers, four heads of eight, two bytes
    degrees = dict(part.split("=") for part in decode.split(",") if "=" in part)
    copies = max(1, int(degrees.get("tp", 1)) // 4)
    whole = int(degrees.get("tp", 1)) * int(degrees.get("cp", 1))  # ranks that take one token
    crossed = batch * prompt * a_token * copies + 4 * batch * whole
    assert actual["handover"]["bytes"] == crossed
    manifest = json.loads((tmp_path / "job" / "manifest.json").read_text())
    assert manifest["serving"] == actual["handover"]
    assert {c["pod"] for c in manifest["classes"]} == {"prefill", "decode"}


def test_a_pod_decodes_behind_the_first_token(tmp_path: Path) -> None:
    """All that a rank of decode computes waits for what prefill sends behind its last computation:
    the token that it has sampled."""
    pods = ("--prefill", "tp=2,microbatches=2", "--decode", "dp=2")
    step = ("--serve", "disaggregated", "--batch", "8", "--prompt", "16", "--set", SIZES)
    ran = stagec("compile", "llama3-8b", *step, *pods, "-o", tmp_path, "--name", "job", "--quiet")
    assert ran.code == 0, ran.err
    first, last = (list(read_trace(tmp_path / f"job.{rank}.et")) for rank in (0, 3))
    made = max((n for n in first if n.kind == NodeKind.COMP), key=lambda n: n.id).id
    tags: set[object] = {
        n.attrs["comm_tag"] for n in first if n.kind == NodeKind.SEND and made in _waits(n)
    }
    (token,) = (n.id for n in last if _comes(n, tags))
    behind = {token}
    for node in last:
        if not behind.isdisjoint(_waits(node)):
            behind.add(node.id)
    assert {n.id for n in last if n.kind == NodeKind.COMP} <= behind


def _comes(node: TraceNode, tags: set[object]) -> bool:
    """Whether a node receives a message of the first rank with one of these tags."""
    of = node.attrs.get("comm_src", 0), node.attrs.get("comm_tag")
    return node.kind == NodeKind.RECV and of[0] == 0 and of[1] in tags


def _waits(node: TraceNode) -> tuple[int, ...]:
    return (*node.data_deps, *node.ctrl_deps)


def test_published_bytes_of_a_prompt() -> None:
    """Llama-3 8B, 4,096 tokens: 536.9 MB cross (facts of disaggregated serving), and the token that
    was sampled to each of eight ranks."""
    actual = _analysed("llama3-8b", "tp=4", "tp=8", 4096)
    assert actual["handover"]["bytes"] == 4096 * 131_072 + 8 * 4


def _analysed(model: str, prefill: str, decode: str, prompt: int) -> dict[str, Any]:
    words = ("--serve", "disaggregated", "--batch", "1", "--prompt", str(prompt), "--json")
    ran = stagec("analyze", model, "--prefill", prefill, "--decode", decode, *words)
    assert ran.code == 0, ran.err
    return dict(json.loads(ran.out))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--prefill", "tp=2"), "needs --prompt"),
        (("--prompt", "16", "--prefill", "tq=2"), "'tq' is not a flag of a strategy"),
        (("--prompt", "16", "--prefill", "sp,foo"), "'foo' is not a flag of a strategy"),
        (("--prompt", "16", "--prefill", "tp=x"), "--prefill 'tp=x'"),
        (
            ("--prompt", "16", "--prefill", "microbatches=2", "--decode", "microbatches=3"),
            "2 micro",
        ),
        (
            ("--prompt", "16", "--prefill", "dp=4,tp=4", "--decode", "microbatches=4"),
            "has 3 elements per rank",
        ),
        (("--prompt", "16", "--prefill", "tp=3"), "in the pod 'prefill'"),
        (("--prompt", "16", "--limit", "200KB"), "does not fit 200KB"),
        (("--prompt", "15", "--prefill", "tp=2,dp=3", "--decode", "tp=2,dp=2"), "3 parts, and 2"),
    ],
)
def test_what_is_wrong_is_reported(words: tuple[str, ...], says: str) -> None:
    ran = stagec(
        "analyze", "llama3-8b", "--serve", "disaggregated", "--batch", "12", "--set", SIZES, *words
    )
    assert ran.code == 1
    assert says in ran.err
    assert "Traceback" not in ran.err


# -- what a command writes ---------------------------------------------------------------------

DISAGGREGATED = ("--serve", "disaggregated", "--batch", "8", "--set", SIZES)
SMALL = ("llama3-8b", *DISAGGREGATED, "--prefill", "tp=2,dp=2", "--decode", "tp=4")


def test_both_strategies_are_printed() -> None:
    for command in ("compile", "analyze"):
        ran = stagec(command, *SMALL, "--prompt", "16", "--print-strategy")
        assert ran.code == 0, ran.err
        assert ran.out.index("// prefill") < ran.out.index("[dp = 2, tp = 2]")
        assert ran.out.index("// decode") < ran.out.index("@pod[tp = 4]")


def test_pods_are_dumped_apart(tmp_path: Path) -> None:
    ran = stagec("compile", *SMALL, "--prompt", "16", "--dry-run", "--dump-dir", tmp_path)
    assert ran.code == 0, ran.err
    for pod, op in (("prefill", "stg.hand_over"), ("decode", "stg.take_over")):
        (dump,) = (tmp_path / pod).glob("*-hand-over.stg")
        assert op in dump.read_text()


def test_a_warning_is_reported_once() -> None:
    """Each pod tells what it has to say, and what both have once."""
    ran = stagec("analyze", *SMALL, "--prompt", "20000")
    assert ran.code == 0
    lines = [line for line in ran.err.splitlines() if "warning" in line]
    assert lines
    assert len(lines) == len(set(lines))


def test_times_and_memory_are_written(tmp_path: Path) -> None:
    """As for one pod: durations of computations, and what nodes add to memory."""
    more = ("--machine", "h100-sxm", "--memory-events", "--names", "short", "--quiet")
    for pods in (SMALL, (*SMALL[:-3], "tp=2,pp=2,microbatches=4", "--decode", "tp=2,pp=2")):
        job = tmp_path / str(len(pods[-1]))
        ran = stagec("compile", *pods, "--prompt", "16", *more, "-o", job)
        assert ran.code == 0, ran.err
        assert stagec("check", job).code == 0
        manifest = json.loads((job / "manifest.json").read_text())
        words = manifest["command"]
        assert "--names short" in words
        assert "--machine h100-sxm" in words
        assert "--prefill" in words
        assert all(c["memory"]["peak_bytes"] > 0 for c in manifest["classes"])
        first = manifest["classes"][0]
        nodes = list(read_trace(job / f"llama3-8b.{first['example_rank']}.et"))
        assert any(node.duration_micros for node in nodes)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--steps", "3"), "--steps compiles steps of one server"),
        (("--name", "manifest"), "'manifest' is not a valid name"),
    ],
)
def test_what_pods_do_not_have_is_refused(
    words: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    ran = stagec("compile", *SMALL, "--prompt", "16", *words, "-o", tmp_path / "job")
    assert ran.code == 1
    assert says in ran.err
    assert "help: " in ran.err
    assert not (tmp_path / "job").exists()


def test_an_archive_has_both_pods(tmp_path: Path) -> None:
    """What is made of it are the files of a folder, byte for byte, and the check proves it."""
    pods = (*SMALL[:-3], "tp=2,pp=2,microbatches=2", "--decode", "dp=2,microbatches=2")
    words = ("compile", *pods, "--prompt", "16", "--machine", "h100-sxm", "--quiet")
    archive = tmp_path / "pods.stagec"
    for more in (("--archive", archive), ("-o", tmp_path / "folder")):
        ran = stagec(*words, *more)
        assert ran.code == 0, ran.err
    checked = stagec("check", archive, "--json")
    assert checked.code == 0, checked.out
    assert json.loads(checked.out)["ranks"] == 6
    assert stagec("materialize", archive, "-o", tmp_path / "made", "--quiet").code == 0
    files = {f.name: f.read_bytes() for f in (tmp_path / "folder").iterdir()}
    assert files == {f.name: f.read_bytes() for f in (tmp_path / "made").iterdir()}
    refused = stagec("materialize", archive, "-o", tmp_path / "simai", "--format", "simai")
    assert refused.code == 1
    assert "needs the model, which an archive does not contain" in refused.err


INDEX: dict[str, Any] = {
    "name": "job",
    "mesh": {"a/x": 2, "b/x": 1},
    "about": {},
    "pods": [
        {"name": "a", "mesh": {"x": 2}, "far": {"b": {"ranks": [[2, 2]], "messages": [0]}}},
        {"name": "b", "mesh": {"x": 1}, "far": {"a": {"ranks": [[0], [1]], "messages": [0, 1]}}},
    ],
    "classes": [
        {
            "pod": pod,
            "coords": {},
            "uses": [],
            "axes": [],
            "entry": {"count": n, "nodes": {"comp": 1, "coll": 0, "send": 1, "recv": 0}},
            "variants": [
                {
                    "widths": [],
                    "start": 0,
                    "size": 1,
                    "bytes": 5,
                    "trace_bytes": 1,
                    "sha256": "",
                    "groups": [],
                    "peers": [["b" if pod == "a" else "a", 0, 1]],
                }
            ],
        }
        for pod, n in (("a", 2), ("b", 1))
    ],
}


def test_the_index_of_pods_is_checked() -> None:
    index = parse_index(INDEX, 10)
    assert [m.tolist() for m in index.members] == [[0, 1], [2]]
    assert index.pods["b"].start == 2

    def wrong(change: Callable[[dict[str, Any]], object]) -> None:
        given = deepcopy(INDEX)
        change(given)
        with pytest.raises(ValueError, match=r"pod|message|axis|ranks|partition|class"):
            parse_index(given, 10)

    wrong(lambda i: i["pods"][1].update(name="a"))
    wrong(lambda i: i["pods"][1].update(name=""))
    wrong(lambda i: i["pods"][0]["mesh"].update(x=3))
    wrong(lambda i: i["pods"][0]["mesh"].update(x=1 << 40))
    wrong(lambda i: i["pods"][0]["far"]["b"].update(messages=[1]))
    wrong(lambda i: i["pods"][0]["far"]["b"].update(ranks=[[2, 3]]))
    wrong(lambda i: i["pods"][0]["far"]["b"].update(ranks=[[2]]))
    wrong(lambda i: i["pods"][0]["far"].update(c={"ranks": [], "messages": []}))
    wrong(lambda i: i["classes"][0].update(pod="c"))
    wrong(lambda i: i["classes"][0].update(pod="b"))
    wrong(lambda i: i["classes"][0]["variants"][0].update(peers=[["b", 1, 1]]))
    wrong(lambda i: i["classes"][0]["variants"][0].update(peers=[["y", 1, 1]]))


@pytest.mark.parametrize("tp", ["", ",tp=2"])
def test_half_batches_meet_whole_ones(tp: str) -> None:
    """All bytes cross, in twice as many messages, whichever pod has two half batches."""
    words = ("mixtral-8x7b", "--set", "L=2", "--serve", "disaggregated", "--batch", "8")
    sent: list[tuple[int, int]] = []
    for first, then in (("", ""), (HALVES, ""), ("", HALVES), (HALVES, HALVES)):
        pods = ("--prefill", f"dp=2,ep=2{first}", "--decode", f"dp=2,ep=2{tp}{then}")
        ran = stagec("analyze", *words, "--prompt", "16", *pods, "--json")
        assert ran.code == 0, ran.err
        handover = json.loads(ran.out)["handover"]
        sent.append((handover["messages"], handover["bytes"]))
    messages, bytes_ = sent[0]
    assert sent[1:] == [(2 * messages, bytes_)] * 3
