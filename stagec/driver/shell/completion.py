"""Shell completion: names of models, machines, presets, stacks, schedules, passes and ops, and
files.

Each list is read only when a shell needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import click

from stagec.models import library, presets, stacks

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Completer: TypeAlias = "Callable[[click.Context, click.Parameter, str], list[CompletionItem]]"


def _machines() -> Iterable[str]:
    from stagec.machines import machine_names

    return machine_names()


def _passes() -> Iterable[str]:
    from stagec.pipeline.plugins import load_plugins

    plugins = load_plugins(())
    return sorted({*plugins.passes, *plugins.pipelines})


def _ops() -> Iterable[str]:
    from stagec.pipeline.plugins import load_plugins

    return sorted(op.name for op in load_plugins(()).registry)


def _schedules() -> Iterable[str]:
    from stagec.schedule.registry import SCHEDULES

    return SCHEDULES


def _complete(
    names: Callable[[], Iterable[str]],
    files: bool,
    _: click.Context | None,
    __: click.Parameter | None,
    incomplete: str,
) -> list[CompletionItem]:
    """The names that complete the last item of a comma-separated list, and files."""
    from click.shell_completion import CompletionItem

    before, comma, last = incomplete.rpartition(",")
    items = [CompletionItem(before + comma + n) for n in names() if n.startswith(last)]
    return [*items, CompletionItem(incomplete, type="file")] if files else items


#: The completers, by `Kind.completes`.
COMPLETERS: Mapping[str, Completer] = {
    "models": partial(_complete, library, True),
    "machines": partial(_complete, _machines, True),
    "presets": partial(_complete, presets, False),
    "stacks": partial(_complete, stacks, True),
    "passes": partial(_complete, _passes, False),
    "ops": partial(_complete, _ops, False),
    "schedules": partial(_complete, _schedules, False),
}
