"""The search of what fits: against every combination there is, in a world of closed forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations
from math import prod
from typing import Any

import pytest

from stagec.analysis.figures import Figures
from stagec.ir_spec.strategy.axes import DATA_AXES
from stagec.jobs.builder import JobBuilder
from stagec.jobs.legal import count_of
from stagec.jobs.request.experts import mesh_axes
from stagec.jobs.request.options import JobOptions
from stagec.searches.advice.knobs import Change, KnobSpace, stretch
from stagec.searches.advice.prediction import Prediction, cost
from stagec.searches.advice.search import Advice, Suggestion, advise
from tests.support import DEEPSEEK, LLAMA, LONG

SIZES = {"B": 256, "S": 8192, "L": 32, "H": 32, "G": 8, "F": 14336, "V": 128256}
JOB = JobOptions(LLAMA, sizes={"B": 256}, dp=16, tp=4, zero=1)
UNIT = 2**40


def ranks_of(options: JobOptions) -> dict[str, int]:
    return {a: n or 1 for a, n in mesh_axes(options).items()}


def world(options: JobOptions, *, gathers: bool = True) -> Figures:
    """A job as closed forms have it: ZeRO shards, microbatches share, sequence parallelism splits
    half of what is kept; with `gathers`, ZeRO-3 sends in each microbatch."""
    axes, count = ranks_of(options), count_of(options)
    dp, split = axes.get("dp", 1), axes.get("tp", 1) * axes.get("pp", 1)

    def shard(size: int, stage: int) -> int:
        return size // (dp if options.zero >= stage else 1) // split

    kept = Fraction(512, dp * count) * (Fraction(1, axes.get("tp", 1)) if options.sp else 1)
    kept /= axes.get("cp", 1) * (8 if options.recompute == "full" else 1)
    again = count if gathers else 1
    traffic = UNIT * axes.get("tp", 1) * (2 if options.sp else 1)
    traffic += UNIT // 8 * again if options.zero == 3 else 0
    offloads: list[str] = options.offload.split(",") if options.offload else []
    memory = {
        "parameters": shard(UNIT, 3),
        "gradients": shard(UNIT * (1 if options.grad_dtype == "bf16" else 2), 2),
        "optimizer": 0 if "optimizer" in offloads else shard(6 * UNIT, 1),
        "others": 0 if "activations" in offloads else int(UNIT * kept),
    }
    return Figures(
        ranks=64,
        mesh=axes,
        parameters=1,
        flops=10**16 * (4 if options.recompute == "full" else 3) // 3,
        sent=traffic,
        copied=UNIT * (len(offloads) + 8 * ("activations" in offloads)),
        host=0,
        idle=1 - 1 / Fraction(stretch(options)),
        memory=memory,
        categories={},
    )


class Compiler:
    """Remembers what it was asked for; some jobs are none."""

    def __init__(self, refused: str = "", *, gathers: bool = True) -> None:
        self.asked: list[JobOptions] = []
        self._refused, self._gathers = refused, gathers

    def __call__(self, jobs: Sequence[JobOptions]) -> list[Figures | None]:
        self.asked += jobs
        return [None if self._is_refused(j) else world(j, gathers=self._gathers) for j in jobs]

    def _is_refused(self, options: JobOptions) -> bool:
        return bool(self._refused) and bool(getattr(options, self._refused))


def search(limit: float, compiler: Compiler, **more: int) -> Advice:
    def room(_mesh: Mapping[str, int]) -> int:
        return int(limit * UNIT)

    return advise(JOB, world(JOB), SIZES, room, compiler, **more)


@cache
def plain(limit: float) -> Advice:
    return search(limit, Compiler())


@cache
def every_of_the_job() -> dict[tuple[Change, ...], JobOptions]:
    return every(JOB, SIZES)


def every(options: JobOptions, sizes: Mapping[str, int]) -> dict[tuple[Change, ...], JobOptions]:
    """All legal combinations of up to three changes."""
    space = KnobSpace(options, sizes)
    actual: dict[tuple[Change, ...], JobOptions] = {}
    for number in range(1, 4):
        for chosen in combinations(space.changes(), number):
            job = space.job(chosen) if len({s.knob for s in chosen}) == number else None
            if job is not None:
                actual[chosen] = job
    return actual


@LONG
@pytest.mark.parametrize("limit", [16, 2, 0.5])
def test_nothing_that_fits_is_cheaper(limit: float) -> None:
    """The first suggestion is the cheapest of all combinations, and few were compiled."""
    advice, before = plain(limit), world(JOB)
    assert before.peak > limit * UNIT
    assert advice.before == before
    exhaustive = {
        chosen: cost(figures) - cost(before)
        for chosen, job in every_of_the_job().items()
        if (figures := world(job)).peak <= limit * UNIT and not any(s.numerics for s in chosen)
    }
    assert advice.suggestions[0].cost == pytest.approx(min(exhaustive.values()))
    assert advice.tried < 65 < advice.count
    assert advice.left == 0
    for each in advice.suggestions:
        assert each.figures == world(each.options)
        assert each.figures.peak <= limit * UNIT
    assert [s.order for s in advice.suggestions] == sorted(s.order for s in advice.suggestions)


def test_suggestions_differ_and_go_no_further_than_needed() -> None:
    actual = plain(2).suggestions
    assert len(actual) == len({frozenset(s.knob for s in each.changes) for each in actual}) > 3
    for each in actual:
        for fewer in combinations(each.changes, len(each.changes) - 1):
            job = KnobSpace(JOB, SIZES).job(fewer)
            less = world(job or JOB)
            assert less.peak > 2 * UNIT or cost(less) - cost(world(JOB)) > each.cost


@LONG
def test_effects_that_multiply_are_predicted_exactly() -> None:
    """From the single changes alone, the sizes of microbatches that were not compiled among them;
    what changes with the mesh as well is not such."""
    jobs = {
        frozenset(c): job
        for c, job in {(): JOB, **every_of_the_job()}.items()
        if not {"tp", "cp", "pp", "offload", "zero"} & {s.knob for s in c}
    }
    alone = {
        c: world(job, gathers=False)
        for c, job in jobs.items()
        if len(c) < 2 and all(s.factor in (None, 2, 4) for s in c)
    }
    assert len(jobs) > 2 * len(alone)
    for combination, peak, more in Prediction(jobs, alone).all():
        figures = world(jobs[combination], gathers=False)
        assert peak == pytest.approx(figures.peak, rel=1e-6)
        assert more == pytest.approx(cost(figures), rel=1e-6)


def test_what_turns_out_otherwise_corrects_what_goes_further() -> None:
    zero, eight, sixteen = (
        Change("zero", 3, 2),
        Change("microbatches", 8, 3, 8),
        Change("microbatches", 16, 4, 16),
    )
    both, more = frozenset({zero, eight}), frozenset({zero, sixteen})
    chosen = [frozenset[Change](), frozenset({zero}), frozenset({eight}), frozenset({sixteen})]
    jobs = {c: KnobSpace(JOB, SIZES).job(c) or JOB for c in (*chosen, both, more)}
    expected = Prediction(jobs, {c: world(jobs[c]) for c in chosen})

    def costs() -> dict[frozenset[Change], float]:
        return {c: actual for c, _, actual in expected.all()}

    before, true = costs(), {c: cost(world(job)) for c, job in jobs.items()}
    expected.correct(both, world(jobs[both]))
    assert costs()[both] == pytest.approx(true[both])
    assert before[more] < costs()[more] <= true[more] * 1.001
    assert all(costs()[c] == pytest.approx(true[c]) for c in chosen)


@LONG
def test_the_budget_holds_and_what_is_left_is_reported() -> None:
    compiler = Compiler()
    advice = search(2, compiler, budget=30)
    assert len(compiler.asked) == 30
    assert advice.left > 0


@LONG
def test_what_is_no_job_is_not_suggested() -> None:
    advice = search(2, Compiler("sp"))
    assert advice.suggestions
    assert not any(s.options.sp for s in advice.suggestions)


@LONG
def test_where_nothing_fits_the_smallest_is_reported() -> None:
    compiler = Compiler()
    advice = search(1e-6, compiler)
    assert not advice.suggestions
    assert advice.smallest.figures.peak == min(world(job).peak for job in compiler.asked)
    assert advice.smallest.figures.peak < world(JOB).peak


@LONG
def test_the_numbers_of_training_change_last() -> None:
    """Element types are not tried where enough else fits; where it does not, they come last."""
    few, many = Compiler(), Compiler()
    search(16, few, wanted=2)
    assert {j.grad_dtype for j in few.asked} == {"f32"}
    search(0.06, many)
    assert {j.grad_dtype for j in many.asked} == {"f32", "bf16"}
    types, free = Change("grad_dtype", "bf16", 1, numerics=True), Change("sp", True, 1)
    cheap, dear = ((Suggestion((s,), JOB, world(JOB), c)) for s, c in ((types, 0), (free, 9)))
    assert min(cheap, dear, key=lambda s: s.order) is dear


BASES = [
    JOB,
    JOB.changed(dp=8, cp=2, sp=True, microbatches=4),
    JOB.changed(dp=1, tp=1, mesh={"dp": 16, "tp": 4}, offload="optimizer"),
    JOB.changed(dp=1, tp=1, mesh={"pp": 2, "dp": 8, "tp": 4}, microbatches=4),
    JOB.changed(dp=1, dp_replicate=4, dp_shard=4, zero=3, recompute="silu"),
    JOB.changed(model=DEEPSEEK, ep=4, no_vocab_parallel=True),
]


def test_what_can_be_changed() -> None:
    """The knobs of a job in which nothing is thrifty yet, each to all that holds less."""
    spends: dict[str, Any] = {
        "no_vocab_parallel": True,
        "tp_inputs": "save-gathered",
        "param_dtype": "f32",
    }
    job = JOB.changed(model=DEEPSEEK, zero=0, ep=2, **spends)
    actual: dict[str, list[Any]] = {}
    for change in KnobSpace(job, {**SIZES, "B": 32, "E": 64}).changes():
        actual.setdefault(change.knob, []).append(change.value)
    assert actual == {
        "sp": [True],
        "no_vocab_parallel": [False],
        "tp_inputs": ["regather"],
        "zero": [1, 2, 3],
        "recompute": ["selective", "full"],
        "offload": ["activations", "optimizer", "activations,optimizer"],
        "tp": [8, 16, 32, 2, 1],
        "cp": [2, 4, 8],
        "pp": [2, 4, 8],
        "ep": [4, 8, 16],
        "microbatches": [2, 4, 8, 16, 32],
        "param_dtype": ["bf16"],
        "grad_dtype": ["bf16"],
        "reduce_dtype": ["bf16"],
        "master_dtype": ["bf16"],
        "fp8": ["hybrid"],
    }
    keeps = JOB.changed(zero=3, reshard_after_forward="never", offload="activations")
    values = {s.knob: s.value for s in KnobSpace(keeps, SIZES).changes() if s.level == 1}
    assert values["reshard_after_forward"] == "last"
    assert values["offload"] == "activations,optimizer"
    assert "zero" not in values


@LONG
@pytest.mark.parametrize("options", BASES, ids=range(len(BASES)))
def test_ranks_and_batch_stay(options: JobOptions) -> None:
    sizes = {**SIZES, "E": 64} if options.ep > 1 else SIZES
    actual = every(options, sizes)
    knobs = {s.knob for chosen in actual for s in chosen}
    assert knobs >= {"microbatches", "recompute", "offload", "tp", "cp", "pp", "grad_dtype"}
    for job in actual.values():
        axes = ranks_of(job)
        assert prod(axes.values()) == 64
        data = prod(axes.get(a, 1) for a in (*DATA_AXES, "ep"))
        assert job.sizes["B"] == 256
        assert 256 % (data * count_of(job)) == 0


@LONG
@pytest.mark.parametrize("options", [BASES[3], BASES[-1]], ids=["pipeline", "experts"])
def test_single_changes_are_jobs(options: JobOptions) -> None:
    """The rules of combination have nothing against them; what divides, the compiler knows."""
    sizes = {**SIZES, "E": 64} if options.ep > 1 else SIZES
    for chosen, job in every(options, sizes).items():
        if len(chosen) == 1:
            assert JobBuilder(job).options.sizes["B"] == 256, chosen
