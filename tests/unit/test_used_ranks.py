"""How many ranks of a unit of the network a job uses, and where its groups then lie."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.formats.astra_sim.topology import dimensions
from stagec.machines import Machine, machines, read_machine
from stagec.machines.placement import crossed, straddling
from stagec.support.diagnostics import DiagnosticError
from stagec.time.cautions import cautions
from stagec.time.costs.network import level_between_pods, spans
from tests.support import examples, stagec

GB200 = machines()["gb200-nvl72"]
EXPERTS = {"pp": 4, "ep": 64}
#: A job of 16 ranks in blocks of 4, on racks of 6.
RACKS = 'base = "h100-sxm"\n[[network]]\nname = "nvlink"\nranks = 6\n'
SMALL = ("llama3-8b", "--set", "L=1,B=16", "--tp", "4", "--dp", "4")


def groups(mesh: dict[str, int]) -> Iterator[tuple[str, list[int]]]:
    """All groups of all axes, by the coordinates of their ranks."""
    ranks = np.arange(prod(mesh.values())).reshape(*mesh.values())
    for place, axis in enumerate(mesh):
        for row in np.moveaxis(ranks, place, -1).reshape(-1, mesh[axis]):
            yield axis, row.tolist()


def racks(ranks: int) -> Machine:
    return machines()["h100-sxm"].changed({"network.nvlink.ranks": ranks})


@examples(60)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), ranks=st.integers(2, 80))
def test_groups_that_fit_into_a_unit_lie_in_one(sizes: list[int], ranks: int) -> None:
    """Against the coordinates of all ranks; no larger number has that, but for one that leaves
    larger groups uneven."""
    mesh, machine = {f"a{i}": n for i, n in enumerate(sizes)}, racks(ranks)
    used = machine.for_mesh(mesh).network[0].unit or 0
    total = prod(sizes)
    blocks = [prod(sizes[i:]) for i in range(len(sizes))]
    if ranks & (ranks - 1) == 0:
        assert machine.for_mesh(mesh) is machine
        return

    def whole(number: int) -> bool:
        return total <= ranks or all(number % block == 0 for block in blocks if block <= ranks)

    assert whole(used)
    assert 1 <= used <= ranks
    for block in (b for b in blocks if b <= ranks):
        assert all(
            len({r // used for r in range(i, i + block)}) == 1 for i in range(0, total, block)
        )
    larger = [n for n in range(used + 1, ranks + 1) if whole(n)]
    even = all(block % used == 0 for block in blocks if block > ranks)
    assert not larger or (even and 2 * used > ranks)
    assert not list(straddling(machine, mesh))


@examples(30)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    ranks=st.integers(2, 20),
    part=st.floats(0, 1),
)
def test_one_mapping(sizes: list[int], ranks: int, part: float) -> None:
    """What an axis crosses, by its name and in ASTRA-sim, is the outermost level that any of its
    groups spans; a group is said to straddle only if it does."""
    mesh = {f"a{i}": n for i, n in enumerate(sizes)}
    machine = racks(ranks).changed({"network.nvlink.used": max(1, round(part * ranks))})
    actual: dict[str, str] = {}
    for axis, members in groups(mesh):
        over = spans(machine, np.array(members))
        if over and actual.get(axis) != "infiniband":
            actual[axis] = over[-1].level.name
    assert {a: level.name for a, level in crossed(machine, mesh).items() if level} == actual
    if prod(sizes) > 1:
        assert {d.axis: d.level for d in dimensions(mesh, machine)} == actual
    for each in straddling(machine, mesh):
        assert actual[each.axis] == "infiniband"
        better = machine.changed({"network.nvlink.used": each.better})
        mended = [spans(better, np.array(r)) for a, r in groups(mesh) if a == each.axis]
        assert {span.level.name for group in mended for span in group} == {"nvlink"}


def test_racks_of_72() -> None:
    """64 are used by groups of 64, which then cross NVLink alone."""
    placed = GB200.for_mesh(EXPERTS)
    assert [level.unit for level in placed.network] == [64, None]
    for first in range(0, 256, 64):
        assert [s.level.name for s in spans(placed, np.arange(first, first + 64))] == ["nvlink"]
    assert GB200.for_mesh({"dp": 5, "tp": 16}).network[0].unit == 64
    assert GB200.for_mesh({"dp": 16, "tp": 8}).network[0].unit == 64
    assert GB200.for_mesh({"tp": 72}) is GB200
    llama = machines()["h100-llama3"].for_mesh({"dp": 2048, "tp": 8})
    assert [level.unit for level in llama.network] == [8, 2048, None]


def test_pods_take_whole_units() -> None:
    """Pods of 128 ranks use 64 of each rack, so two of them take four racks."""
    text = '[[network]]\nname = "nvlink"\nranks = 72\n[[network]]\nname = "pod"\nranks = {}\n'
    levels = '[[network]]\nname = "spine"\n'
    about = 'kind = "fat-tree"\nbandwidth = { value = "1 TB/s", source = "a" }\n'
    about += 'latency = { value = "1 us", source = "a" }\n'
    for ranks, name in ((4 * 72, "pod"), (3 * 72, "spine")):
        whole = (text.format(ranks) + levels).replace("[[", about + "[[").removeprefix(
            about
        ) + about
        machine = read_machine("mine", f'base = "gb200"\n{whole}')
        assert level_between_pods(machine, [{"dp": 2, "ep": 64}] * 2).name == name


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ({"nvlink": 73}, "level 'nvlink' has used = 73; expected at most 72"),
        ({"infiniband": 4}, "expected no 'used' without 'ranks'"),
    ],
)
def test_used_ranks_that_cannot_be(used: dict[str, int], expected: str) -> None:
    with pytest.raises(DiagnosticError, match=expected):
        GB200.changed({f"network.{level}.used": n for level, n in used.items()})


def test_used_ranks_of_levels_are_whole_units() -> None:
    llama = machines()["h100-llama3"]
    with pytest.raises(DiagnosticError, match="a multiple of the 8 that are used inside"):
        llama.changed({"network.pod.used": 100})
    both = llama.changed({"network.nvlink.used": 4, "network.pod.used": 100})
    assert [level.unit for level in both.network] == [4, 100, None]
    with pytest.raises(DiagnosticError, match="expected at most 1536"):
        llama.changed({"network.nvlink.used": 4, "network.pod.used": 2048})


def test_nodes_of_a_power_of_two_are_used_whole() -> None:
    """Groups of 6 cross nodes of 8, as ranks number them; that is reported, with the flag."""
    h100, mesh = machines()["h100-sxm"], {"dp": 4, "tp": 6}
    assert h100.for_mesh(mesh) is h100
    assert crossed(h100, mesh)["tp"] is h100.network[1]
    (expected,) = cautions(h100, [mesh])
    assert "groups of tp lie in blocks of 6 ranks" in expected
    assert "--used-ranks nvlink=6 " in expected


def test_what_crosses_without_need_is_reported_and_is_a_lever(tmp_path: Path) -> None:
    """With the number that the remark names a step is as long as by default."""
    file = tmp_path / "racks.toml"
    file.write_text(RACKS)

    def timed(*words: str) -> tuple[dict[str, Any], str]:
        ran = stagec("time", *SMALL, "--machine", file, "--json", *words)
        assert ran.code == 0, ran.err
        return json.loads(ran.out), ran.err

    default, err = timed("--no-levers")
    assert (default["used_ranks"], default["cautions"]) == ({"nvlink": 4}, [])
    across, err = timed("--levers", "--used-ranks", "nvlink=6")
    assert across["used_ranks"] == {}
    assert across["step_seconds"] > default["step_seconds"]
    (expected,) = across["cautions"]
    assert f"remark: {expected}" in err
    assert "--used-ranks nvlink=4 " in expected
    levers = {each["name"]: each["step_seconds"] for each in across["levers"]}
    assert levers["4 ranks of each nvlink"] == default["step_seconds"]
    again, _ = timed("--no-levers", "--used-ranks", "nvlink=4")
    assert again == default
    ran = stagec("time", *SMALL, "--machine", file, "--sweep", "machine.network.nvlink.used=4,6",
                 "--json", "--jobs", "1")  # fmt: skip
    rows = [row["time"] for row in json.loads(ran.out)]
    assert [r["step_seconds"] for r in rows] == [default["step_seconds"], across["step_seconds"]]
    assert [r["cautions"] for r in rows] == [[], [expected]]


@pytest.mark.parametrize("given", ["nvlink", "nvlink=x", "nvlink=4,nvlink=2", "=4"])
def test_what_is_no_number_of_used_ranks(given: str) -> None:
    ran = stagec("time", "llama3-8b", "--machine", "h100", "--used-ranks", given)
    assert (ran.code, "expects LEVEL=N such as nvlink=64" in ran.err) == (2, True)


def test_used_ranks_of_no_level() -> None:
    ran = stagec("time", "llama3-8b", "--machine", "h100", "--used-ranks", "nvlnk=4")
    assert (ran.code, "did you mean 'nvlink'?" in ran.err) == (1, True)
