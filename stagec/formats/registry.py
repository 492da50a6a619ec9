"""The formats by name, and those that `--format` asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable

from stagec.formats.astra_sim.format import ASTRA_SIM
from stagec.formats.base import Format
from stagec.formats.chakra.format import CHAKRA
from stagec.formats.goal.format import GOAL
from stagec.formats.hpcc import HPCC
from stagec.formats.llmservingsim import LLM_SERVING_SIM
from stagec.formats.perfetto.format import PerfettoFormat
from stagec.formats.pytorch_et import PytorchEtFormat
from stagec.formats.scale_sim import SCALE_SIM
from stagec.formats.simai import SIMAI
from stagec.formats.timeline.chrome import ChromeFormat
from stagec.formats.timeline.kineto import KinetoFormat
from stagec.ir.opdef import Registry
from stagec.support.diagnostics import error
from stagec.support.named import by_name, find

_TIMELINES = KinetoFormat(), PerfettoFormat(), ChromeFormat()
_MESSAGES = SIMAI, GOAL, SCALE_SIM, HPCC, LLM_SERVING_SIM
BUILTIN: tuple[Format, ...] = (CHAKRA, ASTRA_SIM, *_MESSAGES, *_TIMELINES, PytorchEtFormat())
_ONE = re.compile(r"\s*([\w.-]+)\s*(?:\{([^{}]*)\}\s*)?(?:,|$)")


def formats_of(registry: Registry) -> list[Format]:
    """The formats that plug-ins have brought."""
    return [f for f in registry.extras if isinstance(f, Format)]


def known_formats(extra: Iterable[Format] = ()) -> dict[str, Format]:
    """The built-in formats and others. Raises `DiagnosticError` for a name used twice."""
    return by_name("formats", BUILTIN, extra)


def find_format(name: str, extra: Iterable[Format] = ()) -> Format:
    """The format of a name. Raises `DiagnosticError` with the nearest name if there is none."""
    more = ", or load the plug-in that brings it: --plugin"
    return find("format", name, known_formats(extra), more)


def asked_formats(text: str, extra: Iterable[Format] = ()) -> list[Format]:
    """The formats of `chakra,goal{collectives=tree}`, with their options. Raises
    `DiagnosticError`."""
    extra, found, at = list(extra), dict[str, Format](), 0
    while at < len(text) or not found or text.endswith(","):
        match = _ONE.match(text, at)
        if match is None:
            raise error(
                f"--format expects the name of a format, found '{text[at:]}'",
                remedy="write names, and options in braces: chakra,goal{collectives=tree}",
            )
        name, options = match[1], match[2] or ""
        if name in found:
            raise error(f"--format names '{name}' twice", remedy="drop one")
        given: dict[str, str] = {}
        for part in filter(str.strip, options.split(",")):
            key, _, value = (each.strip() for each in part.partition("="))
            if key in given:
                raise error(f"option '{key}' of '{name}' is given twice", remedy="drop one")
            given[key] = value
        found[name] = find_format(name, extra).with_options(given)
        at = match.end()
        if at == len(text) and not text.endswith(","):
            break
    return list(found.values())
