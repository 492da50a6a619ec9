"""Placement: buffers that live at the same time never overlap, by a checker that knows nothing of
the allocators; the arena is never below the bound, and for best-fit within 10% of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.analysis.footprint import timelines
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.memory.arena import requests
from stagec.memory.placement import MODELS, Arena, Placed, PlacementRequest, place, placing
from tests.support import LONG, examples

MIB = 2**20


def checked(asked: list[PlacementRequest], model: str) -> Arena:
    """Place, and check every buffer against all that live beside it."""
    actual, live = Arena(), dict[int, Placed]()
    sizes = {r.number: r.size for r in asked if r.size}
    for request, spot in placing(asked, MODELS[model](), actual):
        if not request.size:
            assert live.pop(request.number) == spot
            continue
        assert spot.offset >= 0
        assert spot.offset % 512 == 0
        assert spot.size >= sizes[request.number]
        for other in live.values():
            assert (
                spot.offset + spot.size <= other.offset or other.offset + other.size <= spot.offset
            )
        live[request.number] = spot
        assert (
            spot.offset + spot.size <= actual.reserved or model == "best-fit" or not actual.reserved
        )
    assert max((p.offset + p.size for p in actual.places.values()), default=0) <= actual.reserved
    assert actual.bound <= actual.allocated <= actual.reserved
    return actual


def bound(asked: list[PlacementRequest]) -> int:
    """The most bytes asked for at once, counted here."""
    sizes, kept, most = dict[int, int](), 0, 0
    for request in asked:
        if request.size:
            sizes[request.number] = request.size
            kept += request.size
        else:
            kept -= sizes[request.number]
        most = max(most, kept)
    return most


@st.composite
def programs(draw: st.DrawFn) -> list[PlacementRequest]:
    """Starts and ends of buffers in any order."""
    asked: list[PlacementRequest] = []
    live: list[int] = []
    for number in range(draw(st.integers(1, 60))):
        size = draw(st.sampled_from((1, 512, 700, MIB, MIB + 1, 9 * MIB, 10 * MIB, 33 * MIB)))
        asked.append(PlacementRequest(number, size * draw(st.integers(1, 3))))
        live.append(number)
        while live and draw(st.sampled_from((True, False))):
            asked.append(PlacementRequest(live.pop(draw(st.integers(0, len(live) - 1))), 0))
    return asked


@LONG
@pytest.mark.parametrize("model", MODELS)
@examples(80)
@given(programs())
def test_buffers_never_overlap(model: str, asked: list[PlacementRequest]) -> None:
    assert checked(asked, model).bound == bound(asked)


JOBS = {
    "llama3-8b": JobOptions("llama3-8b", dp=8, zero=3, sizes={"L": 9}),
    "llama3-70b": JobOptions("llama3-70b", tp=8, pp=4, sp=True, recompute="full"),
    "gpt3-175b": JobOptions("gpt3-175b", tp=8, pp=8, sp=True, microbatches=16),
    "mixtral-8x7b": JobOptions("mixtral-8x7b", dp=8, ep=8, zero=1, recompute="selective"),
    "deepseek-v3": JobOptions("deepseek-v3", dp=16, ep=16, zero=1, recompute="full"),
    "qwen3-30b-a3b": JobOptions("qwen3-30b-a3b", dp=8, ep=8, microbatches=2),
    "gpt-22b": JobOptions("gpt-22b", tp=8, pp=4, schedule="zb-h1", microbatches=8),
}


@pytest.mark.parametrize("name", JOBS)
def test_models_of_the_library(name: str) -> None:
    module = JobBuilder(JOBS[name]).lower("plan-memory")
    _, _, timeline = next(timelines(module))
    asked = list(requests(timeline))
    peak = timeline.peak().total
    fit = place(asked, MODELS["best-fit"]())
    assert bound(asked) == fit.bound == peak
    assert fit.bound <= fit.reserved <= 1.1 * fit.bound
    cached = place(asked, MODELS["caching"]())
    assert fit.bound <= cached.allocated <= cached.reserved
    assert cached.reserved % (2 * MIB) == 0


def test_a_placed_step_has_no_overlap() -> None:
    module = JobBuilder(JobOptions("llama3-8b", tp=2, pp=2, sizes={"L": 4})).lower("plan-memory")
    _, _, timeline = next(timelines(module))
    for model in MODELS:
        checked(list(requests(timeline)), model)


@pytest.mark.parametrize(
    ("size", "given", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (19 * MIB + 512, 20 * MIB, 20 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(size: int, given: int, reserved: int) -> None:
    """Those of PyTorch: a remainder of at most 1 MiB stays with a large block."""
    actual = place([PlacementRequest(0, size)], MODELS["caching"]())
    assert (actual.allocated, actual.reserved) == (given, reserved)


def test_freed_blocks_are_joined_and_used_again() -> None:
    asked = [
        PlacementRequest(0, 6 * MIB),
        PlacementRequest(1, 6 * MIB),
        PlacementRequest(0, 0),
        PlacementRequest(1, 0),
    ]
    actual = place([*asked, PlacementRequest(2, 15 * MIB)], MODELS["caching"]())
    assert actual.reserved == 20 * MIB
