"""ring-attention: passes keys and values of attention over a split sequence round the ranks."""

from collections.abc import Iterator

from stagec.api import (
    Builder,
    Module,
    Operation,
    Pass,
    Phase,
    Strategy,
    axis_size,
    made_by,
    read_strategy,
    symbol,
)
from stagec.ir_spec.ops.attention_core import key_rows
from stagec.ir_spec.ops.ring_work import alignment
from stagec.ir_spec.strategy.kernels import KernelsRule
from stagec.ir_spec.strategy.ring import RingRule
from stagec.sharding.assumptions import Assumptions
from stagec.sharding.special_factors import special_ops


class RingAttention(Pass):
    """Make attention over a split dimension a ring, as `stg.ring` states (arXiv 2310.01889).

    In zigzag order each rank has two chunks of the positions; a `stg.zigzag` declares this.

    Before:
        stg.mesh @pod[cp]
        stg.assume[S % cp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.split[S, over = cp]
          stg.ring[S]
        }
        stg.func @f(%q: bf16[B, S@cp, H, K], %kv: bf16[B, 2, S@cp, H, K]) {
          %a = stg.attention[causal](%q, %kv) : bf16[B, S, H, K]
          stg.return(%a)
        }
    After:
        stg.mesh @pod[cp]
        stg.zigzag[S, over = cp]
        stg.assume[S % cp == 0]
        stg.assume[S % (2*cp) == 0]
        stg.strategy @s[mesh = @pod] {
          stg.split[S, over = cp]
          stg.ring[S]
        }
        stg.func @f(%q: bf16[B, S@cp, H, K], %kv: bf16[B, 2, S@cp, H, K]) {
          %a = stg.attention[causal, ring = zigzag](%q, %kv) : bf16[B, S, H, K]
          stg.return(%a)
        }
    """

    needs = Phase.PLACED

    def applies(self, module: Module) -> bool:
        return bool(read_strategy(module).rings)

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        assumptions = Assumptions(module, self.name, strategy.loc)
        for ring in strategy.rings:
            ops, over = ring_attention(module, strategy, ring)
            if over and ring.order == "zigzag":  # every rank has two chunks
                assumptions.divides(symbol(ring.dim), axis_size(over) * 2, ring.loc)
            for op in ops if over else ():
                aligned = alignment(op, symbol(ring.dim), axis_size(over), ring.order)
                if aligned is not None:
                    assumptions.holds(aligned, op.loc, "gather instead: --cp-mode all-gather")
        assumptions.check()


def ring_attention(
    module: Module, strategy: Strategy, ring: RingRule
) -> tuple[list[Operation], tuple[str, ...]]:
    """Make the affected ops rings, in place. Returns them, and the axes over which positions are
    split.

    Raises `DiagnosticError` if there is no such op, and for one that cannot run as a ring.
    """
    name = ring.dim
    special = [op for op, _ in special_ops(module.main.body, name)]
    ops = [op for op in special if "ring" in op.definition.params_by_name]
    others = [op for op in special if "ring" not in op.definition.params_by_name]
    if not ops and others:
        return [], ()  # scans and convolutions pass states or edges to the next rank
    if not ops:
        raise ring.error(
            f"no op can use {name} in a ring: the model has no fused attention along {name} alone",
            remedy="use stg.attention in the model, or --cp-mode all-gather or ulysses",
        )
    for op in ops:
        rows = key_rows(op, 0)[0].size
        if ring.order == "zigzag" and rows == symbol(name) * symbol(name):
            raise op.error(
                f"zigzag is an order of {name}, but '{op.name}' has {rows} positions",
                remedy="use --cp-order plain",
            )
        op.attrs["ring"] = ring.order
        for code in ("by_head", "given_type", "made_mask", "wide_scores"):  # model code has no ring
            op.attrs.pop(code, None)
        _run_in_steps(module, op, strategy.one(KernelsRule).ring)
        for message in (*op.definition.verify(op), *_another_sequence(op)):
            remedy = "gather or exchange: --cp-mode all-gather, or --cp-mode ulysses"
            raise op.error(f"'{op.name}' {message}", remedy=remedy)
    if ops and others and ring.order == "zigzag":
        raise others[0].error(
            f"'{others[0].name}' needs {name} in order, but the ranks of a ring in zigzag order "
            "do not have consecutive parts",
            remedy="use --cp-order plain, or --cp-mode ulysses",
        )
    rules = [rule for rule in strategy.splits if name in rule.dims and not rule.rest]
    over = tuple(axis for rule in rules for axis in rule.over)
    if ring.order != "zigzag" or not over:
        return ops, over
    root, made = module.root.body, made_by(RingAttention.name, ring.loc)
    places = [root.ops.index(o) for o in module.declaring("symbols", "axes")]
    b = Builder(module.registry, root, 1 + max(places, default=-1), loc=made)
    b.op("stg.zigzag", (), {"dims": (name,), "over": over})
    return ops, over


def _run_in_steps(module: Module, op: Operation, form: str) -> None:
    """Merge the parts by unfused operations: the result is ordered by heads, so its users take a
    copy."""
    if form == "fused":
        return
    op.attrs["steps"] = form
    b = module.after(op, by=RingAttention.name)
    result = op.results[0]
    result.replace_with(b.value("stg.reorder", [result], hint=f"{result.name}_o"))


def _another_sequence(op: Operation) -> Iterator[str]:
    """The message for cross attention, whose queries and keys have different positions."""
    rows, keys = key_rows(op, 0)
    if rows.size != keys.size:
        yield f"is cross attention of {rows.size} queries to {keys.size} keys: expected as many"
