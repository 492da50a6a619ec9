"""The values of a command line's flags, as statements read them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from stagec.ir_spec.strategy.axes import PARTS

Axes: TypeAlias = tuple[str, ...]
#: The need of flags without effect in training: a serving step.
SERVE = "serve"


@dataclass(frozen=True, slots=True)
class FlagValues:
    """The request of a command line: the values of its flags, the sizes of the mesh's axes (None if
    open), the symbols of the model, with their sizes as far as they are known, and its dimensions
    of tokens."""

    flags: Mapping[str, Any]
    axes: Mapping[str, int | None]
    sizes: Mapping[str, int | None]
    sequences: Axes = ("S",)

    def __getitem__(self, flag: str) -> Any:
        return self.flags[flag]

    def is_stated(self, flag: str) -> bool:
        """Whether the request states a flag, be it with its default."""
        return flag in self.flags.get("explicit", ())

    @property
    def decodes(self) -> bool:
        """Whether the step decodes: it has few tokens in addition to the cached ones."""
        return self.flags.get("serve") == "decode"

    @property
    def context(self) -> Axes:
        """The dimensions that context parallelism splits: the tokens of the step, or, in decode,
        the cached tokens."""
        zigzag = self["cp_mode"] == "ring" and self["cp_order"] == "zigzag"
        return ("past",) if self.decodes else self.split_over("cp", times=2 if zigzag else 1)

    @property
    def cp_mode(self) -> str:
        """How attention reads a split sequence; with split caches, it merges partial results."""
        return "merge" if self.decodes else str(self["cp_mode"])

    def split_over(self, *names: str, times: int = 1) -> Axes:
        """The dimensions of tokens that are split over these axes: the first one, which must divide
        evenly, and those of the others that do."""
        parts = self.ranks(*names) * times
        sizes = [self.sizes.get(n) for n in self.sequences[1:]]
        others = zip(self.sequences[1:], sizes, strict=True)
        return (*self.sequences[:1], *(n for n, s in others if s is None or s % parts == 0))

    def over(self, *names: str) -> Axes:
        """Those of these axes that the mesh has, each with its inner axis if it is split in two."""
        named = (a for a in names if a in self.axes)
        return tuple(part for a in named for part in (a, *PARTS.get(a, ())) if part in self.axes)

    def ranks(self, *names: str) -> int:
        """The number of ranks along these axes."""
        return prod(self.axes[a] or 1 for a in self.over(*names))


#: The parameters of each statement that flags represent, by name.
Statements: TypeAlias = Iterator[Mapping[str, Any]]
#: What is wrong with flags, each with a remedy.
Problems: TypeAlias = Iterator[tuple[str, str]]
