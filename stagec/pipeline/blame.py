"""Whose mistake an exception is: that of a plug-in, or one of the compiler.

An exception is a plug-in's if code of the plug-in is on the way to it, or if the compiler was at
work for a pass, an op or a schedule of the plug-in (which has given it what nobody can use).
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from stagec.ir.core import Operation
from stagec.ir.opdef import OpDef
from stagec.pipeline.passes import Pass
from stagec.schedule.base import Schedule
from stagec.support.diagnostics import Diagnostic, note
from stagec.support.source import UNKNOWN, FileLoc, Loc

#: The plug-ins of this process by their outermost module.
_plugins: dict[str, str] = {}
_REMEDY = "correct the plug-in; the notes are the traceback from there on, innermost last"
_MOST = 12


def remember_plugin(module: str, name: str) -> None:
    """What is in this module, or below it, is of the plug-in of this name."""
    if module.partition(".")[0] != "stagec":
        _plugins[module.partition(".")[0]] = name


def plugin_of(module: object) -> str | None:
    """The plug-in that a module is of."""
    return _plugins.get(module.partition(".")[0]) if isinstance(module, str) else None


def blamed(problem: BaseException) -> Diagnostic | None:
    """The mistake of a plug-in behind an exception, with the traceback from its code on; None for a
    mistake of the compiler."""
    frames = list(traceback.walk_tb(problem.__traceback__))
    for at, (frame, _) in enumerate(frames):
        plugin = plugin_of(frame.f_globals.get("__name__"))
        if plugin is not None:
            stack = traceback.StackSummary.extract(iter(frames[at:]))
            found = _Found(plugin, _title(frame.f_locals.get("self")), _own(frames[at:]))
            return _diagnostic(problem, found, stack)
    for at in reversed(range(len(frames))):
        owner = _in_hand(frames[at][0])
        plugin = plugin_of(type(owner).__module__)
        if plugin is not None:
            stack = traceback.StackSummary.extract(iter(frames[at:]))
            return _diagnostic(problem, _Found(plugin, _title(owner), _class_place(owner)), stack)
    return None


@dataclass(frozen=True)
class _Found:
    plugin: str
    title: str
    place: Loc


def _diagnostic(
    problem: BaseException, found: _Found, stack: Sequence[traceback.FrameSummary]
) -> Diagnostic:
    shown = [f for f in stack if not f.filename.startswith("<")][-_MOST:]
    notes = [note(f"in {f.name}: {f.line}", _loc(f.filename, f.lineno)) for f in shown]
    notes += [note(line) for line in getattr(problem, "__notes__", ())]
    message = (
        f"a mistake in plug-in '{found.plugin}'{found.title}: {type(problem).__name__}: {problem}"
    )
    return Diagnostic(message, found.place, "error", _REMEDY, tuple(notes))


def _own(frames: Sequence[tuple[FrameType, int]]) -> Loc:
    """The innermost line of a plug-in."""
    own = [(f, line) for f, line in frames if plugin_of(f.f_globals.get("__name__"))]
    frame, line = own[-1]
    return _loc(frame.f_code.co_filename, line)


def _in_hand(frame: FrameType) -> object:
    """The pass, op or schedule that a function of the compiler works for."""
    values = frame.f_locals
    op = values.get("op")
    held: list[object] = [op.definition] if isinstance(op, Operation) else []
    held += [values.get(name) for name in ("self", "pass_", "definition", "schedule")]
    return next((h for h in held if plugin_of(type(h).__module__)), None)


def _title(owner: object) -> str:
    for kind, title in ((Pass, "pass"), (OpDef, "op"), (Schedule, "schedule")):
        if isinstance(owner, kind):
            return f", {title} '{owner.name}'"
    return ""


def _class_place(owner: object) -> Loc:
    try:
        _, line = inspect.getsourcelines(type(owner))
    except (OSError, TypeError):
        return UNKNOWN
    return _loc(getattr(sys.modules.get(type(owner).__module__), "__file__", None), line)


def _loc(file: str | None, line: int | None) -> Loc:
    return FileLoc(file, line or 1, 1) if file else UNKNOWN
