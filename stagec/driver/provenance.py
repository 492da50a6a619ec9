"""What a manifest says of where its traces come from."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any, cast

from stagec import __version__
from stagec.driver.job import AXES, JobBuilder
from stagec.driver.options import SHORTHANDS, JobOptions

#: What `compile` takes beside the options of a job and makes traces differ, with the defaults.
_OF_TRACES: Mapping[str, object] = {
    "names": "full",
    "granularity": "op",
    "memory_events": False,
    "name": None,
    "peak_tflops": None,
    "memory_gbps": None,
}
_PACKAGES = ("lark", "numpy", "protobuf", "sympy")


def provenance(builder: JobBuilder, strategy: str, given: Mapping[str, Any]) -> dict[str, object]:
    """The command, digests of the texts, sizes, strategy and versions."""
    texts = {
        n: hashlib.sha256(s.text.encode()).hexdigest() for n, s in builder.module.sources.items()
    }
    return {
        "model": builder.model_name,
        "command": shlex.join(_command(builder.options, given)),
        "inputs": texts,
        "symbols": builder.module.symbols,
        "strategy": strategy,
        "versions": {"stagec": __version__, **{p: version(p) for p in _PACKAGES}},
    }


def _command(options: JobOptions, given: Mapping[str, Any]) -> Iterator[str]:
    """The words of the command line that gives the same traces."""
    yield from filter(None, ("stagec", "compile", options.model, options.strategy))
    default = JobOptions("")
    for name in ("preset", *AXES, *SHORTHANDS, "pipeline"):
        value = getattr(options, name)
        if value != getattr(default, name) or name in options.explicit:
            yield from _flag(name, value)
    for name, sizes in (("mesh", options.mesh), ("set", options.sizes)):
        if sizes:
            yield from (f"--{name}", ",".join(_size(*size) for size in sizes.items()))
    for path in options.plugin:
        yield from ("--plugin", str(path))
    for name, usual in _OF_TRACES.items():
        if given[name] != usual:
            yield from _flag(name, given[name])


def _flag(name: str, value: object) -> Iterator[str]:
    shown = name.replace("_", "-")
    if isinstance(value, bool):
        yield f"--{shown}" if value else f"--no-{shown}"
        return
    yield f"--{shown}"
    if name == "expert_load":
        yield json.dumps(value)
    elif isinstance(value, tuple):
        yield ",".join(map(str, cast("tuple[object, ...]", value)))
    else:
        yield str(value)


def _size(name: str, value: int | None) -> str:
    return name if value is None else f"{name}={value}"
