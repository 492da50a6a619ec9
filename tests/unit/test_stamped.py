"""Stamped programs are, byte for byte, those of the slow and plain writer in tests/plain_writer.py:
whatever the schedule, the strategy, the number of microbatches and the widths of numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stagec.formats.base import Durations, Layout
from stagec.formats.chakra.format import CHAKRA
from stagec.jobs.builder import JobBuilder
from stagec.program.nodes import Node
from stagec.schedule.registry import SCHEDULES
from stagec.traces.emit import EmittedJob, make_job
from tests.layer_kinds import ORDERS, STRATEGIES, kinds_job
from tests.plain_writer import plain_trace, program_of
from tests.support import GPT, LLAMA, LONG, crossed, one_of_each_kind, tiny_options


def job(model: str = LLAMA, **options: Any) -> EmittedJob:
    """The job of a tiny model."""
    return make_job(JobBuilder(tiny_options(model, **options)).lower(), "tiny")


def slow(node: Node) -> float:
    """Seconds of a computation on a slow device."""
    return max(node.flops, node.size) / 1e6


def assert_same_as_plain(made: EmittedJob, durations: Durations | None = None) -> None:
    """Of each class, its first and its last rank."""
    layout = Layout(made.mesh, made.groups)
    for each in made.classes:
        plain, stamped = program_of(each), CHAKRA.encoder(each.program(), layout, durations)
        ranks = each.members(made.mesh)
        for rank in {int(ranks[0]), int(ranks[-1])}:
            expected = plain_trace(plain, made.mesh, made.groups, rank, durations)
            assert stamped.rank(rank).tobytes() == expected, f"rank {rank} of {each.name}"


@crossed(zero=[0, 1, 2, 3], microbatches=[1, 2, 4, 12])
def test_data_parallel(zero: int, microbatches: int) -> None:
    options: dict[str, Any] = {
        "dp": 2,
        "zero": zero,
        "microbatches": microbatches,
        "ddp_bucket": 300,
    }
    assert_same_as_plain(job(sizes={"B": 24, "L": 4}, **options))


MORE: list[dict[str, Any]] = [
    {},
    {"zero": 2, "dp": 2, "ddp_bucket": 300},
    {"recompute": "full", "recompute_layers": 1},
]


@crossed(order=ORDERS, strategy=STRATEGIES)
def test_layers_of_several_kinds(order: str, strategy: str, tmp_path: Path) -> None:
    made = kinds_job(tmp_path / "kinds.stg", order, **STRATEGIES[strategy]).lower()
    assert_same_as_plain(make_job(made, "kinds"))


@crossed(one_of_each_kind, more=MORE, schedule=SCHEDULES)
def test_schedules(schedule: str, more: dict[str, Any]) -> None:
    options: dict[str, Any] = {"pp": 2, "microbatches": 12, "schedule": schedule, **more}
    assert_same_as_plain(job(sizes={"B": 24, "L": 8}, **options))


@LONG
@pytest.mark.parametrize(
    "options",
    [
        {"pp": 2, "tp": 2, "sp": True, "microbatches": 130, "sizes": {"B": 130}},
        {"dp": 4, "zero": 3, "fsdp_prefetch": 2, "microbatches": 3, "sizes": {"B": 12, "L": 4}},
        {"tp": 2, "sp": True, "async_tp": True, "microbatches": 3, "sizes": {"B": 6, "L": 3}},
        {"cp": 2, "cp_mode": "ring", "pp": 2, "microbatches": 4, "sizes": {"B": 8, "S": 8}},
        {  # reductions of what others have reduced, in buckets both
            "cp": 2,
            "tp": 2,
            "sp": True,
            "pp": 2,
            "schedule": "dualpipe",
            "microbatches": 4,
            "sizes": {"B": 8, "S": 8, "L": 4},
        },
        {
            "offload": "optimizer",
            "memory_nodes": True,
            "pp": 2,
            "microbatches": 4,
            "sizes": {"B": 8, "L": 4},
        },
    ],
)
def test_strategies(options: dict[str, Any]) -> None:
    assert_same_as_plain(job(**options))


@pytest.mark.parametrize("zero", [0, 1])
def test_sums_over_stages_behind_the_schedule(zero: int) -> None:
    options: dict[str, Any] = {"pp": 2, "dp": 2, "zero": zero, "ddp_bucket": 300}
    assert_same_as_plain(job(GPT, microbatches=3, sizes={"B": 12, "L": 4}, **options))


def test_another_model_with_durations() -> None:
    made = job(GPT, pp=2, microbatches=11, sizes={"B": 22, "L": 4})
    assert_same_as_plain(made, slow)
