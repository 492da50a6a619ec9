"""The text of pipelines: read, built, printed, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.ir.module import Module
from stagec.pipeline.passes import Pass, options_of
from stagec.pipeline.spec import parse_pipeline, parse_specs, print_pass, print_pipeline
from stagec.support.diagnostics import Diagnostic, DiagnosticError
from stagec.support.source import FileLoc


@dataclass(frozen=True)
class Plain(Pass):
    """No options."""

    name: ClassVar[str] = "plain"

    def run(self, module: Module) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Full(Pass):
    """One option of each type."""

    name: ClassVar[str] = "full"
    count: int = 1
    word: str = "a"
    is_on: bool = False
    share: Fraction = Fraction(1, 2)
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Needy(Pass):
    """A required option."""

    name: ClassVar[str] = "needy"
    size: int


PASSES: dict[str, type[Pass]] = {p.name: p for p in (Plain, Full, Needy)}
PIPELINES = {
    "two": "plain,full{count=2}",
    "four": "two,two",
    "loop": "plain,loop",
    "edited": "two,+before(plain):needy{size=1},-full",
    "wide": "needy{size=0},two,needy{size=1}",
    "wider": "wide,plain",
    "round": "two,about",
    "about": "round",
}
WIDE = (Needy(0), Plain(), Full(count=2), Needy(1))


def build(text: str) -> tuple[Pass, ...]:
    return parse_pipeline(text, PASSES, PIPELINES).passes


def failure(text: str) -> Diagnostic:
    with pytest.raises(DiagnosticError) as caught:
        build(text)
    (only,) = caught.value.diagnostics
    return only


def test_empty_text_is_an_empty_pipeline() -> None:
    assert build("") == build("  ") == ()


def test_options_of_all_types() -> None:
    text = 'full{count=3, word="x, y}", is-on, share=3/4, axes=(dp, tp)}'
    assert build(text) == (Full(3, "x, y}", True, Fraction(3, 4), ("dp", "tp")),)


@pytest.mark.parametrize("text", ["is-on", "is-on=true", "is-on=false"])
def test_flags(text: str) -> None:
    assert build(f"full{{{text}}}") == (Full(is_on="false" not in text),)


def test_named_pipelines_expand() -> None:
    assert build("four") == (Plain(), Full(count=2)) * 2


def test_the_last_pass_of_a_named_pipeline_is_known() -> None:
    ends = parse_pipeline("wider,needy{size=2}", PASSES, PIPELINES).ends
    assert ends == {"wider": "plain", "wide": "needy", "two": "full"}


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("two,+after(plain):needy{size=3}", (Plain(), Needy(3), Full(count=2))),
        ("two,+before(plain):needy{size=3}", (Needy(3), Plain(), Full(count=2))),
        ("two,+after(full):needy{size=3}", (Plain(), Full(count=2), Needy(3))),
        ("two , + after ( plain ) : full , plain", (Plain(), Full(), Full(count=2), Plain())),
        ("plain,+after(plain):two", (Plain(), Plain(), Full(count=2))),
        ("four,-plain", (Full(count=2), Full(count=2))),
        ("two,-plain,+before(full):plain", (Plain(), Full(count=2))),
        ("edited,full", (Needy(1), Plain(), Full())),
        # A named pipeline is one thing to an edit, at any depth.
        ("wide,+after(two):needy{size=3}", (Needy(0), Plain(), Full(count=2), Needy(3), Needy(1))),
        ("wide,+before(two):needy{size=3}", (Needy(0), Needy(3), Plain(), Full(count=2), Needy(1))),
        ("wide,-two", (Needy(0), Needy(1))),
        ("wide,full,-wide", (Full(),)),
        ("wider,-two", (Needy(0), Needy(1), Plain())),
        ("wider,+after(wide):full", (*WIDE, Full(), Plain())),
        # What is put beside a pass of a pipeline is of that pipeline, beside the pipeline is not.
        ("two,+after(full):needy{size=3},-two", ()),
        ("two,+after(two):needy{size=3},-two", (Needy(3),)),
        ("wide,+after(two):full,-wide", ()),
        ("two,+after(plain):two", (Plain(), Plain(), Full(count=2), Full(count=2))),
    ],
)
def test_edits_of_what_stands_to_the_left(text: str, passes: tuple[Pass, ...]) -> None:
    assert build(text) == passes


def test_edits_print_as_the_passes_that_they_leave() -> None:
    assert print_pipeline(build("two,+after(plain):needy{size=3}")) == (
        "plain,needy{size=3},full{count=2}"
    )


def test_defaults_are_not_printed() -> None:
    assert print_pass(Full()) == "full"
    assert print_pass(Full(is_on=True)) == "full{is-on=true}"
    assert print_pass(Needy(3)) == "needy{size=3}"


words = st.text(st.characters(codec="ascii", exclude_characters='"\n'), max_size=8)
names = st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True)
fulls = st.builds(
    Full,
    count=st.integers(),
    word=words,
    is_on=st.booleans(),
    share=st.fractions(),
    axes=st.lists(names, max_size=3).map(tuple),
)


@given(st.lists(st.one_of(fulls, st.just(Plain()), st.builds(Needy, st.integers())), max_size=4))
def test_print_and_parse_round_trip(passes: list[Pass]) -> None:
    text = print_pipeline(passes)
    assert build(text) == tuple(passes)
    assert print_pipeline(build(text)) == text


@given(st.text(alphabet='ab,{}=()" -+:', max_size=20))
def test_any_text_parses_or_gives_one_diagnostic(text: str) -> None:
    try:
        parse_specs(text)
    except DiagnosticError as e:
        (item,) = e.diagnostics
        assert isinstance(item.loc, FileLoc)
        assert 1 <= item.loc.col <= len(text) + 1
        assert item.remedy


@pytest.mark.parametrize(
    ("text", "column", "message", "remedy"),
    [
        ("plain,plian", 7, "unknown pass 'plian'", "did you mean 'plain'?"),
        ("plain;plain", 6, "expected ',' or '{', found ';'", None),
        ("plain,", 7, "expected a pass after ',', found the end", None),
        ("full{count}", 1, "expects an integer, found ''", "count=4"),
        ("full{count=x}", 1, "expects an integer, found 'x'", "count=4"),
        ("full{share=1/0}", 1, "expects a fraction", "share=1/2"),
        ("plain,full{cuont=1}", 7, "has no option 'cuont'", "did you mean 'count'?"),
        ("full{count=1,count=2}", 14, "option 'count' is given twice", "drop one"),
        ("full{count=1", 13, "expected ',' or '}', found the end", None),
        ('full{word="a}', 11, "expected a closing quote", None),
        ("needy", 1, "expects option 'size': an integer", "needy{size=...}"),
        ("two{x=1}", 1, "is a named pipeline and takes no options", "plain,full{count=2}"),
        (
            "two,+after(pain):full",
            12,
            "pass 'pain' is not in the pipeline before",
            "did you mean 'plain'?",
        ),
        (
            "two,+after(needy):full",
            12,
            "pass 'needy' is not in the pipeline",
            "the passes before it are plain, full",
        ),
        (
            "+after(plain):full",
            8,
            "pass 'plain' is not in the pipeline",
            "name a pipeline before it",
        ),
        (
            "two,-needy",
            6,
            "pass 'needy' is not in the pipeline",
            "the passes before it are plain, full",
        ),
        ("four,needy{size=1},+after(full):plain", 27, "is in the pipeline 2 times", "once: needy"),
        (
            "two,+behind(full):plain",
            6,
            "expected 'after(PASS):' or 'before(PASS):'",
            "reads train,+a",
        ),
        ("two,+after:full", 11, "expected '(', found ':'", "an insertion reads"),
        ("two,+after(full)", 17, "expected ':' and a pass, found the end", "an insertion reads"),
        ("two,+after(full):", 18, "expected the name of a pass, found the end", None),
        ("two,-", 6, "expected the name of a pass to leave out, found the end", None),
        ("loop", 1, "pipeline 'loop' contains itself", "remove the cycle"),
        ("plain,about", 7, "pipeline 'about' contains itself", "remove the cycle"),
        (
            "four,+after(two):plain",
            13,
            "pass 'two' is in the pipeline 2 times",
            "occurs once: four",
        ),
    ],
)
def test_errors(text: str, column: int, message: str, remedy: str | None) -> None:
    actual = failure(text)
    assert message in actual.message
    assert isinstance(actual.loc, FileLoc)
    assert actual.loc.col == column
    assert remedy is None or remedy in (actual.remedy or "")


def test_options_describe_themselves() -> None:
    options = options_of(Full)
    assert list(options) == ["count", "word", "is-on", "share", "axes"]
    assert options["count"].kind == "an integer"
    assert not options["count"].required
    assert options_of(Needy)["size"].required
