"""Durations in traces: those of the machine's cost model, for computations only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from stagec.answers.time.timed import time_job
from stagec.formats.chakra.format import CHAKRA
from stagec.formats.chakra.nodes import NodeKind, TraceNode
from stagec.formats.chakra.record_files import read_trace
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.machines import load_machine
from stagec.machines.roofline import roofline_machine
from stagec.program.classes import rank_classes
from stagec.program.kernels import Kernel
from stagec.program.nodes import Node
from stagec.time.costs.durations import Durations
from stagec.time.costs.kernels import seconds_in_step
from stagec.time.costs.replay_options import ReplayOptions
from stagec.traces.emit import make_job
from tests.support import LLAMA, stagec

JOB = (LLAMA, "--set", "L=2,B=4,S=2048", "--tp", "2", "--dp", "2", "--quiet")
OPTIONS = JobOptions(LLAMA, tp=2, dp=2, sizes={"L": 2, "B": 4, "S": 2048})
MACHINE = "h100-sxm"


def compiled(path: Path, *more: str) -> list[TraceNode]:
    """The nodes of rank 0."""
    ran = stagec("compile", *JOB, "-o", path, *more)
    assert ran.code == 0, ran.err
    return list(read_trace(path / f"{LLAMA}.0.et"))


def test_a_computation_takes_what_the_model_says(tmp_path: Path) -> None:
    """Its kernel and the gap before it; collectives are left to simulators. Nodes of as many FLOPs
    and bytes differ where their kernels do."""
    machine = load_machine(MACHINE)
    program = rank_classes(JobBuilder(OPTIONS).lower())[0].program()
    actual = compiled(tmp_path / "o", "--machine", MACHINE)
    assert len(actual) == len(program)
    for node, refusal in zip(program.nodes, actual, strict=True):
        if refusal.kind != NodeKind.COMP:
            assert refusal.duration_micros == 0
            continue
        assert node.kernel is not None
        (seconds,) = seconds_in_step(machine, [node.kernel])
        whole = 1e6 * (float(seconds) + machine.compute.launch.value)
        assert refusal.duration_micros == max(1, round(whole))
    assert len({n.duration_micros for n in actual}) > 10


def test_nodes_that_are_alike_have_times_of_their_own(tmp_path: Path) -> None:
    """Kernels tell apart what is alike in all that is written."""
    job = make_job(JobBuilder(OPTIONS).lower(), "job")
    program = job.classes[0].program()
    others = [
        replace(n, kernel=n.kernel._replace(extents=(i,))) if n.kernel is not None else n
        for i, n in enumerate(program.prototypes)
    ]

    def seconds(node: Node) -> float:
        assert node.kernel is not None
        return (1 + node.kernel.extents[0]) / 1e6

    program = replace(program, prototypes=others)
    file = tmp_path / "job.et"
    file.write_bytes(CHAKRA.encoder(program, job.layout, seconds).rank(0))
    for node, refusal in zip(program.nodes, read_trace(file), strict=True):
        if node.kernel is not None:
            assert refusal.duration_micros == 1 + node.kernel.extents[0]


@pytest.mark.parametrize("granularity", ["op", "block", "layer"])
def test_durations_add_up_to_what_time_says(tmp_path: Path, granularity: str) -> None:
    """Merged nodes take as long as their parts; traces know nothing of hosts."""
    nodes = compiled(tmp_path / "o", "--machine", MACHINE, "--granularity", granularity)
    total = sum(node.duration_micros for node in nodes)
    machine = load_machine(MACHINE).changed({"efficiency.host.issue": 0.0})
    blocking = ReplayOptions(overlap=False)
    actual = time_job(OPTIONS, machine, Session(), blocking, levers=False).report
    parts = ("matrix products", "attention", "element-wise", "optimizer", "launch gaps")
    expected = 1e6 * sum(actual.breakdown.get(part, 0.0) for part in parts)
    computations = sum(node.kind == NodeKind.COMP for node in nodes)
    assert total == pytest.approx(expected, abs=computations / 2)


def test_a_roofline_is_the_longer_of_two_times() -> None:
    """Exactly, whatever the type, and without launches."""
    seconds = Durations(roofline_machine(3e12, 7e9))
    for kind, dtype in (("matmul", "bf16"), ("matmul", "f64"), ("attention", "f8e4m3")):
        extents = (1,) * (4 if kind == "matmul" else 7)
        assert seconds.of_kernel(Kernel(kind, dtype, extents, 10**12, 1)) == 10**12 / 3e12
    assert seconds.of_kernel(Kernel("memory", "", (), 10**12, 1)) == 10**12 / 3e12
    assert seconds.of_kernel(Kernel("memory", "", (), 1, 10**12)) == 10**12 / 7e9


def test_an_archive_keeps_durations(tmp_path: Path) -> None:
    archive = tmp_path / "job.stgz"
    flags = ("--machine", MACHINE)
    assert stagec("compile", *JOB, *flags, "--archive", archive).code == 0
    assert stagec("materialize", archive, "-o", tmp_path / "out", "--quiet").code == 0
    assert list(read_trace(tmp_path / "out" / f"{LLAMA}.0.et")) == compiled(tmp_path / "o", *flags)


def test_the_manifest_says_which_machine(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "h100-sxm"\n[memory]\nbandwidth = { value = "1 TB/s", source = "x" }\n')
    compiled(tmp_path / "o", "--machine", str(file))
    manifest = json.loads((tmp_path / "o" / "manifest.json").read_text("utf-8"))
    assert f"--machine {file}" in manifest["command"]
    assert manifest["inputs"][str(file)] == hashlib.sha256(file.read_bytes()).hexdigest()
    compiled(tmp_path / "p")
    manifest = json.loads((tmp_path / "p" / "manifest.json").read_text("utf-8"))
    assert "--machine" not in manifest["command"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--machine", "h100", "--peak-tflops", "1", "--memory-gbps", "1"],
            "cannot be used together: both give the speed",
        ),
        (["--machine", "h1000"], "no machine 'h1000'"),
        (["--machine", "none.toml"], "none.toml"),
    ],
)
def test_wrong_machines(tmp_path: Path, flags: list[str], message: str) -> None:
    ran = stagec("compile", *JOB, "-o", tmp_path / "o", *flags)
    assert (ran.code, message in ran.err) == (1, True), ran.err
    assert not (tmp_path / "o").exists()
