"""The options of machines: `--machine NAME|FILE`, `--used-ranks` and `--graphs`; and those of a
machine with two figures, the peak and the memory bandwidth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagec.jobs.request.option import AnyText, CommandOption, Kind, Number, rare_option, switch
from stagec.jobs.session import Session
from stagec.support.diagnostics import Diagnostic, error
from stagec.support.source import UNKNOWN, Source
from stagec.support.suggest import did_you_mean

if TYPE_CHECKING:
    from stagec.jobs.request.options import JobOptions
    from stagec.machines import Machine

_NUMBER = re.compile(r"[0-9]{1,13}")


def machine_of(given: str, session: Session, used: Mapping[str, int] | None = None) -> Machine:
    """The machine with a name or alias, or in a file, with the `--used-ranks` of its levels. Raises
    `DiagnosticError` for an unknown one."""
    from stagec.machines import file_text, is_file, load_machine, read_machine

    if not is_file(given):
        return with_used(load_machine(given), used)
    path = Path(given)
    source = session.remember(Source(given, file_text(path)))
    return with_used(read_machine(path.stem, source.text, given), used)


def with_used(machine: Machine, used: Mapping[str, int] | None) -> Machine:
    """The machine with these numbers of used ranks by level. Raises `DiagnosticError`."""
    levels = [level.name for level in machine.network]
    for level in (level for level in used or {} if level not in levels):
        raise error(
            f"--used-ranks: machine {machine.name} has no network level '{level}'",
            remedy=did_you_mean(level, levels) or f"the levels are: {', '.join(levels)}",
        )
    return machine.changed({f"network.{level}.used": n for level, n in (used or {}).items()})


def used_text(sizes: Mapping[str, int]) -> str:
    """`nvlink=64`: the form of the option."""
    return ",".join(f"{level}={number}" for level, number in sizes.items())


class UsedRanks(Kind[Mapping[str, int]]):
    """`nvlink=64`, or several with commas."""

    name = "LEVEL=N"

    def read(self, text: str) -> Mapping[str, int]:
        """The numbers of ranks, by level."""
        used: dict[str, int] = {}
        for part in text.split(","):
            level, _, number = (text.strip() for text in part.partition("="))
            if not level or not _NUMBER.fullmatch(number) or level in used:
                raise ValueError(f"expects LEVEL=N such as nvlink=64, found '{part}'")
            used[level] = int(number)
        return used


USED_RANKS = CommandOption(
    "used_ranks",
    UsedRanks(),
    "How many ranks the job uses in each unit of a network level: nvlink=64 (default: the most "
    "that its groups divide, see docs/machines.md).",
)
GRAPHS = switch(
    "graphs",
    "With --serve: capture steps as graphs, as engines do, or launch op by op.",
    default=True,
)


def machine_options(text: str) -> tuple[CommandOption, CommandOption]:
    """`--machine` with the help of a command, and `--used-ranks`."""
    kind = AnyText("machines")
    return CommandOption("machine", kind, text, metavar="NAME|FILE"), USED_RANKS


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


def own_machine(options: JobOptions, machine: Machine) -> Machine:
    """The machine of a pod with these options, of a job on `machine`: its own, if they name one.
    Raises `DiagnosticError`."""
    from stagec.machines import load_machine

    return load_machine(options.on_machine) if options.on_machine else machine


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
    from stagec.ir_spec.ops.quantized import FORMATS
    from stagec.ir_spec.strategy.weights import AUTO

    format_ = FORMATS.get(options.weight_dtype)
    if format_ is None or options.units is None or options.activation_dtype != AUTO:
        return options
    if not format_.units or format_.units in options.units:
        return options
    return options.changed(activation_dtype=_AS_THEY_ARE)


def remark_of(options: JobOptions) -> Diagnostic | None:
    """A remark on a job whose activations `settled` changes; None for others."""
    from stagec.ir_spec.ops.quantized import FORMATS

    if settled(options) is options:
        return None
    text = (
        f"the machine has no units for products of {FORMATS[options.weight_dtype].units}: "
        f"activations of {options.weight_dtype} weights stay as they are "
        f"(--activation-dtype {_AS_THEY_ARE})"
    )
    return Diagnostic(text, UNKNOWN, "remark")
