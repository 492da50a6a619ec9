"""The memory picture against the traces and the planner: what runs comes in the order and takes the
time of the trace's nodes, at the peak is held what the planner says.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from stagec.analysis.footprint import timelines
from stagec.analysis.picture import SMALLER, Picture, pictures
from stagec.ir.expr import evaluate
from stagec.ir.module import Module
from stagec.ir.traits import CopiesMemory, Free
from stagec.ir_spec.ops.comm import Collective
from stagec.ir_spec.ops.pipeline import RecvOp, SendOp
from stagec.jobs.builder import JobBuilder
from stagec.jobs.planned import Planned
from stagec.jobs.request.options import JobOptions
from stagec.machines.roofline import roofline_machine
from stagec.memory.timeline import LiveBuffers, MemoryTimeline, Point
from stagec.program.classes import rank_classes
from stagec.program.nodes import Node
from stagec.schedule.action import RankActions, steps
from stagec.schedule.registry import SCHEDULES
from tests.support import GPT, LLAMA, MIXTRAL, assert_same_items, registry, tiny_options

SIZES = {"L": 4, "B": 8, "S": 8}
#: Slow enough for times of tiny sizes that are not all rounded to nothing.
RATES = roofline_machine(1e9, 1e9)
FEW = 8
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": (GPT, {"dp": 2, "zero": 3, "fsdp_prefetch": 2, "microbatches": 2}),
    "recompute": (LLAMA, {"tp": 2, "sp": True, "recompute": "full", "recompute_every": 2}),
    "plain ring": (LLAMA, {"cp": 2, "cp_order": "plain"}),
    "offload": (LLAMA, {"offload": "activations,optimizer"}),
    "experts": (MIXTRAL, {"dp": 2, "ep": 2}),
}
#: A model of few operations, for what depends on the schedule only.
SHORT = """stg.module @short {
  stg.symbols[B, S = 4, D = 8, F = 16, V = 16, L = 4]
  stg.func @train (
    %tokens: i32[B, S], %labels: i32[B, S],
    %E: bf16[V, D | param], %W: bf16[L, D, F | param], %U: bf16[L, F, D | param]
  ) -> f32[] {
    %x = stg.embedding(%E, %tokens)
    %y = stg.repeat[count = L, carry = 1] (%h = %x, %w = %W, %u = %U) {
      %a = stg.einsum["bsd,df->bsf"](%h, %w)
      %g = stg.gelu(%a)
      %o = stg.einsum["bsf,fd->bsd"](%g, %u)
      %r = stg.add(%h, %o)
      stg.yield(%r)
    }
    %logits = stg.einsum["bsd,vd->bsv"](%y, %E)
    %wide = stg.cast[f32](%logits)
    %loss = stg.cross_entropy[mean = B*S](%wide, %labels)
    stg.return(%loss)
  }
}
"""


@dataclass(frozen=True)
class Plan:
    """What the planner knows of a class."""

    order: RankActions
    points: list[Point]
    updates: list[bool]  # whether each start or end of a buffer is of the optimizer
    peak: int
    static: int
    live: list[LiveBuffers]


@dataclass(frozen=True)
class Seen:
    """A job, lowered, and its memory: by the planner, by operations, and in few columns."""

    module: Module
    plans: list[Plan]
    whole: list[Picture]
    few: list[Picture]


def seen(options: JobOptions) -> Seen:
    watch = Planned(
        lambda m: (
            [_plan(t) for _, _, t in timelines(m)],
            pictures(m, RATES, 10**9),
            pictures(m, RATES, FEW),
        )
    )
    module = JobBuilder(options).lower(watching=[watch])
    return Seen(module, *watch.needed("a test"))


def _plan(timeline: MemoryTimeline) -> Plan:
    peak, static = timeline.peak(), sum(timeline.static().values())
    updates = [e.step.op.phase == "optimizer" for e in timeline.events()]
    points = list(timeline.points())
    return Plan(timeline.order, points, updates, peak.total, static, timeline.live(peak))


@pytest.mark.parametrize("name", JOBS)
def test_a_step(name: str) -> None:
    model, options = JOBS[name]
    job = seen(tiny_options(model, sizes=SIZES, **options))
    check_times(job, order=True)
    check_bytes(job)
    check_columns(job)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduled_step(name: str, tmp_path: Path) -> None:
    model = tmp_path / "short.stg"
    model.write_text(SHORT, "utf-8")
    sizes = {"B": 8}
    job = seen(JobOptions(str(model), sizes=sizes, pp=2, microbatches=4, schedule=name))
    for plan in job.plans:
        check_order(plan)
    paired = any(len(turn) > 1 for turn in steps(job.plans[0].order))
    check_times(job, order=not paired)  # a pair is one column
    check_bytes(job)
    check_columns(job)
    if name == "gpipe":
        check_waits(job)


# -- order and time --------------------------------------------------------------------------------


def check_order(plan: Plan) -> None:
    """What is before the schedule, its turns, what is after it; nothing of the optimizer comes
    before anything else. So do the events of a snapshot."""
    titles = [p.title for p in plan.points]
    assert [t for t in titles if t] == [" with ".join(map(str, turn)) for turn in steps(plan.order)]
    assert [t for t, _ in groupby(map(bool, titles))] == [False, True, False]
    for updates in ([p.step.op.phase == "optimizer" for p in plan.points], plan.updates):
        assert updates == sorted(updates)
        assert any(updates)


def check_times(job: Seen, *, order: bool) -> None:
    """Each computation of a rank, in the order of its trace; the rest of the step it waits."""
    programs = {each.stage: each.program() for each in rank_classes(job.module)}
    for picture in job.whole:
        nodes = [n for n in programs[picture.stage].nodes if n.is_computation]
        assert busy(picture) == sum(map(picoseconds, nodes))
        if order:
            expected = ((n.kind, n.phase, _number(r"/mb(\d+)/", n.name)) for n in nodes)
            assert_same_items(computations(picture), expected)


def computations(picture: Picture) -> Iterator[tuple[str, str, str]]:
    """What computes, in order: kind, phase, microbatch."""
    for moment in picture.moments:
        name = moment.operation.partition(" at ")[0]
        if not moment.phase or isinstance(registry()[name], Collective | SendOp | RecvOp):
            continue
        if not registry()[name].has(Free) and not registry()[name].has(CopiesMemory):
            yield name.partition(".")[2], moment.phase, _number(r"microbatch (\d+)", moment.title)


def _number(pattern: str, text: str) -> str:
    actual = re.search(pattern, text)
    return actual[1] if actual else ""


def busy(picture: Picture) -> int:
    """The time in which a rank does not wait."""
    ends = [m.start for m in picture.moments[1:]] + [picture.time]
    return sum(e - m.start for m, e in zip(picture.moments, ends, strict=True) if m.phase)


def picoseconds(node: Node) -> int:
    return round(1e12 * max(node.flops / 1e9, node.size / 1e9))


# -- bytes and columns -----------------------------------------------------------------------------


def check_bytes(job: Seen) -> None:
    """The peak, its categories, and what is held at it, value by value; in few columns too."""
    for plan, *both in zip(job.plans, job.whole, job.few, strict=True):
        live = Counter[tuple[str, str]]()
        for kept in plan.live:
            live[kept.name, kept.category] += kept.bytes
        for picture in both:
            sums = totals(picture)
            assert max(sums) == picture.peak == plan.peak
            bands = held_at(picture, sums.index(picture.peak))
            assert all(bands[key] == live[key] for key in bands if key[0] != SMALLER)
            for category in {c for _, c in live}:
                assert total_of(bands, category) == total_of(live, category)


def check_columns(job: Seen) -> None:
    """They are in order, and few are not fewer than they have to be."""
    for picture in (*job.whole, *job.few):
        starts = [m.start for m in picture.moments]
        assert starts == sorted(starts)
        assert starts[0] == 0
        assert starts[-1] <= picture.time
    assert all(FEW // 4 < len(picture.moments) <= FEW for picture in job.few)


def check_waits(job: Seen) -> None:
    """GPipe's first stage waits after all its forwards, and holds what each of them has left."""
    module, picture = job.module, job.whole[0]
    left = next(
        evaluate(op.expr("left"), module.env)
        for op in module.ops("stg.working")
        if 0 in op.integers("stages") and op.names("runs") == ("forward",)
    )
    wait = next(i for i, m in enumerate(picture.moments) if not m.phase)
    assert totals(picture)[wait] == job.plans[0].static + 4 * left


def totals(picture: Picture) -> list[int]:
    """All bytes of each column."""
    actual = [0] * len(picture.moments)
    for band in picture.bands:
        ends = [i for i, _ in band.changes[1:]] + [len(actual)]
        for (start, count), end in zip(band.changes, ends, strict=True):
            for i in range(start, end):
                actual[i] += count * band.each
    return actual


def held_at(picture: Picture, column: int) -> Counter[tuple[str, str]]:
    """Bytes by value and category."""
    actual = Counter[tuple[str, str]]()
    for band in picture.bands:
        counts = [count for start, count in band.changes if start <= column]
        actual[band.name, band.category] += band.each * (counts or [0])[-1]
    return actual


def total_of(kept: Mapping[tuple[str, str], int], category: str) -> int:
    return sum(size for (_, c), size in kept.items() if c == category)
