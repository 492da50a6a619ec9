"""The cache of search answers on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stagec import __version__
from stagec.jobs.pod_options import options_of, pod_names
from stagec.jobs.request.command_line import job_words
from stagec.jobs.request.configurations import is_file_name
from stagec.jobs.session import Session
from stagec.jobs.stack import SUFFIX, read_stack
from stagec.machines import load_machine
from stagec.pipeline.plugins import load_plugins
from stagec.support.files import write_file
from stagec.text.printer import print_op

if TYPE_CHECKING:
    from stagec.searches.run import Question

#: The options that affect the answer in addition to the questions.
_ASKED = ("neighbours", "levers", "sensitivity")


def cached(
    given: Mapping[str, Any], asked: Sequence[Question], ask: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """The stored answer to these questions, or a new one, which is stored if it is complete."""
    if not given["cache"]:
        return ask()
    file = _folder() / f"{_key(given, asked)}.json"
    with suppress(OSError, ValueError):
        return {**cast("dict[str, Any]", json.loads(file.read_text("utf-8"))), "cached": True}
    answer = ask()
    if answer["proven"]:
        with suppress(OSError):  # the answer does not depend on a writable cache
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, json.dumps(answer))
    return answer


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stagec" / "search"


def _key(given: Mapping[str, Any], asked: Sequence[Question]) -> str:
    """A digest of all that an answer depends on: version and code, texts, spaces, machines and
    objectives."""
    parts: list[Any] = [__version__, _code(), [given[n] for n in _ASKED]]
    for question in asked:
        pods = [options_of(pod, question.base) for pod in pod_names(question.base)]
        parts += [
            *(text for pod in pods for text in (_text(pod.model), *_stack(pod.stack))),
            *(load_machine(p.on_machine).model_dump_json() for p in pods if p.on_machine),
            sorted(question.sizes.items()),
            sorted(question.base.sizes.items()),
            list(job_words(question.base)),
            question.most_seconds,
            [(n, list(map(str, v))) for n, v in question.space.knobs.items()],
            *(question.machine.given, question.machine.model_dump_json()),
            *(question.ranks, question.objective, question.wanted, question.overlap),
            *(question.exhaustive, question.pareto, question.price, sorted(question.given)),
            (question.limit.text, question.limit.size) if question.limit else None,
        ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _text(model: str) -> str:
    """The text of a model that is a file; the name of a model of the library, whose text is part of
    the code."""
    return Path(model).read_text("utf-8") if is_file_name(model) else model


def _stack(name: str) -> list[str]:
    """The lines of a stack that is a file, also those that it extends; or the name of one of the
    library."""
    if not name.endswith(SUFFIX):
        return [name]
    lines = read_stack(name, Session(), load_plugins(()).registry)
    return [f"{print_op(line.op)} {line.stack}" for line in lines]


def _code() -> list[tuple[str, int, int]]:
    """The name, size and time of change of each source of the compiler."""
    root = Path(str(files("stagec")))
    roots = [root, *(p for p in (root.parent / n for n in ("passes", "ir_spec")) if p.is_dir())]
    sources = (file for folder in roots for file in folder.rglob("*") if file.suffix in _SUFFIXES)
    return sorted((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in sources)


_SUFFIXES = (".py", ".stg", ".toml", ".lark")
