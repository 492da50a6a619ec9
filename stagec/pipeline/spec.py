"""Pipelines as text: `a,b{x=1,y=2},c`, parsed with locations and printed back.

Named pipelines are written like passes, also inside of each other, and are replaced by their
passes. `+after(a):p` and `+before(a):p` insert a pass into the pipeline to the left, `-a` removes
one from it; `a` is a pass, or a complete named pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stagec.pipeline.passes import Pass
from stagec.support.diagnostics import Diagnostic, DiagnosticError, error
from stagec.support.source import UNKNOWN, FileLoc, Loc, UnknownLoc
from stagec.support.suggest import did_you_mean

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"([^"\n]*)"')
_PLAIN = re.compile(r"[^\s,{}()\"=]+")
_WHERE = re.compile(r"after\b|before\b")
_FORM = "a pipeline reads pass-a,pass-b{option=value}"
_INSERTION = "an insertion reads train,+after(insert-collectives):my-pass{option=value}"
#: The name by which diagnostics call the text of a pipeline.
PIPELINE = "<pipeline>"


@dataclass(frozen=True)
class Edit:
    """An edit of the pipeline to the left: insert `after` or `before` a pass, or remove it
    (`without`)."""

    kind: str
    anchor: str
    loc: Loc = UNKNOWN


@dataclass(frozen=True)
class PassSpec:
    """A pass or a named pipeline as written, with its options and its location.

    With an `edit` it is not appended at the end; for `without` the name is that of the removed
    pass.
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    loc: Loc = UNKNOWN
    edit: Edit | None = None


@dataclass(frozen=True)
class Pipeline:
    """Passes in order. `locs` are their locations, and `ends` maps each named pipeline to its last
    pass."""

    passes: tuple[Pass, ...] = ()
    locs: tuple[Loc, ...] = ()
    ends: Mapping[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        return print_pipeline(self.passes)

    def without(self, names: Collection[str]) -> Pipeline:
        """The pipeline without the passes of these names."""
        kept = [i for i, p in enumerate(self.passes) if p.name not in names]
        locs = tuple(self.locs[i] for i in kept) if self.locs else ()
        return replace(self, passes=tuple(self.passes[i] for i in kept), locs=locs)

    def having(self, name: str, **options: Any) -> Pipeline:
        """The pipeline in which passes of this name have these options."""
        passes = tuple(replace(p, **options) if p.name == name else p for p in self.passes)
        return replace(self, passes=passes)


# -- text to specs ---------------------------------------------------------------------------------


def parse_specs(text: str, file: str = PIPELINE) -> list[PassSpec]:
    """The unresolved passes that a text names.

    Raises `DiagnosticError` at the first invalid character.
    """
    return _Parser(text, file).pipeline()


class _Parser:
    def __init__(self, text: str, file: str) -> None:
        self._text, self._file, self._at = text, file, 0
        self._skip()

    def pipeline(self) -> list[PassSpec]:
        specs: list[PassSpec] = []
        while self._at < len(self._text):
            specs.append(self._item())
            if self._at < len(self._text):
                self._expect(",", "',' or '{'" if not specs[-1].options else "','")
                if self._at == len(self._text):
                    raise self._error("a pass after ','")
        return specs

    def _item(self) -> PassSpec:
        if self._peek() == "+":
            self._take()
            edit = self._insertion()
            return replace(self._pass(), edit=edit)
        if self._peek() == "-":
            self._take()
            start = self._at
            name = self._match(_NAME, "the name of a pass to leave out")[0]
            loc = self._loc(start, len(name))
            return PassSpec(name, loc=loc, edit=Edit("without", name, loc))
        return self._pass()

    def _insertion(self) -> Edit:
        """`after(NAME):` or `before(NAME):`."""
        kind = self._match(_WHERE, "'after(PASS):' or 'before(PASS):'", _INSERTION)[0]
        self._expect("(", "'('", _INSERTION)
        start = self._at
        anchor = self._match(_NAME, "the name of a pass", _INSERTION)[0]
        loc = self._loc(start, len(anchor))
        self._expect(")", "')'", _INSERTION)
        self._expect(":", "':' and a pass", _INSERTION)
        return Edit(kind, anchor, loc)

    def _pass(self) -> PassSpec:
        start = self._at
        name = self._match(_NAME, "the name of a pass")[0]
        loc = self._loc(start, len(name))
        options: dict[str, str] = {}
        if self._peek() == "{":
            self._take()
            while self._peek() != "}":
                self._option(options)
                if self._peek() != "}":
                    self._expect(",", "',' or '}'")
            self._take()
        return PassSpec(name, options, loc)

    def _option(self, options: dict[str, str]) -> None:
        start = self._at
        name = self._match(_NAME, "the name of an option")[0]
        if name in options:
            raise error(
                f"option '{name}' is given twice", self._loc(start, len(name)), remedy="drop one"
            )
        options[name] = ""
        if self._peek() == "=":
            self._take()
            options[name] = self._value()

    def _value(self) -> str:
        if self._peek() == '"':
            return self._match(_STRING, "a closing quote")[1]
        if self._peek() == "(":
            self._take()
            parts: list[str] = []
            while self._peek() != ")":
                parts.append(self._value())
                if self._peek() != ")":
                    self._expect(",", "',' or ')'")
            self._take()
            return f"({', '.join(parts)})"
        return self._match(_PLAIN, "a value")[0]

    # -- characters ----------------------------------------------------------------------------

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> None:
        self._at += 1
        self._skip()

    def _expect(self, char: str, what: str, form: str = _FORM) -> None:
        if self._peek() != char:
            raise self._error(what, form)
        self._take()

    def _match(self, pattern: re.Pattern[str], what: str, form: str = _FORM) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self._error(what, form)
        self._at = match.end()
        self._skip()
        return match

    def _error(self, expected: str, form: str = _FORM) -> DiagnosticError:
        shown = f"'{self._peek()}'" if self._peek() else "the end"
        return error(f"expected {expected}, found {shown}", self._loc(self._at, 1), remedy=form)

    def _loc(self, start: int, width: int) -> FileLoc:
        before = self._text[:start]
        line = before.count("\n") + 1
        return FileLoc(self._file, line, start - (before.rfind("\n") + 1) + 1, width)


# -- specs to passes -------------------------------------------------------------------------------


def build_pipeline(
    specs: Sequence[PassSpec],
    passes: Mapping[str, type[Pass]],
    pipelines: Mapping[str, str] | None = None,
) -> Pipeline:
    """The passes of the specs, with expanded named pipelines and applied edits.

    Raises `DiagnosticError` for an unknown name or option.
    """
    built = _Assembler(passes, pipelines or {}).build(specs)
    ends = {part.name: b.pass_.name for b in built for part in b.parts}
    return Pipeline(tuple(b.pass_ for b in built), tuple(b.loc for b in built), ends)


def parse_pipeline(
    text: str,
    passes: Mapping[str, type[Pass]],
    pipelines: Mapping[str, str] | None = None,
    *,
    file: str = PIPELINE,
) -> Pipeline:
    """The passes of a text. Raises `DiagnosticError` with the location in the text."""
    return build_pipeline(parse_specs(text, file), passes, pipelines)


@dataclass(frozen=True)
class _Placed:
    """A pass in the list. `parts` are the uses of named pipelines to which it belongs, outer ones
    first; one use is one object."""

    pass_: Pass
    loc: Loc
    parts: tuple[_Part, ...] = ()

    def depth(self, name: str) -> int | None:
        """The number of named pipelines around this pass, or around the one of `parts` with this
        name; None if neither has it."""
        names = [*(part.name for part in self.parts), self.pass_.name]
        return names.index(name) if name in names else None


@dataclass(frozen=True, eq=False)
class _Part:
    """One use of a named pipeline."""

    name: str


class _Assembler:
    def __init__(self, passes: Mapping[str, type[Pass]], pipelines: Mapping[str, str]) -> None:
        self._passes, self._pipelines = passes, pipelines

    def build(
        self, specs: Sequence[PassSpec], parts: tuple[_Part, ...] = (), outer: tuple[str, ...] = ()
    ) -> list[_Placed]:
        """The passes of specs, which belong to `parts`; `outer` are the names of the enclosing
        pipelines."""
        built: list[_Placed] = []
        for spec in specs:
            if spec.edit is None:
                built += self._expanded(spec, parts, outer)
            elif spec.edit.kind == "without":
                removed = {i for run in _runs_of(built, spec.edit) for i in run}
                built = [b for i, b in enumerate(built) if i not in removed]
            else:
                run = _only(built, spec.edit)
                beside = built[run[0]]
                around = beside.parts[: beside.depth(spec.edit.anchor)]
                at = run.stop if spec.edit.kind == "after" else run.start
                built[at:at] = self._expanded(spec, around, outer)
        return built

    def _expanded(
        self, spec: PassSpec, parts: tuple[_Part, ...], outer: tuple[str, ...]
    ) -> list[_Placed]:
        if spec.name in self._passes:
            return [_Placed(_with_place(self._passes[spec.name], spec), spec.loc, parts)]
        text = self._text_of(spec, outer)
        inner = parse_specs(text, f"<pipeline {spec.name}>")
        located = [
            replace(s, loc=spec.loc, edit=s.edit and replace(s.edit, loc=spec.loc)) for s in inner
        ]
        return self.build(located, (*parts, _Part(spec.name)), (*outer, spec.name))

    def _text_of(self, spec: PassSpec, outer: tuple[str, ...]) -> str:
        """The text of a named pipeline. Raises `DiagnosticError` if there is none, or it is
        cyclic."""
        if spec.name not in self._pipelines:
            raise error(
                f"unknown pass '{spec.name}'",
                spec.loc,
                remedy=did_you_mean(spec.name, {**self._passes, **self._pipelines})
                or "'stagec passes' lists the passes, --plugin FILE loads others",
            )
        if spec.name in outer:
            raise error(
                f"pipeline '{spec.name}' contains itself", spec.loc, remedy="remove the cycle"
            )
        if spec.options:
            raise error(
                f"'{spec.name}' is a named pipeline and takes no options",
                spec.loc,
                remedy=f"write its passes: {self._pipelines[spec.name]}",
            )
        return self._pipelines[spec.name]


def _runs_of(built: Sequence[_Placed], edit: Edit) -> list[range]:
    """The positions of the pass or named pipeline of an edit, each from its first pass to its last.
    Raises `DiagnosticError` if there is none."""
    depths = [placed.depth(edit.anchor) for placed in built]
    ranges: list[range] = []
    for i, depth in enumerate(depths):
        if depth is None:
            continue
        part = built[i].parts[depth : depth + 1]
        if ranges and part and built[ranges[-1].start].parts[depth : depth + 1] == part:
            ranges[-1] = range(ranges[-1].start, i + 1)
        else:
            ranges.append(range(i, i + 1))
    if not ranges:
        names = _names(built)
        shown = (
            f"the passes before it are {', '.join(names)}" if names else "name a pipeline before it"
        )
        raise error(
            f"pass '{edit.anchor}' is not in the pipeline before this edit",
            edit.loc,
            remedy=did_you_mean(edit.anchor, names) or shown,
        )
    return ranges


def _names(built: Sequence[_Placed]) -> list[str]:
    """The names of the passes in the list, with repetitions, and then of named pipelines."""
    pipelines = dict.fromkeys(part for placed in built for part in placed.parts)
    return [*(placed.pass_.name for placed in built), *(part.name for part in pipelines)]


def _only(built: Sequence[_Placed], edit: Edit) -> range:
    first, *more = _runs_of(built, edit)
    if more:
        names = _names(built)
        once = ", ".join(name for name in names if names.count(name) == 1)
        raise error(
            f"pass '{edit.anchor}' is in the pipeline {1 + len(more)} times before this edit, "
            "expected once",
            edit.loc,
            remedy=f"name one that occurs once: {once}" if once else "write the passes one by one",
        )
    return first


def _with_place(pass_type: type[Pass], spec: PassSpec) -> Pass:
    try:
        return pass_type.from_options(spec.options)
    except DiagnosticError as e:
        raise DiagnosticError(*(_placed(d, spec.loc) for d in e.diagnostics)) from None


def _placed(diagnostic: Diagnostic, loc: Loc) -> Diagnostic:
    if not isinstance(diagnostic.loc, UnknownLoc):
        return diagnostic
    return Diagnostic(
        diagnostic.message, loc, diagnostic.severity, diagnostic.remedy, diagnostic.notes
    )


# -- passes to text --------------------------------------------------------------------------------


def print_pipeline(passes: Sequence[Pass]) -> str:
    """The text from which these passes can be built."""
    return ",".join(map(print_pass, passes))


def print_pass(pass_: Pass) -> str:
    """The text of one pass, without options that have their defaults."""
    parts = [f"{name}={_quoted(text)}" for name, text in pass_.options().items()]
    return pass_.name + (f"{{{','.join(parts)}}}" if parts else "")


def _quoted(text: str) -> str:
    plain = _PLAIN.fullmatch(text) or re.fullmatch(r"\((?:[\w.-]+(?:, )?)*\)", text)
    return text if plain else f'"{text}"'
