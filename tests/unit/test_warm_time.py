"""A step in other sizes is evaluated with the programs that are there: as if it were compiled and
unrolled for them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest

from stagec.analysis.family import Compiles
from stagec.answers.time.timed import time_job
from stagec.api import DiagnosticError, time_step
from stagec.jobs import figures
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.machines import load_machine
from stagec.program.classes import rank_classes
from stagec.time.clock.graph import step_graph
from stagec.time.clock.times import ClassTimes, ClockedStep
from stagec.time.costs.replay_options import ReplayOptions
from stagec.time.step import StepTime, host_costs
from tests.support import DEEPSEEK, EXHAUSTIVE, LLAMA, LONG, MIXTRAL, stagec

#: A job, and values of it that differ in sizes and degrees.
GRIDS: Mapping[str, tuple[str, dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "stages": (
        LLAMA,
        {"pp": 2, "microbatches": 4},
        {"tp": (2, 4), "dp": (2, 4), "sizes": ({"L": 8, "S": 512}, {"L": 8, "S": 1024, "B": 64})},
    ),
    "sharded parameters": (
        LLAMA,
        {"zero": 3, "microbatches": 2, "sizes": {"L": 4}},
        {"dp": (2, 4, 8), "tp": (1, 2)},
    ),
    "buckets of other gradients": (
        LLAMA,
        {"zero": 1, "sizes": {"L": 4}},
        {"dp": (4, 8), "tp": (1, 2, 8)},
    ),
    "ranks that differ": (
        LLAMA,
        {"cp_order": "plain", "sizes": {"L": 2}},
        {"cp": (2, 4), "tp": (2, 4)},
    ),
    "experts": (MIXTRAL, {"sizes": {"L": 2}, "ep": 2}, {"dp": (2, 4), "tp": (1, 2)}),
    "overlapped pairs": (
        DEEPSEEK,
        {"pp": 2, "ep": 2, "microbatches": 4, "schedule": "dualpipev", "sizes": {"L": 8}},
        {"dp": (2, 4)},
    ),
    "counts of layers": (LLAMA, {"dp": 2}, {"sizes": ({"L": 2}, {"L": 4}, {"L": 2, "S": 64})}),
}
CASES = [
    pytest.param(name, overlap, id=f"{name}-{overlap}", marks=() if first else EXHAUSTIVE)
    for i, name in enumerate(GRIDS)
    for overlap, first in ((True, i == 0), (False, i == 1))
]


@LONG
@pytest.mark.parametrize(("name", "overlap"), CASES)
def test_an_evaluation_is_that_of_a_compile_of_its_own(
    name: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "_structures", {})
    model, base, values = GRIDS[name]
    machine = load_machine("h100-sxm")
    for choice in product(*values.values()):
        flags = {**base, **dict(zip(values, choice, strict=True))}
        actual = time_step(model, machine, overlap=overlap, **flags)
        options = JobOptions(model).changed(**flags, explicit=frozenset(flags))
        alone = time_job(options, machine, Session(), ReplayOptions(overlap), levers=False).report
        assert actual.as_json() == {**alone.as_json(), "stack": actual.stack}


def test_programs_are_unrolled_once_for_sizes_that_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unrolled: list[int] = []

    def spy(module: Any) -> Any:
        unrolled.append(1)
        return rank_classes(module)

    monkeypatch.setattr("stagec.time.step.rank_classes", spy)
    monkeypatch.setattr(figures, "_structures", {})
    base: dict[str, Any] = {"pp": 2, "microbatches": 4, "ddp_bucket": 0}  # no buckets by bytes
    for tp, dp in ((2, 4), (4, 2), (8, 4)):
        time_step(LLAMA, tp=tp, dp=dp, sizes={"L": 4}, **base)
    assert len(unrolled) == 1
    time_step(LLAMA, tp=2, dp=4, sizes={"L": 8}, **base)  # more layers
    assert len(unrolled) == 2
    time_step(LLAMA, tp=4, dp=4, sizes={"L": 4}, **base)
    assert len(unrolled) == 2


def test_ranks_that_differ_are_unrolled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions about the coordinates of ranks have the same answers for other sizes."""
    unrolled: list[int] = []

    def spy(module: Any) -> Any:
        unrolled.append(1)
        return rank_classes(module)

    monkeypatch.setattr("stagec.time.step.rank_classes", spy)
    monkeypatch.setattr(figures, "_structures", {})
    for length in (256, 512, 1024):
        actual = time_step(LLAMA, cp=2, cp_order="plain", sizes={"L": 2, "S": length})
        assert len(actual.classes) == 2
    assert len(unrolled) == 1


def test_graphs_are_made_and_hosts_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for what does not depend on sizes, nor does what hosts issue."""
    graphs: list[int] = []
    hosts: list[int] = []

    def graph(*given: Any, **how: Any) -> Any:
        graphs.append(1)
        return step_graph(*given, **how)

    def costs(*given: Any) -> Any:
        hosts.append(1)
        return host_costs(*given)

    monkeypatch.setattr("stagec.time.step.step_graph", graph)
    monkeypatch.setattr("stagec.time.step.host_costs", costs)
    monkeypatch.setattr(figures, "_structures", {})
    for length in range(128, 128 * 5, 128):
        time_step(LLAMA, pp=2, microbatches=2, sizes={"L": 4, "S": length})
    assert (len(graphs), len(hosts)) == (1, 1)


def test_of_classes_that_end_together_the_slowest_computes_longest() -> None:
    class Ends(list[str]):
        ends, end = (8, 9, 9, 9), 9

        def computing(self, number: int) -> int:
            return (9, 3, 7, 7)[number]

    actual = cast("ClockedStep", Ends("abcd"))
    assert StepTime(9, actual, {}, actual).slowest == cast("ClassTimes", "c")


@LONG
def test_what_was_not_asked_for_lately_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where programs are long, few are kept: a search does not fill the memory."""
    kept: dict[Any, Compiles] = {}
    monkeypatch.setattr(figures, "_structures", kept)

    def ask(recompute: str, **flags: Any) -> None:
        time_step(LLAMA, pp=2, microbatches=2, recompute=recompute, sizes={"L": 4}, **flags)

    ask("none")
    ask("full")
    one, other = kept
    ask("none")
    assert list(kept) == [other, one]
    monkeypatch.setattr(figures, "_MOST_NODES", kept[one].nodes)
    ask("none", zero=1, dp=2)
    assert list(kept)[:-1] == [one]


@LONG
def test_small_structures_stay_when_a_large_one_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of the large ones goes, however long nobody asked for the small ones."""
    kept: dict[Any, Compiles] = {}
    monkeypatch.setattr(figures, "_structures", kept)
    time_step(LLAMA, sizes={"L": 1})
    time_step(LLAMA, pp=2, microbatches=2, sizes={"L": 4})
    small, large = kept
    assert kept[small].nodes < kept[large].nodes / 2
    monkeypatch.setattr(figures, "_MOST_NODES", kept[large].nodes)
    time_step(LLAMA, tp=2, sizes={"L": 1})
    assert list(kept)[:-1] == [small]


@LONG
def test_compiles_are_counted_not_structures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are not decided alike are compiled each, and each takes memory."""
    kept: dict[Any, Compiles] = {}
    monkeypatch.setattr(figures, "_structures", kept)
    monkeypatch.setattr(figures, "_MOST_KEPT", 3)
    for count in (1, 2, 3):  # not enough layers to share a compile
        figures.CompiledJob.of(JobOptions(LLAMA, sizes={"L": count})).figures()
    (first,) = kept.values()
    assert len(first) == 3
    time_step(LLAMA, tp=2, sizes={"L": 2})
    (other,) = kept.values()
    assert other is not first


def _checked(monkeypatch: pytest.MonkeyPatch) -> list[JobOptions]:
    """The options that are checked from now on."""
    checked: list[JobOptions] = []

    def builder(options: JobOptions, *given: Any) -> JobBuilder:
        checked.append(options)
        return JobBuilder(options, *given)

    monkeypatch.setattr(figures, "_requests", {})
    monkeypatch.setattr(figures, "JobBuilder", builder)
    return checked


def test_sizes_that_no_check_reads_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was reported of a job is reported of it in other sizes."""
    checked = _checked(monkeypatch)
    options = JobOptions(LLAMA, cp=2, sizes={"L": 8, "S": 1024, "B": 8})
    first, second = Session(), Session()
    figures.CompiledJob.of(options, first)
    job = figures.CompiledJob.of(options.changed(sizes={"L": 8, "S": 2048, "B": 16}), second)
    assert len(checked) == 1
    assert (job.values["S"], job.values["B"], job.values["cp"]) == (2048, 16, 2)
    assert first.diagnostics == second.diagnostics != []
    assert first.sources == second.sources
    figures.CompiledJob.of(options.changed(sizes={"L": 8, "S": 1024}))  # the batch is open
    figures.CompiledJob.of(options.changed(tp=2))
    assert len(checked) == 3


def test_a_check_reads_its_sizes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = _checked(monkeypatch)
    options = JobOptions(LLAMA, recompute="full", recompute_layers=6)
    for layers, valid in ((8, True), (4, False), (8, True), (12, True)):
        sized = options.changed(sizes={"L": layers})
        if valid:
            assert figures.CompiledJob.of(sized).values["L"] == layers
        else:
            with pytest.raises(DiagnosticError, match="the model has L = 4 layers"):
                figures.CompiledJob.of(sized)
    assert len(checked) == 4


def test_a_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "model.stg"
    text = stagec("models", LLAMA).out
    for width in (8192, 16384):
        file.write_text(text.replace("F = 14336", f"F = {width}"), encoding="utf-8")
        assert figures.CompiledJob.of(JobOptions(str(file), sizes={"L": 8})).values["F"] == width


def test_it_is_what_the_command_tells() -> None:
    expected = stagec(
        "time", LLAMA, "--tp", "2", "--sp", "--set", "L=4", "--machine", "b200", "--json"
    )
    actual = time_step(LLAMA, "b200", tp=2, sp=True, sizes={"L": 4}, levers=True)
    assert expected.out.count("\n") > 10
    import json

    assert json.loads(expected.out) == actual.as_json()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"tpp": 2}, "no flag 'tpp'"),
        ({"tp": "two"}, "tp: 'two' is not a valid integer"),
        ({"zero": 9}, "zero: 9 is not in the range"),
        ({"sp": 3}, "sp: "),
        ({"sizes": {"S": -1}}, "S expects a positive integer"),
        ({"tp": 3}, "H = 32, G = 8 and F = 14336 do not divide over tp = 3"),
        ({"tp": 2.5}, "tp: '2.5' is not a valid integer"),
        ({"ranks": 2.5}, "ranks: '2.5' is not a valid integer"),
        ({"mesh": ["dp"]}, "mesh: expects a dictionary"),
        ({"strategy": "no/such.stg"}, "no strategy file 'no/such.stg'"),
    ],
)
def test_mistakes_are_reported_as_those_of_a_command(flags: dict[str, Any], expected: str) -> None:
    with pytest.raises(DiagnosticError) as problem:
        time_step(LLAMA, **flags)
    assert expected in str(problem.value.diagnostics[0].message)
    assert problem.value.diagnostics[0].remedy


def test_a_flag_that_is_none_is_not_given() -> None:
    flags: Any = {"tp": 2.0, "sp": None, "zero": None, "strategy": None, "sizes": {"L": 2}}
    given = time_step(LLAMA, **flags)
    assert given == time_step(LLAMA, tp=2, sizes={"L": 2})


def test_warnings_are_those_of_python() -> None:
    with pytest.warns(UserWarning, match="has no effect without --pp"):
        time_step(LLAMA, stage_layers=(2,), sizes={"L": 2})


def test_a_builder_is_not_changed_by_what_was_compiled_before() -> None:
    """The text of a job is the same after others have been evaluated with its structure."""
    options = JobOptions(LLAMA).changed(tp=2, sizes={"L": 2})
    before = JobBuilder(options).strategy()
    time_step(LLAMA, tp=4, sizes={"L": 2})
    assert JobBuilder(options).strategy() == before


def test_what_is_forgotten_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A structure that was not asked for last keeps what evaluations need."""
    kept: dict[Any, Compiles] = {}
    monkeypatch.setattr(figures, "_structures", kept)
    flags: dict[str, Any] = {"pp": 2, "microbatches": 2, "sizes": {"L": 4}}
    before = [time_step(LLAMA, overlap=overlap, **flags).as_json() for overlap in (True, False)]
    time_step(LLAMA, tp=2, sizes={"L": 2})
    first = next(iter(kept.values()))
    assert first.nodes > 0
    after = [time_step(LLAMA, overlap=overlap, **flags).as_json() for overlap in (True, False)]
    assert after == before
    assert len(first) == 1
