"""The elements of a schedule: actions, their order on a rank, and the placement of virtual stages.

A virtual stage is one contiguous part of the model; a chunk is the number of a virtual stage on its
rank. Virtual stages are numbered over all copies of the model: those of copy c start at c*depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from stagec.support.diagnostics import error

Kind: TypeAlias = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")


@dataclass(frozen=True, slots=True)
class Action:
    """The work of one chunk for one microbatch.

    `F` is forward, `B` backward, `W` the gradient of the weights. A `B` with `split` computes the
    gradient of the input only, and the `W` of the same chunk and microbatch comes later on the
    rank; a `B` without `split` is the whole backward. An `F` and the `B` right after it that carry
    the same `pair` run as one overlapped step.
    """

    kind: Kind
    chunk: int
    microbatch: int
    pair: int | None = None
    split: bool = False

    def __str__(self) -> str:
        return f"{self.kind}(chunk {self.chunk}, microbatch {self.microbatch})"


#: The actions of a rank in order.
RankOrder: TypeAlias = Iterable[Action]
RankActions: TypeAlias = tuple[Action, ...]
Actions: TypeAlias = tuple[RankActions, ...]


class StageChunk(NamedTuple):
    """The rank and the chunk of a virtual stage."""

    rank: int
    chunk: int


@dataclass(frozen=True)
class Placement:
    """The rank and chunk of every virtual stage. With `copies` > 1 each copy is a complete
    model."""

    homes: tuple[StageChunk, ...]
    copies: int = 1

    def __getitem__(self, stage: int) -> StageChunk:
        return self.homes[stage]

    def __len__(self) -> int:
        return len(self.homes)

    @property
    def depth(self) -> int:
        """Virtual stages of one copy: the parts that the model is cut into."""
        return len(self.homes) // self.copies

    @cached_property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return 1 + max(home.rank for home in self.homes)

    @property
    def share(self) -> Fraction:
        """A chunk as a fraction of 1/ranks of the model: 1/v of it for v chunks of one copy."""
        return Fraction(self.ranks, self.depth)

    @cached_property
    def _stages(self) -> dict[tuple[int, int], int]:
        return {(home.rank, home.chunk): stage for stage, home in enumerate(self.homes)}

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, sorted."""
        return tuple(sorted(home.chunk for home in self.homes if home.rank == rank))

    def stage(self, rank: int, chunk: int) -> int:
        """The virtual stage of a chunk of a rank. Raises `DiagnosticError` if it does not exist."""
        stage = self._stages.get((rank, chunk))
        if stage is None:
            raise error(
                f"rank {rank} has no chunk {chunk}",
                remedy=f"its chunks are {', '.join(map(str, self.chunks(rank))) or 'none'}",
            )
        return stage

    def previous(self, stage: int) -> int | None:
        """The virtual stage whose activation this one reads; None for the first of a copy."""
        return stage - 1 if stage % self.depth else None

    def following(self, stage: int) -> int | None:
        """The virtual stage whose gradient this one reads; None for the last of a copy."""
        return stage + 1 if (stage + 1) % self.depth else None


def round_robin(stages: int, chunks: int = 1) -> Placement:
    """Virtual stage s on rank s mod p, as its chunk s div p."""
    return Placement(tuple(StageChunk(s % stages, s // stages) for s in range(stages * chunks)))


def v_shape(stages: int) -> Placement:
    """Down the ranks with chunk 0 and up with chunk 1: rank 0 has the first and the last stage."""
    return Placement(_there_and_back(stages))


def two_copies(stages: int) -> Placement:
    """Two copies of p stages, one down the ranks (chunk 0) and one up (chunk 1)."""
    return Placement(_there_and_back(stages), copies=2)


def _there_and_back(stages: int) -> tuple[StageChunk, ...]:
    down = [StageChunk(rank, 0) for rank in range(stages)]
    return (*down, *(StageChunk(rank, 1) for rank in reversed(range(stages))))


def steps(actions: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """The actions of a rank in execution order: single ones, and overlapped pairs together."""
    index = 0
    while index < len(actions):
        first = actions[index]
        paired = first.pair is not None and index + 1 < len(actions)
        size = 2 if paired and actions[index + 1].pair == first.pair else 1
        yield tuple(actions[index : index + size])
        index += size


def stashes(actions: Sequence[Action], chunk: int | None = None) -> int:
    """The most stashes that a rank has at once, of all chunks or of one.

    A stash are the values that forward keeps of one microbatch on one chunk. It lives from F to B,
    or to W if the gradient of the weights is split off. In an overlapped pair both stashes are
    live.
    """
    stashes = most = 0
    for action in actions:
        if chunk is not None and action.chunk != chunk:
            continue
        if action.kind == "F":
            stashes += 1
            most = max(most, stashes)
        elif action.kind == "W" or not action.split:
            stashes -= 1
    return most
