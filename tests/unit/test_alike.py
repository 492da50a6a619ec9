"""Actions that are alike have one region where figures and times alone are asked for."""

from typing import Any

import numpy as np
import pytest

from stagec.analysis.family import Compiled
from stagec.ir.core import Operation
from stagec.jobs.builder import JobBuilder
from stagec.jobs.figures import compiled_of
from stagec.jobs.request.options import JobOptions
from stagec.program.classes import RankClass
from stagec.program.nodes import Program

CHUNKS: dict[str, Any] = {"pp": 2, "chunks": 4, "schedule": "interleaved", "microbatches": 4}
JOBS: dict[str, dict[str, Any]] = {
    "interleaved": {"model": "llama3-8b", **CHUNKS, "tp": 2, "zero": 2, "sp": True},
    "recompute": {"model": "llama3-8b", **CHUNKS, "dp": 2, "zero": 3, "recompute": "full"},
    "fused": {"model": "llama3-8b", **CHUNKS, "tp": 2, "fusion": "epilogue"},
    "gathered": {"model": "llama3-8b", **CHUNKS, "tp": 2, "sp": True, "tp_gathers": "in-steps"},
    "V": {"model": "llama3-8b", "pp": 4, "schedule": "zbv", "microbatches": 8},
    "pairs": {"model": "llama3-8b", "pp": 4, "schedule": "dualpipe", "microbatches": 8},
    "experts": {"model": "mixtral-8x7b", **CHUNKS, "dp": 4, "ep": 4},
}


def _classes(name: str, *, shared: bool) -> tuple[list[RankClass], int]:
    """The classes of a job, and how many regions its actions have."""
    builder = JobBuilder(JobOptions(**JOBS[name], sizes={"B": 64, "S": 1024}))
    if shared:
        compiled = compiled_of(builder)
    else:
        passes = builder.loaded.pipeline(builder.pipeline_text)
        compiled = Compiled(builder.module, passes)
    classes = compiled.classes(builder.module.env)
    actions: list[Operation] = [
        op for each in classes for op in each.graph.body.walk() if op.name == "et.action"
    ]
    return classes, len({op.body for op in actions})


@pytest.mark.parametrize("name", JOBS)
def test_programs_of_shared_actions_are_those_of_actions_apart(name: str) -> None:
    shared, fewer = _classes(name, shared=True)
    apart, regions = _classes(name, shared=False)
    assert fewer < regions
    for one, other in zip(shared, apart, strict=True):
        mine, theirs = one.program(), other.program()
        for column in ("microbatch", "tag", "starts", "control", "edges"):
            assert np.array_equal(getattr(mine, column), getattr(theirs, column)), column
        assert _rows(mine) == _rows(theirs)


def _rows(program: Program) -> list[tuple[object, ...]]:
    nodes = [program.prototypes[i] for i in map(int, program.prototype)]
    return [
        (n.kind, n.phase, n.size, n.flops, n.out, n.kernel, n.by, n.layer, n.group) for n in nodes
    ]


def test_chunks_that_are_alike_have_one_region() -> None:
    _, shared = _classes("interleaved", shared=True)
    _, apart = _classes("interleaved", shared=False)
    # of 4 chunks on each of 2 stages those with the embedding and the head stand alone; the others
    # are one on each stage, as the stages receive from different sides
    assert (apart, shared) == (16, 8)
