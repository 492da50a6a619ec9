"""Base classes of all forms of fused attention and their gradients: their work follows from the
pairs of queries and keys that a mask leaves, and that a kernel computes."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from stagec.ir.core import Operation
from stagec.ir.expr import ONE, Expr, call, expand, product
from stagec.ir.kernel import SELECTS, KernelShape
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef, Sizes
from stagec.ir.rule import Rule
from stagec.ir.types import DTYPE_BYTES
from stagec.ir_spec.ops.attention_core import (
    backward,
    core_misfits,
    core_rule,
    forward,
    given,
    scores_of,
)
from stagec.ir_spec.ops.masks import is_plain

#: Heads of a block of kernels whose queries select rows of a latent (deepseek-ai/FlashMLA,
#: csrc/sm100/prefill/sparse and csrc/sm90/prefill/sparse: `B_H = 64`); fewer are filled up.
SELECTING = 64


class AttentionWork(OpDef):
    """Base class for FLOPs and kernels.

    Forward has two products over the pairs, 2 FLOPs per multiply-add; `backward` has five, three
    with the head size of queries and keys and two with that of values, since its kernel recomputes
    the scores.
    """

    backward: ClassVar[bool] = False
    queries: ClassVar[int] = 0  # the index of the queries, which keys follow

    def __init_subclass__(cls) -> None:
        cls.queries = 3 if cls.backward else 0  # after dy, y and lse
        super().__init_subclass__()

    def left(self, op: Operation, n: Sizes) -> Expr:
        """The number of pairs that the mask leaves on a rank."""
        raise NotImplementedError

    def computed(self, op: Operation, n: Sizes) -> Expr:
        """The number of pairs that kernels compute, including masked ones."""
        raise NotImplementedError

    def met(self, op: Operation, n: Sizes) -> tuple[Expr, bool]:
        """The number of keys that a kernel processes, and whether a causal mask leaves half of the
        pairs."""
        return n["t"], False

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return self._products(n, self.left(op, n))

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return self._products(n, self.computed(op, n))

    def _products(self, n: Sizes, pairs: Expr) -> Expr:
        keys, values = (3, 2) if self.backward else (1, 1)
        sizes = n["k"] * keys + n.get("v", n["k"]) * values
        return expand(product(n[f] for f in "bgr") * pairs * sizes * 2)

    def kernel(self, op: Operation, n: Sizes) -> KernelShape:
        """Its FLOPs are `2 * batch * heads * queries * keys` times `qk + v`, in backward times
        `3*qk + 2*v`; half of that if a causal mask leaves half of the pairs. With other masks,
        `keys` is the mean number per query, rounded up. Queries that select rows of a latent share
        none: each counts as a separate sequence, and has 64 heads at least. Of caches in 16 bits,
        they are marked, since machines have another kernel of these for prompts."""
        keys, masked = self.met(op, n)
        if not is_plain(op) or "past" in op.attrs:
            keys, masked = call("ceildiv", [self.left(op, n), n["s"]]), False
        kind = "attention_backward" if self.backward else "attention"
        batch, queries, heads, mark = n["b"], n["s"], n["g"] * n["r"], ""
        if op.flag("selected") and "values" in op.attrs and not self.backward:
            batch, queries, heads = batch * queries, ONE, call("max", [heads, ONE * SELECTING])
            mark = SELECTS if DTYPE_BYTES[op.operands[1].tensor.dtype] == 2 else ""
        extents = (batch, heads, n["g"], queries, keys, n["k"], n.get("v", n["k"]))
        windowed = "window" in op.attrs
        return KernelShape(kind, op.operands[0].tensor.dtype, extents, masked, windowed, mark=mark)


class AttentionOp(AttentionWork):
    """Base class for operands, results and the numeric reference too. A gradient takes dy, the
    result and its log-sum-exp before the queries."""

    integral = "r"  # query heads of a key head

    def keys(self, op: Operation) -> str:
        """The factor of the sequence of keys and values."""
        return "s"

    def rule(self, op: Operation) -> Rule:
        text = "bs(gr)k,{kv}{more}->bs(gr){v},b(gr)s"
        if self.backward:
            text = "bs(gr){v},bs(gr){v},b(gr)s,bs(gr)k,{kv}{more}->bs(gr)k,{kv}{grads}"
        return core_rule(op, text, self.queries + 1, self.keys(op))

    def verify(self, op: Operation) -> Iterator[str]:
        yield from core_misfits(op, self.queries + 1)

    def source(self, op: Operation, ctx: NumericContext) -> NumericContext:
        """The rank that keys and values come from."""
        return ctx

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        before, rest = args[: self.queries], args[self.queries :]
        x = given(op, rest, ctx)
        scores = scores_of(op, ctx, self.source(op, ctx), self.queries, x)
        return backward(x, scores, *before) if before else forward(x, scores)
