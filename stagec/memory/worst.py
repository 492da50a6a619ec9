"""The most bytes in use at one of many moments, as an expression: found by numbers if all sizes are
known, else the maximum of the moments that may be the highest."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import lcm
from operator import ge

from stagec.ir.expr import Env, Expr, evaluate, maximum, substitute, symbol, terms, total
from stagec.memory.buffers import Buffer
from stagec.memory.step import MemoryRun, Moment, highest
from stagec.support.limits import MAX_PLAN_STEPS, Budget

#: Whether a buffer is counted.
Wanted = Callable[[Buffer], bool]
#: Multiples of a monomial, by its number.
_Terms = Mapping[int, int]
_LARGE = 4096


def on_device(buffer: Buffer) -> bool:
    """Whether a buffer is in device memory."""
    return buffer.space == "device"


def on_host(buffer: Buffer) -> bool:
    """Whether a buffer is in host memory."""
    return not on_device(buffer)


def total_of(buffers: Iterable[Buffer], wanted: Wanted = on_device) -> Expr:
    """Bytes of the buffers that are `wanted`."""
    return total(b.size for b in buffers if wanted(b))


def worst_of(
    runs: Sequence[MemoryRun],
    env: Env,
    long: frozenset[str] = frozenset(),
    wanted: Wanted = on_device,
) -> Expr:
    """The most bytes in use at a moment of these runs, beyond those at the start of the run. With
    symbolic sizes the answer holds for large values of the symbols in `long`, such as numbers of
    layers."""
    buffers = dict.fromkeys(b for run in runs for step, ends in run for b in (*step.made, *ends))
    sizes = {b: b.size for b in buffers if wanted(b)}
    different = {id(e): e for e in sizes.values()}  # buffers of one value share theirs
    if all(e.symbols <= env.keys() for e in different.values()):
        values = {number: evaluate(e, env) for number, e in different.items()}
        known = {b: values[id(e)] for b, e in sizes.items()}
        moment = highest(runs, lambda b: known.get(b, 0))
        moments = [moment] if moment is not None else []
    else:
        more = {n: symbol(n) + _LARGE for n in long}
        moments = _undominated(runs, _numbered({b: substitute(e, more) for b, e in sizes.items()}))
    return maximum(total_of(m.made, wanted) - total_of(m.gone, wanted) for m in moments)


def _numbered(sizes: Mapping[Buffer, Expr]) -> dict[Buffer, _Terms]:
    """Sizes as coefficients by monomial, all scaled so that the coefficients are integers."""
    table = {b: terms(e) for b, e in sizes.items()}
    numbers = {m: i for i, m in enumerate(dict.fromkeys(m for t in table.values() for m in t))}
    scale = lcm(*(c.denominator for t in table.values() for c in t.values()))
    return {b: {numbers[m]: int(c * scale) for m, c in t.items()} for b, t in table.items()}


def _undominated(runs: Iterable[MemoryRun], sizes: Mapping[Buffer, _Terms]) -> list[Moment]:
    """The moments that may be the highest. Sizes are positive, so a moment is excluded if another
    one has at least as much of every term."""
    budget = Budget(
        MAX_PLAN_STEPS, "comparing moments with open sizes", "give sizes: --set, or bind them"
    )
    kept: list[tuple[Moment, list[int]]] = []
    for run in runs:
        for moment, mine in _candidates(run, sizes, budget):
            budget.spend(2 * len(mine) * len(kept))
            if not any(_covers(other, mine) for _, other in kept):
                kept = [(m, t) for m, t in kept if not _covers(mine, t)] + [(moment, mine)]
    return [m for m, _ in kept]


def _candidates(
    run: MemoryRun, sizes: Mapping[Buffer, _Terms], budget: Budget
) -> Iterator[tuple[Moment, list[int]]]:
    """The moments after which a buffer ends or nothing runs, with the coefficients in use. Between
    them memory only grows."""
    live = [0] * (1 + max((number for t in sizes.values() for number in t), default=-1))
    for place, (step, ends) in enumerate(run):
        for buffer in step.made:
            _add(live, sizes.get(buffer, {}), 1)
        last = place + 1 == len(run) or not run[place + 1][0].counts
        if step.counts and (last or any(b in sizes for b in ends)):
            budget.spend(len(live))
            yield Moment(run, place), list(live)
        for buffer in ends:
            _add(live, sizes.get(buffer, {}), -1)


def _add(live: list[int], part: _Terms, sign: int) -> None:
    for monomial, number in part.items():
        live[monomial] += sign * number


def _covers(big: list[int], small: list[int]) -> bool:
    return all(map(ge, big, small))
