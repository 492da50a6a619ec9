"""The order of layers of several kinds, as runs of kinds: `(5*local, global)*10, 2*local`.

An order is stored in its compact form; the sequence of layers is computed on demand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import cast

from stagec.ir.expr import Expr, terms
from stagec.support.limits import MAX_LAYERS


@dataclass(frozen=True, slots=True)
class Multiple:
    """A repeated list in parentheses, as the parser reads it: `(5*local, global)*10`."""

    items: tuple[object, ...]
    times: int

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.items))})*{self.times}"


@dataclass(frozen=True)
class LayerOrder:
    """A sequence of runs: kinds, or nested orders, each with its repetition count."""

    runs: tuple[tuple[str | LayerOrder, int], ...]

    def __str__(self) -> str:
        return ", ".join(_run_text(what, times) for what, times in self.runs)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """The number of layers of each kind, in the order in which the kinds are named."""
        counts: Counter[str] = Counter()
        for what, times in self.runs:
            inside = {what: 1} if isinstance(what, str) else what.counts
            for kind, number in inside.items():
                counts[kind] += number * times
        return dict(counts)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The kind of each layer, first to last."""
        return tuple(self._layers())

    @cached_property
    def numbered(self) -> tuple[tuple[str, int], ...]:
        """The kind of each layer, and its number among those of its kind."""
        seen: Counter[str] = Counter()
        result: list[tuple[str, int]] = []
        for kind in self.layers:
            result.append((kind, seen[kind]))
            seen[kind] += 1
        return tuple(result)

    @cached_property
    def places(self) -> Mapping[str, tuple[int, ...]]:
        """The positions in the stack of the layers of each kind."""
        places_of: dict[str, list[int]] = {}
        for place, kind in enumerate(self.layers):
            places_of.setdefault(kind, []).append(place)
        return {kind: tuple(places) for kind, places in places_of.items()}

    def _layers(self) -> Iterator[str]:
        for what, times in self.runs:
            yield from ((what,) if isinstance(what, str) else what.layers) * times


def read_order(raw: object) -> LayerOrder:
    """The order that a text states. Raises `ValueError` with the expected form."""
    if isinstance(raw, LayerOrder):
        return raw
    runs: list[tuple[str | LayerOrder, int]] = []
    items = cast("tuple[object, ...]", raw) if isinstance(raw, tuple) else (raw,)
    for item in items:
        runs += _runs_of(item)
    order = LayerOrder(tuple(runs))
    if sum(order.counts.values()) > MAX_LAYERS:
        raise ValueError(f"an order has at most {MAX_LAYERS:,} layers")
    return order


def _runs_of(item: object) -> Iterable[tuple[str | LayerOrder, int]]:
    if isinstance(item, tuple):
        return read_order(cast("tuple[object, ...]", item)).runs
    if isinstance(item, Multiple) and item.times > 0:
        return [(read_order(item.items), item.times)]
    if isinstance(item, Expr):
        ((kind, times), *others) = terms(item).items()
        if not others and item.symbols == frozenset({kind}) and times >= times.denominator == 1:
            return [(kind, int(times))]
    raise ValueError(f"an order expects kinds of layers as in (5*local, global)*10, found {item}")


def _run_text(what: str | LayerOrder, times: int) -> str:
    if isinstance(what, str):
        return what if times == 1 else f"{times}*{what}"
    return f"({what})*{times}"


#: Most runs in a list that is searched for repetition.
_WIDEST = 32


def compact(layers: Sequence[str]) -> LayerOrder:
    """The order of a sequence of layers, with repetitions folded: `(2*a, b)*2, c` for `a a b a a b
    c`."""
    return LayerOrder(tuple(_folded([(k, len(list(same))) for k, same in groupby(layers)])))


def _folded(runs: Sequence[tuple[str | LayerOrder, int]]) -> Iterator[tuple[str | LayerOrder, int]]:
    """Fold repeated lists of runs, at each position the one that saves most."""
    at = 0
    while at < len(runs):
        width, times = max(
            ((w, _repeats(runs, at, w)) for w in range(2, min(_WIDEST, (len(runs) - at) // 2) + 1)),
            key=lambda run: run[0] * (run[1] - 1),
            default=(1, 1),
        )
        if times == 1:
            yield runs[at]
            at += 1
        else:
            yield LayerOrder(tuple(runs[at : at + width])), times
            at += width * times


def _repeats(runs: Sequence[object], at: int, width: int) -> int:
    times = 1
    while runs[at : at + width] == runs[at + times * width : at + (times + 1) * width]:
        times += 1
    return times
