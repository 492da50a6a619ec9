"""The formats by name, and the parser of `--format`."""

import re
from collections.abc import Iterable, Mapping
from importlib import import_module

from stagec.formats.base import Format
from stagec.ir.opdef import Registry
from stagec.support.diagnostics import error
from stagec.support.named import by_name, find

#: The modules and constants of the built-in formats. A module is imported when its format is used,
#: since some import schemas, machines and cost models.
BUILTIN: Mapping[str, str] = {
    "chakra": "stagec.formats.chakra.format:CHAKRA",
    "astra-sim": "stagec.formats.astra_sim.format:ASTRA_SIM",
    "simai": "stagec.formats.simai:SIMAI",
    "goal": "stagec.formats.goal.format:GOAL",
    "scale-sim": "stagec.formats.scale_sim:SCALE_SIM",
    "hpcc": "stagec.formats.hpcc:HPCC",
    "llmservingsim": "stagec.formats.llmservingsim:LLM_SERVING_SIM",
    "kineto": "stagec.formats.timeline.kineto:KINETO",
    "perfetto": "stagec.formats.perfetto.format:PERFETTO",
    "chrome": "stagec.formats.timeline.chrome:CHROME",
    "pytorch-et": "stagec.formats.pytorch_et:PYTORCH_ET",
}
_ONE = re.compile(r"\s*([\w.-]+)\s*(?:\{([^{}]*)\}\s*)?(?:,|$)")


def formats_of(registry: Registry) -> list[Format]:
    """The formats that plug-ins have registered."""
    return [f for f in registry.extras if isinstance(f, Format)]


def formats_by_name(formats: Iterable[Format]) -> dict[str, Format]:
    """The formats of plug-ins by name. Raises `DiagnosticError` for a duplicate name."""
    return by_name("formats", formats, taken=BUILTIN)


def find_format(name: str, plugin_formats: Iterable[Format] = ()) -> Format:
    """The format with a name. Raises `DiagnosticError` with the most similar name if there is
    none."""
    brought = formats_by_name(plugin_formats)
    more = ", or load the plug-in that brings it: --plugin"
    known: Mapping[str, str | Format] = {**BUILTIN, **brought}
    match = find("format", name, known, more)
    return match if isinstance(match, Format) else _loaded(match)


def _loaded(place: str) -> Format:
    """The format at `MODULE:CONSTANT`."""
    module, _, constant = place.partition(":")
    format_ = getattr(import_module(module), constant)
    if not isinstance(format_, Format):
        raise TypeError(f"{place} is not a format")
    return format_


def parse_formats(text: str, plugin_formats: Iterable[Format] = ()) -> list[Format]:
    """The formats, with their options, of a text such as `chakra,goal{collectives=tree}`. Raises
    `DiagnosticError` for an invalid text, and for unknown formats and options."""
    plugin_formats, formats, at = list(plugin_formats), dict[str, Format](), 0
    while at < len(text) or not formats or text.endswith(","):
        match = _ONE.match(text, at)
        if match is None:
            raise error(
                f"--format expects the name of a format, found '{text[at:]}'",
                remedy="write names, and options in braces: chakra,goal{collectives=tree}",
            )
        name, options = match[1], match[2] or ""
        if name in formats:
            raise error(f"--format names '{name}' twice", remedy="drop one of them")
        given: dict[str, str] = {}
        for part in filter(str.strip, options.split(",")):
            key, _, value = (each.strip() for each in part.partition("="))
            if key in given:
                raise error(f"option '{key}' of '{name}' is given twice", remedy="drop one of them")
            given[key] = value
        formats[name] = find_format(name, plugin_formats).with_options(given)
        at = match.end()
        if at == len(text) and not text.endswith(","):
            break
    return list(formats.values())
