"""Products of a server with low-rank adapters, of which each token uses its own."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from stagec.ir.core import Operation
from stagec.ir.expr import ONE, Expr, call, maximum, product, total
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.kernel import KernelShape, matrix_product
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule, parse_rule, shape_text
from stagec.ir_spec.ops.base import SPEC

_SEQUENCES = Param(
    "sequences", "size", "sequences that an element of the first dimension of `adapter` has"
)


class AdapterProduct(OpDef):
    """Base: a product whose second factor is one of several adapters, chosen for each token.

    A kernel reads the adapters that a step uses. Sequences use each of N adapters as likely as any
    other, so of n sequences 1 - (1 - 1/N)^n of them are read on average, and rows are multiplied
    in as many groups, as kernels of SGMV do (Punica, arXiv 2310.18547). An adapter has N adapters
    first; they lie on every rank.
    """

    params = (SPEC, _SEQUENCES)
    #: The operands that are multiplied, rows and adapters, and the numbers of the adapters.
    rows: ClassVar[int] = 0
    weights: ClassVar[int] = 1
    adapter: ClassVar[int] = 2

    @abstractmethod
    def rule(self, op: Operation) -> Rule: ...

    def verify(self, op: Operation) -> Iterator[str]:
        """The rule has the adapters first in the weights, and not in the result."""
        shapes, results = parse_rule(op.text("spec"))
        if len(shapes) != self.adapter + 1 or len(results) != 1:
            yield f"expects a rule of {self.adapter + 1} operands and one result"
            return
        adapters = shapes[self.weights][0]
        others = [g for i, s in enumerate((*shapes, *results)) if i != self.weights for g in s]
        if adapters in others:
            yield f"factor '{adapters[0]}' of the adapters is in another operand or the result"
        if (dtype := op.operands[self.adapter].tensor.dtype) != "i32":
            yield f"expects numbers of adapters in i32, found {dtype}"

    def _rule(self, op: Operation, whole: str = "", linear: Sequence[int] = ()) -> Rule:
        spec = op.text("spec")
        adapters = parse_rule(spec)[0][self.weights][0][0]
        return make_rule(spec, whole=adapters + whole, linear=linear)

    def _product(self, op: Operation) -> Rule:
        """The product of a token with its adapter."""
        rule = self.rule(op)
        rows, weights = rule.operands[self.rows], rule.operands[self.weights][1:]
        return replace(rule, operands=(rows, weights))

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return product(n[f] for f in self._product(op).factors) * 2

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return self.flops(op, n)

    def used(self, op: Operation, whole: Expr, n: Sizes) -> Expr:
        """What of something that is spread over the adapters the sequences of a rank use, to the
        nearest whole number."""
        adapters = op.operands[self.weights].tensor.shape[0]
        chosen = self.rule(op).operands[self.adapter]
        sequences = n[chosen[0][0]] * op.expr("sequences", ONE)
        return call("reached", [whole, adapters, ONE, sequences])

    def bytes_touched(self, op: Operation) -> Expr:
        n = factor_sizes(op, self.rule(op), local=True)
        weights = op.operands[self.weights].tensor.local_bytes
        others = (v for i, v in enumerate(op.operands) if i != self.weights)
        every = (v.tensor.local_bytes for v in (*others, *op.results))
        return total([*every, self.used(op, weights, n)])

    def kernel(self, op: Operation, n: Sizes) -> KernelShape | None:
        adapters = op.operands[self.weights].tensor
        kernel = matrix_product(self._product(op), n, adapters.dtype)
        if kernel is None:
            return None
        groups = maximum([self.used(op, adapters.shape[0], n), ONE])
        batch, m, columns, k = kernel.extents
        return replace(kernel, extents=(batch * groups, m / groups, columns, k))

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        return op.operands[self.weights].tensor.shape[0] if operand == self.adapter else None

    def _multiplied(self, op: Operation, *args: Array) -> Array:
        """The product of each token with its adapter."""
        shapes, (out,) = parse_rule(op.text("spec"))
        x, weights, chosen = (args[i] for i in (self.rows, self.weights, self.adapter))
        each = (*shapes[self.adapter], *shapes[self.weights][1:])
        spec = f"{shape_text(shapes[self.rows])},{shape_text(each)}->{shape_text(out)}"
        made: Array = np.einsum(spec, x, weights[np.asarray(chosen, int)], optimize=True)
        return made


class LoraBuffer(OpDef):
    """Zeros in 32 bits, for the results of products with adapters of tokens; one kernel. Its rule
    has the letter of the rank, and that of what packs matrices, in the results alone."""

    name = "stg.lora_buffer"
    operands = ("adapter",)
    results = ("zeros*",)
    params = (
        SPEC,
        Param("factors", "names", "letters of the results that are no dimensions of tokens"),
        Param("sizes", "sizes", "their sizes"),
    )
    example = '%z = stg.lora_buffer["bs->bsr", factors = r, sizes = 16](%adapter) : f32[B, S, 16]'

    def rule(self, op: Operation) -> Rule:
        sizes = dict(zip(op.names("factors"), op.exprs("sizes"), strict=True))
        return make_rule(op.text("spec"), whole="".join(sizes), sizes=sizes)

    def dtypes(self, op: Operation) -> Sequence[str]:
        return ["f32"] * len(self.rule(op).results)

    def bytes_touched(self, op: Operation) -> Expr:
        return total(v.tensor.local_bytes for v in op.results)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [np.zeros(ctx.shape(v)) for v in op.results]


class LoraShrink(AdapterProduct):
    """x A, in 32 bits, with the adapter A of each token; with `zeros` in their buffer, in which
    kernels add up parts of the contraction (vLLM, lora/ops/triton_ops/lora_shrink_op.py)."""

    name = "stg.lora_shrink"
    operands = ("x", "a", "adapter", "zeros?")
    element_types = ("f32",)
    example = '%low = stg.lora_shrink["bsd,zdr,bs->bsr"](%x, %a, %adapter) : f32[B, S, 16]'

    def rule(self, op: Operation) -> Rule:
        rule = self._rule(op)
        zeros = rule.results if len(op.operands) > self.adapter + 1 else ()
        return replace(rule, operands=(*rule.operands, *zeros))

    def reuses(self, op: Operation, result: int) -> int | None:
        return self.adapter + 1 if len(op.operands) > self.adapter + 1 else None

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [self._multiplied(op, *args)]


class LoraExpand(AdapterProduct):
    """y + low B, in place, with the adapter B of each token.

    As `lora_expand` of vLLM (lora/ops/triton_ops/lora_expand_op.py, `add_inputs`). Of partial sums
    y and low it makes a partial sum: behind a product that is split along what it contracts, one
    all_reduce adds up both (`RowParallelLinearWithLoRA`).
    """

    name = "stg.lora_expand"
    operands = ("y", "low", "b", "adapter")
    rows, weights, adapter = 1, 2, 3
    example = (
        '%q2 = stg.lora_expand["bshk,bsr,zrhk,bs->bshk"](%q, %low, %b, %adapter) : bf16[B, S, H, K]'
    )

    def rule(self, op: Operation) -> Rule:
        shapes, (out,) = parse_rule(op.text("spec"))
        low = [f for g in shapes[1] for f in g if g not in out]
        return self._rule(op, "".join(low), (0, 1))

    def reuses(self, op: Operation, result: int) -> int | None:
        return 0

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return super().flops(op, n) + product(n[f] for g in self.rule(op).results[0] for f in g)

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return super().flops(op, n)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        return [args[0] + self._multiplied(op, *args)]
