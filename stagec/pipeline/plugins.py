"""Loading of plug-ins with passes, ops and named pipelines, from entry points and files.

The entry point group `stagec.plugins` has the built-in plug-in and those of other packages.

Checks of the contributions of a plug-in when it is loaded: names, kinds and classes.

Errors are reported with the class and its line, before anything runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain
from pathlib import Path
from typing import Any, cast

from stagec.formats.base import Format
from stagec.formats.registry import formats_by_name, formats_of
from stagec.importers.family import ModelFamily, known_families
from stagec.ir.index_rule import IndexRule
from stagec.ir.opdef import OpDef, Registry
from stagec.ir.param import PARAM_KINDS, Param
from stagec.ir.traits import Trait
from stagec.pipeline.blame import blamed, place_of, remember_plugin
from stagec.pipeline.passes import Pass, Plugin, options_of
from stagec.pipeline.spec import Pipeline, parse_pipeline, parse_specs
from stagec.schedule.attached import schedules_of
from stagec.schedule.base import Schedule
from stagec.schedule.registry import known_schedules
from stagec.serving.policy import BatchingPolicy, known_policies, policies_of
from stagec.support.diagnostics import DiagnosticError, DiagnosticList, error
from stagec.support.source import UNKNOWN, FileLoc, Loc
from stagec.support.suggest import did_you_mean

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


_OP_NAME = re.compile(r"[a-z_]\w*\.[a-z_]\w*", re.ASCII)
_PASS_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
#: A message, and its remedy.
_Fault = tuple[str, str]


def valid_parts(plugin: Plugin, problems: DiagnosticList) -> Plugin:
    """The plug-in with its valid ops and passes only, and with other parts only where they are
    tuples; appends the errors of the others."""

    def kept(what: str, check: Callable[[object], Iterator[_Fault]] = _any) -> tuple[Any, ...]:
        given: Any = getattr(plugin, what)
        if not isinstance(given, tuple):
            message = f"plug-in '{plugin.name}': its {what} are not a tuple"
            problems.error(message, _place(given), remedy=f"write {what}=(MyOne,), with a comma")
            return ()
        return tuple(part for part in cast("tuple[object, ...]", given) if valid(part, check(part)))

    def valid(part: object, faults: Iterator[_Fault]) -> bool:
        messages = list(faults)
        for message, remedy in messages:
            problems.error(f"plug-in '{plugin.name}': {message}", _place(part), remedy=remedy)
        return not messages

    def pipelines(given: object) -> Mapping[str, str]:
        texts = cast("Mapping[str, str]", given if isinstance(given, Mapping) else {0: 0})
        if all(isinstance(text, str) for pair in texts.items() for text in cast("Any", pair)):
            return texts
        message = f"plug-in '{plugin.name}': its pipelines are not texts by name"
        remedy = 'write pipelines={"mine": "train,my-pass"}'
        problems.error(message, _place(plugin.pipelines), remedy=remedy)
        return {}

    return Plugin(
        plugin.name,
        kept("passes", _pass),
        kept("ops", _op),
        pipelines(plugin.pipelines),
        kept("schedules"),
        kept("formats"),
        kept("families"),
        kept("policies"),
    )


def _any(_: object) -> Iterator[_Fault]:
    return iter(())


def _place(part: object) -> Loc:
    return place_of(part if isinstance(part, type) else type(part))


def _pass(given: object) -> Iterator[_Fault]:
    if not isinstance(given, type) or not issubclass(given, Pass):
        yield f"{given!r} is not a class of a pass", "bring classes: passes=(MyPass,)"
        return
    if not given.name:
        yield f"it has a pass without a name: {given.__name__}", 'add name = "my-pass" to the class'
    elif not _PASS_NAME.fullmatch(given.name):
        yield (
            f"'{given.name}' is not a valid name of a pass",
            "use letters, digits and '-': my-pass",
        )


def _op(given: object) -> Iterator[_Fault]:
    if isinstance(given, type) and issubclass(given, OpDef):
        message = f"{given.__name__} is the class of an op, expected an instance"
        yield message, f"bring {given.__name__}()"
        return
    if not isinstance(given, OpDef):
        yield f"{given!r} is not an op", "bring instances of subclasses of OpDef: ops=(MyOp(),)"
        return
    if not _OP_NAME.fullmatch(str(given.name)):
        yield f"{given.name!r} is not a valid name of an op", "write it as dialect.op: my.relu6"
    for what in ("operands", "results", "params", "traits", "element_types"):
        if not isinstance(getattr(given, what), tuple):
            message = f"the {what} of op '{given.name}' are not a tuple"
            yield message, f"write {what} = (...,), with a comma"
            return
    for trait in given.traits:
        if not isinstance(cast("object", trait), Trait):
            message = f"op '{given.name}' has {trait!r} as a trait"
            yield message, "write an instance of a trait of stagec.api.traits: View()"
    yield from _op_data(given)
    seen: set[str] = set()
    for param in given.params:
        for message, remedy in _param(param, seen):
            yield f"op '{given.name}' {message}", remedy


def _op_data(given: OpDef) -> Iterator[_Fault]:
    if not isinstance(cast("object", given.index), IndexRule | None):
        message = f"op '{given.name}' has {given.index!r} as its index rule"
        yield message, 'write index = IndexRule("...->...")'
    flops = cast("object", given.flops_per_point)
    if not isinstance(flops, int) or flops < 0:
        message = f"op '{given.name}' has {flops!r} FLOPs per point"
        yield message, "write an integer from 0, or define 'flops'"


def _param(param: object, seen: set[str]) -> Iterator[_Fault]:
    if not isinstance(param, Param):
        yield f"has {param!r} as a parameter", 'write Param("by", "size", "what it is")'
        return
    if param.kind not in PARAM_KINDS:
        kinds = f"the kinds are: {', '.join(PARAM_KINDS)}"
        remedy = did_you_mean(str(param.kind), PARAM_KINDS)
        message = f"has parameter '{param.name}' of the unknown kind {param.kind!r}"
        yield message, f"{remedy} {kinds}" if remedy else kinds
    if param.name in seen:
        yield f"has two parameters '{param.name}'", "rename one of the two"
    seen.add(param.name)
    if isinstance(cast("object", param.choices), str):
        message = f"has parameter '{param.name}' whose choices are a text"
        yield message, 'write choices=("a", "b")'
