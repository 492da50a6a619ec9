"""The provenance of traces in a manifest: command, inputs and versions."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from stagec import __version__
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.command_line import job_words
from stagec.jobs.request.flags import words
from stagec.jobs.request.machine import used_text
from stagec.jobs.request.options import JobOptions

#: The options of `compile` besides those of the job that affect traces, with their defaults.
_OF_TRACES: Mapping[str, object] = {
    "format": "chakra",
    "names": "full",
    "granularity": "op",
    "memory_events": False,
    "tensor_names": False,
    "name": None,
    "steps": None,
    "requests": None,
    "policy": "fcfs",
    "cache_blocks": None,
    "bucket": 1,
    "tick": None,
    "machine": None,
    "graphs": True,
    "used_ranks": None,
    "kernels_from": None,
    "peak_tflops": None,
    "memory_gbps": None,
}
_PACKAGES = ("lark", "numpy", "protobuf", "sympy")


def provenance(builder: JobBuilder, strategy: str, given: Mapping[str, Any]) -> dict[str, object]:
    """The command, digests of the texts, sizes, strategy and versions."""
    texts = {
        n: hashlib.sha256(s.text.encode()).hexdigest() for n, s in builder.module.sources.items()
    }
    texts |= {} if given["machine"] is None else _machine_texts(given["machine"])
    for table in given["measured"]:
        texts[str(table)] = hashlib.sha256(Path(table).read_bytes()).hexdigest()
    return {
        "model": builder.model_name,
        "command": command_of(builder.options, given),
        "inputs": texts,
        "symbols": builder.module.symbols,
        "strategy": strategy,
        "versions": {"stagec": __version__, **{p: version(p) for p in _PACKAGES}},
    }


def _machine_texts(machine: str) -> dict[str, str]:
    """The digests of the files that `--machine` names."""
    from stagec.machines import file_text, files_of

    return {
        path: hashlib.sha256(file_text(Path(path)).encode()).hexdigest()
        for path in files_of(machine)
    }


def command_of(options: JobOptions, given: Mapping[str, Any]) -> str:
    """The command line that writes the same traces."""
    return shlex.join(_command(options, given))


def _command(options: JobOptions, given: Mapping[str, Any]) -> Iterator[str]:
    """The words of the command line."""
    yield from ("stagec", "compile", *job_words(options))
    for table in given["measured"]:
        yield from words("measured", table)
    for name, usual in _OF_TRACES.items():
        if given[name] != usual:
            yield from words(name, _option_value(name, given[name]))


def _option_value(name: str, value: object) -> object:
    """A value in the form of its option, such as a tick in milliseconds."""
    if name == "used_ranks" and isinstance(value, Mapping):
        return used_text(cast("Mapping[str, int]", value))
    return str(Decimal(value) / 10**6) if name == "tick" and isinstance(value, int) else value
