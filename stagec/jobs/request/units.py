"""Resolves `--activation-dtype auto` for a machine: whether its matrix units multiply weights of
few bits directly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagec.ir_spec.ops.quantized import FORMATS
from stagec.ir_spec.strategy.weights import AUTO
from stagec.jobs.request.options import JobOptions
from stagec.support.diagnostics import Diagnostic
from stagec.support.source import UNKNOWN

if TYPE_CHECKING:
    from stagec.machines import Machine

#: The type of activations that are not quantized.
_AS_THEY_ARE = "bf16"


def on_machine(options: JobOptions, machine: Machine | None) -> JobOptions:
    """The options of a job with the types that a machine multiplies."""
    if machine is None:
        return options
    return options.changed(units=frozenset(map(str, machine.compute.matrix)))


def settled(options: JobOptions) -> JobOptions:
    """The options with activations that are not quantized, if the units of the machine do not
    multiply the weights directly. Without a machine nothing changes."""
    format_ = FORMATS.get(options.weight_dtype)
    if format_ is None or options.units is None or options.activation_dtype != AUTO:
        return options
    if not format_.units or format_.units in options.units:
        return options
    return options.changed(activation_dtype=_AS_THEY_ARE)


def remark_of(options: JobOptions) -> Diagnostic | None:
    """A remark on a job whose activations `settled` changes; None for others."""
    if settled(options) is options:
        return None
    text = (
        f"the machine has no units for products of {FORMATS[options.weight_dtype].units}: "
        f"activations of {options.weight_dtype} weights stay as they are "
        f"(--activation-dtype {_AS_THEY_ARE})"
    )
    return Diagnostic(text, UNKNOWN, "remark")
