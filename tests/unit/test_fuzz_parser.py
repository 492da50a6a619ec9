"""Mutated modules through parser, verifier and passes: only `DiagnosticError` comes out."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagec.ir.module import Module
from stagec.pipeline.manager import PassManager
from stagec.pipeline.spec import Pipeline
from stagec.support.diagnostics import DiagnosticError, render
from stagec.support.source import Source
from stagec.text.build import parse_module
from stagec.text.printer import print_module
from tests.support import loaded

LIT = Path(__file__).resolve().parent.parent / "lit"
TOKEN = re.compile(r'"[^"\n]*"|//[^\n]*|[A-Za-z_][\w.]*|%\w+|@\w+|\d+|\s+|.')
#: What mutations put in, besides what the seeds hold.
ODD = (
    "0",
    "-1",
    "1/2",
    "9223372036854775807",
    "node",
    '"->"',
    '"ab"',
    '"(ab)c->c"',
    "é",
    "\0",
    "%",
)
#: The passes that suit a module of each phase.
PASSES = {
    "parsed": "infer-shapes,verify,propagate-sharding,insert-collectives,clean",
    "shaped": "clean,propagate-sharding,insert-collectives,clean",
    "sharded": "insert-collectives,clean",
}


@lru_cache(maxsize=1)
def seeds() -> list[list[str]]:
    """The tokens of every part of every lit test of the language."""
    files = sorted(f for f in LIT.rglob("*.stg") if f.parts[-2] != "Inputs")
    parts = [p for f in files for p in f.read_text(encoding="utf-8").split("// -----\n")]
    tokens = [TOKEN.findall(re.sub(r"//[^\n]*", "", p)) for p in parts]
    return [t for t in tokens if 20 < len(t) < 1500]


@lru_cache(maxsize=1)
def pool() -> list[str]:
    """Tokens to insert."""
    return sorted({t for seed in seeds() for t in seed} | set(ODD))


@lru_cache(maxsize=16)
def pipeline(phase: str) -> Pipeline:
    return loaded().pipeline(PASSES.get(phase, "verify"))


@st.composite
def mutants(draw: st.DrawFn) -> str:
    """A seed with one to three tokens deleted, inserted, replaced or swapped."""
    tokens = list(draw(st.sampled_from(seeds())))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(tokens) - 1))
        kind = draw(st.sampled_from(("delete", "insert", "replace", "replace", "swap")))
        if kind == "delete":
            del tokens[at]
        elif kind == "insert":
            tokens.insert(at, draw(st.sampled_from(pool())))
        elif kind == "replace":
            tokens[at] = draw(st.sampled_from(pool()))
        else:
            other = draw(st.integers(0, len(tokens) - 1))
            tokens[at], tokens[other] = tokens[other], tokens[at]
    return "".join(tokens)


def parse(text: str, *, unregistered: bool = False) -> Module:
    source = Source("fuzz.stg", text)
    return parse_module(source, loaded().registry, allow_unregistered=unregistered)


def check_diagnostics(error: DiagnosticError) -> None:
    """Something is said, and it can be shown."""
    assert error.diagnostics
    assert all(render(d, {}) for d in error.diagnostics)


FUZZ = settings(
    max_examples=1500,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@FUZZ
@given(mutants(), st.booleans())
def test_only_diagnostics_come_out(text: str, unregistered: bool) -> None:
    try:
        module = parse(text, unregistered=unregistered)
        PassManager(pipeline(module.phase)).run(module)
    except DiagnosticError as e:
        check_diagnostics(e)


@FUZZ
@given(mutants())
def test_what_is_printed_reads_back_as_the_same(text: str) -> None:
    try:
        module = parse(text, unregistered=True)
    except DiagnosticError:
        return
    printed = print_module(module)
    assert print_module(parse(printed, unregistered=True)) == printed


@FUZZ
@given(st.text(max_size=60))
def test_any_text_parses_or_gives_diagnostics(text: str) -> None:
    try:
        parse(text)
    except DiagnosticError as e:
        check_diagnostics(e)
