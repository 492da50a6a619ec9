"""What the tests share: tiny jobs built in process, runs of modules on all ranks of a mesh, and the
command line as a function.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, product, zip_longest
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import settings

from stagec.analysis.count import Counts, count_graph, lowered_graphs
from stagec.analysis.report import analysis
from stagec.driver.cli import main
from stagec.interp.data import random_inputs
from stagec.interp.machine import run_module
from stagec.ir.core import Operation
from stagec.ir.expr import Expr, as_expr
from stagec.ir.module import Module
from stagec.ir.opdef import Array, Registry
from stagec.ir.types import AxisUse, Dim
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.pipeline.instrument import Verification
from stagec.pipeline.manager import PassManager
from stagec.pipeline.passes import Pass
from stagec.pipeline.plugins import Loaded, load_plugins
from stagec.program.classes import rank_classes
from stagec.program.nodes import Program
from stagec.support.source import Source
from stagec.text.build import parse_module, parse_op
from stagec.text.printer import print_module

LLAMA, GPT = "llama3-8b", "gpt3-175b"
MIXTRAL, QWEN = "mixtral-8x7b", "qwen3-30b-a3b"
DEEPSEEK_V2, DEEPSEEK, DEEPSEEK_MTP = "deepseek-v2", "deepseek-v3", "deepseek-v3-mtp"
PALM = "palm-540b"
#: Each rank's share of the tokens loads all experts alike.
_EXPERTS = {
    "B": 8,
    "S": 8,
    "L": 2,
    "D": 8,
    "H": 8,
    "K": 2,
    "M": 8,
    "E": 4,
    "T": 2,
    "V": 16,
    "theta": 100,
}
_LATENT = {"L_dense": 1, "Q": 4, "C": 4, "R": 2, "W": 4, "F": 8, "F_shared": 8, "N": 2, "N_top": 1}
#: Sizes at which everything divides by 4, twice for the batch, and a run takes milliseconds.
TINY: Mapping[str, Mapping[str, int]] = {
    LLAMA: {"B": 8, "S": 4, "L": 2, "D": 8, "H": 8, "G": 4, "K": 2, "F": 16, "V": 16, "theta": 100},
    GPT: {"B": 8, "S": 4, "L": 2, "D": 8, "H": 4, "K": 2, "F": 16, "V": 16},
    MIXTRAL: {**_EXPERTS, "G": 4},
    QWEN: {**_EXPERTS, "G": 4},
    DEEPSEEK_V2: {**_EXPERTS, **_LATENT},
    DEEPSEEK: {**_EXPERTS, **_LATENT},
    DEEPSEEK_MTP: {**_EXPERTS, **_LATENT, "L": 1},
    PALM: {"B": 8, "S": 4, "L": 2, "D": 8, "H": 4, "K": 2, "F": 16, "V": 16, "theta": 100},
}
_CLICKS = {"B": 8, "X": 4, "N": 4, "D": 4, "F1": 4, "F2": 4, "T1": 4, "T2": 4, "T3": 4, "T4": 4}
#: The same of recommendation models, which have neither layers nor a sequence.
TINY_CLICKS: Mapping[str, Mapping[str, int]] = {
    "dlrm": {**_CLICKS, "R": 16},
    "dlrm-tables": {**_CLICKS, "R": 4, "P": 2},
}
#: A schedule of each kind: plain, with chunks, with split backwards, with overlapped pairs.
KINDS = ("1f1b", "interleaved", "zbv", "dualpipe")
#: Mark what `make test-all` runs and `make test` does not; continuous integration runs a share of
#: what is exhaustive, and all of what takes long.
EXHAUSTIVE, LONG = pytest.mark.exhaustive, pytest.mark.long
#: Marks a test each of whose cases is a property of its own: `make test` runs them all.
DISTINCT = pytest.mark.distinct
STEP = "inline,infer-shapes,apply-strategy,differentiate,add-optimizer,eliminate-dead-code"
PLACE = "partition,units"


@lru_cache(maxsize=1)
def loaded() -> Loaded:
    """The built-in ops, passes and pipelines."""
    return load_plugins(())


def registry() -> Registry:
    """The built-in ops."""
    return loaded().registry


def parse(text: str, name: str = "test.stg") -> Module:
    """The module of a text."""
    return parse_module(Source(name, text), registry())


def parse_one(text: str, name: str = "test.stg") -> Operation:
    """The one operation of a text."""
    return parse_op(Source(name, text), registry())


class VerifiedOnce(Verification):
    """Verifies a module before the first pass and after the last one; tests/conftest.py says
    when."""

    def after_pass(self, pass_: Pass, module: Module) -> None:
        """Nothing: another test has this pass verified."""

    def finish(self, module: Module) -> None:
        self.start(module)


def dim(size: Expr | int, *axes: str, priority: int = 0) -> Dim:
    """A dimension split over these axes at one priority."""
    return Dim(as_expr(size), tuple(AxisUse(a, priority) for a in axes))


def run_passes(module: Module, pipeline: str) -> Module:
    """The same module after the passes."""
    PassManager(loaded().pipeline(pipeline)).run(module)
    return module


def compiled(text: str, pipeline: str) -> Module:
    """The module of a text after the passes."""
    return run_passes(parse(text), pipeline)


def clone(module: Module) -> Module:
    """A copy of a module, by way of its text."""
    return parse(print_module(module), "clone.stg")


def tiny_options(model: str, **options: Any) -> JobOptions:
    """Options of a job on tiny sizes; `sizes` overrides single ones, and gives those of a file."""
    sizes = {**{**TINY, **TINY_CLICKS}.get(model, {}), **options.pop("sizes", {})}
    return replace(JobOptions(model, sizes=sizes), **options)


def tiny_module(model: str, pipeline: str, **options: Any) -> Module:
    """A library model on tiny sizes after the passes."""
    return run_passes(JobBuilder(tiny_options(model, **options)).module, pipeline)


def inputs_of(module: Module, seed: int = 0) -> dict[str, Array]:
    """Random values for all arguments, at the sizes that the module states."""
    return random_inputs(module.main.body.args, module.env, seed)


def run_numeric(module: Module, inputs: Mapping[str, Array]) -> list[Array]:
    """All ranks in lockstep at the sizes that the module states."""
    return run_module(module, module.env, inputs)


def run_one_device(module: Module, inputs: Mapping[str, Array]) -> list[Array]:
    """The module on a mesh of one rank."""
    mesh = module.mesh
    alone = dict.fromkeys(mesh.axes if mesh else (), 1)
    return run_module(module, {**module.env, **alone}, inputs)


def operations(module: Module, *names: str) -> list[Operation]:
    """All operations of these names, inner ones included."""
    return [op for op in module.walk() if op.name in names]


_ANALYSED: dict[str, dict[str, Any]] = {}


def analyse(model: str, **options: Any) -> dict[str, Any]:
    """What `stagec analyze --json` prints, for options as the command line gives them. The same is
    analysed once."""
    key = f"{model} {sorted(options.items())}"
    if key not in _ANALYSED:
        symbolic = bool(options.pop("symbolic", False))
        builder = JobBuilder(JobOptions(model, **options), symbolic=symbolic)
        module = builder.lower(verify=False)  # what verifies is tested where modules are compiled
        _ANALYSED[key] = analysis(module, builder.model_name, symbolic=symbolic)
    return deepcopy(_ANALYSED[key])


@dataclass(frozen=True)
class Outcome:
    """What a command gave."""

    code: int
    out: str
    err: str


def stagec(*argv: str | Path) -> Outcome:
    """Run `stagec ARGV` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(a) for a in argv])
    return Outcome(code, out.getvalue(), err.getvalue())


#: Two factors, earlier first, each with the number of a value.
_Pair = tuple[str, int, str, int]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Combinations in which every pair of values of two factors occurs, chosen greedily."""
    counts = {name: len(values) for name, values in factors.items()}
    missing = {
        (a, x, b, y)
        for a, b in combinations(counts, 2)
        for x in range(counts[a])
        for y in range(counts[b])
    }
    while missing:
        chosen = _next_row(counts, missing)
        missing -= _pairs(chosen)
        yield {n: factors[n][i] for n, i in chosen.items()}


def _next_row(counts: Mapping[str, int], missing: set[_Pair]) -> dict[str, int]:
    """The first missing pair, with those values beside it that bring most of the others."""
    a, x, b, y = min(missing)
    row = {a: x, b: y}
    for name, count in counts.items():
        if name not in row:
            gains = [
                len(_pairs(_ordered(counts, {**row, name: i})) & missing) for i in range(count)
            ]
            row[name] = gains.index(max(gains))
    return _ordered(counts, row)


def _ordered(counts: Mapping[str, int], row: Mapping[str, int]) -> dict[str, int]:
    return {name: row[name] for name in counts if name in row}


def _pairs(row: Mapping[str, int]) -> set[_Pair]:
    return {(a, x, b, y) for (a, x), (b, y) in combinations(row.items(), 2)}


def each_value(
    rows: Iterable[Mapping[str, Any]], label: Callable[[Mapping[str, Any]], str]
) -> list[Any]:
    """Rows as parameters of a test. Some that together hold every value of every factor stay in all
    runs; the others are `exhaustive`."""
    given = list(rows)
    kept = _covering(given)
    return [
        pytest.param(row, id=label(row), marks=() if i in kept else EXHAUSTIVE)
        for i, row in enumerate(given)
    ]


def crossed(
    usual: Callable[[Mapping[str, Any]], bool] = lambda _: True, /, **factors: Iterable[Any]
) -> pytest.MarkDecorator:
    """All combinations of the values of a test's parameters. Some usual ones that together hold
    every value of these stay in all runs; the others are `exhaustive`."""
    rows = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    rows.sort(key=usual, reverse=True)
    kept = _covering([row for row in rows if usual(row)])
    params = [
        pytest.param(
            *row.values(),
            id="-".join(map(str, row.values())),
            marks=() if i in kept else EXHAUSTIVE,
        )
        for i, row in enumerate(rows)
    ]
    return pytest.mark.parametrize(tuple(factors), params)


def _covering(rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """Some of the rows that hold every value of all of them, chosen greedily."""
    cells = [{(name, repr(value)) for name, value in row.items()} for row in rows]
    missing, kept = set[tuple[str, str]]().union(*cells), set[int]()
    while missing:
        best = max(range(len(rows)), key=lambda i: len(cells[i] & missing))
        kept.add(best)
        missing -= cells[best]
    return kept


def kinds_of_schedules(pipelines: Iterable[tuple[str, *tuple[int, ...]]]) -> list[Any]:
    """Schedules with sizes as parameters of a test. One of each kind stays in all runs: plain, with
    chunks, with split backwards, with overlapped pairs; the others are `exhaustive`."""
    return [
        pytest.param(p, id=str(p), marks=() if p[0] in KINDS else EXHAUSTIVE) for p in pipelines
    ]


def one_of_each_kind(row: Mapping[str, Any]) -> bool:
    """Whether the schedule of a row stands for its kind, see `kinds_of_schedules`."""
    return any(value in KINDS for value in row.values() if isinstance(value, str))


def tries(count: int) -> int:
    """So many tries of what repeats a property; the profile `quick` makes a part of them."""
    return max(1, count * settings().max_examples // 100)


def examples(count: int) -> settings:
    """So many random examples, or a part of them."""
    return settings(max_examples=tries(count), deadline=None)


def parse_expr(text: str) -> Expr:
    """The expression that a text states, as the size of a dimension."""
    function = parse_one(f"stg.func @f(%x: f32[{text}]) {{\n  stg.return(%x)\n}}")
    return function.body.args[0].tensor.shape[0]


def assert_same_text(actual: str, expected: str, what: str = "") -> None:
    """Equal texts, told by their first different line: a diff of long texts takes minutes."""
    if actual == expected:
        return
    pairs = zip_longest(actual.splitlines(), expected.splitlines(), fillvalue="<end>")
    for number, (ours, theirs) in enumerate(pairs, start=1):
        if ours != theirs:
            raise AssertionError(f"{what}: line {number}:\nfound    {ours}\nexpected {theirs}")


def assert_same_items(actual: Iterable[object], expected: Iterable[object], what: str = "") -> None:
    """Equal items, one by one; told by the first that differ."""
    for number, (ours, theirs) in enumerate(zip_longest(actual, expected)):
        if ours != theirs:
            raise AssertionError(f"{what}: item {number}:\nfound    {ours}\nexpected {theirs}")


def only_program(module: Module) -> Program:
    """The program of the one rank class of a lowered module."""
    (only,) = rank_classes(module)
    return only.program()


def counted(module: Module) -> Counts:
    """What is counted of the one graph of a lowered module."""
    (only,) = lowered_graphs(module)
    return count_graph(module, only)


def schema_of(name: str) -> Any:
    """The validator of a published schema, stagec/answers/NAME.schema.json."""
    path = Path(__file__).resolve().parents[1] / "stagec" / "answers" / f"{name}.schema.json"
    return jsonschema.Draft202012Validator(json.loads(path.read_text(encoding="utf-8")))


def assert_schema(name: str, actual: object) -> None:
    """What `--json` printed has the published schema of this name."""
    problems = [f"{e.json_path}: {e.message}" for e in schema_of(name).iter_errors(actual)]
    assert not problems, problems[:3]
