"""Messages in lowered modules: both ends carry the same tag and size, peers are neighbours along an
axis, and the stages of a pipeline are rank classes of their own.
"""

from __future__ import annotations

from pathlib import Path

from stagec.check.traces import check_directory
from stagec.formats.chakra.nodes import NodeKind, TraceNode
from stagec.formats.chakra.record_files import read_trace
from stagec.ir.module import Module
from stagec.program.classes import rank_classes
from stagec.traces.emit import make_job
from stagec.traces.writer import write_source
from tests.support import parse

COMP = "et.comp[add, flops = 8, bytes = 4, out = 4]"
SEND = "et.send[over = {0}, by = {1}, bytes = 32]"
RECV = "et.recv[over = {0}, by = {1}, bytes = 32]"


def lowered(*graphs: str, mesh: str) -> Module:
    body = "\n".join(graphs)
    return parse(f"stg.module @m[phase = lowered] {{\n  stg.mesh @p[{mesh}]\n{body}\n}}\n")


def ring(by: int) -> Module:
    """Every rank computes, sends around a ring and computes with what it gets."""
    return lowered(
        "et.graph @f[ranks = dp*cp] (%x: node) -> node {\n"
        f"  %a = {COMP}(%x) : node\n"
        f"  %s = {SEND.format('cp', by)}(%a) : node\n"
        f"  %r = {RECV.format('cp', by)}(%a) : node\n"
        f"  %b = {COMP}(%r, %a) : node\n"
        "  et.return(%b)\n}",
        mesh="cp = 3, dp = 100",
    )


PIPELINE = (
    (
        "et.graph @f0[over = pp, stages = 0, ranks = dp] (%x: node) -> node {\n"
        '  %y = et.accumulate[count = 3, schedule = "1f1b"] (%i: node = %x) {\n'
        "    %h = et.action[forward, chunk = 0] () {\n"
        f"      %a = {COMP}(%i) : node\n"
        f"      %s = {SEND.format('pp', 1)}(%a) : node\n"
        "      et.yield(%a)\n    } : node\n"
        "    %g = et.action[backward, chunk = 0, phase = backward] () {\n"
        f"      %d = {RECV.format('pp', -1)}() : node\n"
        f"      %b = {COMP}(%d, %h) : node\n"
        "      et.yield(%b)\n    } : node\n"
        "    et.yield(%g)\n  } : node\n"
        "  et.return(%y)\n}"
    ),
    (
        "et.graph @f1[over = pp, stages = 1, ranks = dp] (%x: node) -> node {\n"
        '  %y = et.accumulate[count = 3, schedule = "1f1b"] (%i: node = %x) {\n'
        "    %h = et.action[forward, chunk = 0] () {\n"
        f"      %r = {RECV.format('pp', 1)}() : node\n"
        f"      %a = {COMP}(%r) : node\n"
        "      et.yield(%a)\n    } : node\n"
        "    %g = et.action[backward, chunk = 0, phase = backward] () {\n"
        f"      %b = {COMP}(%h) : node\n"
        f"      %s = {SEND.format('pp', -1)}(%b) : node\n"
        "      et.yield(%b)\n    } : node\n"
        "    et.yield(%g)\n  } : node\n"
        "  et.return(%y)\n}"
    ),
)


def emitted(module: Module, tmp_path: Path) -> dict[int, list[TraceNode]]:
    """The nodes of all ranks; the job must pass the checker."""
    write_source(make_job(module, "job"), tmp_path / "out", {})
    report = check_directory(tmp_path / "out")
    assert not (report.errors)
    assert not (report.warnings)
    files = (tmp_path / "out").glob("*.et")
    return {int(p.suffixes[-2][1:]): list(read_trace(p)) for p in files}


def test_a_ring_of_messages_wraps_around_its_axis(tmp_path: Path) -> None:
    ranks = emitted(ring(1), tmp_path)
    assert len(ranks) == 300
    for rank, nodes in ranks.items():
        (send,) = [n for n in nodes if n.kind == NodeKind.SEND]
        (recv,) = [n for n in nodes if n.kind == NodeKind.RECV]
        assert send.attrs["comm_dst"] == (rank + 100) % 300
        assert recv.attrs["comm_src"] == (rank - 100) % 300
        assert send.attrs["comm_size"] == recv.attrs["comm_size"] == 32
        assert send.attr_types["comm_dst"] == recv.attr_types["comm_src"] == "int32"


def test_messages_go_the_other_way(tmp_path: Path) -> None:
    ranks = emitted(ring(-1), tmp_path)
    (send,) = [n for n in ranks[0] if n.kind == NodeKind.SEND]
    assert send.attrs["comm_dst"] == 200


def test_stages_run_their_own_graphs_in_the_order_of_the_schedule(tmp_path: Path) -> None:
    module = lowered(*PIPELINE, mesh="pp = 2, dp = 2")
    first, last = rank_classes(module)
    assert (first.name, last.name) == ("stage0", "stage1")
    names = [n.name for n in first.program().nodes if not n.is_message]
    assert names == [
        "forward/mb0/a",
        "forward/mb1/a",
        "backward/mb0/b",
        "forward/mb2/a",
        "backward/mb1/b",
        "backward/mb2/b",
    ]
    names = [n.name for n in last.program().nodes if not n.is_message]
    assert names == [
        f"{phase}/mb{i}/{name}"
        for i in range(3)
        for phase, name in (("forward", "a"), ("backward", "b"))
    ]
    ranks = emitted(module, tmp_path)
    for rank, nodes in ranks.items():
        peers = {n.attrs.get("comm_dst", n.attrs.get("comm_src")) for n in nodes} - {None}
        assert peers == {(rank + 2) % 4}
        tags = [n.attrs["comm_tag"] for n in nodes if n.kind == NodeKind.SEND]
        assert len(set(tags)) == 3


def test_backward_takes_what_forward_of_its_microbatch_made() -> None:
    first, _ = rank_classes(lowered(*PIPELINE, mesh="pp = 2, dp = 2"))
    for node in first.program().nodes:
        if node.name.startswith("backward") and node.kind == "add":
            (forward,) = [d for d in node.deps if not d.is_message]
            assert forward.name == node.name.replace("backward", "forward").replace("/b", "/a")
