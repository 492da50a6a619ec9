"""The longest paths of a structure, with other costs each time: what a replay of all classes finds,
and a class alone as it is among the others."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from stagec.program.nodes import Node
from stagec.time.clock.join import joined
from stagec.time.clock.replayed import PAYS, Plans, Replayed
from stagec.time.step import Issued
from stagec.time.streams import Cost
from tests.support import EXHAUSTIVE, LLAMA
from tests.unit.test_step_time import JOBS, issued_of, options_of

#: Jobs with one kind of wait each: messages, calls that join classes, one stream, copies.
FIRST = ("1f1b", "interleaved", "ring in plain order", "tied embeddings")
CASES = [pytest.param(n, marks=() if n in FIRST else EXHAUSTIVE) for n in JOBS]
FSDP: dict[str, Any] = {"pp": 2, "dp": 2, "zero": 2, "microbatches": 8, "chunks": 2}


def costs_like(seed: int, unit: int = 1) -> Callable[[Node], Cost]:
    """Costs without sense in some unit, some of which are nothing: others for each seed."""

    def cost(node: Node) -> Cost:
        code = zlib.crc32(f"{seed} {node.kind} {node.size}".encode())
        if node.is_computation:
            return Cost(code % 97 * unit, code % 5)
        return Cost((code % 331) * (code % 3) * unit)

    return cost


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("one_stream", [False, True])
def test_paths_are_those_of_a_replay(name: str, one_stream: bool) -> None:
    compare(issued_of(options_of(*JOBS[name])), one_stream)


def test_reductions_of_each_microbatch_fall_behind() -> None:
    options = options_of(LLAMA, {**FSDP, "schedule": "interleaved"})
    compare(issued_of(options), one_stream=False)


@pytest.mark.parametrize("days", [50, 10**9])
def test_steps_of_many_days_are_exact(days: int) -> None:
    """Of more picoseconds than numpy counts, too: in one node, or in all together."""
    compare(issued_of(options_of(*JOBS["1f1b"])), one_stream=False, unit=days * 86400 * 10**12)


def compare(issued: Issued, one_stream: bool, unit: int = 1) -> None:
    """Replay with some costs by paths, and at once."""
    found = joined(issued.classes, issued.runs, issued.mesh, one_stream=one_stream)
    plans = Plans(found, cache(issued.each(lambda node: node).numbers))
    assert all(plans.paths is None for _ in range(PAYS - 1))  # so few replays need none
    for seed in range(3):
        each = issued.each(costs_like(seed, unit))
        costs = [(0, each)] * len(plans)
        later = Replayed(plans, costs, numbered=[each] * len(plans))
        whole = Replayed(plans, costs)
        assert "_classes" not in vars(later)
        assert later.ends == [each.end for each in whole]
        for number, among in enumerate(whole):
            alone = later.alone(number)
            assert later.computing(number) == sum(
                span
                for piece in among.pieces
                for step, span in zip(piece.shape.steps, piece.spans, strict=True)
                if step.computes and not piece.shape.joins
            )
            assert alone.bases == among.bases
            assert alone.ends == among.ends
            assert alone.parts(whole.end) == among.parts(whole.end)
            assert alone.streams == among.streams
