"""Values that serving caches instead of values computed from them: the flag `cached` of an op.

The keys and values of latent attention are computed from a latent and from a rotated key that all
heads share. These have the flag `cached`: the step packs their new rows into one value, appends it
to the cache, and recomputes the rows of keys and values from all cached rows:

    %latent_c_parts = stg.concat(%c, %kr1)                             // [B, S, C + R]
    %latent_c = stg.reshape["bs(zc)->bszc", ...](%latent_c_parts)      // [B, S, 1, C + R]
    %latent_c_rows = stg.append[past = past](%latent_c_cache, %latent_c)      // [B, past + S, ...]
    %c_rows, %kr1_rows = stg.cut[sizes = (C, R)](...)
    %kn_rows = stg.einsum["bsc,chk->bshk"](%c_rows, %wk_b)             // [B, past + S, H, K]
"""

from collections.abc import Sequence

from stagec.api import Operation, Value
from stagec.ir.builder import RawAttr
from stagec.ir.expr import ONE
from stagec.ir.serving_step import ServingStep
from stagec.ir.traits import View


def rows_of_latent(step: ServingStep, values: Sequence[Value]) -> list[Value] | None:
    """See `ServingStep.rows_of_latent`."""
    sources, between, others = list[Value](), set[Operation](), list[Value]()
    todo = list(values)
    while todo:
        value = todo.pop()
        op = value.producer
        if is_cached(value):
            sources += [value] if value not in sources else []
        elif op is None or op.region is not None or step.mixes(op):
            others.append(value)
        elif op not in between:
            between.add(op)
            made_of = [v for v in op.operands if any(map(step.is_tokens, v.tensor.shape))]
            todo += made_of
            others += [] if made_of else [value]
    if not sources:
        return None
    if others:
        raise others[0].error(
            f"%{values[0].name} depends on %{sources[0].name}, which is cached, and on "
            f"%{others[0].name}, which is not",
            remedy="mark all of them 'cached', or none",
        )
    region = values[0].region
    place = {op: i for i, op in enumerate(region.ops)}
    flags = {v: op for v in sources if (op := _flagged(v)) is not None}
    sources.sort(key=lambda v: place[flags[v]])  # the same in every step
    known = dict(zip(sources, _cached(step, sources), strict=True))
    for op in sorted(between, key=lambda o: place[o]):
        operands = [known.get(v, v) for v in op.operands]
        names = [f"{r.name}_rows" for r in op.results]
        again = step.b.op(op.name, operands, op.attrs, names=names)
        known |= dict(zip(op.results, again.results, strict=True))
    return [known[v] for v in values]


def is_cached(value: Value) -> bool:
    """Whether serving caches a value, or the value of which it is a view."""
    return _flagged(value) is not None


def _flagged(value: Value) -> Operation | None:
    op = value.producer
    while op is not None and op.has(View) and not op.flag("cached"):
        op = op.operands[0].producer
    return op if op is not None and op.flag("cached") else None


def _cached(step: ServingStep, sources: Sequence[Value]) -> Sequence[Value]:
    """All rows of values [B, S, C] that share one cache [B, T, 1, C + ...], like keys of a single
    head. Raises `DiagnosticError` for values of another rank."""
    for value in sources:
        if value.tensor.rank != 3:
            raise value.error(
                f"%{value.name} is to be cached, but is {value.type}",
                remedy="mark only values [batch, positions, width] 'cached'",
            )
    b, packed = step.b, sources[0]
    name = packed.prefixed("latent_")
    if len(sources) > 1:
        packed = b.value("stg.concat", sources, hint=f"{name}_parts")
    row: dict[str, RawAttr] = {"spec": "bs(zc)->bszc", "factors": ("z",), "sizes": (ONE,)}
    rows = step.append(b.value("stg.reshape", [packed], row, hint=name))
    whole = b.value("stg.reshape", [rows], {"spec": "bszc->bs(zc)"}, hint=f"{name}_all")
    if whole.tensor.dtype != packed.tensor.dtype:
        whole = b.value("stg.cast", [whole], {"to": packed.tensor.dtype}, hint=whole.name)
    if len(sources) == 1:
        return [whole]
    sizes = tuple(v.tensor.shape[2] for v in sources)
    names = [f"{v.name}_rows" for v in sources]
    return b.op("stg.cut", [whole], {"sizes": sizes}, names=names).results
