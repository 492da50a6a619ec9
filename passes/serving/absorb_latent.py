"""absorb-latent: attention reads the cached latent directly instead of keys and values made of
it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stagec.api import Builder, Dim, Module, Operation, Pass, Phase, Rule, Value, const
from stagec.ir.builder import RawAttr
from stagec.ir.expr import ONE
from stagec.ir.queries import IsPositive, ask
from stagec.ir.rewrite import erase_unused
from stagec.ir.rule import shape_text
from stagec.ir.traits import Recasts
from stagec.ir_spec.ops.attention import FlashAttention
from stagec.ir_spec.ops.contraction import Broadcast, Einsum
from stagec.ir_spec.ops.layout import Reshape
from stagec.ir_spec.ops.selection import Concat, Cut


class AbsorbLatent(Pass):
    """Rewrite attention whose keys and values are products of a latent, by associativity.

    `q . (c W) = (q W^T) . c`, and `sum of p (c V) = (sum of p c) V`: queries are projected to the
    size of the latent. All heads share one key, the latent with the shared rotated part, and the
    values are its first columns (arXiv 2405.04434, section 2.1.2). With few queries this is less
    work, and no keys and values are computed for all cached tokens.

    Before:
        stg.func @f(%q: bf16[B, S, H, K], %c: bf16[B, S, E], %w: bf16[E, H, K], %u: bf16[E, H, F]) {
          %k = stg.einsum["bsc,chk->bshk"](%c, %w) : bf16[B, S, H, K]
          %v = stg.einsum["bsc,chf->bshf"](%c, %u) : bf16[B, S, H, F]
          %a = stg.attention[causal](%q, %k, %v) : bf16[B, S, H, F]
          stg.return(%a)
        }
    After:
        stg.func @f(%q: bf16[B, S, H, K], %c: bf16[B, S, E], %w: bf16[E, H, K], %u: bf16[E, H, F]) {
          %q_absorbed = stg.einsum["bshk,chk->bshc"](%q, %w) : bf16[B, S, H, E]
          %c_head = stg.reshape["bs(zc)->bszc", factors = z, sizes = 1](%c) : bf16[B, S, 1, E]
          %a_latent = stg.attention[causal, rsqrt = K, values = E](%q_absorbed, %c_head)
            : bf16[B, S, H, E]
          %a = stg.einsum["bshc,chf->bshf"](%a_latent, %u) : bf16[B, S, H, F]
          stg.return(%a)
        }
    """

    needs = Phase.SHAPED

    queries: int = field(
        default=0,
        metadata={"help": "of sequences with at most so many queries (default: with any number)"},
    )
    selected: bool = field(
        default=False, metadata={"help": "no others than these and queries that select their keys"}
    )

    def run(self, module: Module) -> None:
        absorb_latent(module, self.queries, self.selected)


def absorb_latent(module: Module, queries: int = 0, selected: bool = False) -> int:
    """Rewrite attention on keys and values that are made of a latent, in place; returns the number
    of rewritten ops. With `queries` only attention of sequences that are known to have at most this
    number of queries is rewritten; with `selected` only that (if `queries` is given) and attention
    whose queries select their keys."""
    body = module.main.body
    ops = [op for op in body.walk() if isinstance(op.definition, FlashAttention)]
    if queries or not selected:
        ops = [op for op in ops if _few(module, op, queries) or (selected and op.flag("selected"))]
    else:
        ops = [op for op in ops if op.flag("selected")]
    count = sum(_absorb(module, op) for op in ops)
    if count:
        erase_unused(body)
    return count


def _few(module: Module, op: Operation, queries: int) -> bool:
    count = op.operands[0].tensor.shape[1]
    known = count.symbols <= module.env.keys()
    return not queries or (known and ask(IsPositive(const(queries + 1) - count), module.env))


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of keys or values [B, T, H, K]: rows [B, T, C] that all heads share, and the weight
    that projects them to K elements per head; without a weight each head has the rows
    themselves."""

    rows: Value
    weight: Value | None = None
    rule: Rule | None = None

    def times(self, b: Builder, x: Value, hint: str, *, back: bool) -> Value:
        """The product of x [B, S, H, C] with the weight, or `back` of x [B, S, H, K]."""
        if self.weight is None or self.rule is None:
            return x
        (batch, rows, inner), weight = self.rule.operands
        made = self.rule.results[0]
        flat = (batch, rows, made[2], inner)
        left, right = (made, flat) if back else (flat, made)
        spec = f"{shape_text(left)},{shape_text(weight)}->{shape_text(right)}"
        return b.value("stg.einsum", [x, self.weight], {"spec": spec}, hint=hint)


def _absorb(module: Module, op: Operation) -> bool:
    if len(op.operands) < 3 or "values" in op.attrs or len(op.results) != 1:
        return False
    q, keys, values, *more = op.operands
    parts, latent = _parts(keys), _part(values)
    if parts is None or latent is None or latent.weight is None:
        return False
    first = next((p for p in parts if p.rows is latent.rows and p.weight is not None), None)
    if first is None:
        return False
    b = module.before(op, by=AbsorbLatent.name)
    order = [first, *(p for p in parts if p is not first)]
    queries = dict(zip(parts, _cut(b, q, keys, parts), strict=True))
    sizes = [p.rows.tensor.shape[2] for p in order]
    name = f"{q.name}_absorbed"
    absorbed = [p.times(b, queries[p], name, back=True) for p in order]
    whole = absorbed[0]
    if len(order) > 1:
        whole = b.value("stg.concat", absorbed, hint=f"{q.name}_latent")
    shared = _one_head(b, [p.rows for p in order])
    attrs = {"rsqrt": q.tensor.shape[3], **op.attrs, "values": sizes[0]}
    old, hint = op.result.tensor, f"{op.result.name}_latent"
    type_ = replace(old, dims=(*old.dims[:3], Dim(sizes[0])))
    seen = b.value(op.name, [whole, shared, *more], attrs, type=type_, hint=hint)
    op.result.replace_with(latent.times(b, seen, op.result.name, back=False))
    op.erase()
    return True


def _parts(keys: Value) -> list[_Part] | None:
    """The parts of keys along the last dimension; None if one is not made of shared rows."""
    op = keys.producer
    joined = op is not None and isinstance(op.definition, Concat) and op.integer("dim", 3) == 3
    values = op.operands if op is not None and joined else (keys,)
    parts = [_part(v) for v in values]
    return None if None in parts else [p for p in parts if p is not None]


def _part(value: Value) -> _Part | None:
    op = value.producer
    rule = op.definition.rule(op) if op is not None else None
    if op is None or rule is None or len(rule.results[0]) != 4 or len(rule.operands[0]) != 3:
        return None
    rows, made = rule.operands[0], rule.results[0]
    if isinstance(op.definition, Broadcast) and made == (*rows[:2], made[2], rows[2]):
        return _Part(op.operands[0])
    if not isinstance(op.definition, Einsum) or rows[:2] != made[:2] or rows[2] in made:
        return None
    weight = set(rule.operands[1])
    return _Part(op.operands[0], op.operands[1], rule) if weight == {rows[2], *made[2:]} else None


def _cut(b: Builder, q: Value, keys: Value, parts: list[_Part]) -> Sequence[Value]:
    """The queries of each part of the keys."""
    if len(parts) == 1:
        return [q]
    op = keys.producer
    sizes = tuple(v.tensor.shape[3] for v in (op.operands if op is not None else ()))
    names = [f"{q.name}_{p.rows.name.rpartition('/')[2]}" for p in parts]
    return b.op("stg.cut", [q], {"sizes": sizes}, names=names).results


def _one_head(b: Builder, rows: list[Value]) -> Value:
    """Concatenated rows as the keys of a single head [B, T, 1, C + ...]."""
    op = rows[0].producer
    together = op is not None and isinstance(op.definition, Cut) and list(op.results) == rows
    flat = op.operands[0] if op is not None and together else rows[0]
    if not together and len(rows) > 1:
        flat = b.value("stg.concat", rows, hint=f"{rows[0].name}_parts")
    source = flat.producer
    if source is not None and source.has(Recasts):  # the kernel reads them as they are cached
        source = source.operands[0].producer
    if source is not None and isinstance(source.definition, Reshape):
        whole = source.operands[0]
        if whole.tensor.rank == 4 and whole.tensor.shape[2] == ONE:
            return whole
    attrs: dict[str, RawAttr] = {"spec": "bs(zc)->bszc", "factors": ("z",), "sizes": (ONE,)}
    return b.value("stg.reshape", [flat], attrs, hint=f"{flat.name}_head")
