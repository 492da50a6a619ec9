"""A plot as notebooks show it."""

from __future__ import annotations


class SVGText(str):
    """The text of an SVG. It is a `str`; a notebook draws it."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)
