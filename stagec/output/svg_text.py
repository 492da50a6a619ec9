"""A plot as notebooks show it and as papers print it."""

from importlib import import_module
from typing import Any

from stagec.support.diagnostics import error


class SVGText(str):
    """The text of an SVG. It is a `str`; a notebook draws it."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)

    def to_pdf(self) -> bytes:
        """The plot as a PDF of vectors. Raises `DiagnosticError` without CairoSVG, which is
        optional."""
        return pdf(self)


def pdf(svg: str) -> bytes:
    """An SVG as a PDF of vectors. Raises `DiagnosticError` without CairoSVG, which is optional."""
    drawn: bytes = pdf_writer().svg2pdf(bytestring=svg.encode())
    return drawn


def pdf_writer() -> Any:
    """The package CairoSVG. Raises `DiagnosticError` without it or the library that it loads."""
    try:
        return import_module("cairosvg")
    except (ImportError, OSError):  # without the package, or without the library that it loads
        raise error(
            "a PDF needs the package CairoSVG and the library cairo",
            remedy="install them: pip install 'stagec[pdf]', or write FILE.svg",
        ) from None
