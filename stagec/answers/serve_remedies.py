"""Remedies for a server that does not fit: more ranks per layer, fewer bits per weight, or a larger
device."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import TypeVar

from stagec.analysis.memory_fit import MemoryFit, room_of
from stagec.ir.serving_step import PREFILL
from stagec.jobs.figures import CompiledJob
from stagec.jobs.pod_options import machines_text
from stagec.jobs.request.machine import on_machine
from stagec.jobs.request.options import JobOptions
from stagec.machines import Machine, machines
from stagec.output.tables import bytes_text
from stagec.support.diagnostics import DiagnosticError, error

Name = TypeVar("Name", int, str)

#: Formats of weights, from most bits to fewest.
_FORMATS = "fp8", "int4"


def misfit(
    options: JobOptions,
    machine: Machine,
    fit: MemoryFit,
    mesh: Mapping[str, int],
    *,
    asked: bool,
    pod: str = "",
) -> str:
    """`a batch of 1 needs 131.75 GiB per rank, but h100-sxm has 78.56 GiB: split the model with
    --tp 2, or add --weight-dtype fp8, or give --machine h200`: each of these alone makes the decode
    step fit. They are the smallest split of layers within a node, the most bits per weight, and
    the smallest device that is no slower; if none suffices, a combination. Raises it as a
    `DiagnosticError` unless the batch was `asked` for. With two pods the split is an option of
    `pod`."""
    splits = _first(_splits(options, machine, prod(mesh.values())), machine)
    formats = _FORMATS if options.weight_dtype in (None, "bf16") else ()
    format_ = _first(((name, options.changed(weight_dtype=name)) for name in formats), machine)
    rooms = {name: room_of(other, mesh) for name, other in machines().items()}
    larger = [
        name
        for name, other in machines().items()
        if rooms[name] >= fit.peak and _is_larger(other, machine)
    ]
    device = min(larger, key=rooms.__getitem__, default=None)
    names = machines_text(options, machine)
    if names != machine.name:  # parts have machines of their own
        names, device = f"one of {names}", None
    split = f"--{pod} tp=" if pod else "--tp "
    texts = [
        *([f"split the model with {split}{splits}"] if splits else []),
        *([f"add --weight-dtype {format_}"] if format_ else []),
        *([f"give --machine {device}"] if device else []),
    ]
    where = " in the pod that prefills" if options.serve == PREFILL else ""
    problem = (
        f"a batch of {options.batch}{where} needs {bytes_text(fit.peak)} per rank, but "
        f"{names} has {bytes_text(fit.room)}"
    )
    remedy = ", or ".join(texts) or "split the model over more ranks, and add --weight-dtype fp8"
    if not asked:
        raise error(f"no batch fits: {problem}", remedy=remedy)
    return f"{problem}: {remedy}"


def _is_larger(other: Machine, machine: Machine) -> bool:
    """Whether a device has more memory and is no slower in memory and products: a device with a
    lower limit of power is no remedy."""
    memory, products = other.memory, other.compute.matrix
    rates = machine.compute.matrix.items()
    return (
        memory.capacity.value > machine.memory.capacity.value
        and memory.bandwidth.value >= machine.memory.bandwidth.value
        and all(products[t].value >= rate.value for t, rate in rates if t in products)
    )


def _splits(options: JobOptions, machine: Machine, ranks: int) -> Iterator[tuple[int, JobOptions]]:
    """Doubling degrees of tensor parallelism within a node."""
    have = options.tp or 1
    times = 2
    while ranks * times <= (machine.network[0].ranks or 1):
        yield have * times, options.changed(tp=have * times)
        times *= 2


def _first(jobs: Iterable[tuple[Name, JobOptions]], machine: Machine) -> Name | None:
    """The name of the first job that compiles and fits."""
    for name, options in jobs:
        try:
            if CompiledJob.of(on_machine(options, machine)).fit(machine).fits:
                return name
        except DiagnosticError:
            continue
    return None
