"""Muon: a momentum that is orthogonalized by Newton-Schulz iterations, as in torch.optim.Muon."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, const, maximum, product
from stagec.ir.kernel import KernelShape
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, OpDef, Sizes
from stagec.ir.param import Param
from stagec.ir.rule import Rule, letters, make_rule
from stagec.ir.traits import InPlace, Trait
from stagec.ir_spec.ops.base import pointwise
from stagec.ir_spec.ops.structure import ratio

_MOMENTUM = Param("momentum", "ratio", "what is left of the momentum (default 0.95)")
#: Coefficients of an iteration, `a x + b (x x^T) x + c (x x^T)^2 x`: DEFAULT_A, _B and _C there.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class MuonMomentum(OpDef):
    """momentum * m + (1 - momentum) * g, in place: 3 FLOPs per element. An optional last operand is
    a scalar factor of the gradient."""

    name = "stg.muon_momentum"
    operands = ("m", "grad", "clip?")
    traits: ClassVar[tuple[Trait, ...]] = (InPlace(operands=(0,)),)
    params = (_MOMENTUM,)
    flops_per_point = 3
    example = "%m2 = stg.muon_momentum(%m, %g) : bf16[D, F]"

    def rule(self, op: Operation) -> Rule:
        return pointwise(op, scalars=len(op.operands) - 2)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        m, grad, *clip = args
        left = ratio(op, "momentum", 0.95)
        return [left * m + (1 - left) * (grad * clip[0] if clip else grad)]


class MuonUpdate(MuonMomentum):
    """The formula of `stg.muon_momentum` with the gradient and the updated momentum (Nesterov), as
    a new tensor with the type of the gradient."""

    name = "stg.muon_update"
    traits = ()
    element_types = ("grad",)
    example = "%u = stg.muon_update(%m, %g) : bf16[D, F]"


class NewtonSchulz(OpDef):
    """Orthogonalizes matrices with `steps` iterations in bf16 (arXiv 2502.16982, section 2): each
    computes x x^T, a polynomial of it, and its product with x. If there are more columns than rows,
    the result is multiplied by the root of columns / rows.

    `rows` and `columns` are the dimensions of a matrix, which cannot be split; the other dimensions
    are a batch of matrices. With n the smaller extent and m the larger one, an iteration has 4 n^2
    m + 2 n^3 FLOPs; its time is that of one product of n by n with all of these. `scratch` contains
    two tensors of n by n and one of the size of the matrix.
    """

    name = "stg.newton_schulz"
    operands = ("x",)
    results = ("result", "scratch")
    element_types = ("bf16", "bf16")
    params = (
        Param("rows", "ints", "the dimensions of rows", required=True),
        Param("columns", "ints", "the dimensions of columns", required=True),
        Param("steps", "int", "the number of iterations (default 5)"),
    )
    example = (
        "%o, %s = stg.newton_schulz[rows = 0, columns = 1](%u) : "
        "(bf16[D, F], bf16[D*F + 2*(D + F - max(D, F))^2])"
    )

    def rule(self, op: Operation) -> Rule:
        t = letters(op.operands[0].tensor.rank)
        matrix = "".join(t[i] for i in self._matrix(op))
        others = "".join(f for f in t if f not in matrix)
        rows, columns = self._extents(op)
        less = rows + columns - maximum([rows, columns])
        scratch = rows * columns + less * less * 2
        return make_rule(f"{t}->{t},{others}z", whole=matrix, sizes={"z": scratch})

    def _matrix(self, op: Operation) -> tuple[int, ...]:
        return (*op.integers("rows"), *op.integers("columns"))

    def _extents(self, op: Operation) -> tuple[Expr, Expr]:
        """The numbers of rows and columns of a matrix."""
        shape = op.operands[0].tensor.shape
        rows, columns = (product(shape[i] for i in op.integers(n)) for n in ("rows", "columns"))
        return rows, columns

    def verify(self, op: Operation) -> Iterator[str]:
        matrix, places = self._matrix(op), range(op.operands[0].tensor.rank)
        if len({*matrix}) < len(matrix) or not {*matrix} <= {*places}:
            yield f"expects different dimensions of %{op.operands[0].name} as rows and columns"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        batch, less, more, steps = self._sizes(op, n)
        return batch * steps * (less * less * more * 4 + less * less * less * 2)

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        return self.flops(op, n)

    def kernel(self, op: Operation, n: Sizes) -> KernelShape:
        batch, less, more, steps = self._sizes(op, n)
        return KernelShape("matmul", "bf16", (batch, less, less, steps * (more * 2 + less)))

    def bytes_touched(self, op: Operation) -> Expr:
        """The bytes of the operands and the result of each product, and of the division by the
        norm."""
        rows, columns = self._extents(op)
        less, matrix = rows + columns - maximum([rows, columns]), rows * columns
        each = matrix * 3 + less * less * 4
        batch = op.operands[0].tensor.local_bytes / matrix
        return batch * (const(op.integer("steps", 5)) * each + matrix * 5)

    def _sizes(self, op: Operation, n: Sizes) -> tuple[Expr, Expr, Expr, Expr]:
        """The number of matrices on a rank, their smaller and larger extent, and the number of
        iterations."""
        t = letters(op.operands[0].tensor.rank)
        rows, columns = (product(n[t[i]] for i in op.integers(m)) for m in ("rows", "columns"))
        batch = product(n[f] for i, f in enumerate(t) if i not in self._matrix(op))
        more = maximum([rows, columns])
        return batch, rows + columns - more, more, const(op.integer("steps", 5))

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        (x,) = args
        rows, columns = op.integers("rows"), op.integers("columns")
        batch = [i for i in range(x.ndim) if i not in (*rows, *columns)]
        order = (*batch, *rows, *columns)
        lead = [x.shape[i] for i in batch]
        height, width = (int(np.prod([x.shape[i] for i in d])) for d in (rows, columns))
        update = x.transpose(order).reshape(*lead, height, width)
        update = _orthogonal(update, op.integer("steps", 5)) * np.sqrt(max(1.0, width / height))
        update = update.reshape([x.shape[i] for i in order]).transpose(np.argsort(order))
        scratch = op.results[1].tensor.dims[-1].local
        return [update, np.zeros((*lead, ctx.size(scratch)))]


def _orthogonal(x: Array, steps: int) -> Array:
    a, b, c = _COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = np.swapaxes(x, -1, -2) if tall else x
    x = x / np.maximum(np.sqrt(np.square(x).sum((-2, -1), keepdims=True)), 1e-7)
    for _ in range(steps):
        gram = x @ np.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return np.swapaxes(x, -1, -2) if tall else x
