"""`stagec search`: what it proposes is legal, compiles, fits, and is the best of all points."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import unescape
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.ir_spec.strategy.axes import expert_parts
from stagec.jobs.legal import checked
from stagec.jobs.request.combine import complete
from stagec.jobs.request.experts import mesh_axes
from stagec.jobs.request.machine import machine_of
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import CACHES, STEP
from stagec.jobs.session import Session
from stagec.schedule.costs import Costs
from stagec.schedule.registry import SCHEDULES
from stagec.schedule.report import run_schedule
from stagec.searches.bounds import JobBounds
from stagec.searches.explore.bounds import Floats, Work, time_bound
from stagec.searches.explore.branch import Front, Ranked, Search, beats
from stagec.searches.explore.layout import Layers, StepLayout, layer_layout, rank_layers
from stagec.searches.explore.memo import MemoByReads
from stagec.searches.explore.pipelined import (
    ActionTimes,
    Pair,
    PhaseTimes,
    PipelineBound,
    pipelined,
)
from stagec.searches.explore.reasons import limits, reason
from stagec.searches.explore.space import Space
from stagec.searches.jobs import Evaluated, Probes, work
from stagec.searches.merge_messages import merge_messages
from stagec.searches.probes import Asked, Probe, probe, shared_state_probe, state_probe, work_probe
from stagec.searches.question import questions
from stagec.searches.run import Answer, Question, search
from stagec.searches.space import KNOBS, JobList, default_space, list_jobs
from stagec.searches.table import as_json, command_of
from stagec.searches.tried import changes_text, flags_to_try
from stagec.support.diagnostics import DiagnosticError
from tests.support import EXHAUSTIVE, LONG, examples, stagec, tries
from tests.unit.test_memory_page import BROWSER, BROWSER_FLAGS, ERRORS

JOB = """
model = "llama3-8b"
[sizes]
B = 16
S = 1024
L = 4
[strategy]
tp = 16
dp = 1
sp = true
moment_dtype = "bf16"
[machine]
name = "h100-sxm"
"""

SMALL = (
    *("search", "llama3-8b", "--ranks", "8", "--machine", "h100-sxm", "--no-cache"),
    *("--set", "B=16,S=1024,L=4", "--tp", "1,2", "--pp", "1,2", "--zero", "0,3", "--cp", "1"),
    *("--recompute", "none", "--microbatch-size", "1,2", "--chunks", "0", "--jobs", "1"),
    "--no-levers",
)

#: Small spaces: model, sizes, ranks, machine, and what varies beside the usual.
SPACES: tuple[tuple[str, str, int, str, Mapping[str, tuple[Any, ...]]], ...] = (
    ("llama3-8b", "B=16,S=2048,L=4", 8, "h100-sxm", {}),
    ("llama3-8b", "B=32,S=2048,L=9", 16, "a100-80g", {"pp": (2, 4)}),
    ("llama3-8b", "B=16,S=4096,L=6", 8, "b200", {"cp": (1, 2)}),
    ("llama3-70b", "B=16,S=2048,L=4", 16, "h100-sxm", {"tp": (4, 8)}),
    ("llama3-70b", "B=32,S=4096,L=8", 16, "h200-sxm", {"schedule": ("zb-h1", "gpipe")}),
    ("gpt-1.7b", "B=32,S=1024,L=6", 8, "a100-80g", {"recompute": ("selective", "full")}),
    ("gpt3-175b", "B=16,S=1024,L=4", 16, "a100-80g", {"tp": (8,), "sp": (True, False)}),
    ("mixtral-8x7b", "B=16,S=1024,L=4", 8, "h100-sxm", {"ep": (1, 2, 4)}),
    ("mixtral-8x7b", "B=16,S=1024,L=6", 16, "h100-sxm", {"ep": (4,), "tp": (2,), "etp": (0, 1)}),
    ("qwen3-30b-a3b", "B=16,S=1024,L=4", 8, "h100-sxm", {"ep": (2, 8), "zero": (1, 2)}),
    ("llama3-8b", "B=32,S=1024,L=8", 8, "h100-sxm", {"schedule": ("zbv", "dualpipe"), "pp": (2,)}),
    ("llama3-8b", "B=16,S=1024,L=5", 8, "h100-sxm", {"offload": ("", "activations")}),
    ("llama3-8b", "B=16,S=1024,L=4", 8, "h100-sxm", {"fusion": ("none", "elementwise")}),
    ("llama3-8b", "B=16,S=1024,L=4", 8, "h100-sxm", {"fp8": ("none", "hybrid")}),
    ("llama3-8b", "B=16,S=1024,L=4", 16, "a100-80g", {"reshard_after_forward": ("never", "last")}),
    ("llama3-8b", "B=16,S=8192,L=4", 16, "h100-sxm", {"cp": (2, 4), "cp_mode": ("all-gather",)}),
    (
        *("llama3-8b", "B=16,S=8192,L=4", 16, "h100-sxm"),
        {"cp": (1, 2), "cp_mode": ("ring", "ulysses"), "tp": (2,)},
    ),
    (
        *("llama3-8b", "B=16,S=2048,L=4", 16, "h100-sxm"),
        {"mesh_order": ("", "tp,dp", "dp,pp"), "tp": (2,), "cp": (1, 2)},
    ),
    ("llama2-7b", "B=16,S=1024,L=8", 8, "a100-80g", {"recompute_layers": (0, 2)}),
    ("llama3-8b", "B=16,S=1024,L=7", 8, "h100-sxm", {"schedule": ("looped-bfs",), "pp": (2,)}),
    ("llama3-8b", "B=16,S=1024,L=4", 8, "h100-sxm", {"dp_shard": (2, 4), "zero": (1, 3)}),
    (
        *("llama3-8b", "B=64,S=1024,L=8", 16, "h100-sxm"),
        {"grad_reduction": ("each", "once", "staged"), "zero": (3,), "pp": (1, 2)},
    ),
    (
        *("llama3-8b", "B=16,S=2048,L=8", 8, "h100-sxm"),
        {"grad_dtype": ("f32", "bf16"), "zero": (2,), "pp": (1,), "recompute": ("none",)},
    ),
    ("gpt-3.6b", "B=32,S=1024,L=4", 16, "a100-80g", {"scatter_gather": (False, True), "pp": (2,)}),
    ("deepseek-v2", "B=16,S=1024,L=4", 8, "h100-sxm", {"ep": (8,), "zero": (1, 3)}),
    ("gemma-3-4b", "B=32,S=1024", 8, "h200", {"pp": (1, 2, 4), "zero": (0, 1, 3)}),
    ("deepseek-v2-lite", "B=64,S=1024", 16, "b200", {"pp": (1, 3), "ep": (1, 4), "zero": (0, 2)}),
)
USUAL: Mapping[str, tuple[Any, ...]] = {
    "tp": (1, 2),
    "pp": (1, 2),
    "cp": (1,),
    "sp": (True,),
    "zero": (0, 3),
    "schedule": ("1f1b", "interleaved"),
    "chunks": (0,),
    "microbatch_size": (1, 2),
    "recompute": ("none", "full"),
}


#: Options of the command that are not given.
NOT_GIVEN = (
    *("space", "seed_from", "limit", "pareto", "exhaustive", "batch", "price", "objective"),
    *("serve", *STEP, *CACHES, "ttft", "tpot", "part", "draft"),
    *("accepted", "acceptance"),
)


def asked(model: str, sizes: str, ranks: int, machine: str, **more: Any) -> Question:
    """A question of a space that is given."""
    values = {n: int(v) for n, v in (part.split("=") for part in sizes.split(","))}
    usual: dict[str, Any] = dict.fromkeys((*KNOBS, *NOT_GIVEN), None)
    knobs = {**USUAL, **{n: v for n, v in more.items() if n in KNOBS}}
    rest = {n: v for n, v in more.items() if n not in KNOBS}
    about = {
        "model": model,
        "sizes": values,
        "ranks": (ranks,),
        "machine": (machine_of(machine, Session()),),
    }
    fixed = {"objective": "time", "top": 3, "overlap": True, "used_ranks": None, "stack": "ideal"}
    return questions({**usual, **knobs, **about, **fixed, **rest}, Session())[0]


def answer_of(question: Question) -> Answer:
    """The answer, found in this process."""
    return search(question, lambda units: ((i, work(u)) for i, u in enumerate(units)), 4, _quiet)


def _quiet(text: str) -> None:
    del text


def _few(values: Mapping[str, tuple[Any, ...]], at: random.Random, most: int) -> dict[str, Any]:
    """Some of these values of each flag, so that there are at most so many points."""
    left = {n: list(v) for n, v in values.items()}
    while prod(map(len, left.values())) > most:
        name = at.choice([n for n, v in left.items() if len(v) > 1])
        left[name].remove(at.choice(left[name]))
    return {n: tuple(v) for n, v in left.items()}


def _is_answered(question: Question) -> Answer:
    """The top K by bounds are those of evaluating every point, and no bound is above its value,
    as good as bounds get."""
    actual, every = answer_of(question), answer_of(replace(question, exhaustive=True))
    settled = _settled(actual)
    fits = [
        (v.seconds, v.peak)
        for v in every.known.values()
        if isinstance(v, Evaluated) and v.seconds is not None
    ]
    distinct = list(dict.fromkeys(f.value for f in actual.best))  # jobs that are the same are one
    values = list(dict.fromkeys(sorted(value for value, _ in fits)))
    assert distinct == values[: len(distinct)]
    assert len(actual.best) == question.wanted or len(distinct) == len(values)
    assert {(f.value, f.what.peak) for f in actual.best} <= set(fits)
    assert actual.evaluated <= every.evaluated
    for number, value in every.known.items():
        if isinstance(value, Evaluated):
            seconds, kept = settled
            assert kept[number] <= value.peak
            assert value.seconds is None or seconds[number] <= value.seconds
    return actual


def _settled(actual: Answer) -> tuple[Floats, Floats]:
    """The best bounds of all points."""
    question, none = actual.question, np.zeros(0)
    if not len(actual.job_list.jobs):
        return none, none
    probes = Probes(lambda units: ((i, work(u)) for i, u in enumerate(units)), _quiet)
    about = actual.job_list.jobs, question.layers, question.sizes, question.machine, probes
    bounds = JobBounds(*about, overlap=question.overlap)
    bounds.settle(range(len(actual.job_list.jobs)))
    return bounds.seconds, bounds.memory


CASES = [
    pytest.param(i, id=f"{s[0]}-{i}", marks=EXHAUSTIVE if i else ()) for i, s in enumerate(SPACES)
]


@LONG
@pytest.mark.parametrize("number", CASES)
def test_the_best_are_those_of_all_points(number: int) -> None:
    """Of small spaces, each with something of its own beside what is usual."""
    model, sizes, ranks, machine, more = SPACES[number]
    at = random.Random(number)
    knobs = {**_few(USUAL, at, max(2, tries(30) // prod(map(len, more.values())))), **more}
    _is_answered(asked(model, sizes, ranks, machine, **knobs))


@LONG
@pytest.mark.distinct
def test_models_whose_layers_are_no_symbol_have_bounds_too() -> None:
    """T5 has two stacks, and neither is the number L of layers that are many."""
    knobs = {"pp": (1, 2), "tp": (1,), "zero": (0, 1), "schedule": ("1f1b",)}
    question = asked("t5-base", "B=64,S=256", 8, "tpu-v5p", **knobs, recompute=("none",))
    actual = _is_answered(replace(question, wanted=1))
    seconds, kept = _settled(actual)
    assert actual.evaluated < len(seconds)
    assert seconds.min() > 0
    assert kept.min() > 0


#: What random spaces are made of: models with their sizes, machines, and values of flags.
MODELS = (
    ("llama3-8b", "S=1024,L={},B=16"),
    ("gpt-1.7b", "S=1024,L={},B=16"),
    ("mixtral-8x7b", "S=1024,L={},B=16"),
    ("deepseek-v2", "S=1024,L={},B=16"),
)
MACHINES = ("h100-sxm", "a100-80g", "b200", "a100-40g")
WIDE: Mapping[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "cp": (1, 2),
    "sp": (True, False),
    "ep": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "schedule": ("1f1b", "interleaved", "gpipe", "zb-h1", "zbv"),
    "chunks": (0, 2),
    "microbatch_size": (1, 2, 4),
    "etp": (0, 1),
    "recompute": ("none", "selective", "full"),
    "fp8": ("none", "hybrid"),
    "offload": ("", "optimizer"),
    "fusion": ("none", "elementwise"),
}


def _random_question(at: random.Random) -> Question:
    """A question of a few legal points."""
    model, sizes = at.choice(MODELS)
    experts = model in ("mixtral-8x7b", "deepseek-v2")
    knobs = {n: v for n, v in WIDE.items() if experts or n not in ("ep", "etp")}
    text, machine = sizes.format(at.choice((4, 5, 8))), at.choice(MACHINES)
    while True:
        question = asked(model, text, 8, machine, **_few(knobs, at, 48))
        base = question.base.changed(ranks=8)
        count = len(list_jobs(question.space, base, question.sizes, question.layers.total).jobs)
        if 5 <= count <= 14:
            return question


@pytest.mark.long
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=EXHAUSTIVE if n else ()) for n in range(12)]
)
def test_any_space_is_answered(seed: int, tmp_path: Path) -> None:
    """And what is proposed compiles, fits as predicted, and passes `check`."""
    actual = _is_answered(_random_question(random.Random(seed)))
    if not actual.best:
        return
    first = actual.best[0]
    words = shlex.split(command_of(actual.job(first), 1))
    job = words[2 : words.index("-o")]
    kept = json.loads(stagec("memory", *job, "--json").out)
    assert max(c["peak"] for c in kept["classes"]) == first.what.peak
    folder = tmp_path / "traces"
    assert stagec("compile", *job, "-o", folder, "--quiet").code == 0
    assert stagec("check", folder).code == 0


@LONG
@pytest.mark.distinct
@pytest.mark.parametrize(
    ("model", "sizes", "ranks", "more", "share"),
    [
        ("qwen3-30b-a3b", "B=256,S=4096,L=8", 32, {"ep": (16,), "tp": (1,), "zero": (0,)}, 0.95),
        ("llama3-8b", "B=512,S=256,L=8", 64, {"tp": (4,), "zero": (2,)}, 0.4),
        ("llama3-8b", "B=64,S=2048,L=8", 16, {"tp": (2,), "zero": (3,), "pp": (1,)}, 0.99),
        (
            *("llama3-8b", "B=128,S=4096,L=8", 16),
            {"tp": (2,), "zero": (0,), "pp": (4,), "schedule": ("zb-h1",)},
            0.955,
        ),
    ],
    ids=[
        *("exchanges of experts", "reductions of each microbatch"),
        *("the next microbatch waits for reductions", "split backwards"),
    ],
)
def test_bounds_of_steps_that_exchange_are_close(
    model: str, sizes: str, ranks: int, more: Mapping[str, tuple[Any, ...]], share: float
) -> None:
    one = {"pp": (2,), "schedule": ("1f1b",), "microbatch_size": (1,), "recompute": ("none",)}
    actual = answer_of(asked(model, sizes, ranks, "h100-sxm", **{**one, **more}))
    (step,) = (v.seconds for v in actual.known.values() if isinstance(v, Evaluated))
    assert step is not None
    assert share * step <= _settled(actual)[0][0] <= step


@LONG
@pytest.mark.distinct
@pytest.mark.parametrize(
    ("model", "more", "share"),
    [
        ("mixtral-8x7b", {"ep": (2,), "pp": (4,), "schedule": ("interleaved",)}, 0.97),
        (
            "gpt-1.7b",
            {"pp": (2,), "reshard_after_forward": ("never",), "recompute": ("none",)},
            0.6,
        ),
    ],
    ids=["each gathers its layers", "parameters stay gathered"],
)
def test_bounds_of_what_stages_hold_are_close(
    model: str, more: Mapping[str, tuple[Any, ...]], share: float
) -> None:
    """Of parameters that stay gathered there is one copy, however many microbatches are kept."""
    one = {"tp": (1,), "zero": (3,), "microbatch_size": (1,), "recompute": ("full",)}
    one |= {"schedule": ("1f1b",)}
    actual = answer_of(asked(model, "B=32,S=1024,L=16", 16, "h100-sxm", **{**one, **more}))
    (peak,) = (v.peak for v in actual.known.values() if isinstance(v, Evaluated))
    assert share * peak <= _settled(actual)[1][0] <= peak


@LONG
def test_what_no_rank_shares_is_known_without_probes_of_state() -> None:
    """All of parameters, gradients and optimizer without ZeRO, with it less and less."""
    knobs = {"tp": (1,), "pp": (1,), "microbatch_size": (1,), "recompute": ("full",)}
    question = asked("gpt-1.7b", "B=16,S=1024,L=8", 8, "h100-sxm", zero=(0, 1, 2, 3), **knobs)
    jobs = list_jobs(question.space, question.base.changed(ranks=8), question.sizes).jobs
    about = jobs, question.layers, question.sizes, question.machine
    bounds = JobBounds(
        *about, Probes(lambda units: ((i, work(u)) for i, u in enumerate(units)), _quiet)
    )
    first = bounds.memory.copy()
    bounds.refine(range(len(jobs)))
    assert [jobs[n].zero for n in range(4)] == [0, 1, 2, 3]
    assert first[0] == bounds.memory[0]
    whole, state = first[0] - first[3], first[0] - first[1]
    assert state == pytest.approx(whole * 12 / 18)  # bf16, f32, and f32 three times
    assert first[2] - first[3] == pytest.approx(whole * 2 / 18)
    assert (first[1:] < bounds.memory[1:]).all()


def test_a_backward_begins_while_all_is_kept() -> None:
    """Of two stages with two chunks each, the second rank (F0 F0 F1 B1 F1 B1 F0 B0 ..) keeps the
    layers of chunk 0 of three microbatches before it begins the backward of the first."""
    layers = Layers(1, 6)
    plain = rank_layers(layers, "1f1b", 2, 4, 0, (4, 3))
    assert [(r.own, r.kept, r.begins) for r in plain] == [(3, 6, 3), (3, 3, 3)]
    looped = rank_layers(layers, "interleaved", 2, 4, 2, (1, 2, 3, 1))
    assert [(r.own, r.kept, r.begins) for r in looped] == [(3, 6, 3), (3, 6, 2)]
    assert all(r.begins == 0 for r in rank_layers(layers, "zb-h1", 2, 4, 0, (4, 3)))


@given(st.integers(0, 10**6))
@examples(60)
def test_branch_and_bound_finds_what_all_points_have(seed: int) -> None:
    """For any values and any bounds that are not above them, ties among them, which a second value
    ranks."""
    at = random.Random(seed)
    count, wanted = at.randint(1, 40), at.randint(1, 6)
    values = {i: at.choice([None, *range(10)]) for i in range(count)}
    bounds = {i: (at.randint(0, 9) if v is None else v * at.random()) for i, v in values.items()}
    better = {i: (v if v is not None else 9) - 0.5 for i, v in values.items() if at.random() < 0.5}
    seconds = {i: at.randint(0, 2) for i in values}
    actual: Search[int] = Search(bounds, wanted, seconds.__getitem__)
    tried: list[int] = []

    def evaluate(numbers: Sequence[int]) -> list[tuple[int, float | None, int]]:
        tried.extend(numbers)
        return [(n, values[n], n) for n in numbers]

    def refine(numbers: Sequence[int]) -> dict[int, float | None]:
        """Once each; what has no value may be left out."""
        once = {n: better.pop(n) for n in numbers if n in better}
        none = {n for n in once if values[n] is None and at.random() < 0.5}
        return {n: None if n in none else max(b, bounds[n]) for n, b in once.items()}

    list(actual.run(refine, evaluate, at.randint(1, 4)))
    every = sorted(Ranked(n, v, None, seconds[n]).order for n, v in values.items() if v is not None)
    assert [f.order for f in actual.best] == every[:wanted]
    assert len(tried) == len(set(tried))


@given(st.integers(0, 10**6))
@examples(60)
def test_a_front_is_what_no_point_beats(seed: int) -> None:
    at = random.Random(seed)
    values = {i: (at.randint(0, 8), at.randint(0, 8)) for i in range(at.randint(1, 30))}
    bounds = {i: (a * at.random(), b * at.random()) for i, (a, b) in values.items()}
    front: Front[None] = Front(bounds)
    list(front.run(lambda ns: [(n, values[n], None) for n in ns], at.randint(1, 4)))
    kept = {v for v in values.values() if not any(beats(w, v) for w in values.values())}
    assert {values[f.number] for f in front.best} == kept


@given(
    st.sampled_from([n for n in SCHEDULES if not n.startswith("dualpipe")]),
    st.integers(2, 6),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 17),
)
@examples(100)
def test_the_bound_of_a_pipeline_is_that_of_its_schedule(
    name: str, stages: int, times: int, forward: int, weight: int
) -> None:
    """Never above a replay of its actions, whatever part of backward is that of weights; of equal
    stages it is the makespan, of ZB-H1 where the parts are equal."""
    schedule = SCHEDULES[name]
    count, chunks = stages * times, 1 if name in ("1f1b", "gpipe", "zb-h1") else 2
    weight = min(weight, 2 * forward - 1)
    costs = Costs(forward, 2 * forward, weight)
    span = float(run_schedule(schedule, stages, count, chunks, costs).timeline.makespan)
    layers = stages * chunks

    def of(*numbers: float) -> list[Any]:
        return [np.array([n], dtype=np.float64) for n in numbers]

    shape = StepLayout(
        *of(*layer_layout(Layers(0, layers), name, stages, count, chunks, (1,) * layers))
    )
    each = 3 * forward / chunks
    bound = time_bound(Work(*of(each, *[0] * 7, forward / chunks)), shape)[0]
    assert bound <= span
    if name in ("1f1b", "interleaved") or (name == "zb-h1" and weight == forward):
        assert bound == pytest.approx(span, rel=1e-3)
    if name not in ("1f1b", "interleaved", "gpipe", "looped-bfs"):
        return
    times_of = ActionTimes((PhaseTimes(forward / chunks), PhaseTimes(2 * forward / chunks)))
    piped = pipelined(Layers(0, layers), PipelineBound(name, stages, count, chunks), times_of)
    assert piped == pytest.approx(span)


def test_what_an_action_leaves_delays_the_next() -> None:
    """The last of two stages runs F B F B: a wait between B and F counts once, one at a border of
    the model for each message of the way there and back, and a tail at the end; what is split or
    runs both ways at once is not bounded. Between F and B there is the head, so a wait of actions
    that end and begin with layers does not count."""
    layers, shape = Layers(0, 2), PipelineBound("1f1b", 2, 2, 1)
    phases = PhaseTimes(1.0), PhaseTimes(2.0)
    plain = pipelined(layers, shape, ActionTimes(phases))
    assert plain == 1 + 2 * 3 + 2
    waits = Pair(), Pair(forward=0.25)
    assert pipelined(layers, shape, ActionTimes(phases, inner=waits)) == plain + 0.25
    beside_head = Pair(backward=0.25), Pair()
    assert pipelined(layers, shape, ActionTimes(phases, inner=beside_head)) == plain
    assert pipelined(layers, shape, ActionTimes(phases, beside_head)) == plain + 0.5
    assert pipelined(layers, shape, ActionTimes(phases), Pair(0.5, 0.125)) == plain + 0.625
    assert pipelined(layers, shape, ActionTimes(phases, tail=0.5)) == plain + 0.5
    assert pipelined(layers, shape, ActionTimes(phases), again=0.5) == plain - 0.5
    for name in ("zb-h1", "zbv", "dualpipe"):
        assert pipelined(layers, PipelineBound(name, 2, 4, 0), ActionTimes(phases)) == 0
    assert pipelined(layers, shape, ActionTimes((phases[0], None))) == 0


def test_the_default_space_depends_on_the_model() -> None:
    machine = machine_of("h100-sxm", Session())
    dense = default_space({"S": 8192}, 32, 64, machine).knobs
    assert "ep" not in dense
    assert max(default_space({"S": 131072}, 32, 64, machine).knobs["cp"]) > max(dense["cp"])
    assert "ep" in default_space({"S": 4096, "E": 64}, 32, 64, machine).knobs
    gemma = asked("gemma-3-4b", "B=64", 64, "h200", pp=None)  # its 34 layers are of two kinds
    assert gemma.space.knobs["pp"] == (1, 2, 4, 8, 16)


def _jobs(actual: JobList) -> list[JobOptions]:
    return [actual.jobs[n] for n in range(len(actual.jobs))]


def test_what_is_listed_is_legal_and_stands_once() -> None:
    """Every point is a job, refused, or the same job as another; no job stands twice."""
    question = asked("llama3-8b", "B=16,S=1024,L=4", 8, "h100-sxm", sp=(True, False))
    base = question.base.changed(ranks=8)
    actual = list_jobs(question.space, base, question.sizes, question.layers.total)
    jobs = _jobs(actual)
    assert actual.points == question.space.count
    assert len(jobs) + sum(actual.refused.values()) + actual.same == actual.points
    assert len({repr(vars(job)) for job in jobs}) == len(jobs)
    assert all(job.tp > 1 for job in jobs if job.sp)
    for job in jobs[::7]:
        checked(job, question.sizes, question.layers.total)


def test_experts_over_some_ranks_of_tp_are_not_searched() -> None:
    """They stay out beside those that are split over all of these ranks, or whole."""
    knobs = {"tp": (1, 4), "ep": (1, 2, 4), "pp": (2,), "etp": (0,), "sp": (False,)}
    question = asked("mixtral-8x7b", "B=16,S=1024,L=4", 8, "h100-sxm", **knobs)
    base, total = question.base.changed(ranks=8), question.layers.total
    actual = list_jobs(question.space, base, question.sizes, total)
    assert {(job.tp, job.ep) for job in _jobs(actual)} == {(1, 1), (1, 2), (1, 4), (4, 1), (4, 4)}
    assert actual.refused["experts over some ranks of --tp are not searched"] > 0
    (job,) = [job for job in _jobs(actual) if (job.tp, job.ep) == (4, 4)][:1]
    parts = job.changed(ep=2, sizes={"B": 16})
    checked(parts, question.sizes, total)
    assert work_probe(parts, question.sizes).dp == 1


def test_a_flag_without_its_axis_makes_no_second_point() -> None:
    """The mode of cp where there is no cp, an order of axes of which one is not there, or that is
    the order anyway."""
    about = "llama3-8b", "B=16,S=1024,L=4", 8, "h100-sxm"
    modes, orders = ("ring", "ulysses", "all-gather"), ("", "dp,cp", "cp,dp", "dp,pp")
    plain, wide = (
        list_jobs(q.space, q.base.changed(ranks=8), q.sizes, q.layers.total)
        for q in (
            asked(*about, cp=(1, 2), cp_mode=("ring",)),
            asked(*about, cp=(1, 2), cp_mode=modes),
        )
    )
    count = {n: sum(job.cp == n for job in _jobs(plain)) for n in (1, 2)}
    assert min(count.values()) > 0
    assert len(wide.jobs) == count[1] + 3 * count[2]
    assert wide.points == 3 * plain.points
    assert len(wide.jobs) + sum(wide.refused.values()) + wide.same == wide.points
    mixed = asked(*about, cp=(1, 2), mesh_order=orders, pp=(1,))
    actual = list_jobs(mixed.space, mixed.base.changed(ranks=8), mixed.sizes, mixed.layers.total)
    meshes = [tuple(mesh_axes(job).items()) for job in _jobs(actual)]
    alone = asked(*about, cp=(1, 2), pp=(1,))
    usual = list_jobs(alone.space, alone.base.changed(ranks=8), alone.sizes, alone.layers.total)
    twice = sum(job.cp > 1 and job.dp > 1 for job in _jobs(usual))
    assert len(actual.jobs) == len(usual.jobs) + twice > len(usual.jobs)
    assert len({*meshes}) == len(
        {tuple(mesh_axes(job).items()) for job in _jobs(usual)} | {*meshes}
    )


def test_options_are_changed_by_name() -> None:
    options = JobOptions("llama3-8b", tp=2)
    changed = options.changed(pp=4)
    assert changed == JobOptions("llama3-8b", tp=2, pp=4)
    assert options == JobOptions("llama3-8b", tp=2)
    with pytest.raises(TypeError, match="expected names of options, found pq"):
        options.changed(pq=4)


@pytest.mark.parametrize(("objective", "tries"), [("time", False), ("memory", True)])
def test_what_only_spares_memory_is_not_tried_for_time(objective: str, tries: bool) -> None:
    question = replace(asked("llama3-8b", "B=8,S=1024,L=4", 8, "h100-sxm"), objective=objective)
    job = question.base.changed(ranks=8, dp=8)
    answer: Any = SimpleNamespace(question=question, best=[0], job={0: job}.__getitem__)
    names = {flag.name for flag in flags_to_try(answer)}
    assert ("offload" in names) == tries
    assert "fusion" in names


def test_changes_name_what_the_job_has() -> None:
    """Without sequence parallelism no product has a gather to overlap with."""
    values = {"tp_gathers": "in_steps", "sp": False, "microbatch_size": 2}
    job: Any = SimpleNamespace(tp_gathers="whole", sp=False)
    assert changes_text(values, job) == "sp off, microbatch-size 2"


@pytest.mark.long
def test_what_helps_beyond_the_space_is_reported_with_its_command() -> None:
    """What is reported takes what `time` says; a search that has the flags finds the same; a flag
    that the question gives is left alone."""
    few = ("--pp", "1", "--zero", "3", "--tp", "1", "--microbatch-size", "1", "--top", "1")
    fixed = ("--fusion", "none", "--dp-shard", "1", "--schedule", "1f1b", "--sp", "off")
    actual = json.loads(stagec(*SMALL, *few, *fixed, "--levers", "--json").out)
    best, reported = actual["best"][0]["step_seconds"], actual["tried"]
    assert reported["count"] > len(reported["better"]) > 0
    changes = {row["change"]: row for row in reported["better"]}
    assert "reshard-after-forward never" in changes
    assert not any(change.startswith(("fusion", "zero", "tp")) for change in changes)
    row = reported["better"][0]
    words = shlex.split(row["command"])
    job = words[2 : words.index("-o")]
    timed = json.loads(stagec("time", *job, "--machine", "h100-sxm", "--json").out)
    assert timed["step_seconds"] == row["step_seconds"] < best
    assert row["more"] == pytest.approx(row["step_seconds"] / best - 1)
    assert row["step_seconds"] == min(r["step_seconds"] for r in reported["better"])
    assert all(r["more"] <= -0.001 for r in reported["better"]), "no change that a table rounds off"
    wider = ("--reshard-after-forward", "always,never")
    again = json.loads(stagec(*SMALL, *few, *fixed, *wider, "--json").out)
    assert "tried" not in again
    mine = changes["reshard-after-forward never"]
    assert again["best"][0]["step_seconds"] == mine["step_seconds"]
    assert again["best"][0]["strategy"] == mine["strategy"]


@LONG
def test_rules_that_remember_refuse_what_rules_refuse() -> None:
    """As many points as without remembering, for the same reasons."""
    knobs = {n: v for n, v in WIDE.items() if n not in ("fp8", "fusion", "offload", "recompute")}
    knobs |= {"zero": (1,), "tp": (1, 4), "microbatch_size": (1, 4)}
    question = asked("mixtral-8x7b", "B=16,S=1024,L=5", 8, "h100-sxm", **knobs)
    base, sizes, total = question.base.changed(ranks=8), question.sizes, question.layers.total
    actual, refused = list_jobs(question.space, base, sizes, total), 0
    for point in question.space:
        given = {n: v for n, v in point.items() if n != "microbatch_size"}
        try:
            job = complete(base.changed(**given))
            count, rest = divmod(16, job.dp * point["microbatch_size"])
            checked(job.changed(microbatches=count), sizes, total)
            refused += bool(rest) or expert_parts(partial(getattr, job)) > 1
        except DiagnosticError:
            refused += 1
    assert refused == sum(actual.refused.values()) > 0


def test_answers_go_on_from_what_calls_have_in_common() -> None:
    """What is asked for the first time there as well."""
    memo = MemoByReads(lambda v: v["a"] and v["a"] + v["b"])
    assert memo.reads_of({"a": 0}).answer == []  # nothing was asked
    assert (memo({"a": 0, "b": 7}), memo({"a": 1, "b": 7})) == (0, 8)
    assert memo.reads_of({"a": 0}).answer == [0]
    start = memo.reads_of({"a": 1})
    assert (start.name, start.answer) == ("b", [])
    assert [memo({"a": 1, "b": b}, start) for b in (7, 9, 9)] == [8, 10, 10]
    assert memo.reads_of({"a": 2}).name == "a"  # a value that was not seen yet


@LONG
def test_json_has_what_scripts_rely_on(tmp_path: Path) -> None:
    """And a command that is proposed compiles, to traces that hold, with the memory predicted."""
    few = ("--zero", "0", "--microbatch-size", "1")
    actual = json.loads(stagec(*SMALL, *few, "--json", "--top", "2").out)
    assert {"points", "legal", "evaluated", "seconds", "best"} <= actual.keys()
    assert len(actual["best"]) == 2
    first = actual["best"][0]
    names = ("command", "strategy", "step_seconds", "memory_peak", "mfu", "limits", "reason")
    assert all(first[n] is not None for n in names)
    assert first["step_seconds"] <= actual["best"][1]["step_seconds"]
    words = shlex.split(first["command"])
    assert words[:2] == ["stagec", "compile"]
    job = words[2 : words.index("-o")]
    timed = json.loads(stagec("time", *job, "--machine", "h100-sxm", "--json").out)
    assert timed["step_seconds"] == first["step_seconds"]
    kept = json.loads(stagec("memory", *job, "--json").out)
    fullest = max(kept["classes"], key=lambda each: each["peak"])
    assert fullest["peak"] == first["memory_peak"]
    assert fullest["categories"] == first["memory"]
    folder = tmp_path / "traces"
    assert stagec("compile", *job, "-o", folder, "--quiet").code == 0
    assert stagec("check", folder).code == 0


@LONG
def test_neighbours_are_reported_without_being_evaluated() -> None:
    """Their bounds are below what they take; what is the same job is reported as such."""
    few = ("--pp", "1", "--zero", "3", "--tp", "1,2,4", "--top", "1")
    more = ("--recompute", "none,selective,full", *few, "--json")
    reported, exact = (
        {row["change"]: row for row in json.loads(stagec(*SMALL, *more, *given).out)["neighbours"]}
        for given in ((), ("--neighbours",))
    )
    assert reported.keys() == exact.keys()
    assert reported["recompute selective"]["note"] == "the same job"
    for change, row in reported.items():
        assert row["more"] <= exact[change]["more"], change
        assert not row["exact"] or row["more"] == exact[change]["more"], change


def test_reasons_add_up() -> None:
    """Reported parts are differences of the two steps, in percent of the better one."""
    best = {"matrix products": 8.0, "bubble": 2.0}
    mine = {"matrix products": 8.0, "bubble": 2.5, "exposed tp all_gather": 1.0}
    reported = reason(mine, best, {"tp": "infiniband"}, {})
    assert reported.startswith("+1.5 s (+15.0%)")
    assert "exposed tp all_gather over infiniband +10.0%" in reported
    assert "bubble +5.0%" in reported
    assert limits(best, {}) == "computation 80%, bubble 20%"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (1234.0, "+1,234 s"),
        (1.5, "+1.5 s"),
        (0.9999, "+1 s"),
        (0.109, "+109 ms"),
        (-0.00207, "-2.07 ms"),
        (0.000489, "+489 us"),
        (0.0, "+0 us"),
    ],
)
def test_differences_have_the_unit_of_their_size(more: float, text: str) -> None:
    best = {"bubble": 10.0}
    assert reason({"bubble": 10.0 + more}, best, {}, {}).startswith(f"{text} (")


def test_files_of_one_name_are_two_machines(tmp_path: Path) -> None:
    """Rows name the file, and each file has its price."""
    prices: dict[str, float] = {}
    for base, price in (("h100-sxm", 2.5), ("b200", 6.0)):
        file = tmp_path / base / "mine.toml"
        file.parent.mkdir()
        file.write_text(f'base = "{base}"\n')
        prices[str(file)] = price
    words = ["search", "llama3-8b", "--set", "L=2", "--batch", "2", "--ranks", "2", "--tp", "1"]
    words += ["--pp", "1", "--cp", "1", "--no-cache", "--json", "--machine", ",".join(prices)]
    data = json.loads(stagec(*words, "--price", ",".join(map(str, prices.values()))).out)
    assert [row["machine"] for row in data["searches"]] == [*prices]
    for row in (*data["best"], *(each["best"] for each in data["searches"])):
        hours = row["step_seconds"] * row["ranks"] / 3600
        assert row["cost"] == pytest.approx(hours * prices[row["machine"]])


def test_a_space_as_text(tmp_path: Path) -> None:
    """What --print-space prints can be given as --space, and is the same space."""
    printed = stagec(*SMALL, "--print-space").out
    file = tmp_path / "space.stg"
    file.write_text(printed)
    again = stagec(*SMALL[:9], "--space", file, "--print-space")
    assert again.out == printed
    file.write_text('stg.space @s {\n  stg.vary[tpp, "1,2"]\n}\n')
    wrong = stagec(*SMALL[:9], "--space", file)
    assert wrong.code == 1
    assert f"{file}:2:3: error: 'tpp' is not a flag that can vary" in wrong.err
    assert "did you mean 'tp'" in wrong.err


@pytest.mark.parametrize(
    ("more", "reported"),
    [
        (("--set", "B=16", "--machine", "h100-sxm"), "the number of ranks is not given"),
        (("--set", "B=16", "--ranks", "8"), "no machine is given"),
        (
            (
                *("--set", "B=16", "--ranks", "8", "--machine", "h100-sxm"),
                *("--microbatches", "1..1000000", "--fsdp-prefetch", "1..64", "--tp", "1..1000000"),
                *("--pp", "1..1000000", "--recompute-every", "1..1000000"),
            ),
            "points, which take about",
        ),
        (
            (*("--set", "B=16", "--ranks", "8"), *("--machine", "h100-sxm", "--schedule", "1fb1")),
            "no schedule '1fb1'",
        ),
    ],
)
def test_bad_questions(more: tuple[str, ...], reported: str) -> None:
    actual = stagec("search", "llama3-8b", *more)
    assert actual.code == 1
    assert reported in actual.err


def test_what_rules_refuse_is_reported_with_its_numbers() -> None:
    """One line for a rule; where a number is the same in all its messages, it is known."""
    messages = {
        "1f1b has 1 chunk per rank, found 4": 2,
        "1f1b has 1 chunk per rank, found 8": 3,
        "32 layers are too few for 64 parts (64 stages of 1)": 1,
        "no experts": 5,
    }
    parts = {f"{n:,} rows over 8 ranks": 1 for n in (12, 9, 1000, 30)}
    assert merge_messages(messages | parts) == {
        "1f1b has 1 chunk per rank, found 4 or 8": 5,
        "32 layers are too few for 64 parts (64 stages of 1)": 1,
        "no experts": 5,
        "9 to 1,000 rows over 8 ranks": 4,
    }


def test_a_text_without_a_space_says_how_one_looks(tmp_path: Path) -> None:
    file = tmp_path / "space.stg"
    for text, line in (("\n", "1:1: error: the text is empty"), ("stg.module @m {}", "has no")):
        file.write_text(text)
        reported = stagec(*SMALL, "--space", file)
        assert reported.code == 1
        assert line in reported.err
        assert (
            "write 'stg.space @s { stg.vary[tp, \"1..8\"] }'; --print-space prints" in reported.err
        )


def test_an_empty_space_is_reported() -> None:
    """Nothing is legal: three ranks over two tensor-parallel ones."""
    actual = stagec(*SMALL, "--tp", "3", "--ranks", "8")
    assert actual.code == 1
    assert "no strategy of the space can be compiled within the limits" in actual.err
    assert "--print-space prints the space" in actual.err


def test_a_text_that_does_not_compile_leads_to_the_whole_message(tmp_path: Path) -> None:
    """The counts have the beginning of what the compiler says."""
    file = tmp_path / "m.stg"
    file.write_text(
        "stg.module @m { stg.symbols[B, S = 8, D = 8, L = 2] stg.func @f(%x: bf16[B, S, D]) {\n"
        "%y = stg.repeat @layers[count = L, carry = 1] (%h = %x) {\n"
        "%w = stg.param : bf16[D, D]\nstg.yield() }\nstg.return(%y) } }",
        encoding="utf-8",
    )
    words = "--ranks", "2", "--batch", "2", "--tp", "1", "--pp", "1", "--cp", "1", "--jobs", "1"
    ran = stagec("search", file, "--machine", "h100", *words, "--no-cache")
    assert (ran.code, "refused by the compiler: 'stg.repeat' carries 1" in ran.out) == (1, True)
    assert "'stagec memory MODEL' prints the whole message" in ran.err


def test_what_does_not_fit_is_reported_with_what_is_nearest() -> None:
    words = (*SMALL, "--tp", "2", "--pp", "1", "--zero", "3", "--limit", "1GiB")
    actual = stagec(*words)
    assert actual.code == 1
    assert "error: no strategy of the space fits: '--dp 4 --tp 2 --sp --zero 3" in actual.err
    near = json.loads(stagec(*words, "--json").out)["nearest"]
    assert near["memory_at_least"] > near["room"] == 2**30
    assert not near["exact"], "no job was compiled"


def test_of_jobs_of_the_same_time_the_one_with_less_memory_is_better() -> None:
    """ZeRO 1 and 2 exchange the same for one microbatch."""
    words = ("search", "llama3.2-1b", "--ranks", "4", "--machine", "h100-sxm", "--no-cache")
    few = ("--set", "L=2,B=4", "--tp", "1", "--pp", "1", "--cp", "1", "--zero", "1,2")
    answer = stagec(*words, *few, "--recompute", "none", "--no-levers", "--jobs", "1", "--json")
    first, second = json.loads(answer.out)["best"]
    assert first["step_seconds"] == second["step_seconds"]
    assert first["memory_peak"] < second["memory_peak"]


def test_of_jobs_that_do_not_fit_the_smallest_is_named() -> None:
    """The smallest of those that were compiled, not one with a smaller bound."""
    words = (*SMALL, "--microbatch-size", "2", "--limit", "6GiB")
    assert "per rank, the least of those compiled, but" in stagec(*words).err
    answer = json.loads(stagec(*words, "--json").out)
    near, compiled = answer["nearest"], answer["evaluations"]
    assert near["exact"]
    assert near["memory_at_least"] == min(row["memory_peak"] for row in compiled)


def test_an_interrupt_before_anything_is_found_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not looked at is not said to be left out."""

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stagec.searches.run._Searching._first_bounds", stop)
    actual = stagec(*SMALL)
    assert actual.code == 130
    assert "interrupted before a strategy was found; " in actual.err
    assert "points are left" in actual.err


@pytest.mark.parametrize(
    ("place", "reported"),
    [
        ("run.list_jobs", "interrupted while the points were listed"),
        ("bounds.JobBounds.settle", "interrupted: 0 points may still be better"),
        ("tried.tried", "interrupted: 0 points may still be better"),
        ("sensitivity.neighbours", "interrupted: 0 points may still be better"),
    ],
)
def test_an_interrupt_before_or_behind_the_best_is_reported(
    place: str, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"stagec.searches.{place}", stop)
    few = ("--pp", "1", "--zero", "3", "--microbatch-size", "1")
    actual = stagec(*SMALL, *few, "--levers" if place.startswith("tried") else "--no-levers")
    assert reported in actual.out + actual.err
    assert actual.code == 130
    assert ("[1] stagec compile" in actual.out) == ("listed" not in reported)


def test_an_interrupt_of_a_second_question_keeps_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points of 16 ranks are being listed when it comes: the best of 8 ranks are reported."""
    asked: list[object] = []

    def once(*given: Any) -> JobList:
        asked.append(given)
        if len(asked) > 1:
            raise KeyboardInterrupt
        return list_jobs(*given)

    monkeypatch.setattr("stagec.searches.run.list_jobs", once)
    one = ("--tp", "2", "--pp", "1", "--cp", "1", "--zero", "0", "--recompute", "none")
    actual = stagec(*SMALL, "--ranks", "2,4", *one, "--microbatch-size", "1")
    assert actual.code == 130, actual.err
    assert "interrupted: 0 points may still be better" in actual.out
    assert "[1] stagec compile" in actual.out


@LONG
def test_an_answer_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same question is answered from the folder; another one is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    line = [*(w for w in SMALL if w != "--no-cache"), "--json", "--zero", "0", "--tp", "2"]
    first = json.loads(stagec(*line, "--pp", "1").out)
    again = json.loads(stagec(*line, "--pp", "1").out)
    assert "cached" not in first
    assert again == {**first, "cached": True}
    assert "cached" not in json.loads(stagec(*line, "--pp", "2").out)


def test_a_kept_answer_names_the_file_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two files with the same figures the second is not answered with the name of the first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["search", "llama3-8b", "--set", "L=2", "--batch", "2", "--ranks", "2", "--tp", "1"]
    words += ["--pp", "1", "--cp", "1", "--json", "--no-levers", "--machine"]
    for name in ("one", "other"):
        file = tmp_path / name / "mine.toml"
        file.parent.mkdir()
        file.write_text('base = "h100-sxm"\n')
        answer = json.loads(stagec(*words, file).out)
        assert {row["machine"] for row in answer["best"]} == {str(file)}


@LONG
def test_several_ranks_and_fronts() -> None:
    """By ranks a row for each; on a front no row beats another."""
    few = ("--json", "--pp", "1", "--microbatch-size", "1")
    actual = json.loads(stagec(*SMALL, "--ranks", "4..8", "--zero", "0", *few).out)
    assert [s["ranks"] for s in actual["searches"]] == [4, 8]
    front = json.loads(stagec(*SMALL, *few, "--pareto", "time,memory").out)["best"]
    points = [(row["step_seconds"], row["memory_peak"]) for row in front]
    assert len(points) > 1
    assert not any(beats(a, b) for a in points for b in points)


def test_points_are_counted_before_they_are_made() -> None:
    space = Space({f"k{i}": tuple(range(1000)) for i in range(4)})
    assert space.count == 10**12
    assert next(iter(space.part(frozenset({"k0"})))) == {"k0": 0}


_PROBE = """<script>
document.body.innerHTML = JSON.stringify({
  problems, rows: all("tbody tr").length,
  lines: all(".wide polyline.many").length,
  broken: all("svg [data-key]").filter(
    (mark) => !document.querySelector(`tr[data-key=${mark.dataset.key}]`)).length,
});
</script>"""


@LONG
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """It loads nothing, and each mark leads to what it is."""
    page = tmp_path / "page.html"
    actual = json.loads(stagec(*SMALL, "--pp", "1", "--json", "--html", page).out)
    text = page.read_text("utf-8")
    assert "http" not in re.sub(r"http-equiv", "", text)
    policy = r'<meta http-equiv="Content-Security-Policy"[^>]*>'
    probed = re.sub(policy, "", text).replace("</head>", ERRORS + "</head>", 1)
    page.write_text(probed.replace("</body>", _PROBE + "</body>", 1), "utf-8")
    flags = (*BROWSER_FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri())
    ran = subprocess.run([str(BROWSER), *flags], capture_output=True, timeout=120, check=True)
    match = re.search(r"<body>(.*)</body>", ran.stdout.decode(), re.DOTALL)
    assert match is not None
    seen = json.loads(unescape(match[1]))
    timed = [p for p in actual["evaluations"] if p["step_seconds"] is not None]
    assert seen == {"problems": [], "rows": len(timed), "lines": len(timed), "broken": 0}


def test_an_answer_is_the_same_in_whatever_order_points_are_evaluated() -> None:
    space = {"tp": (1, 2), "pp": (1,), "zero": (0, 1), "cp": (1,), "recompute": ("none",)}
    answer = answer_of(asked("llama3-8b", "B=8,S=1024,L=2", 4, "h100-sxm", **space))
    other = replace(answer, known=dict(reversed(answer.known.items())))
    assert len(answer.known) > 2
    assert json.dumps(as_json([other])) == json.dumps(as_json([answer]))


def test_bounds_are_arrays() -> None:
    """Nothing is known of a job without probes: its bound is 0, not an error."""
    question = asked("llama3-8b", "B=16,S=1024,L=4", 8, "h100-sxm")
    jobs = list_jobs(question.space, question.base.changed(ranks=8), question.sizes).jobs
    about = jobs, question.layers, question.sizes, question.machine
    bounds = JobBounds(*about, lambda units: [Probe() for _ in units])
    bounds.settle(range(len(jobs)))
    assert bounds.seconds.tolist() == bounds.memory.tolist() == [0.0] * len(jobs)


def test_state_is_that_over_as_many_data_parallel_ranks() -> None:
    """Jobs that differ in how sequences are split share a probe, with the bytes of their own."""
    knobs = {"pp": (1,), "tp": (1,), "cp": (1, 2, 4), "cp_mode": ("ring", "ulysses")}
    question = asked("llama3-8b", "B=16,S=1024,L=4", 8, "h100-sxm", **knobs, zero=(0, 1, 2, 3))
    jobs = list_jobs(question.space, question.base.changed(ranks=8), question.sizes).jobs
    about, shared = (question.machine, question.layers), set[str]()
    kinds = {repr(state_probe(jobs[n])): jobs[n] for n in range(len(jobs))}
    for job in kinds.values():
        both = state_probe(job), shared_state_probe(job)
        own, other = (probe(Asked(options, *about, "state")) for options in both)
        assert own == other != Probe()
        shared.add(repr(both[1]))
    assert len(kinds) > 2 * len(shared)
    split = jobs[0].changed(ep=2, cp=2)
    assert shared_state_probe(split) == state_probe(split)


# -- job files -------------------------------------------------------------------------------------


def _space_of(*words: str) -> dict[str, str]:
    text = stagec("search", *words, "--print-space").out
    return dict(re.findall(r'stg\.vary\[(\w+), "(.*)"\]', text))


def test_job_file_gives_what_flags_would(tmp_path: Path) -> None:
    """Model, sizes, ranks and machine are those of the job, a flag that nothing varies is fixed,
    and one that varies by default is a further value."""
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    flags = ("--set", "B=16,S=1024,L=4", "--ranks", "16", "--machine", "h100-sxm")
    plain = _space_of("llama3-8b", *flags)
    assert "moment_dtype" not in plain
    assert plain["tp"] == "1,2,4,8"
    assert _space_of(str(job)) == {**plain, "tp": "1,2,4,8,16", "moment_dtype": "bf16"}
    assert _space_of(str(job), "--tp", "2", "--moment-dtype", "f32") == {
        **plain,
        "tp": "2",
        "moment_dtype": "f32",
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('strategy_file = "s.stg"', "has 'strategy_file', but a search varies flags"),
        ('mesh = "dp=16"', "has 'mesh', but a search varies flags"),
    ],
)
def test_job_file_that_flags_cannot_say(tmp_path: Path, line: str, message: str) -> None:
    """No answer is given for part of a job."""
    job = tmp_path / "job.toml"
    job.write_text(line + JOB)
    result = stagec("search", str(job))
    assert result.code == 1
    assert message in result.err


# -- stacks ----------------------------------------------------------------------------------------

STACKED = (
    *("search", "llama3-8b", "--stack", "torchtitan", "--ranks", "8", "--machine", "h100-sxm"),
    *("--set", "B=16,S=1024,L=4", "--tp", "1,2", "--pp", "1,2", "--zero", "3", "--cp", "1"),
    *("--microbatch-size", "1", "--chunks", "0", "--no-cache", "--jobs", "1"),
    *("--no-levers", "--json"),
)


@pytest.mark.parametrize("stack", ["huggingface", "torchtitan"])
def test_defaults_of_a_stack_that_one_stage_of_zero_has_refuse_no_other(stack: str) -> None:
    """Units of shards and their copies are of ZeRO-3; the other stages leave out all of them."""
    words = ("llama3.2-1b", "--stack", stack, "--ranks", "2", "--machine", "h100-sxm")
    sizes = ("--set", "B=4,S=128,L=1", "--tp", "1,2", "--pp", "1", "--zero", "0,1,3", "--cp", "1")
    rest = ("--recompute", "none", "--microbatches", "1", "--sp", "off", "--no-cache", "--json")
    answer = json.loads(stagec("search", *words, *sizes, *rest, "--jobs", "1", "--no-levers").out)
    assert answer["refused"] == {}
    assert answer["legal"] == 4


@LONG
def test_searches_with_a_stack(tmp_path: Path) -> None:
    """What the space varies is the space's, and the rest the stack's: bounds find what evaluating
    every point finds, and each command is the job that was evaluated."""
    words = (*STACKED, "--recompute", "none,full", "--top", "2")
    answer = json.loads(stagec(*words).out)
    assert answer["best"]
    every = json.loads(stagec(*words, "--exhaustive").out)
    figures = [[row["step_seconds"] for row in each["best"]] for each in (answer, every)]
    assert figures[0] == figures[1]
    for row in answer["best"]:
        _, _, *flags = shlex.split(row["command"])
        assert "--grads" not in flags, "the stack says it"
        flags = flags[: flags.index("-o")]
        timed = json.loads(stagec("time", *flags, "--machine", "h100-sxm", "--json").out)
        assert timed["step_seconds"] == row["step_seconds"]
