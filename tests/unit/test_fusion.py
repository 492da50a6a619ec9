"""Fused kernels: the same FLOPs in fewer nodes that touch fewer bytes, and nothing waits for more.

The nodes with and without fusion are laid side by side: a kernel stands for as many computations as
it names, which follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stagec.analysis.memory_events import EventPlans
from stagec.ir.module import Module
from stagec.jobs.builder import JobBuilder
from stagec.jobs.planned import Planned
from stagec.program.classes import rank_classes
from stagec.program.kernels import Kernel
from stagec.program.nodes import Node, Program
from tests.support import DEEPSEEK, GPT, LLAMA, MIXTRAL, TINY, crossed, stagec, tiny_options

JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": (LLAMA, {"dp": 2, "zero": 3, "microbatches": 2, "fsdp_prefetch": 2}),
    "ddp": (GPT, {"dp": 2, "zero": 1, "ddp_bucket": 300, "recompute": "full"}),
    "tensor": (LLAMA, {"tp": 2, "sp": True, "async_tp": False, "recompute": "selective"}),
    "partly again": (GPT, {"tp": 2, "sp": True, "recompute": "full", "recompute_layers": 1}),
    "ring": (LLAMA, {"cp": 2, "cp_mode": "ring", "tp": 2}),
    "experts": (MIXTRAL, {"ep": 2, "dp": 2, "fp8": "hybrid"}),
    "latent": (DEEPSEEK, {"tp": 2, "dp": 2}),
    "zero bubble": (LLAMA, {"pp": 2, "microbatches": 4, "schedule": "zb-h1"}),
    "interleaved": (LLAMA, {"pp": 2, "microbatches": 4, "schedule": "interleaved", "tp": 2}),
    "overlapped": (LLAMA, {"pp": 2, "microbatches": 4, "schedule": "dualpipe"}),
    "offload": (LLAMA, {"dp": 2, "offload": "activations", "memory_nodes": True}),
}
KINDS = ("pointwise", "elementwise", "epilogue")
#: Those that `make test` tries.
USUAL = ("ddp", "ring", "experts", "interleaved")


def usual(row: Mapping[str, Any]) -> bool:
    """Whether a case is of one of these jobs."""
    return row["job"] in USUAL


def lowered(job: str, fusion: str) -> Module:
    model, options = JOBS[job]
    return JobBuilder(tiny_options(model, **options, fusion=fusion)).lower()


def computations(program: Program) -> list[Node]:
    return [n for n in program.nodes if n.is_computation]


def aligned(plain: Program, fused: Program) -> Iterator[tuple[list[Node], Node]]:
    """Each kernel of the fused program with the computations that it stands for."""
    nodes = iter(computations(plain))
    for node in computations(fused):
        yield [next(nodes) for _ in kernel_of(node).op.split("+")], node
    assert next(nodes, None) is None


def kernel_of(node: Node) -> Kernel:
    assert node.kernel is not None
    return node.kernel


def transfers_before(program: Program) -> dict[str, list[frozenset[str]]]:
    """For the nodes of each name, the transfers that they wait for, directly or not.

    Calls of a reduction in buckets do not count: which gradients share one depends on the order in
    which they are complete."""
    waits: dict[int, frozenset[str]] = {}
    actual: dict[str, list[frozenset[str]]] = {}
    own: dict[int, frozenset[str]] = {}
    for node in program.nodes:
        befores = [other.id for other in (*node.deps, *node.after)]
        waits[node.id] = frozenset[str]().union(*(waits[i] | own[i] for i in befores))
        mine = actual.setdefault(node.name, [])
        counts = not (node.is_computation or node.bucket)
        own[node.id] = frozenset({f"{node.name} {len(mine)}"} if counts else ())
        mine.append(waits[node.id])
    return actual


def reduced(program: Program) -> int:
    return sum(n.size for n in program.nodes if n.bucket)


@crossed(usual, job=JOBS, fusion=KINDS)
def test_the_same_work_in_fewer_nodes(job: str, fusion: str) -> None:
    """A kernel executes what its parts execute, touches fewer bytes, and waits for no transfer that
    its first part does not wait for; transfers wait for the same ones as before."""
    both = zip(*(rank_classes(lowered(job, how)) for how in ("none", fusion)), strict=True)
    for plain, fused in (tuple(each.program() for each in pair) for pair in both):
        assert len(fused) < len(plain) or (fusion == "pointwise" and len(fused) == len(plain))
        before, after = transfers_before(plain), transfers_before(fused)
        for parts, node in aligned(plain, fused):
            kernel, size = kernel_of(node), sum(p.size for p in parts)
            assert parts[-1].name == node.name
            assert {p.phase for p in parts} == {node.phase}
            assert after[node.name].pop(0) == before[parts[0].name].pop(0)
            for other in parts[1:]:
                before[other.name].pop(0)
            assert kernel.op == "+".join(kernel_of(p).op for p in parts)
            assert kernel.flops == node.flops == sum(p.flops for p in parts)
            assert kernel.bytes == node.size
            assert node.size < size if len(parts) > 1 else node.size == size
            assert node.matmul == parts[0].matmul == sum(p.matmul for p in parts)
            first = kernel_of(parts[0])
            assert (kernel.kind, kernel.extents) == (first.kind, first.extents)
        for node in plain.nodes:
            if not (node.is_computation or node.bucket):
                assert after[node.name].pop(0) == before[node.name].pop(0)
        assert reduced(plain) == reduced(fused)


@pytest.mark.parametrize("fusion", KINDS)
def test_memory_of_a_rank_is_as_planned(fusion: str) -> None:
    """The plan is of the computations one by one, so events of fused nodes have the same peak."""
    model, options = JOBS["zero bubble"]
    peaks = set[tuple[int, ...]]()
    for how in ("none", fusion):
        builder = JobBuilder(tiny_options(model, **options, fusion=how))
        looked = Planned(EventPlans)
        module = builder.lower(watching=[looked])
        plans = looked.needed("--memory-events")
        actual = [plans.annotate(c, c.program()).events for c in rank_classes(module)]
        peaks.add(tuple(events.peak for events in actual if events is not None))
    assert len(peaks) == 1


@crossed(
    more=["", "--granularity block", "--memory-events"],
    strategy=[
        "--dp 2 --zero 3 --microbatches 2 --fusion elementwise",
        "--pp 2 --microbatches 4 --schedule dualpipe --fusion epilogue",
        "--cp 2 --cp-mode ring --pp 2 --schedule zb-h1 --fusion epilogue",
    ],
)
def test_traces_pass_all_checks(strategy: str, more: str, tmp_path: Path) -> None:
    sizes = ",".join(f"{name}={size}" for name, size in TINY[LLAMA].items())
    job = ["compile", LLAMA, "--set", sizes, "--quiet", *strategy.split(), *more.split()]
    ran = stagec(*job, "-o", tmp_path / "folder")
    assert ran.code == 0, ran.err
    checked = stagec("check", tmp_path / "folder")
    assert checked.code == 0, checked.err
    ran = stagec(*job, "--archive", tmp_path / "job.stagec")
    assert ran.code == 0, ran.err
    ran = stagec("materialize", tmp_path / "job.stagec", "-o", tmp_path / "again")
    assert ran.code == 0, ran.err
    for path in (tmp_path / "folder").glob("*.et"):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
