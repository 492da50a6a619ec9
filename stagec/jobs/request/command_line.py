"""Options as the words of the command line that gives them."""

from __future__ import annotations

from collections.abc import Iterator

from stagec.ir_spec.strategy.axes import AXES
from stagec.jobs.request.flags import SHORTHANDS, words
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving import STEP
from stagec.jobs.request.units import settled

#: The options of a step of serving.
_SERVING = ("serve", *STEP, "draft", "page", "kv_dtype", "sampling", "prefill", "decode")


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
