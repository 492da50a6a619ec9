"""The options of a machine with two figures: the peak and the memory bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stagec.jobs.request.option import CommandOption, Number, rare_option
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.machines import Machine

_RATE = Number(0, above=True)
_SLOWEST, _FASTEST = 1e-6, 1e9
#: Dense BF16 TFLOP/s and GB/s of an H100 SXM (NVIDIA's data sheet), the default of pictures.
H100 = 989, 3350
#: The machine with these figures.
DEVICE = "h100-sxm"


def rate_options(purpose: str) -> tuple[CommandOption, ...]:
    """The two options; `purpose` is what durations are used for."""
    return (
        rare_option("peak_tflops", _RATE, f"With --memory-gbps: {purpose}."),
        rare_option("memory_gbps", _RATE, "Memory bandwidth for durations, GB/s."),
    )


def rated_machine(given: Mapping[str, Any]) -> Machine | None:
    """The roofline machine of the options; None without them. Raises `DiagnosticError` for one
    option without the other, and for rates that no device has."""
    tflops, bandwidth = given["peak_tflops"], given["memory_gbps"]
    if (tflops is None) != (bandwidth is None):
        raise error("--peak-tflops and --memory-gbps need each other", remedy="give both")
    if tflops is None:
        return None
    if not all(_SLOWEST <= rate <= _FASTEST for rate in (tflops, bandwidth)):
        raise error(
            f"--peak-tflops {tflops:g} and --memory-gbps {bandwidth:g}: expected rates from "
            f"{_SLOWEST:g} to {_FASTEST:g}",
            remedy=f"give rates such as those of an H100, {H100[0]} and {H100[1]}",
        )
    return roofline_of(tflops, bandwidth)


def roofline_of(tflops: float, bandwidth: float) -> Machine:
    """The roofline machine with these TFLOP/s and GB/s."""
    from stagec.machines.roofline import roofline_machine

    return roofline_machine(tflops * 1e12, bandwidth * 1e9)
