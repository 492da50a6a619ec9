"""The axes into which tensor parallelism is divided: for KV heads, for experts that take some of
its ranks, and for cached tokens (`--dcp`)."""

from collections.abc import Callable, Mapping
from functools import partial

from stagec.ir_spec.strategy.axes import (
    EXPERT_PART,
    EXPERTS,
    REPLICAS,
    expert_parts,
    fewest_key_heads,
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
    one splits these heads and one replicates them; `dcp` splits cached tokens over the latter, or,
    with latent attention, which has no such heads, over as many ranks as it says. Raises
    `DiagnosticError` for sizes that do not divide each other.
    """
    if options.tp == 1:
        return {}
    experts = expert_parts(partial(getattr, options))
    parts: Parts = {EXPERT_PART: experts} if experts > 1 and EXPERTS in symbols else {}
    tp, (_, heads) = options.tp, fewest_key_heads(symbols)
    _check_cached(options, heads)
    if heads is None:
        heads = tp if options.dcp == tp else tp // options.dcp
    elif tp > heads and tp % heads == 0:
        if heads % experts:
            raise error(
                f"--ep {experts} does not divide the {heads} key/value heads, over which --tp {tp} "
                "is split",
                remedy=f"choose --ep {nearest(experts, [*divisors(heads), tp])}",
            )
        rest = f"{'*'.join([*parts, 'tp'])} = {heads}"
        what = "and their cached tokens" if options.dcp > 1 else "and replicated"
        text = (
            f"--tp {tp} is more than the {heads} key/value heads: they are split over {rest} "
            f"{what} over {REPLICAS} = {tp // heads}"
        )
        report(Diagnostic(text, severity="remark"))
    if tp <= heads or tp % heads:
        return {**parts, "tp": tp // experts} if parts else {}
    return {**parts, "tp": heads // experts, REPLICAS: tp // heads}


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
        raise error(f"--dcp {dcp} {why}", remedy=f"choose --dcp {nearest(dcp, fits)}")
