"""The axes of the mesh that flags give; the ranks of expert parallelism fold into other axes."""

from collections.abc import Mapping
from functools import partial

from stagec.ir_spec.strategy.axes import (
    AXES,
    EXPERTS,
    PARTS,
    WITHIN,
    expert_parts,
    ordered,
    whole_experts,
)
from stagec.ir_spec.strategy.moe import GATHER, same_tokens
from stagec.jobs.request.combine import divisors, nearest
from stagec.jobs.request.flags import FLAGS
from stagec.jobs.request.options import JobOptions
from stagec.support.diagnostics import error


def _folded_axes(options: JobOptions) -> dict[str, int]:
    """The size of each axis. Expert-parallel ranks are taken from the data-parallel ones, but first
    from the tensor-parallel ones: all of these with whole experts (`--etp 1`), or some of them if
    experts are split over the rest."""
    sizes = {a: int(getattr(options, a)) for a in AXES}
    sizes["ep"] //= tensor_ranks(options)
    sizes[_data_axis(options)] //= sizes["ep"]
    return sizes


def mesh_axes(options: JobOptions) -> dict[str, int | None]:
    """The axes of the mesh that options give, before `JobBuilder` divides some of them for the
    model."""
    if options.mesh is not None:
        return dict(options.mesh)
    axes = {a: n for a, n in _folded_axes(options).items() if n > 1}
    return {a: axes[a] for a in ordered(axes, options.mesh_order)}


def parts_of_data(options: JobOptions) -> dict[str, dict[str, int | None]]:
    """The axes into which data parallelism is divided if blocks stay split over some of its ranks
    (`--reshard-ranks`). Raises `DiagnosticError` if these do not divide it."""
    ranks, axes = options.reshard_ranks, mesh_axes(options)
    name = next((a for a in PARTS if a in axes), None)
    whole = 1 if name is None or options.mesh is not None else axes[name] or 1
    if name is None or whole == ranks or ranks == 1:
        return {}
    if whole % ranks:
        raise error(
            f"--reshard-ranks {ranks} does not divide {name} = {whole}",
            remedy=f"choose --reshard-ranks {nearest(ranks, divisors(whole))}",
        )
    return {name: {name: whole // ranks, WITHIN: ranks}}


def tensor_ranks(options: JobOptions) -> int:
    """The number of tensor-parallel ranks that expert parallelism takes: all, some, or one."""
    flag = partial(getattr, options)
    return options.tp if options.ep > 1 and whole_experts(flag) else expert_parts(flag)


def check_experts(options: JobOptions, symbols: Mapping[str, int | None]) -> None:
    """Raise `DiagnosticError`, with the nearest choice, for invalid expert-parallel flags."""
    about = [flag for flag in FLAGS.values() if EXPERTS in flag.needs]
    given = [flag for flag in about if not flag.is_default(getattr(options, flag.name))]
    if given and EXPERTS not in symbols:
        raise error(
            f"{given[0].option}: the model has no experts (no dimension {EXPERTS})",
            remedy="leave it out, or choose a mixture of experts, such as mixtral-8x7b",
        )
    tp = options.tp if options.mesh is None else options.mesh.get("tp", 1)
    some = options.mesh is None and expert_parts(partial(getattr, options)) > 1
    split = options.sp or options.dp_attention
    if options.etp not in (0, 1, tp) and not some:
        raise error(
            f"--etp {options.etp} is neither 1 nor the {tp or 'open'} ranks of tp",
            remedy="leave --etp out to split experts over tp, or choose --etp 1 for whole ones",
        )
    if some and split:
        raise error(
            f"--ep {options.ep} takes some of --tp {tp}, which all need the same tokens, but "
            f"{'--sp' if options.sp else '--dp-attention'} splits them",
            remedy=f"leave it out, or give --ep {tp} for whole experts",
        )
    if options.etp == 1 and tp != 1 and not split and options.ep == 1 and options.mesh is None:
        raise error(
            f"--etp 1 with tp = {tp}: each rank would have all experts, and compute all of them "
            "for the same tokens",
            remedy=f"split the experts over these ranks, --ep {tp}, or leave --etp out",
        )
    if options.mesh is None:
        _check_sizes(options, symbols.get(EXPERTS))
    _check_tokens(options)


def _check_tokens(options: JobOptions) -> None:
    """Raise `DiagnosticError` if an all-to-all would join ranks with the same tokens:
    tensor-parallel ranks with whole experts must split the tokens, or gather all of them."""
    same = whole_experts(partial(getattr, options)) and not (options.sp or options.dp_attention)
    exchanged = options.moe_dispatch != GATHER
    if options.mesh is None:
        exchanged &= same_tokens(partial(getattr, options)) and mesh_axes(options).get("ep", 1) != 1
    elif options.mesh.get("tp", 1) == 1:
        return
    if same and exchanged:
        raise error(
            "whole experts are split over ranks of tp, which have the same tokens: an all-to-all "
            "would send the same tokens several times",
            remedy=f"add {'--dp-attention' if options.serve else '--sp'} to split the tokens "
            f"over these ranks, or give --moe-dispatch {GATHER}, by which each rank "
            "gathers all tokens",
        )


def _check_sizes(options: JobOptions, experts: int | None) -> None:
    """Raise `DiagnosticError` unless the expert-parallel ranks divide the data-parallel ones (and
    the tensor-parallel ones that they take), and the experts, redundant ones included, divide over
    them."""
    axis = _data_axis(options)
    ranks, unit = getattr(options, axis), tensor_ranks(options)
    count = experts + options.redundant_experts if experts is not None else 0
    others = divisors(options.tp) if ranks == 1 else (unit, options.tp)
    units = {unit} if options.etp else {*others}
    fits = sorted({n * u for n in divisors(ranks) for u in units if count % (n * u) == 0})
    choices = f"choose --ep {nearest(options.ep, fits)}"
    flag = axis.replace("_", "-")
    if unit == 1 < options.ep < options.tp and ranks % options.ep and options.tp % options.ep == 0:
        whole = f"give --ep {options.tp} for whole ones, or " if options.tp in fits else ""
        raise error(
            f"--ep {options.ep} does not divide --{flag} {ranks}, and is not all of --tp "
            f"{options.tp}: experts are split over all ranks of tp, or whole",
            remedy=f"{whole}leave --ep out to split them over tp, or choose another --{flag}",
        )
    if ranks * unit % options.ep or options.ep % unit:
        whole = f", a multiple of --tp {unit}," if unit > 1 else ""
        raise error(
            f"--ep {options.ep}{whole} does not divide --{flag} {ranks}"
            + (f" times {unit}: experts fold into these ranks" if unit > 1 else ""),
            remedy=f"{choices}, or another --{flag}",
        )
    if experts is not None and count % options.ep:
        copies = options.redundant_experts + -count % options.ep
        shown = f"E = {experts}" + (f" + {count - experts} copies" if count > experts else "")
        fewer = f"give --redundant-experts {copies}, or "
        raise error(
            f"{shown} experts do not divide over --ep {options.ep}",
            remedy=(fewer if options.serve and copies <= experts else "") + choices,
        )


def _data_axis(options: JobOptions) -> str:
    """The axis from which expert parallelism takes ranks: the innermost data-parallel axis."""
    return "dp_shard" if options.dp == 1 and options.dp_shard > 1 else "dp"
