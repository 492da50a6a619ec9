"""Options as the words of the command line that gives them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import cast

from stagec.driver.combine import flag
from stagec.driver.job import AXES
from stagec.driver.options import SHORTHANDS, JobOptions


def job_words(options: JobOptions) -> Iterator[str]:
    """The model and the options of a job whose ranks are written down."""
    yield from filter(None, (options.model, options.strategy))
    default = JobOptions("")
    for name in ("preset", *AXES, *SHORTHANDS, "pipeline"):
        value = getattr(options, name)
        if value != getattr(default, name) or name in options.explicit:
            yield from flag_words(name, value)
    for name, sizes in (("mesh", options.mesh), ("set", options.sizes)):
        if sizes:
            yield from (f"--{name}", ",".join(_size(*size) for size in sizes.items()))
    for path in options.plugin:
        yield from ("--plugin", str(path))


def flag_words(name: str, value: object) -> Iterator[str]:
    """`--zero 3`, `--sp`."""
    if isinstance(value, bool):
        yield flag(name) if value else f"--no-{name.replace('_', '-')}"
        return
    yield flag(name)
    if name == "expert_load":
        yield json.dumps(value)
    elif isinstance(value, tuple):
        yield ",".join(map(str, cast("tuple[object, ...]", value)))
    else:
        yield str(value)


def _size(name: str, value: int | None) -> str:
    return name if value is None else f"{name}={value}"
