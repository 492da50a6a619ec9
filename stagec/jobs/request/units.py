"""What `--activation-dtype auto` stands for on a machine: whether its units multiply weights of few
bits as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagec.ir_spec.ops.quantized import FORMATS
from stagec.ir_spec.strategy.weights import AUTO
from stagec.jobs.request.options import JobOptions
from stagec.support.diagnostics import Diagnostic
from stagec.support.source import UNKNOWN

if TYPE_CHECKING:
    from stagec.machines import Machine

#: The type of activations that stay as they are.
_AS_THEY_ARE = "bf16"


def on_machine(options: JobOptions, machine: Machine | None) -> JobOptions:
    """The options of a job on a machine."""
    if machine is None:
        return options
    return options.changed(units=frozenset(map(str, machine.compute.matrix)))


def settled(options: JobOptions) -> JobOptions:
    """The options with activations as they are, where the units of the machine do not multiply the
    weights as they are. Of an unknown machine nothing changes."""
    format_ = FORMATS.get(options.weight_dtype)
    if format_ is None or options.units is None or options.activation_dtype != AUTO:
        return options
    if not format_.units or format_.units in options.units:
        return options
    return options.changed(activation_dtype=_AS_THEY_ARE)


def remark_of(options: JobOptions) -> Diagnostic | None:
    """What to say of a job whose activations are settled."""
    if settled(options) is options:
        return None
    text = (
        f"the machine has no units for products of {FORMATS[options.weight_dtype].units}: "
        f"activations of {options.weight_dtype} weights stay as they are "
        f"(--activation-dtype {_AS_THEY_ARE})"
    )
    return Diagnostic(text, UNKNOWN, "remark")
