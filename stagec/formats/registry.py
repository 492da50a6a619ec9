"""The formats by name."""

from __future__ import annotations

from collections.abc import Iterable

from stagec.formats.base import Format
from stagec.formats.chakra.format import CHAKRA
from stagec.ir.opdef import Registry
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean


def formats_of(registry: Registry) -> list[Format]:
    """The formats that plug-ins have brought."""
    return [f for f in registry.extras if isinstance(f, Format)]


def known_formats(extra: Iterable[Format] = ()) -> dict[str, Format]:
    """The built-in formats and others. Raises `DiagnosticError` for a name used twice."""
    found: dict[str, Format] = {CHAKRA.name: CHAKRA}
    for each in extra:
        if each.name in found:
            raise error(
                f"two formats have the name '{each.name}'", remedy="give the new one another name"
            )
        found[each.name] = each
    return found


def find_format(name: str, extra: Iterable[Format] = ()) -> Format:
    """The format of a name. Raises `DiagnosticError` with the nearest name if there is none."""
    known = known_formats(extra)
    if name not in known:
        raise error(
            f"no format '{name}'",
            remedy=did_you_mean(name, known)
            or f"choose among {', '.join(known)}, or load the plug-in that brings it: --plugin",
        )
    return known[name]
