"""Attribution of exceptions to plug-ins or to the compiler.

An exception belongs to a plug-in if code of the plug-in is in its traceback, or if the compiler was
working for a pass, an op or a schedule of the plug-in (which returned an unusable value).
"""

import inspect
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
    """Note that this module and its submodules belong to the plug-in of this name."""
    if module.partition(".")[0] != "stagec":
        _plugins[module.partition(".")[0]] = name


def plugin_of(module: object) -> str | None:
    """The plug-in to which a module belongs, or None."""
    return _plugins.get(module.partition(".")[0]) if isinstance(module, str) else None


def blamed(problem: BaseException) -> Diagnostic | None:
    """The diagnostic for an exception of a plug-in, with the traceback from its code on; None for
    an exception of the compiler."""
    frames = list(traceback.walk_tb(problem.__traceback__))
    stack = traceback.extract_tb(problem.__traceback__)
    for at, (frame, _) in enumerate(frames):
        plugin = plugin_of(frame.f_globals.get("__name__"))
        if plugin is not None:
            own = [n for n in range(at, len(frames)) if _is_of_plugin(frames[n][0])]
            culprit = _Culprit(plugin, _title(frame.f_locals.get("self")), _loc(stack[own[-1]]))
            return _diagnostic(problem, culprit, stack[at:])
    for at in reversed(range(len(frames))):
        owner = _in_hand(frames[at][0])
        plugin = plugin_of(type(owner).__module__)
        if plugin is not None:
            culprit = _Culprit(plugin, _title(owner), place_of(type(owner)))
            return _diagnostic(problem, culprit, stack[at:])
    return None


@dataclass(frozen=True)
class _Culprit:
    plugin: str
    title: str
    place: Loc


def _diagnostic(
    problem: BaseException, blame: _Culprit, stack: Sequence[traceback.FrameSummary]
) -> Diagnostic:
    shown = [f for f in stack if not f.filename.startswith("<")][-_MOST:]
    notes = [note(f"in {f.name}", _loc(f)) for f in shown]
    notes += [note(line) for line in getattr(problem, "__notes__", ())]
    message = (
        f"a mistake in plug-in '{blame.plugin}'{blame.title}: {type(problem).__name__}: {problem}"
    )
    return Diagnostic(message, blame.place, "error", _REMEDY, tuple(notes))


def _is_of_plugin(frame: FrameType) -> bool:
    return plugin_of(frame.f_globals.get("__name__")) is not None


def _in_hand(frame: FrameType) -> object:
    """The pass, op or schedule of a plug-in for which a function of the compiler works, or None."""
    values = frame.f_locals
    op = values.get("op")
    candidates: list[object] = [op.definition] if isinstance(op, Operation) else []
    candidates += [values.get(name) for name in ("self", "pass_", "definition", "schedule")]
    return next((h for h in candidates if plugin_of(type(h).__module__)), None)


def _title(owner: object) -> str:
    for kind, title in ((Pass, "pass"), (OpDef, "op"), (Schedule, "schedule")):
        if isinstance(owner, kind):
            return f", {title} '{owner.name}'"
    return ""


def place_of(owner: type) -> Loc:
    """The location of a class."""
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    try:
        return FileLoc(_shown(file), inspect.getsourcelines(owner)[1], 1) if file else UNKNOWN
    except (OSError, TypeError):
        return UNKNOWN


def _loc(frame: traceback.FrameSummary) -> Loc:
    """The location of a frame, with its width if it is known and on one line."""
    start, end = frame.colno, frame.end_colno
    line = frame.lineno or 1
    if start is None or end is None or frame.end_lineno != frame.lineno:
        return FileLoc(_shown(frame.filename), line, 1)
    return FileLoc(_shown(frame.filename), line, start + 1, max(1, end - start))


def _shown(file: str) -> str:
    """The path relative to the working folder, if it is inside."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
