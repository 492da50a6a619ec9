"""A machine with two figures: FLOP/s of all types and bytes/s of its memory."""

from functools import cache
from typing import get_args

from stagec.machines import read_machine
from stagec.machines.figures import DataType
from stagec.machines.schema import Machine

_TYPES = "\n".join(
    f'{name} = {{ value = "1 FLOP/s", source = "given" }}' for name in get_args(DataType)
)
_TEXT = f"""\
title = "roofline"

[compute]
processors = {{ value = 1, source = "none: a roofline does not ask" }}
clock = {{ value = "1 GHz", source = "none: a roofline does not ask" }}
launch = {{ value = "0 s", source = "none: launches take no time" }}

[compute.matrix]
{_TYPES}

[compute.vector]
{_TYPES}

[memory]
capacity = {{ value = "1 TiB", source = "none: a roofline does not ask" }}
bandwidth = {{ value = "1 B/s", source = "given" }}

[[network]]
name = "network"
kind = "switch"
bandwidth = {{ value = "1 GB/s", source = "none: for computations only" }}
latency = {{ value = "0 s", source = "none: for computations only" }}

[host]
bandwidth = {{ value = "1 GB/s", source = "none: for computations only" }}
latency = {{ value = "0 s", source = "none: for computations only" }}

[efficiency]
kernels = "roofline"
"""


@cache
def _any() -> Machine:
    return read_machine("roofline", _TEXT)


def roofline_machine(flops: float, bandwidth: float) -> Machine:
    """A machine on which a computation takes the longer of its FLOPs at `flops` FLOP/s and its
    bytes at `bandwidth` bytes/s, and launches take no time. It is only for durations of
    computations: its network and host link have arbitrary figures. Raises `DiagnosticError` for
    invalid rates."""
    return _any().changed(
        {"compute.matrix": flops, "compute.vector": flops, "memory.bandwidth": bandwidth}
    )
