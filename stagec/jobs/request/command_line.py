"""Writes options as words of a command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from stagec.ir_spec.strategy.axes import AXES
from stagec.jobs.request.flags import SHORTHANDS, words
from stagec.jobs.request.machine import settled, used_text
from stagec.jobs.request.option import CommandOption
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import STEP

if TYPE_CHECKING:
    from stagec.machines import Machine

#: The options of a step of serving.
_SERVING = ("serve", *STEP, "draft", "page", "kv_dtype", "sampling", "prefill", "decode")


def question_command(
    name: str,
    options: JobOptions,
    machine: Machine | None,
    asked: Sequence[CommandOption] = (),
    given: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The command `name` for a job, with the values `given` of its options `asked`."""
    command = ["stagec", name, *job_words(options)]
    command += _machine_words(machine) if machine is not None else ()
    return shlex.join([*command, *asked_words(asked, given)])


def asked_words(options: Iterable[CommandOption], given: Mapping[str, Any]) -> Iterator[str]:
    """The words of a command line that give options their values."""
    for option in options:
        yield from option.words_of(given[option.name])


def step_command(
    options: JobOptions, machine: Machine | None, *, overlap: bool = True, more: Sequence[str] = ()
) -> str:
    """The command of a step: `stagec time` on a machine, with `more` words, or `stagec memory`."""
    if machine is None:
        return shlex.join(["stagec", "memory", *job_words(options)])
    command = ["stagec", "time", *job_words(options), *_machine_words(machine)]
    return shlex.join([*command, *([] if overlap else ["--no-overlap"]), *more])


def _machine_words(machine: Machine) -> Iterator[str]:
    yield from ("--machine", machine.given)
    if used := {level.name: level.used for level in machine.network if level.used is not None}:
        yield from ("--used-ranks", used_text(used))


def job_words(options: JobOptions) -> Iterator[str]:
    """The words for the model and the options of a job."""
    options = settled(options)
    yield from filter(None, (options.model, options.strategy))
    default = JobOptions("")
    for name in ("preset", "stack", *_SERVING, "ranks", *AXES, *SHORTHANDS, "pipeline"):
        value = getattr(options, name)
        explicit = name in options.explicit and value is not None
        if explicit or value != getattr(default, name):
            yield from words(name, value)
    for name, sizes in (("mesh", options.mesh), ("set", options.sizes)):
        if sizes:
            yield from (f"--{name}", ",".join(_size(*size) for size in sizes.items()))
    for path in options.plugin:
        yield from ("--plugin", str(path))


def _size(name: str, value: int | None) -> str:
    return name if value is None else f"{name}={value}"
