"""`stagec.api.time_step`: what `stagec time` tells, for programs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from stagec.driver.output.common import kept_reports
from stagec.driver.request.flags import FLAGS, OF_ONE_MESH, type_of
from stagec.driver.request.machine import machine_of
from stagec.driver.request.options import JobOptions
from stagec.driver.request.sizes import SizesType
from stagec.driver.request.units import on_machine
from stagec.support.diagnostics import NotAnIntegerError, error
from stagec.support.garbage import seldom_collected
from stagec.support.suggest import did_you_mean

if TYPE_CHECKING:
    from stagec.analysis.time_report import TimeReport
    from stagec.machines import Machine

#: Options of a job that a call has beside flags.
_OTHERS = ("strategy", "preset", "sizes", "mesh", "ranks", "pipeline", "plugin")


def time_step(
    model: str = "",
    machine: str | Machine = "h100-sxm",
    *,
    overlap: bool = True,
    levers: bool = False,
    **flags: Any,
) -> TimeReport:
    """How long a training step takes on a machine, and why: the call of `stagec time`.

    `model` is the name of a library model or a file, `machine` a name, a file or a `Machine`.
    `flags` are those of the command with underscores for dashes (`tp=8`, `zero=3`, `sp=True`),
    `strategy`, `preset`, `ranks`, and as dictionaries `sizes` of symbols (--set) and `mesh`.
    A flag that is None is not given. Without `overlap` all collectives are blocking. Warnings are
    Python's. A process compiles a structure once: a further call that differs in sizes and degrees
    takes milliseconds.

    Raises `DiagnosticError` for what the command refuses.
    """
    from stagec.driver.job.figures import CompiledJob

    given = {name: value for name, value in flags.items() if value is not None}
    options = JobOptions(model).changed(**_checked(given), explicit=frozenset(given))
    on = machine_of(machine) if isinstance(machine, str) else machine
    with seldom_collected(), kept_reports() as told:
        try:
            found = CompiledJob.of(on_machine(options, on)).time(on, overlap=overlap, levers=levers)
        except NotAnIntegerError as problem:
            raise error(str(problem), remedy="choose sizes that divide") from None
        except OSError as problem:
            raise error(
                f"{problem.filename}: {problem.strerror}", remedy="check the path"
            ) from None
    for diagnostic in told:
        if diagnostic.severity == "warning":
            warnings.warn(diagnostic.message, stacklevel=2)
    return found


def _checked(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The values as the command line takes them. Raises `DiagnosticError`."""
    known = [f.name for f in fields(JobOptions) if f.name in OF_ONE_MESH or f.name in _OTHERS]
    found: dict[str, Any] = {}
    for name, value in flags.items():
        if name not in known:
            remedy = did_you_mean(name, known) or "flags are as 'stagec time --help' has them"
            raise error(f"time_step: no flag '{name}'", remedy=remedy)
        try:
            found[name] = _value(name, value)
        except (click.BadParameter, ValueError, TypeError) as problem:
            message = problem.message if isinstance(problem, click.BadParameter) else str(problem)
            raise error(f"{name}: {message}", remedy="give it as the command line does") from None
    return found


def _value(name: str, value: Any) -> Any:
    """A value of the type that an option has."""
    if name in ("sizes", "mesh"):
        if not isinstance(value, str | Mapping):
            raise TypeError(f"expects a dictionary, found {value!r:.60}")
        sizes = cast("str | Mapping[str, object]", value)
        text = sizes if isinstance(sizes, str) else ",".join(f"{n}={v}" for n, v in sizes.items())
        return cast("Any", SizesType()(text))
    if isinstance(value, float):  # click cuts what is behind the point off
        value = str(int(value)) if value.is_integer() else str(value)
    if name == "ranks":
        return cast("Any", click.IntRange(min=1)(value))
    if name == "plugin":
        return tuple(Path(file) for file in value)
    if name not in FLAGS:
        return str(value)
    if isinstance(value, int) and FLAGS[name].kind == "switch":
        value = str(value)  # True and 1 are on
    return cast("Any", type_of(FLAGS[name])(_joined(value)))


def _joined(value: Any) -> Any:
    """A list as the command line writes it."""
    if not isinstance(value, list | tuple):
        return value
    return ",".join(map(str, cast("Sequence[object]", value)))
