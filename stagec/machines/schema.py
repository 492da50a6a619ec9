"""The schema of machine texts: compute, memory, network, host link, efficiency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from stagec.machines import changes, placement
from stagec.machines.efficiency import Efficiency
from stagec.machines.figures import (
    Bandwidth,
    Count,
    DataType,
    Duration,
    Frequency,
    Rate,
    Size,
    Text,
    figure_text,
)
from stagec.support.diagnostics import error

LevelKind = Literal["switch", "ring", "mesh", "fat-tree"]
_Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")]


class Compute(Text):
    """The compute units of a device.

    `processors` are the units that tiles of a product are distributed to (SMs, compute units,
    matrix units of a TPU). `launch` is the time that the launch of a kernel adds. `matrix` and
    `vector` are dense peaks by the element type of the operands; the device cannot compute types
    that are not listed.
    """

    processors: Count
    clock: Frequency
    launch: Duration
    matrix: dict[DataType, Rate] = Field(min_length=1)
    vector: dict[DataType, Rate] = Field(default_factory=dict[DataType, Rate])


class Reserve(Text):
    """Memory that jobs cannot use, as far as it is known.

    `communicator` is the memory of each communicator of the communication library that spans a node
    or more (github.com/NVIDIA/nccl, issue 986).
    """

    driver: Size | None = None
    context: Size | None = None
    communicator: Size | None = None


class Memory(Text):
    """The memory of a device; its capacity is that of the board."""

    capacity: Size
    bandwidth: Bandwidth
    reserve: Reserve = Reserve()


class Level(Text):
    """One level of the network; levels are listed from the inside out.

    `ranks` is the number of ranks that one unit of the level connects, including those of inner
    levels; without it, the level connects any number, and a ring the units that a job uses. `used`
    is the number of them that a job uses; without it, that depends on the job
    (`stagec.machines.placement`). `bandwidth` is the rate at which one rank can send over all its
    links of the level together, `latency` the time of one hop of a small message.
    `oversubscription` divides the bandwidth when all ranks send. `kind` says how the units inside
    are connected: all at full bandwidth (`switch`, `fat-tree`), each to its two neighbours (`ring`,
    with half of the bandwidth each), or each pair by its own link (`mesh`).
    `reductions`: switches can add and copy.
    """

    name: _Name
    ranks: Annotated[int, Field(strict=True, ge=2, le=2**40)] | None = None
    used: Annotated[int, Field(strict=True, ge=1, le=2**40)] | None = None
    kind: LevelKind
    bandwidth: Bandwidth
    latency: Duration
    oversubscription: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    reductions: bool = False

    @property
    def unit(self) -> int | None:
        """The ranks of a job in one unit of the level; None for any number."""
        return self.used or self.ranks


class HostLink(Text):
    """The link of a device to the memory of its host; the bandwidth is that of one direction.
    `memory` is the bandwidth of the memory of a host (default: that of the link of each device),
    which `devices` of a node share."""

    bandwidth: Bandwidth
    latency: Duration
    memory: Bandwidth | None = None
    devices: Annotated[int, Field(ge=1)] = 8


def check_levels(levels: Sequence[Level]) -> None:
    """Raises ValueError if two levels have the same name, or a level does not connect whole units
    of the one inside it."""
    names = [level.name for level in levels]
    if len(set(names)) != len(names):
        raise ValueError(f"network: two levels have the same name: {', '.join(names)}")
    for inner, outer in pairwise(levels):
        if inner.ranks is None:
            raise ValueError(
                f"network: level '{inner.name}' has no 'ranks', so it must be the last; "
                f"write ranks = N, or remove '{outer.name}'"
            )
        joined = outer.ranks
        if joined is not None and (joined <= inner.ranks or joined % inner.ranks):
            raise ValueError(
                f"network: level '{outer.name}' joins {outer.ranks} ranks; expected a "
                f"multiple of the {inner.ranks} of '{inner.name}' inside it"
            )
    below, inside = 1, 1
    for level in levels:
        if level.used is None:
            below, inside = level.ranks or below, level.ranks or inside
            continue
        most = 0 if level.ranks is None else level.ranks // inside * below
        if level.used > most or level.used % below:
            whole = f", a multiple of the {below} that are used inside" if below > 1 else ""
            raise ValueError(
                f"network: level '{level.name}' has used = {level.used}; expected "
                + (f"at most {most}{whole}" if most else "no 'used' without 'ranks'")
            )
        below, inside = level.used, level.ranks or inside


class Machine(Text):
    """A device and the network that connects many of them. `name` is that of its text, `given` the
    value of `--machine` for it, such as the path of a file. `aliases` are other common names.
    `family` is that of devices on which a framework sustains a similar share of the peak
    (`stg.sustained`), such as hopper; it is empty for a device with a lower limit of power than
    others of its family, and for one without data."""

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    family: Annotated[str, Field(pattern=r"^[a-z0-9_]{0,30}$")] = ""
    compute: Compute
    memory: Memory
    network: Annotated[tuple[Level, ...], Field(min_length=1)]
    host: HostLink
    efficiency: Efficiency
    _file: str = PrivateAttr("")

    def __repr__(self) -> str:
        return f"<stagec machine: {self.name}, {self.title}>"

    @property
    def given(self) -> str:
        return self._file or self.name

    def of_file(self, path: str) -> Machine:
        """The machine with `path` as the value of `--machine`."""
        other = self.model_copy()
        other._file = path
        return other

    @model_validator(mode="after")
    def _levels(self) -> Machine:
        """Check the order of levels, and that they have a protocol in common."""
        check_levels(self.network)
        first, *others = (set(e.protocols) for e in self.efficiency.network.values())
        if not first.intersection(*others):
            raise ValueError("efficiency.network: levels have no protocol in common")
        return self

    def _repr_html_(self) -> str:
        cells = ((path, figure_text(f), f.source) for path, f in self.figures())
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells)
        head = "<th>figure</th><th>value</th><th>source</th>"
        return (
            f"<table><caption>{escape(f'{self.name}: {self.title}')}</caption><tr>{head}</tr>"
            f"{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
        )

    def for_mesh(self, mesh: Mapping[str, int]) -> Machine:
        """The machine as a job on this mesh uses it: each level with `ranks` but without `used`
        gets the `used` of the job."""
        return placement.for_mesh(self, mesh)

    def left(self, communicators: int) -> int:
        """The bytes per device that a job with this number of communicators can use."""
        reserve = self.memory.reserve
        once = (reserve.driver, reserve.context)
        reserved = sum(part.value for part in once if part is not None)
        each = reserve.communicator.value if reserve.communicator is not None else 0
        return self.memory.capacity.value - reserved - each * communicators

    def changed(self, values: Mapping[str, float | str]) -> Machine:
        """The machine with other figures, by their paths (`memory.bandwidth`,
        `network.nvlink.latency`, `compute.matrix` for all types, `network.bandwidth` for all
        levels): numbers in bytes, seconds, FLOP/s and Hz, or texts with units.

        Rates and bandwidths may be infinite, for operations without cost. Raises `DiagnosticError`
        for an unknown path, and for values that a text could not have.
        """
        return self._grown(changes.changed(self, values))

    def scaled(self, path: str, factor: float) -> Machine:
        """The machine with the figures of a path multiplied. Raises `DiagnosticError` as `changed`
        does."""
        return self._grown(changes.scaled(self, path, factor))

    def _grown(self, other: Machine) -> Machine:
        """A changed machine. Raises `DiagnosticError` if its levels changed and do not fit
        together."""
        if other.network is not self.network:
            try:
                check_levels(other.network)
            except ValueError as e:
                raise error(str(e), remedy="change 'ranks' and 'used' of both levels") from None
        return other

    def paths(self) -> list[str]:
        """All paths of single figures that `changed` takes."""
        return changes.paths(self)

    def figures(self) -> Iterator[tuple[str, Any]]:
        """Every figure with its path, in the order of the text."""
        return changes.figures(self)
