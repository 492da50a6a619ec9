"""AdamW with block-wise 8-bit moments, as in bitsandbytes (arXiv 2110.02861)."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, const
from stagec.ir.opdef import Array
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.traits import InPlace
from stagec.ir_spec.ops.optimizer import Update, adam_step, moments

#: The elements of a block, and of the smallest tensor with blocks: bitsandbytes/optim/optimizer.py,
#: Optimizer2State.update_step and `min_8bit_size`.
BLOCK, SMALLEST = 256, 4096
_CODES = const(256)
_STATES = ("m", "v", "m_scale", "v_scale")


class Adam8bit(Update):
    """One AdamW step in place, in one kernel, with 8-bit moments: an element is the index of a
    value in a table (`create_dynamic_map`), times the largest value of its block, an f32. 20 FLOPs
    per element.

    Blocks are along dimension `dim`: `block` elements share a scale and are not split. The operands
    after the moments are their scales, then those of `stg.adamw`.
    """

    name = "stg.adam8bit"
    states = _STATES
    operands = ("param", "grad", *_STATES, "master or clip*")
    results = ("param", *_STATES, "master?")
    traits = (InPlace(operands=(0, 2, 3, 4, 5, 6)),)
    params = (
        *Update.params,
        Param("dim", "int", "the dimension along which blocks lie", required=True),
        Param("block", "int", "elements of a block", required=True),
    )
    flops_per_point = 20
    example = (
        "%w2, %m2, %v2, %a2, %b2 = stg.adam8bit[dim = 0, block = 256](%w, %g, %m, %v, %a, %b) : "
        "(f32[D], u8[D], u8[D], f32[D/256], f32[D/256])"
    )

    def rule(self, op: Operation) -> Rule:
        dim, rank = op.integer("dim"), op.operands[0].tensor.rank
        t = [*letters(rank)]
        blocks = "".join(t)
        t[dim] = f"({t[dim]}z)"
        full, master = "".join(t), op.flag("master")
        operands = [*[full] * 4, blocks, blocks, *[full] * master, *[""] * op.flag("clip")]
        results = [*[full] * 3, blocks, blocks, *[full] * master]
        text = f"{','.join(operands)}->{','.join(results)}"
        return make_rule(text, whole="z", sizes={"z": op.expr("block")})

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        if not 0 <= op.integer("dim") < op.operands[0].tensor.rank:
            yield f"expects 'dim' to be a dimension of %{op.operands[0].name}"

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return _CODES if operand in (2, 3) else None

    def updated(
        self, op: Operation, old: Array, grad: Array, states: Sequence[Array]
    ) -> Sequence[Array]:
        dim, block = op.integer("dim"), op.integer("block")
        coded, scales = states[:2], states[2:]
        tables = (dynamic_map(signed=True), dynamic_map(signed=False))
        decoded = (
            table[np.asarray(codes, int)] * np.repeat(scale, block, dim)
            for table, codes, scale in zip(tables, coded, scales, strict=True)
        )
        m, v = moments(op, grad, *decoded)
        new = adam_step(op, old, m, v)
        pairs = [quantized(x, dim, block, t) for x, t in zip((m, v), tables, strict=True)]
        return [new, *(codes for codes, _ in pairs), *(scale for _, scale in pairs)]


def quantized(x: Array, dim: int, block: int, table: Array) -> tuple[Array, Array]:
    """The nearest codes in a table, and the largest absolute value of each block."""
    shape = (*x.shape[:dim], x.shape[dim] // block, block, *x.shape[dim + 1 :])
    scale = np.abs(x.reshape(shape)).max(dim + 1)
    unit = x / np.maximum(np.repeat(scale, block, dim), 1e-38)
    between = (table[1:] + table[:-1]) / 2
    return between.searchsorted(unit), scale


@lru_cache(maxsize=2)
def dynamic_map(*, signed: bool) -> Array:
    """The 256 values of 8 bits with a unary exponent, ascending:
    bitsandbytes.functional.create_dynamic_map with its defaults."""
    values = [0.0, 1.0]
    for i in range(7):
        bounds = np.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1)
        means = 10.0 ** (i - 6) * (bounds[:-1] + bounds[1:]) / 2
        values += [*means, *(-means if signed else ())]
    return np.sort(np.array(values))
