"""Loads that differ between experts and layers: what each rank does, against shares computed here.

What a rank does is linear in the rows of its experts, so a job with a capacity factor of 2, which
knows nothing of loads, tells how much of the work goes with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from stagec.analysis.report import analysis
from stagec.jobs.builder import JobBuilder
from stagec.program.classes import RankClass, rank_classes
from tests.oracle.test_experts import assert_same
from tests.support import (
    DEEPSEEK,
    DEEPSEEK_MTP,
    EXHAUSTIVE,
    LONG,
    MIXTRAL,
    Outcome,
    analyse,
    stagec,
    tiny_options,
)

EXPERTS, LAYERS = 4, 8
#: No two layers, and no two sums of layers, are loaded alike.
LOADS = tuple((1 << layer, 3 * layer + 1, 5, layer * layer) for layer in range(LAYERS))
SIZES = {"L": LAYERS, "B": 32, "S": 8}


def classes(model: str = MIXTRAL, **options: Any) -> list[RankClass]:
    """The rank classes of a tiny job."""
    sizes = {**SIZES, **options.pop("sizes", {})}
    return rank_classes(JobBuilder(tiny_options(model, sizes=sizes, **options)).lower())


def work(each: RankClass) -> int:
    """FLOPs of a rank's whole trace."""
    return sum(node.flops for node in each.program().nodes)


def shares(loads: Sequence[int], parts: int, rows: int) -> list[Fraction]:
    """The load of each part of the experts over the mean, in whole rows by largest remainder."""
    each = len(loads) // parts
    exact = [
        Fraction(sum(loads[i * each :][:each]) * rows * parts, sum(loads)) for i in range(parts)
    ]
    whole = [int(e) for e in exact]
    by_rest = sorted(range(parts), key=lambda i: (whole[i] - exact[i], i))
    for i in by_rest[: rows * parts - sum(whole)]:
        whole[i] += 1
    return [Fraction(n, rows) for n in whole]


def kept(stage: int, stages: int, schedule: str) -> list[int]:
    """The layers of a stage, by the definition of the schedule."""
    if schedule == "interleaved":
        parts = [stage, stages + stage]
    elif schedule in ("zbv", "dualpipev"):
        parts = [stage, 2 * stages - 1 - stage]
    elif schedule == "dualpipe":
        parts = [stage, stages - 1 - stage]
    else:
        parts = [stage]
    depth = stages if schedule in ("1f1b", "dualpipe") else 2 * stages
    size = LAYERS // depth
    return [layer for part in parts for layer in range(part * size, (part + 1) * size)]


STRATEGIES: Sequence[Mapping[str, Any]] = (
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 4, "microbatches": 2, "recompute": "full"},
    {"dp": 4, "ep": 2, "tp": 2, "sp": True, "zero": 3},
    {"dp": 2, "ep": 4, "tp": 2, "sp": True, "etp": 1},
    {"dp": 2, "ep": 2, "cp": 2},
    {"dp": 2, "ep": 2, "recompute": "full", "recompute_every": 3},
    {"dp": 2, "ep": 2, "pp": 2, "recompute": "full", "recompute_layers": 1},
    {"dp": 2, "ep": 2, "pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 4},
    {"dp": 2, "ep": 2, "pp": 2, "schedule": "zbv", "microbatches": 4},
    {"dp": 2, "ep": 2, "pp": 4, "schedule": "dualpipe", "microbatches": 8},
)


#: Other ones have the same axes, or parts of the model in another order.
MORE = tuple(
    o
    for o in STRATEGIES
    if o.keys() == {"dp", "ep"} or o.get("schedule") in ("interleaved", "dualpipe")
)


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [pytest.param(o, marks=EXHAUSTIVE if o in MORE else ()) for o in STRATEGIES], ids=str
)
def test_each_rank_does_the_work_of_its_rows(options: Mapping[str, Any]) -> None:
    """In its trace, and in the analysis, which takes means of layers.

    Layers that are recomputed have loads of their own, so where they are a part of all, only trace
    and analysis are compared."""
    module = JobBuilder(tiny_options(MIXTRAL, sizes=SIZES, expert_load=LOADS, **options)).lower()
    actual = rank_classes(module)
    assert len(actual) == options["ep"] * options.get("pp", 1)
    analysed = analysis(module, MIXTRAL)["classes"]
    assert [c["name"] for c in analysed] == [c.name for c in actual]
    for entry, each in zip(analysed, actual, strict=True):
        nodes = list(each.program().nodes)
        assert sum(entry["flops"].values()) == sum(n.flops for n in nodes)
        sent = sum(n.size for n in nodes if n.is_collective)
        assert sum(r["bytes"] for r in entry["collectives"]) == sent
    if not {"recompute_every", "recompute_layers"} & options.keys():
        check_work(actual, options)


def check_work(actual: Sequence[RankClass], options: Mapping[str, Any]) -> None:
    """FLOPs are those of even load, and those of the rows that a rank has beyond it."""
    even, double = (
        {c.stage: work(c) for c in classes(capacity_factor=Fraction(n), **options)} for n in (1, 2)
    )
    parts, tp = options["ep"], options.get("tp", 1)
    stages, schedule = options.get("pp", 1), str(options.get("schedule", "1f1b"))
    count = options.get("microbatches", 2 * stages if stages > 1 else 1)
    split = options["dp"] * options.get("cp", 1) * (tp if options.get("sp") else 1)
    rows = SIZES["B"] * SIZES["S"] * 2 // (count * split)
    for each in actual:
        index = each.coords["ep"]
        if options.get("etp"):
            index = index * tp + each.coords["tp"]
        layers = kept(each.stage, stages, schedule)
        extra = sum(shares(LOADS[layer], parts, rows)[index] - 1 for layer in layers)
        base, more = even[each.stage], double[each.stage]
        assert work(each) == base + (more - base) * extra / len(layers), each.name


def test_exchanges_are_as_long_as_the_fullest_rank_needs() -> None:
    options: dict[str, Any] = {"dp": 4, "ep": 4}
    actual, even = classes(expert_load=LOADS, **options), classes(**options)
    rows = SIZES["B"] * SIZES["S"] * 2 // 4
    sizes = [
        [n.size for n in c.program().nodes if n.kind == "all_to_all"] for c in (*even, *actual)
    ]
    assert all(s == sizes[1] for s in sizes[1:])
    most = [max(shares(loads, 4, rows)) for loads in LOADS]
    forward = [n for loads in most for n in (loads, loads)]
    assert sizes[1] == [s * n for s, n in zip(sizes[0], forward + forward[::-1], strict=True)]


@LONG
def test_layers_are_counted_through_the_model() -> None:
    """DeepSeek's prediction module is the last layer with experts, behind two in a repeat."""
    options = {"dp": 2, "ep": 2, "sizes": {"L": 3, "L_dense": 1}}
    even = [(1,) * EXPERTS] * 3
    flat, *heavy = (
        [work(c) for c in classes(DEEPSEEK_MTP, expert_load=tuple(rows), **options)]
        for rows in (
            even,
            *([(1, 1, 0, 0) if i == n else even[i] for i in range(3)] for n in range(3)),
        )
    )
    assert flat[0] == flat[1]
    for first, second in heavy:
        assert first + second == sum(flat)
        assert first - flat[0] == heavy[0][0] - flat[0] > 0


@pytest.mark.long
def test_one_load_for_all_layers_and_even_loads() -> None:
    options: dict[str, Any] = {"dp": 4, "ep": 2, "microbatches": 2}
    one = [work(c) for c in classes(expert_load=(5, 1, 1, 1), **options)]
    each = [work(c) for c in classes(expert_load=((5, 1, 1, 1),) * LAYERS, **options)]
    assert one == each
    plain, same = classes(**options), classes(expert_load=(7,) * EXPERTS, **options)
    assert [work(plain[0])] * 2 == [work(c) for c in same]


def test_an_expert_may_have_nothing_to_do(tmp_path: Path) -> None:
    loads = tmp_path / "loads.json"
    loads.write_text("[0, 0, 3, 1, 0, 0, 0, 0]")
    out = tmp_path / "out"
    options = ("--dp", 4, "--ep", 4, "--set", "L=2,S=64,D=64,M=64,V=64,B=4")
    done = stagec("compile", MIXTRAL, *map(str, options), "--expert-load", loads, "-o", out)
    assert done.code == 0, done.err
    assert "0 errors, 0 warnings" in stagec("check", out).out


def test_a_rank_without_rows_takes_part_in_collectives(tmp_path: Path) -> None:
    """Consumers stall on sizes of 0, so a byte is written."""
    loads, out = tmp_path / "loads.json", tmp_path / "out"
    loads.write_text("[0, 0, 1, 1, 1, 1, 1, 1]")
    flags = ("--dp", 4, "--ep", 4, "--tp", 2, "--sp", "--set", "L=2,S=64,D=64,M=64,V=64,B=4")
    done = stagec("compile", MIXTRAL, *map(str, flags), "--expert-load", loads, "-o", out)
    assert done.code == 0, done.err
    assert "0 errors, 0 warnings" in stagec("check", out).out


def test_stages_without_experts() -> None:
    """They do the same on all ranks, so they are one class."""
    options: dict[str, Any] = {"dp": 2, "ep": 2, "pp": 2, "sizes": {"L": 2, "L_dense": 2, "B": 8}}
    actual = classes(DEEPSEEK, expert_load=(5, 1, 1, 1), **options)
    assert [c.name for c in actual] == ["stage0", "stage1-ep0", "stage1-ep1"]
    assert len({work(c) for c in actual}) == 3


def test_layers_without_loads_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    path.write_text("[[2, 1, 1, 1, 1, 1, 1, 1]]")
    done = stagec(
        "analyze", MIXTRAL, "--dp", "2", "--ep", "2", "--set", "L=3", "--expert-load", path
    )
    assert done.code == 0
    assert "2 of 3 layers with experts have no loads" in done.err


def test_memory_is_that_of_the_fullest_rank() -> None:
    options = {"sizes": {**tiny_options(MIXTRAL).sizes, **SIZES}, "dp": 2, "ep": 2}
    stash = [
        c["memory"]["stash"]
        for load in ((), (1, 1, 1, 1), (3, 3, 1, 1), (1, 1, 3, 3))
        for c in analyse(MIXTRAL, expert_load=load, **options)["classes"]
    ]
    plain, *even, first, second, third, fourth = stash
    assert even == [plain, plain]
    assert plain < first == second == third == fourth


@pytest.mark.parametrize("axes", [{"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "tp": 2, "sp": True}])
def test_numbers_are_those_of_even_load(axes: dict[str, Any]) -> None:
    """The interpreter runs the sizes of even load, which `E_load` is 1 for."""
    assert_same(MIXTRAL, {**axes, "expert_load": (5, 1, 1, 1)})


def refused(loads: str, folder: Path, *options: str, model: str = MIXTRAL) -> str:
    """What is said of a file of loads."""
    path = folder / "loads.json"
    path.write_text(loads)
    flags = ("--dp", "2", "--ep", "2", "--set", "L=2", *options)
    done: Outcome = stagec("analyze", model, *flags, "--expert-load", path)
    assert done.code == 1, done
    assert done.out == ""
    return done.err


@pytest.mark.parametrize(
    ("loads", "said"),
    [
        ("", "loads.json:1:1: error: expected whole numbers"),
        ("[1,\n 1", "loads.json:2:3: error: expected whole numbers"),
        ("{}", "no list of numbers"),
        ("[]", "no list of numbers"),
        ("[1, -1, 1, 1, 1, 1, 1, 1]", "-1 among the loads"),
        ("[1, 0.5]", "0.5 among the loads"),
        ("[true]", "true among the loads"),
        ("[[1, 1], 3]", "[1, 1] among the loads"),
        ("[" * 100_000, "not JSON"),
        ("[1, 1, 1]", "3 loads are given, expected one for each of the E = 8 experts"),
        ("[0, 0, 0, 0, 0, 0, 0, 0]", "at least one of them above 0"),
        (json.dumps([[1] * 8] * 3), "layer 2 of 2 layers with experts"),
    ],
)
def test_what_is_no_load_is_refused(loads: str, said: str, tmp_path: Path) -> None:
    assert said in refused(loads, tmp_path)


def test_loads_without_experts_or_with_a_capacity_are_refused(tmp_path: Path) -> None:
    text = "[2, 1, 1, 1, 1, 1, 1, 1]"
    assert "--capacity-factor" in refused(text, tmp_path, "--capacity-factor", "2")
    assert "no experts" in refused(text, tmp_path, "--ep", "1", model="llama3-8b")


def test_a_remark_says_that_loads_change_nothing_on_one_rank(tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    path.write_text("[2, 1, 1, 1, 1, 1, 1, 1]")
    done = stagec("analyze", MIXTRAL, "--dp", "2", "--set", "L=2", "--expert-load", path)
    assert done.code == 0
    assert "every rank holds all experts" in done.err
