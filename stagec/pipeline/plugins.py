"""Loading of plug-ins with passes, ops and named pipelines, from entry points and files.

The entry point group `stagec.plugins` has the built-in plug-in and those of other packages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain
from pathlib import Path

from stagec.formats.base import Format
from stagec.formats.registry import formats_by_name, formats_of
from stagec.importers.family import ModelFamily, known_families
from stagec.ir.opdef import Registry
from stagec.pipeline.blame import blamed, remember_plugin
from stagec.pipeline.passes import Pass, Plugin, options_of
from stagec.pipeline.plugin_checks import valid_parts
from stagec.pipeline.spec import Pipeline, parse_pipeline, parse_specs
from stagec.schedule.attached import schedules_of
from stagec.schedule.base import Schedule
from stagec.schedule.registry import known_schedules
from stagec.serving.policy import BatchingPolicy, known_policies, policies_of
from stagec.support.diagnostics import DiagnosticError, DiagnosticList, error
from stagec.support.source import UNKNOWN, FileLoc, Loc

GROUP = "stagec.plugins"
BUILTIN = "builtin"


@dataclass(frozen=True)
class Loaded:
    """All contributions of loaded plug-ins, by name."""

    registry: Registry
    passes: dict[str, type[Pass]] = field(default_factory=dict[str, type[Pass]])
    pipelines: dict[str, str] = field(default_factory=dict[str, str])
    origins: dict[str, str] = field(default_factory=dict[str, str])

    def copy(self) -> Loaded:
        """A copy, to which more plug-ins can be added."""
        registry = self.registry.copy()
        return Loaded(registry, {**self.passes}, {**self.pipelines}, {**self.origins})

    def pipeline(self, text: str, **where: str) -> Pipeline:
        """The passes that a text names. Raises `DiagnosticError`."""
        return parse_pipeline(text, self.passes, self.pipelines, **where)

    def add(self, plugin: Plugin) -> None:
        """Add one plug-in. Raises `DiagnosticError` for invalid parts, and for names that are
        taken."""
        problems = DiagnosticList()
        plugin = valid_parts(plugin, problems)
        brought = (plugin.passes, plugin.ops, plugin.schedules, plugin.formats, plugin.policies)
        for part in chain(*brought):  # also of a module that the plug-in imports
            if module := getattr(part, "__module__", None):  # what is no part is an error below
                remember_plugin(module, plugin.name)
        steps: list[Callable[[], None]] = [partial(self.registry.add, op) for op in plugin.ops]
        steps += [partial(self._add_pass, p, plugin.name) for p in plugin.passes]
        steps += [
            partial(self._add_pipeline, name, text, plugin.name)
            for name, text in plugin.pipelines.items()
        ]
        steps += [partial(self._add_schedule, s, plugin.name) for s in plugin.schedules]
        steps += [partial(self._add_format, f, plugin.name) for f in plugin.formats]
        steps += [partial(self._add_family, f, plugin.name) for f in plugin.families]
        steps += [partial(self._add_policy, p, plugin.name) for p in plugin.policies]
        for step in steps:
            try:
                step()
            except DiagnosticError as e:
                problems.add(*e.diagnostics)
        problems.check()

    def _add_pass(self, pass_type: type[Pass], origin: str) -> None:
        options_of(pass_type)
        self._claim(pass_type.name, origin)
        self.passes[pass_type.name] = pass_type

    def _add_pipeline(self, name: str, text: str, origin: str) -> None:
        parse_specs(text, f"<pipeline {name}>")
        self._claim(name, origin)
        self.pipelines[name] = text

    def _add_schedule(self, schedule: object, origin: str) -> None:
        named = isinstance(getattr(schedule, "name", None), str)
        if not isinstance(schedule, Schedule) or not named:
            raise error(
                f"plug-in '{origin}' registers {schedule!r} as a schedule",
                remedy='bring instances of stagec.api.Schedule with name = "mine"',
            )
        known_schedules([*schedules_of(self.registry), schedule])
        self._claim(f"schedule {schedule.name}", origin)
        self.registry.extras.append(schedule)

    def _add_format(self, format_: object, origin: str) -> None:
        texts = [str(getattr(format_, name, "")) for name in ("name", "suffix")]
        plain = all(text.isascii() and text.replace("-", "").isalnum() for text in texts)
        if not isinstance(format_, Format) or not plain:
            raise error(
                f"plug-in '{origin}' registers {format_!r} as a format",
                remedy="bring instances of stagec.api.Format with a name and a suffix of letters "
                'and digits: name = "mine", suffix = "ext"',
            )
        formats_by_name([*formats_of(self.registry), format_])
        self._claim(f"format {format_.name}", origin)
        self.registry.extras.append(format_)

    def _add_family(self, family: object, origin: str) -> None:
        if not isinstance(family, ModelFamily):
            raise error(
                f"plug-in '{origin}' registers {family!r} as a family of models",
                remedy="bring instances of stagec.api.ModelFamily: "
                'ModelFamily("Mine", ("mine",), read_mine)',
            )
        from stagec.importers.registry import families_of  # imported here, because it is slow

        known_families([*families_of(self.registry.extras), family])
        self.registry.extras.append(family)

    def _add_policy(self, policy: object, origin: str) -> None:
        if not isinstance(policy, BatchingPolicy) or not isinstance(
            getattr(policy, "name", None), str
        ):
            raise error(
                f"plug-in '{origin}' registers {policy!r} as a batching policy",
                remedy='bring instances of stagec.api.BatchingPolicy with name = "mine"',
            )
        known_policies([*policies_of(self.registry.extras), policy])
        self._claim(f"policy {policy.name}", origin)
        self.registry.extras.append(policy)

    def _claim(self, name: str, origin: str) -> None:
        taken = self.origins.get(name)
        if taken is not None:
            raise error(
                f"plug-in '{origin}' registers '{name}', which plug-in '{taken}' has registered "
                "already",
                remedy="rename one of the two, or load one of the plug-ins only",
            )
        self.origins[name] = origin


def load_plugins(files: Iterable[Path | str] = ()) -> Loaded:
    """Load the built-in plug-in, those of installed packages, and those in these files. The result
    is a copy, to which the caller may add more.

    Raises `DiagnosticError` for a plug-in that cannot be loaded or conflicts with another one.
    """
    loaded = _loaded(_installed(tuple(sys.path))).copy()
    for file in files:
        loaded.add(_from_file(Path(file)))
    return loaded


@lru_cache(maxsize=8)
def _loaded(entries: Sequence[EntryPoint]) -> Loaded:
    """All contributions of installed plug-ins."""
    loaded = Loaded(Registry())
    for entry in entries:
        loaded.add(_from_entry_point(entry))
    return loaded


@lru_cache(maxsize=8)
def _installed(_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The entry points of installed plug-ins, the built-in one first; cached by search path."""
    points = sorted(entry_points(group=GROUP), key=lambda e: (e.name != BUILTIN, e.name))
    return tuple(dict.fromkeys(points))


def _from_entry_point(entry: EntryPoint) -> Plugin:
    where = f"plug-in '{entry.name}' ({entry.value})"
    remember_plugin(entry.module, entry.name)
    with _loading(where, "uninstall the package that brings it, or repair it"):
        return _checked(entry.load(), where)


def _from_file(path: Path) -> Plugin:
    where = f"plug-in {path}"
    if not path.is_file():
        raise error(f"{where} is not a file", remedy="give the path of a Python file with a PLUGIN")
    name = f"stagec_plugin_{path.stem}_{abs(hash(path.resolve()))}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise error(f"{where} is not a Python file", remedy="its name must end in .py")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look annotations up there
    remember_plugin(name, str(path))
    with _loading(where, "correct the line"):
        spec.loader.exec_module(module)
    plugin = getattr(module, "PLUGIN", None)
    if plugin is None:
        raise error(
            f"{where} defines no PLUGIN",
            remedy='add PLUGIN = Plugin(name="mine", passes=(MyPass,))',
        )
    checked = _checked(plugin, where)
    remember_plugin(name, checked.name)
    return checked


def _checked(plugin: object, where: str) -> Plugin:
    if isinstance(plugin, Plugin):
        return plugin
    raise error(
        f"{where}: PLUGIN is a {type(plugin).__name__}, expected a stagec.api.Plugin",
        remedy="build it with stagec.api.Plugin(...)",
    )


@contextmanager
def _loading(where: str, remedy: str) -> Generator[None]:
    """Turn any exception while a plug-in is loaded into a diagnostic at its line."""
    try:
        yield
    except DiagnosticError:
        raise
    except (Exception, SystemExit) as e:  # `sys.exit` in a plug-in must not end the command
        culprit = blamed(e)
        loc, notes = (culprit.loc, culprit.notes) if culprit else (_syntax_place(e), ())
        message = f"{where} cannot be loaded: {type(e).__name__}: {e}"
        raise error(message, loc, remedy=remedy, notes=notes) from None


def _syntax_place(problem: BaseException) -> Loc:
    if isinstance(problem, SyntaxError) and problem.filename and problem.lineno:
        return FileLoc(problem.filename, problem.lineno, problem.offset or 1)
    return UNKNOWN
