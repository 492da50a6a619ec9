"""The options that say how fast a device is, for durations by a roofline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.program.roofline import Roofline

F = TypeVar("F", bound=Callable[..., Any])
_SLOWEST, _FASTEST = 1e-6, 1e9
#: Dense BF16 TFLOP/s and GB/s of an H100 SXM (NVIDIA's data sheet): what pictures take by default.
H100 = 989, 3350


def rate_options(purpose: str) -> Callable[[F], F]:
    """Give a command the two options; `purpose` says what the durations are for."""

    def decorate(function: F) -> F:
        flops = click.option(
            "--peak-tflops",
            type=click.FloatRange(min=0, min_open=True),
            help=f"With --memory-gbps: {purpose}.",
        )
        bandwidth = click.option(
            "--memory-gbps",
            type=click.FloatRange(min=0, min_open=True),
            help="Memory bandwidth for durations, GB/s.",
        )
        return flops(bandwidth(function))

    return decorate


def roofline(given: Mapping[str, Any]) -> Roofline | None:
    """The roofline that the options give, if they do. Raises `DiagnosticError` for one without the
    other, and for rates that no device has."""
    from stagec.program.roofline import Roofline

    tflops, bandwidth = given["peak_tflops"], given["memory_gbps"]
    if (tflops is None) != (bandwidth is None):
        raise error(
            "durations need both --peak-tflops and --memory-gbps", remedy="give the other one too"
        )
    if tflops is None:
        return None
    if not all(_SLOWEST <= rate <= _FASTEST for rate in (tflops, bandwidth)):
        raise error(
            f"--peak-tflops {tflops:g} and --memory-gbps {bandwidth:g}: expected rates from "
            f"{_SLOWEST:g} to {_FASTEST:g}",
            remedy=f"an H100, for example, has {H100[0]} and {H100[1]}",
        )
    return Roofline(tflops * 1e12, bandwidth * 1e9)
