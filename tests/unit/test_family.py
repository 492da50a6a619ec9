"""A family of jobs: compiled once for all sizes that decide alike, with the figures of a compile of
their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from stagec.analysis.report import analysis
from stagec.api import (
    Family,
    Figures,
    Module,
    Pass,
    Phase,
    Relation,
    Source,
    const,
    load_plugins,
    parse_module,
    symbol,
)
from stagec.ir.queries import Queries, TrackedValues
from stagec.jobs.builder import JobBuilder
from stagec.jobs.figures import CompiledJob
from stagec.jobs.lowered import LoweredJob
from stagec.jobs.request.options import JobOptions
from stagec.pipeline.manager import PassManager
from stagec.pipeline.spec import Pipeline
from stagec.support.diagnostics import DiagnosticError
from stagec.text.printer import print_module
from tests.support import EXHAUSTIVE, tries

LOADED = load_plugins()


def text_of(options: JobOptions) -> str:
    """A job as one text: model, mesh and strategy."""
    return print_module(JobBuilder(options).module)


def reader(text: str) -> Callable[[Mapping[str, int]], Module]:
    """Reads a text, with values for its symbols and axes."""

    def read(values: Mapping[str, int]) -> Module:
        module = parse_module(Source("job.stg", text), LOADED.registry)
        module.set_values(values)
        return module

    return read


def family_of(text: str, pipeline: Pipeline) -> Family:
    """The family of a text."""
    return Family(Source("job.stg", text), LOADED.registry, pipeline)


def alone(module: Module, pipeline: Pipeline) -> dict[str, Any]:
    """The figures of a compile of its own, from the report that `stagec analyze` prints."""
    PassManager(pipeline, verify=False).run(module)
    classes: list[dict[str, Any]] = analysis(module, "job")["classes"]
    worst = max((c["memory"] for c in classes), key=lambda m: m["peak"])
    return {
        "flops": max(sum(c["flops"].values()) for c in classes),
        "sent": max(
            sum(r["wire_bytes"] for r in c["collectives"])
            + sum(m["bytes"] for m in c["p2p"] if m["dir"] == "send")
            for c in classes
        ),
        "peak": worst["peak"],
        "parameters": worst["parameters"],
        "host": max(c["memory"]["host"] for c in classes),
    }


def shown(figures: Figures) -> dict[str, Any]:
    """The same of a family."""
    return {
        "flops": figures.flops,
        "sent": figures.sent,
        "peak": figures.peak,
        "parameters": figures.memory["parameters"],
        "host": figures.host,
    }


def grid(base: Mapping[str, int], values: Mapping[str, tuple[int, ...]]) -> list[dict[str, int]]:
    """All combinations, with a batch that divides."""
    actual: list[dict[str, int]] = []
    for choice in product(*values.values()):
        chosen = {**base, **dict(zip(values, choice, strict=True))}
        actual.append({**chosen, "B": chosen["B"] * chosen.get("dp", 1)})
    return actual


def first_and_last(rows: list[dict[str, int]]) -> list[dict[str, int]]:
    """Rows that differ in all values, or all rows where all tries are made."""
    return rows if tries(len(rows)) == len(rows) else [rows[0], rows[-1]]


#: Options, what is tried, and how many compiles that may take at most.
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], int]] = {
    "fsdp": (
        {"model": "llama3-8b", "dp": 2, "tp": 2, "sp": True, "zero": 3},
        {"dp": (2, 64), "tp": (2, 8), "S": (2048, 8192), "L": (16,)},
        1,
    ),
    "few layers": (
        {"model": "llama3-8b", "dp": 2, "zero": 3, "fsdp_prefetch": 2},
        {"L": (1, 2, 3, 9, 10, 11, 40)},
        6,
    ),
    "state that does not divide": (
        {"model": "llama3-8b", "dp": 2, "zero": 1},
        {"dp": (2, 4, 512), "L": (12,)},
        1,
    ),
    "pipeline": (
        {"model": "llama3-8b", "pp": 4, "dp": 2, "microbatches": 8, "schedule": "zb-h1"},
        {"dp": (2, 4), "L": (16, 32)},
        2,
    ),
    "experts": (
        {"model": "mixtral-8x7b", "dp": 4, "ep": 4, "tp": 2, "sp": True, "sizes": {"B": 64}},
        {"tp": (2, 4), "S": (2048, 4096), "L": (8,)},
        2,
    ),
    "ring in plain order": (
        {"model": "llama3-8b", "cp": 4, "cp_order": "plain"},
        {"cp": (2, 4), "S": (4096, 8192), "L": (12,)},
        2,
    ),
    "recompute in some layers": (
        {"model": "gpt-22b", "dp": 2, "recompute": "full", "recompute_every": 3},
        {"L": (7, 24, 25, 26, 48)},
        4,
    ),
    "offload": (
        {"model": "gpt-22b", "dp": 2, "offload": "activations,optimizer"},
        {"dp": (2, 4), "L": (12, 48)},
        1,
    ),
    "buffers of buckets": (
        {"model": "llama3-8b", "dp": 2, "ddp_copies": True},
        {"dp": (2, 4), "L": (16, 32)},
        1,
    ),
    "sizes that are filled up": (
        {"model": "llama3-8b", "tp": 2, "pad_vocab": 1000},
        {"V": (32001, 32000), "L": (16, 32)},
        2,
    ),
    "one head of keys": (
        {"model": "llama3-8b", "attention": "eager", "sizes": {"G": 1, "H": 8, "L": 2}},
        {"B": (2, 1)},
        2,
    ),
    "windows": (
        {"model": "mistral-7b", "attention": "sdpa", "sizes": {"L": 4}},
        {"W": (512, 1024)},
        1,
    ),
}


#: Like others that stay in all runs, but for what decides.
MORE = ("state that does not divide", "ring in plain order", "recompute in some layers", "offload")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=EXHAUSTIVE if c in MORE else ()) for c in CASES]
)
def test_figures_are_those_of_a_compile_of_their_own(case: str) -> None:
    options, values, most = CASES[case]
    text = text_of(JobOptions(**options))
    read, pipeline = reader(text), LOADED.pipeline("train")
    family = family_of(text, pipeline)
    base = dict(parse_module(Source("job.stg", text), LOADED.registry).env)
    base["B"] = max(1, base["B"] // base.get("dp", 1))
    for chosen in first_and_last(grid(base, values)):
        assert shown(family.at(chosen)) == alone(read(chosen), pipeline), chosen
    assert len(family) <= most


@dataclass(frozen=True)
class HalfOfTheLayers(Pass):
    """Does as it likes with a value."""

    name = "half-of-the-layers"
    needs = Phase.SHAPED

    def run(self, module: Module) -> None:
        if module.env["S"] > 1000:
            module.main.body.ops[0].attrs["phase"] = "forward"


def test_a_pass_that_reads_a_value_has_jobs_compiled_for_each() -> None:
    """Whatever a pass does with it: nothing that was read goes unnoticed."""
    text = text_of(JobOptions(model="llama3-8b", dp=2))
    train = LOADED.pipeline("train")
    opened, shaped, *others = train.passes
    pipeline = Pipeline((opened, shaped, HalfOfTheLayers(), *others))
    family = family_of(text, pipeline)
    base = dict(parse_module(Source("job.stg", text), LOADED.registry).env)
    for length in (2048, 2048, 4096, 2048):
        family.at({**base, "S": length})
    assert len(family) == 2
    plain = family_of(text, train)
    for length in (2048, 4096):
        plain.at({**base, "S": length})
    assert len(plain) == 1


def test_sizes_that_do_not_go_are_reported_as_by_a_compile_of_their_own() -> None:
    text = text_of(JobOptions(model="llama3-8b", tp=2))
    family = family_of(text, LOADED.pipeline("train"))
    base = dict(parse_module(Source("job.stg", text), LOADED.registry).env)
    family.at(base)
    with pytest.raises(
        DiagnosticError, match="H = 32, G = 8 and F = 14336 do not divide over tp = 3"
    ):
        family.at({**base, "tp": 3})
    family.at(base)
    assert len(family) == 1


@pytest.mark.parametrize(
    ("model", "good", "bad", "message"),
    [
        ("bert-base", {"L": 2, "S": 512}, {"L": 2, "S": 1024}, "the assumption P >= S does not"),
        ("qwen2.5-7b", {"L": 2, "H": 28}, {"L": 2, "H": 14}, "the assumption H % G == 0 does not"),
        ("llama3-8b", {"L": 2, "H": 32}, {"L": 2, "H": 12}, "needs a whole number for factor .r."),
    ],
)
def test_what_the_verifier_refuses_shares_no_compile(
    model: str, good: dict[str, int], bad: dict[str, int], message: str
) -> None:
    CompiledJob.of(JobOptions(model, sizes=good))
    with pytest.raises(DiagnosticError, match=message):
        CompiledJob.of(JobOptions(model, sizes=bad))


def test_a_query_that_other_values_cannot_answer_has_another_answer() -> None:
    """Such as the comparison of half a size, where the size is odd."""
    half = Relation(symbol("S") / 2, "<=", const(8))
    queries = Queries()
    assert half.holds(TrackedValues({"S": 8}, queries))
    assert queries.same({"S": 10})
    assert not queries.same({"S": 9})


@dataclass(frozen=True)
class _Chosen:
    """A query that reads one value or the other, and counts how often it is asked."""

    asked: Counter[str] = field(compare=False)

    def __call__(self, values: Mapping[str, int]) -> int:
        self.asked["times"] += 1
        return values["one"] if values["which"] else values["other"]


def test_queries_whose_values_are_those_of_a_match_are_not_asked_again() -> None:
    """What a query reads may depend on what it has read."""
    query = _Chosen(Counter())
    queries = Queries({query: 5})
    for which, one, other in (*product((0, 1), (5, 6), (5, 6)), *product((1, 0), (6, 5), (5, 6))):
        values = {"which": which, "one": one, "other": other}
        assert queries.same(values) == (query(values) == 5)
    first = {"which": 1, "one": 5, "other": 5, "S": 8}
    queries = Queries({query: 5})
    assert queries.same(first)
    query.asked.clear()
    assert queries.same({**first, "other": 6, "S": 16})
    assert not query.asked
    assert not queries.same({**first, "one": 6})


def test_what_passes_set_is_no_value_of_a_match() -> None:
    queries = Queries()
    TrackedValues({"S": 9}, queries)["S"]
    queries.change({"S": 16})
    assert TrackedValues({"S": 16}, queries)["S"] == 16
    assert queries.same({"S": 9})
    assert not queries.same({"S": 10})
    assert queries.settled({"S": 9}) == {"S": 16}


def test_what_is_not_given_is_as_in_the_text() -> None:
    text = text_of(JobOptions(model="llama3-8b", tp=2))
    family = family_of(text, LOADED.pipeline("train"))
    base = dict(parse_module(Source("job.stg", text), LOADED.registry).env)
    assert family.at({}) == family.at(base)
    assert family.at({"S": 4096}) == family.at({**base, "S": 4096}) != family.at({})


OPEN = """stg.module @job {
  stg.symbols[B, D = 64]
  stg.mesh @pod[dp]
  stg.func @f(%x: bf16[B, D]) -> bf16[B, D] {
    stg.return(%x)
  }
}
"""


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"B": 8}, "no value for dp"),
        ({}, "no value for B, dp"),
        ({"B": 8, "dpp": 2}, "'dpp': it is neither a symbol nor a mesh axis"),
        ({"B": 8, "dp": 2.0}, "'dp' to 2.0: sizes are positive whole numbers"),
        ({"B": 0, "dp": 2}, "'B' to 0: sizes are positive whole numbers"),
    ],
)
def test_values_that_are_none_are_reported(values: dict[str, int], expected: str) -> None:
    family = family_of(OPEN, LOADED.pipeline("train"))
    with pytest.raises(DiagnosticError, match=expected) as actual:
        family.at(values)
    assert actual.value.diagnostics[0].remedy


def test_figures_asked_for_late_are_those_of_the_plan_in_the_module() -> None:
    given: dict[str, Any] = {"pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 4}
    sizes = {"B": 8, "S": 1024}
    options = JobOptions("llama3-8b", **given, zero=2, offload="activations", sizes=sizes)
    planned = LoweredJob.of(options, figures=True).figures()
    assert CompiledJob.of(options).figures() == planned
    late = CompiledJob.of(options.changed(recompute="full"))
    CompiledJob.of(options)  # lets go of the text of the job before it
    assert not late.compiled.has_figures(late.values)
    assert late.figures().flops > planned.flops
