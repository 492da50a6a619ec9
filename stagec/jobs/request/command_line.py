"""Options as the words of the command line that gives them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stagec.ir_spec.strategy.axes import AXES
from stagec.jobs.request.flags import SHORTHANDS, words
from stagec.jobs.request.machine import used_text
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving import STEP
from stagec.jobs.request.units import settled

if TYPE_CHECKING:
    from stagec.machines import Machine

#: The options of a step of serving.
_SERVING = ("serve", *STEP, "draft", "page", "kv_dtype", "sampling", "prefill", "decode")


def step_command(options: JobOptions, machine: Machine | None, *, overlap: bool = True) -> str:
    """The command that answers for a step: `stagec time` on a machine, or `stagec memory`."""
    if machine is None:
        return shlex.join(["stagec", "memory", *job_words(options)])
    said = ["stagec", "time", *job_words(options), "--machine", machine.name]
    if used := {level.name: level.used for level in machine.network if level.used is not None}:
        said += ["--used-ranks", used_text(used)]
    return shlex.join([*said, *([] if overlap else ["--no-overlap"])])


def job_words(options: JobOptions) -> Iterator[str]:
    """The model and the options of a job whose ranks are written down."""
    options = settled(options)
    yield from filter(None, (options.model, options.strategy))
    default = JobOptions("")
    for name in ("preset", "stack", *_SERVING, *AXES, *SHORTHANDS, "pipeline"):
        value = getattr(options, name)
        if value != getattr(default, name) or name in options.explicit:
            yield from words(name, value)
    for name, sizes in (("mesh", options.mesh), ("set", options.sizes)):
        if sizes:
            yield from (f"--{name}", ",".join(_size(*size) for size in sizes.items()))
    for path in options.plugin:
        yield from ("--plugin", str(path))


def _size(name: str, value: int | None) -> str:
    return name if value is None else f"{name}={value}"
