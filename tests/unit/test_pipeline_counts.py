"""What the stages of a pipeline count, against formulas: messages with their sharded size, work and
parameters that add up to those of the whole model, stashes in flight, reductions between stages.
"""

from __future__ import annotations

from typing import Any

import pytest

from stagec.schedule.action import stashes
from stagec.schedule.registry import find_schedule
from tests.support import GPT, LLAMA, analyse, crossed, stagec

SIZES = {"L": 16, "S": 64, "D": 32, "H": 8, "G": 4, "K": 4, "F": 64, "V": 128}
GPT_SIZES = {n: v for n, v in SIZES.items() if n != "G"}
WIDTH = 2  # bytes of a bf16


def staged(model: str = LLAMA, **options: Any) -> dict[str, Any]:
    """An analysis with small sizes."""
    given = {**(SIZES if model == LLAMA else GPT_SIZES), **options.pop("sizes", {})}
    return analyse(model, sizes=given, **options)


def rows(entry: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """The messages or collectives of a class with these values."""
    actual = [*entry["p2p"], *entry["collectives"]]
    return [r for r in actual if all(r.get(n) == v for n, v in wanted.items())]


MESHES = [(2, 1, 1, False), (4, 2, 2, False), (4, 2, 2, True), (2, 1, 4, True), (8, 2, 1, False)]


@crossed(recompute=["none", "full"], mesh=MESHES)
def test_a_stage_sends_one_activation_per_microbatch_each_way(
    recompute: str, mesh: tuple[int, int, int, bool]
) -> None:
    pp, dp, tp, sp = mesh
    m, batch = 2 * pp, 2 * pp * dp * 3
    sizes = {"B": batch}
    actual = staged(pp=pp, dp=dp, tp=tp, sp=sp, microbatches=m, recompute=recompute, sizes=sizes)
    assert [c["name"] for c in actual["classes"]] == [f"stage{s}" for s in range(pp)]
    assert [c["coords"] for c in actual["classes"]] == [{"pp": s} for s in range(pp)]
    size = batch // (m * dp) * SIZES["S"] * SIZES["D"] * WIDTH // (tp if sp else 1)
    for stage, entry in enumerate(actual["classes"]):
        assert entry["count"] == dp * tp
        assert entry["example_rank"] == stage * dp * tp
        ends = {
            ("send", 1): stage < pp - 1,
            ("recv", -1): stage > 0,
            ("send", -1): stage > 0,
            ("recv", 1): stage < pp - 1,
        }
        for (direction, peer), there in ends.items():
            got = rows(entry, dir=direction, peer=peer)
            assert len(got) == there
            if there:
                assert (got[0]["count"], got[0]["bytes"]) == (m, m * size)
                assert got[0]["over"] == "pp"
                assert got[0]["dtype"] == "bf16"


PIPELINES = [
    ("gpipe", 4, 1, 8),
    ("1f1b", 4, 1, 8),
    ("interleaved", 4, 2, 8),
    ("interleaved", 2, 4, 8),
    ("looped-bfs", 4, 2, 8),
    ("zb-h1", 4, 1, 8),
    ("interleaved-zb", 2, 4, 8),
    ("zbv", 4, 2, 8),
    ("dualpipev", 4, 2, 8),
]


@crossed(model=[LLAMA, GPT], pipeline=PIPELINES)
def test_stages_add_up_to_the_model(model: str, pipeline: tuple[str, int, int, int]) -> None:
    schedule, pp, chunks, m = pipeline
    sizes = {"B": 16}
    whole = staged(model, microbatches=m, sizes=sizes)
    actual = staged(model, pp=pp, schedule=schedule, chunks=chunks, microbatches=m, sizes=sizes)
    assert actual["parameters"] == whole["parameters"]
    (alone,) = whole["classes"]
    for table in ("flops", "matmul_flops"):
        for phase, expected in alone[table].items():
            total = sum(c[table][phase] for c in actual["classes"])
            if (table, phase) == ("flops", "optimizer"):  # each stage works out the clip factor
                assert total >= expected
            elif model == GPT and (table, phase) == ("flops", "backward"):
                tied = SIZES["V"] * SIZES["D"]  # added up for each use, then once, on one stage
                assert -tied <= expected - total <= tied * m * 2
            else:
                assert total == expected
    for category in ("parameters", "gradients", "optimizer") if model == LLAMA else ():
        assert sum(c["memory"][category] for c in actual["classes"]) == alone["memory"][category]
    sends = sum(rows(c, dir="send")[0]["count"] for c in actual["classes"] if rows(c, dir="send"))
    assert sends > 0


def test_two_copies_of_the_model_have_twice_its_parameters_and_its_work_once() -> None:
    sizes = {"B": 16}
    (alone,) = staged(microbatches=8, sizes=sizes)["classes"]
    actual = staged(pp=4, schedule="dualpipe", microbatches=8, sizes=sizes)["classes"]
    assert sum(c["flops"]["forward"] for c in actual) == alone["flops"]["forward"]
    assert sum(c["memory"]["parameters"] for c in actual) == 2 * alone["memory"]["parameters"]
    for entry in actual:  # gradients of both copies are added up between mirrored stages
        (row,) = rows(entry, op="all_reduce", over=["pp:mirror"])
        assert row["group_size"] == 2
        assert row["bytes"] == entry["memory"]["gradients"]
        assert row["phase"] == "gradient"


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)])
def test_tied_embeddings_are_added_up_between_the_ends(schedule: str, chunks: int) -> None:
    pp, dp = 4, 2
    options: dict[str, Any] = {
        "pp": pp,
        "dp": dp,
        "schedule": schedule,
        "chunks": chunks,
        "microbatches": 8,
    }
    actual = staged(GPT, **options, sizes={"B": 32})["classes"]
    tied = SIZES["V"] * SIZES["D"] * 4  # fp32 gradients
    for stage, entry in enumerate(actual):
        got = rows(entry, op="all_reduce", over=["pp:mirror"])
        assert len(got) == (stage in (0, pp - 1))
        if got:
            assert (got[0]["count"], got[0]["bytes"], got[0]["phase"]) == (1, tied, "gradient")


def test_a_rank_that_holds_both_ends_adds_tied_embeddings_up_by_itself() -> None:
    actual = staged(GPT, pp=2, schedule="zbv", microbatches=4, sizes={"B": 8})["classes"]
    assert not any(rows(entry, over=["pp:mirror"]) for entry in actual)


def test_the_gradient_norm_is_one_scalar_over_all_stages() -> None:
    actual = staged(pp=4, dp=2, tp=2, zero=1, microbatches=8, sizes={"B": 32})["classes"]
    for entry in actual:
        (row,) = rows(entry, op="all_reduce", over=["pp"])
        assert (row["count"], row["bytes"], row["phase"]) == (1, 4, "optimizer")


@pytest.mark.parametrize(
    ("schedule", "pp", "chunks", "m"),
    [("gpipe", 4, 1, 6), ("1f1b", 4, 1, 8), ("interleaved", 4, 2, 8), ("interleaved", 2, 4, 8)],
)
def test_stashes_in_flight_are_those_of_the_schedule(
    schedule: str, pp: int, chunks: int, m: int
) -> None:
    """In the middle of the pipeline all chunks keep the same, so bytes are stashes times that."""
    options: dict[str, Any] = {"schedule": schedule, "recompute": "full", "microbatches": m}
    sizes = {"B": m, "L": 32}
    actual = staged(pp=pp, chunks=chunks, **options, sizes=sizes)["classes"]
    layers = sizes["L"] // (pp * chunks)
    one = layers * SIZES["S"] * SIZES["D"] * WIDTH
    actions = find_schedule(schedule).actions(pp, m, chunks)
    for stage in range(1, pp - 1):
        assert actual[stage]["memory"]["stash"] == stashes(actions[stage]) * one


BAD = [
    (["--pp", "3", "--schedule", "interleaved", "--microbatches", "4"], "microbatches"),
    (["--pp", "4", "--schedule", "dualpipe", "--microbatches", "4"], "8 microbatches"),
    (["--pp", "16", "--chunks", "2", "--schedule", "interleaved"], "are too few for"),
    (["--pp", "2", "--stage-layers", "3,4"], "'layers' gives 7 layers"),
    (["--pp", "2", "--stage-layers", "3,x"], "neither a number of layers"),
    (["--pp", "2", "--schedule", "1f2b"], "no schedule '1f2b'"),
    (["--pp", "2", "--chunks", "2"], "choose the schedule 'interleaved'"),
    (["--mesh", "pp,dp=2"], "of the pipeline stages has no size"),
]


@pytest.mark.parametrize(("flags", "message"), BAD, ids=lambda v: str(v)[:40])
def test_what_cannot_be_a_pipeline_is_refused(flags: list[str], message: str) -> None:
    made = stagec("analyze", LLAMA, "--set", "L=8", *flags)
    assert made.code in (1, 2)
    assert message in made.err
    assert "Traceback" not in made.err


@pytest.mark.parametrize("tp", [2, 4])
def test_scattered_messages_have_a_part_of_the_bytes(tp: int) -> None:
    """As in Megatron-LM: 1/tp of each message, and as many all_gathers as there are receives."""
    options: dict[str, Any] = {"pp": 2, "tp": tp, "microbatches": 4, "sizes": {"B": 16}}
    whole, parts = staged(**options), staged(**options, scatter_gather=True)
    for before, after in zip(whole["classes"], parts["classes"], strict=True):
        for direction in ("send", "recv"):
            (one,), (other,) = (rows(c, dir=direction) for c in (before, after))
            assert one["bytes"] == tp * other["bytes"]
            assert one["count"] == other["count"] == 4
        (gather,) = rows(after, op="all_gather", over=["tp"])
        assert not rows(before, op="all_gather", over=["tp"])
        (got,) = rows(before, dir="recv")
        assert (gather["count"], gather["bytes"]) == (got["count"], got["bytes"])


@pytest.mark.long
def test_scattering_needs_something_to_scatter() -> None:
    for argv, what in (
        (["--pp", "2"], "--scatter-gather has no effect without --tp"),
        (["--tp", "2"], "--scatter-gather has no effect without --pp"),
        (["--pp", "2", "--tp", "2", "--sp"], "has no effect with --sp"),
    ):
        assert what in stagec("analyze", LLAMA, "--set", "L=2,B=4", *argv, "--scatter-gather").err
    odd = ("--pp", "2", "--tp", "2", "--microbatches", "1", "--scatter-gather")
    ran = stagec("analyze", LLAMA, "--set", "L=2,B=1,S=7,D=9", *odd)
    assert ran.code == 1
    assert "no dimension of bf16[B, S, D | rep] divides over tp = 2" in ran.err
    assert "leave out 'scatter' (--scatter-gather)" in ran.err
