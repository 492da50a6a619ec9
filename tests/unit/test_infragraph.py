"""InfraGraph files as the network of a machine: each figure from the links of the file, and
mistakes as diagnostics."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagec.machines import Machine, load_machine
from stagec.support.diagnostics import DiagnosticError
from tests.support import stagec

POD = (Path(__file__).parents[2] / "docs" / "examples" / "pod.yaml").read_text()
MESH = (
    '{ep1: {component: "xpu[0:8]"}, ep2: {component: "xpu[0:8]"}, scheme: many2many, link: nvlink}'
)
RING = (
    '{ep1: {component: "xpu[0:7]"}, ep2: {component: "xpu[1:8]"}, scheme: one2one, link: nvlink}\n'
    '  - {ep1: {component: "xpu[7]"}, ep2: {component: "xpu[0]"}, scheme: one2one, link: nvlink}'
)
SWITCH = (
    '{ep1: {component: "xpu[0:8]"}, ep2: {component: "nvswitch[0]"}, '
    "scheme: many2many, link: nvlink}"
)


def machine(tmp_path: Path, text: str) -> Machine:
    """The machine of an H100 and a file of this text."""
    path = tmp_path / "net.yaml"
    path.write_text(text)
    return load_machine(f"h100+{path}")


def levels(actual: Machine) -> list[tuple[str, int | None, str, float, float]]:
    """Name, ranks, kind, GB/s and nanoseconds of each level."""
    return [
        (n.name, n.ranks, n.kind, n.bandwidth.value / 1e9, round(n.latency.value * 1e9, 3))
        for n in actual.network
    ]


def test_levels_have_the_figures_of_the_links(tmp_path: Path) -> None:
    """NVLink 450 GB/s and two links of 300 ns; 400 Gbit/s a card, and xpu, nic, port, switch, port,
    nic, xpu: 500 ns for each of pcie and cable, twice."""
    actual = machine(tmp_path, POD)
    assert levels(actual) == [
        ("inside", 8, "switch", 450, 600),
        ("outside", None, "fat-tree", 50, 2000),
    ]
    h100 = load_machine("h100")
    assert (actual.compute, actual.memory) == (h100.compute, h100.memory)


@pytest.mark.parametrize(
    ("edge", "kind", "bandwidth"), [(RING, "ring", 2 * 450), (MESH, "mesh", 7 * 450)]
)
def test_accelerators_may_be_joined_directly(
    edge: str, kind: str, bandwidth: float, tmp_path: Path
) -> None:
    assert SWITCH in POD
    inside = levels(machine(tmp_path, POD.replace(SWITCH, edge)))[0]
    assert inside == ("inside", 8, kind, bandwidth, 300)


def test_a_card_is_no_faster_than_its_link(tmp_path: Path) -> None:
    slow = POD.replace("gigabytes_per_second: 64}", "gigabytes_per_second: 20}")
    assert levels(machine(tmp_path, slow))[1][3] == 20


def test_accelerators_without_links_meet_outside(tmp_path: Path) -> None:
    actual = levels(machine(tmp_path, POD.replace(f"  - {SWITCH}\n", "")))
    assert [level[0] for level in actual] == ["outside"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (POD.replace("choice: xpu", "choice: cpu"), "no component is an xpu"),
        (POD.replace("400g, physical", "400g, nothing"), "no link with a bandwidth leads out of"),
        (POD.replace("link: 400g}\n- {ep1", "link: 500g}\n- {ep1"), "have different links"),
        (POD.replace("count: 16", "count: 1000000"), "more than 200,000 components"),
        ("a: [", "not an InfraGraph"),
        ("{}", "not an InfraGraph"),
        ("[]", "not an InfraGraph"),
        ("null", "not an InfraGraph"),
        (POD[: len(POD) // 2], "not an InfraGraph"),
    ],
)
def test_mistakes_are_reported(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError, match=problem):
        machine(tmp_path, text)


def test_a_network_alone_is_no_machine(tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text(POD)
    done = stagec("time", "llama3-8b", "--machine", tmp_path / "pod.yaml")
    assert done.code == 1
    assert "describes a network without devices" in done.err


def test_the_manifest_knows_the_file(tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text(POD)
    words = "compile", "llama3-8b", "--set", "L=1", "--dp", "2", "--quiet"
    given = "--machine", f"h100+{tmp_path / 'pod.yaml'}", "-o", tmp_path / "job"
    assert stagec(*words, *given).code == 0
    assert str(tmp_path / "pod.yaml") in (tmp_path / "job" / "manifest.json").read_text()
