"""Writes docs/reference/api: every name of `stagec.api` with its signature, documentation, members
and an example, which is run.

docs/examples/api.py has the examples, and is the outline of the pages: one for each part.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from stagec import api
from tools.markup import markdown, page, page_name, paragraphs

_INTRO = (
    "What authors of passes, ops, schedules, formats and policies import, all from `stagec.api`; "
    "it changes only with a major version. Guides: [writing a pass](../../writing-a-pass.md) "
    "and [writing an op](../../writing-an-op.md). The examples are one session that starts with "
    "`from stagec.api import *`; `#>` marks what they print."
)
_PART = re.compile(r"^# == (?P<title>[^:]+): (?P<text>.*)$")
_ENTRY = re.compile(r"^# -- (?P<names>[\w, ]+?)(?:: (?P<text>.*))?$")


@dataclass
class Entry:
    """Names that share an example, and a text for those without documentation."""

    names: Sequence[str]
    text: str
    code: list[str] = field(default_factory=list[str])


@dataclass
class ApiPart:
    """A part of the page."""

    title: str
    text: str
    entries: list[Entry] = field(default_factory=list[Entry])


def api_pages(examples: Path) -> dict[str, str]:
    """The index, and a page for each part. Raises ValueError for names without an example, and the
    exceptions of examples."""
    parts = outline(examples.read_text(encoding="utf-8"))
    shown = [name for part in parts for entry in part.entries for name in entry.names]
    if sorted(shown) != sorted(api.__all__):
        raise ValueError(f"not once each in {examples.name}: {set(shown) ^ set(api.__all__)}")
    names: dict[str, Any] = {n: getattr(api, n) for n in api.__all__} | {"__name__": __name__}
    pages = {page_name(p.title): page(p.title, p.text, _body(p, names)) for p in parts}
    return {"index": page("The API", _INTRO, _index(parts)), **pages}


def outline(text: str) -> list[ApiPart]:
    """The parts and entries of the examples."""
    parts: list[ApiPart] = []
    for line in text.splitlines():
        if part := _PART.match(line):
            parts.append(ApiPart(part["title"], part["text"]))
        elif entry := _ENTRY.match(line):
            parts[-1].entries.append(Entry(entry["names"].split(", "), entry["text"] or ""))
        elif parts and parts[-1].entries:
            parts[-1].entries[-1].code.append(line)
    return parts


def _index(parts: Sequence[ApiPart]) -> Iterator[str]:
    for part in parts:
        file = f"{page_name(part.title)}.md"
        links = (f"[`{n}`]({file}#{n.lower()})" for entry in part.entries for n in entry.names)
        yield f"- [{part.title}]({file}): {', '.join(links)}"


def _body(part: ApiPart, names: dict[str, Any]) -> Iterator[str]:
    for entry in part.entries:
        for name in entry.names:
            yield from _name(name, getattr(api, name), entry.text)
        yield from ("", "```python", *session("\n".join(entry.code).strip(), names), "```")


# -- a name ----------------------------------------------------------------------------------------


def _name(name: str, value: object, text: str) -> Iterator[str]:
    yield from ("", f"## {name}", "")
    if (
        not (inspect.isclass(value) or inspect.isfunction(value))
        or value.__module__[:6] != "stagec"
    ):
        yield text  # another name for a type
        return
    shown = signature(value)
    if shown:
        yield from (f"`{name}{shown}`", "")
    yield from markdown(inspect.getdoc(value) or "")
    if isinstance(value, type):
        yield from _members(value)


def signature(value: Callable[..., object]) -> str:
    """The parameters and the result, with annotations as in the source."""
    try:
        signature_ = inspect.signature(value)
    except ValueError:
        return ""
    if inspect.isclass(value) and (issubclass(value, Enum) or "args" in signature_.parameters):
        return ""
    if inspect.isclass(value) and not signature_.parameters:
        return ""
    shown: list[str] = []
    for p in signature_.parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in "".join(shown):
            shown.append("*")
        star = "*" * ((p.kind is p.VAR_POSITIONAL) + 2 * (p.kind is p.VAR_KEYWORD))
        default = "" if p.default is p.empty else f" = {p.default!r}"
        shown += (
            [] if p.name in ("self", "cls") else [f"{star}{p.name}{_of(p.annotation)}{default}"]
        )
    returns = "" if inspect.isclass(value) else _of(signature_.return_annotation, " -> ")
    return f"({', '.join(shown)}){returns}"


def _of(annotation: object, before: str = ": ") -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    written = getattr(annotation, "__forward_arg__", annotation)
    return before + str(written)


_VARIABLE = re.compile(r"^    (\w+): ClassVar\[.*?\] = (.*?)  # (.*)$", re.M)


def _members(cls: type) -> Iterator[str]:
    """Variables with a comment, methods and properties that the class itself documents."""
    slots = [n for n in getattr(cls, "__slots__", ()) if not n.startswith("_")]
    if slots and not hasattr(cls, "__dataclass_fields__"):
        yield from ("", f"Attributes: {', '.join(f'`{n}`' for n in slots)}.")
    rows = [(f"{n} = {v}", said) for n, v, said in _VARIABLE.findall(inspect.getsource(cls))]
    for name, member in vars(cls).items():
        call: object = getattr(member, "__func__", member)
        doc = inspect.getdoc(call)
        if name.startswith("_") or not doc:
            continue
        if inspect.isfunction(call):
            rows.append((f"{name}{signature(call)}", " ".join(next(paragraphs(doc)))))
        elif isinstance(member, property | cached_property):
            rows.append((name, " ".join(next(paragraphs(doc)))))
    if rows:
        yield from ("", "| | |", "|---|---|")
        yield from (f"| `{_cell(left)}` | {_cell(right)} |" for left, right in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- examples --------------------------------------------------------------------------------------


def session(code: str, names: dict[str, Any]) -> Iterator[str]:
    """The lines of some code, each statement with its output."""
    lines, done = code.splitlines(), 0
    for node in ast.parse(code).body:
        yield from lines[done : node.end_lineno]
        done = node.end_lineno or done
        yield from (f"#> {line}".rstrip() for line in printed(node, names))


def printed(node: ast.stmt, names: dict[str, Any]) -> list[str]:
    """The output of a statement in a session."""
    out = io.StringIO()
    hook, sys.displayhook = sys.displayhook, sys.__displayhook__
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(ast.Interactive([node]), "<example>", "single"), names)
    finally:
        sys.displayhook = hook
    return out.getvalue().splitlines()
