"""Kernels of computations: the properties of one launch on a device that determine its time.

A kernel is a matrix product, fused attention, or bound by memory. The first two have symbolic
extents; `stagec.program.kernels` has those of a program as numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stagec.ir.expr import Expr, product
from stagec.ir.rule import Rule
from stagec.ir.types import WITHOUT_SCALES

MEMORY = "memory"
#: The mark of a product of experts with routed rows, if a strategy asks for it.
EXPERTS = "experts"
#: The mark of a product that expands 4-bit weights to the 16 bits of its activations.
EXPANDS = "expands"
#: The marks of such products of experts in Triton kernels, and of Marlin kernels.
TRITON, MARLIN = "triton", "marlin"
#: The marks of the scores of an indexer for sparse attention, and of attention whose queries select
#: rows of a latent in 16 bits.
INDEXER, SELECTS = "indexer", "selects"
#: The mark of an update that the host makes in its own memory.
ON_HOST = "host"
#: All marks of products that expand 4-bit weights.
EXPANDING = EXPANDS, TRITON, MARLIN
#: The mark of a kernel bound by memory whose work an adjacent kernel does, followed by `ALWAYS` or
#: the family of devices on which this holds.
CONTINUES, ALWAYS = "continues", "always"
#: The mark of a kernel that copies a value of 8 bits so that products contract other dimensions,
#: and that of a cast which writes this copy, followed by the bytes that it reads for an element.
TURNS, CASTS = "turns", "casts_"
#: The mark of a cast of a parameter whose copies stay over microbatches, which adds no kernel to
#: each of them.
STAYS = "stays"
#: The families of devices whose products take 8-bit operands along any dimension, so that there are
#: no such copies (NVIDIA/TransformerEngine, `nvte_is_non_tn_fp8_gemm_supported`: from sm100 on; XLA
#: chooses layouts on TPUs).
ANY_DIMENSION = frozenset({"blackwell", "tpu"})
#: Kinds of fused attention.
ATTENDS = ("attention", "attention_backward")
_ATTENTION = ("batch", "heads", "kv_heads", "queries", "keys", "qk", "v")
#: The extents of each kind of kernel, in elements of one rank.
EXTENTS: Mapping[str, tuple[str, ...]] = {
    "matmul": ("batch", "m", "n", "k"),
    "attention": _ATTENTION,
    "attention_backward": _ATTENTION,
    MEMORY: (),
}


def continues(form: str, family: str) -> bool:
    """Whether a kernel with this mark is part of another one, or does not exist, on devices of a
    family."""
    turns = form == TURNS and family in ANY_DIMENSION
    return turns or form in (STAYS, f"{CONTINUES}_{ALWAYS}", f"{CONTINUES}_{family}")


def moved_share(form: str, family: str) -> float:
    """The share of its bytes that a kernel with this mark moves on devices of a family, where
    values in 8 bits need no second copy."""
    if family not in ANY_DIMENSION or not form.startswith((TURNS, CASTS)):
        return 1.0
    if form == TURNS:
        return 0.0
    read = int(form.removeprefix(CASTS))
    return (read + 1) / (read + 2)


@dataclass(frozen=True, slots=True)
class KernelShape:
    """A matrix product or fused attention with its extents, those of `EXTENTS[kind]`.

    `dtype` is the element type of its operands. With `causal` a mask leaves half of the pairs of
    queries and keys. With `windowed` each query sees the keys of a window that moves with it, and
    `keys` is their mean number. With `transposed` neither operand of a product has contiguous
    elements of k: rows are summed up, as in gradients of weights. `mark` is that of an op whose
    kernel is one of its own, whatever a strategy says.
    """

    kind: str
    dtype: str
    extents: tuple[Expr, ...]
    causal: bool = False
    windowed: bool = False
    transposed: bool = False
    mark: str = ""


def matrix_product(rule: Rule, n: Mapping[str, Expr], dtype: str) -> KernelShape | None:
    """The matrix product of a rule of two operands, from the size of each factor; None if the rule
    is not a product.

    | factors                          | are        |
    |----------------------------------|------------|
    | of both operands and the result  | the batch  |
    | of the left one and the result   | m          |
    | of the right one and the result  | n          |
    | not of the result                | k          |

    Its FLOPs are `2 * batch * m * n * k`, since every factor belongs to one of the four. A sum of
    elementwise products, such as `sd,sd->s`, has neither m nor n: it is not a matrix product.
    """
    if len(rule.operands) != 2 or len(rule.results) != 1:
        return None
    left, right = ({f for g in shape for f in g} for shape in rule.operands)
    contracted = rule.contracted(0)
    kept = [f for f in rule.factors if f not in contracted]
    rows = [f for f in kept if f in left and f not in right]
    columns = [f for f in kept if f in right and f not in left]
    batch = [f for f in kept if f in left and f in right]
    if not contracted or not (rows or columns):
        return None
    inner = [f for f in rule.factors if f in contracted]
    extents = tuple(product(n[f] for f in group) for group in (batch, rows, columns, inner))
    a, b = (next((g[-1] for g in reversed(shape) if g), "") for shape in rule.operands)
    transposed = a in rows and b in columns
    return KernelShape("matmul", WITHOUT_SCALES.get(dtype, dtype), extents, transposed=transposed)
