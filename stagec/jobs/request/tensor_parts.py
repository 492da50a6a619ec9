"""The axes into which tensor parallelism is divided: for KV heads, for experts that take some of
its ranks, and for cached tokens (`--dcp`)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

from stagec.ir.serving_step import PREFILL
from stagec.ir_spec.strategy.axes import (
    EXPERT_PART,
    EXPERTS,
    MORE_KEYS,
    REPLICAS,
    expert_parts,
    known_key_heads,
)
from stagec.jobs.request.combine import divisors, nearest
from stagec.jobs.request.options import JobOptions
from stagec.support.diagnostics import Diagnostic, error

Parts = dict[str, int | None]


def tensor_parts(
    options: JobOptions, symbols: Mapping[str, int | None], report: Callable[[Diagnostic], None]
) -> Parts:
    """The axes that replace `tp`, with their ranks, slowest first; none if it is not divided.

    One splits experts, if `ep` takes some ranks of tp. With more ranks than KV heads of some layer,
    one splits these heads, one replicates them, and between both stand those that split the heads
    of layers with more of them (at most `MORE_KEYS`). `dcp` splits cached tokens over ranks with
    the same keys, in decode with latent attention, which has no such heads, over as many ranks as
    it says. Raises `DiagnosticError` for sizes that do not divide each other.
    """
    if options.tp == 1:
        return {}
    experts = expert_parts(partial(getattr, options))
    parts: Parts = {EXPERT_PART: experts} if experts > 1 and EXPERTS in symbols else {}
    tp, kinds = options.tp, known_key_heads(symbols)
    fewest = next(iter(kinds.values()), None)
    _check_cached(options, fewest)
    if fewest is None:
        splits = options.dcp if options.serve != PREFILL else 1
        heads = tp if splits == tp else tp // splits
        return _divided(tp, experts, [heads], parts)
    counts = _nested(tp, [*kinds.values()])
    if counts:
        if fewest % experts:
            raise error(
                f"--ep {experts} does not divide the {fewest} key/value heads, over which --tp "
                f"{tp} is split",
                remedy=f"choose --ep {nearest(experts, [*divisors(fewest), tp])}",
            )
        few = {n: size for n, size in kinds.items() if size < tp}
        text = _remark(options, few, counts, experts)
        report(Diagnostic(text, severity="remark"))
    return _divided(tp, experts, counts or [tp], parts)


def _nested(tp: int, sizes: Sequence[int]) -> list[int]:
    """The numbers of KV heads, from the fewest on, over which ranks are split one within the other;
    none unless tp is a multiple of the fewest."""
    counts: list[int] = []
    for size in sizes:
        least = counts[-1] if counts else 1
        if size < tp and tp % size == 0 and size % least == 0 and size not in counts:
            counts.append(size)
        elif not counts:
            return []
    return counts[: 1 + len(MORE_KEYS)]


def _divided(tp: int, experts: int, counts: Sequence[int], parts: Parts) -> Parts:
    """The axes of ranks that are split into `counts`, one within the other."""
    if counts == [tp]:
        return {**parts, "tp": tp // experts} if parts else {}
    more = (b // a for a, b in pairwise(counts))
    rest = {"tp": counts[0] // experts, **dict(zip(MORE_KEYS, more, strict=False))}
    return {**parts, **rest, REPLICAS: tp // counts[-1]}


def _remark(
    options: JobOptions, few: Mapping[str, int], counts: Sequence[int], experts: int
) -> str:
    """What happens to KV heads of which there are fewer than ranks."""
    tp, replicas = options.tp, options.tp // counts[-1]
    caches = " and their cached tokens" if options.dcp > 1 else " and replicated"
    if len(counts) > 1:
        then = "splits their cached tokens" if options.dcp > 1 else "replicates them"
        names = ", ".join(f"{n} = {size}" for n, size in few.items())
        return (
            f"--tp {tp} is more than the key/value heads of some layers ({names}): each kind of "
            f"layer splits its own over as many ranks, and {then} over the others"
        )
    rest = f"{f'{EXPERT_PART}*' if experts > 1 else ''}tp = {counts[0]}"
    if counts[0] == 1:
        own = "its cached tokens are split" if options.dcp > 1 else "it is replicated"
        return f"--tp {tp} is more than the one key/value head: {own} over {REPLICAS} = {replicas}"
    return (
        f"--tp {tp} is more than the {counts[0]} key/value heads: they are split over {rest}"
        f"{caches} over {REPLICAS} = {replicas}"
    )


def _check_cached(options: JobOptions, heads: int | None) -> None:
    """Raise `DiagnosticError` unless `dcp` takes ranks that have the same keys."""
    dcp, tp = options.dcp, options.tp
    if dcp == 1:
        return
    if heads is None:
        unit = tp // expert_parts(partial(getattr, options))
        fits, why = [tp, *divisors(unit)], f"does not divide the {unit} ranks of tp with one key"
    else:
        same = max(1, tp // heads)
        fits = [same]
        why = f"splits the cached tokens of {heads} key/value heads over --tp {tp}, of which "
        why += "each rank has heads of its own" if same == 1 else f"{same} ranks have the same ones"
    if dcp not in fits:
        remedy = "leave it out" if fits == [1] else f"choose --dcp {nearest(dcp, fits)}"
        raise error(f"--dcp {dcp} {why}", remedy=remedy)
