"""fuse-attention: replaces products and the softmax between them by fused attention."""

from collections.abc import Iterator
from string import ascii_letters

from stagec.api import Module, Operation, Pass, Phase, read_strategy
from stagec.ir.expr import ONE
from stagec.ir.rewrite import erase_unused, replace_op
from stagec.ir_spec.ops.activation import Dropout
from stagec.ir_spec.ops.contraction import Einsum
from stagec.ir_spec.ops.softmax import Softmax
from stagec.ir_spec.strategy.kernels import DEVICE, UNFUSED, KernelsRule

#: Both products, with letters in order of appearance: "bshk,bthk->bhst", "bhst,bthk->bshk".
_SCORES, _VALUES = "abcd,aecd->acbe", "abcd,adbe->acbe"
#: Attributes of a softmax that a fused kernel supports.
_PLAIN = {"causal", "window", "rsqrt", "phase"}


class FuseAttention(Pass):
    """Replace products of queries and keys, their softmax and the product with values by fused
    attention, if `stg.kernels` names a kernel for it.

    Heads have keys of their own, and the intermediate values have no other users. A dropout of
    shares becomes part of the kernel, which stores no mask (`flash_attn_func` with `dropout_p`,
    `DotProductAttention` of Transformer Engine with `attention_dropout`). Other softmaxes are not
    changed: those with a bias by distance, of cached keys, or of modified scores.

    Before:
        stg.strategy @s {
          stg.kernels[attention = flash_2]
        }
        stg.func @f(%q: bf16[B, S, H, K], %k: bf16[B, S, H, K], %v: bf16[B, S, H, K]) {
          %s = stg.einsum["bshk,bthk->bhst"](%q, %k) : bf16[B, H, S, S]
          %p = stg.softmax[causal, rsqrt = K](%s) : bf16[B, H, S, S]
          %a = stg.einsum["bhst,bthk->bshk"](%p, %v) : bf16[B, S, H, K]
          stg.return(%a)
        }
    After:
        stg.strategy @s {
          stg.kernels[attention = flash_2]
        }
        stg.func @f(%q: bf16[B, S, H, K], %k: bf16[B, S, H, K], %v: bf16[B, S, H, K]) {
          %a = stg.attention[causal](%q, %k, %v) : bf16[B, S, H, K]
          stg.return(%a)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).one(KernelsRule).attention not in (DEVICE, *UNFUSED)

    def run(self, module: Module) -> None:
        for scores, softmax, values in list(_composed(module)):
            q, k = scores.operands
            given = {n: v for n, v in softmax.attrs.items() if n in ("causal", "window")}
            scale = softmax.expr("rsqrt", ONE)
            if scale != q.tensor.dims[-1].size:
                given["rsqrt"] = scale
            b = module.before(values, by=self.name)
            operands, old = [q, k, values.operands[1]], values.result
            new = b.value("stg.attention", operands, given, type=old.type, hint=old.name)
            replace_op(values, [new])
        erase_unused(module.main.body)


def _composed(module: Module) -> Iterator[tuple[Operation, Operation, Operation]]:
    """The product of queries and keys, the softmax, and the product with values of each unfused
    attention."""
    for softmax in module.main.body.walk():
        if not isinstance(softmax.definition, Softmax) or not {*softmax.attrs} <= _PLAIN:
            continue
        scores, values = softmax.operands[0].producer, _only_user(softmax)
        if values is not None and isinstance(values.definition, Dropout):
            values = _only_user(values)
        if scores is None or values is None or len(softmax.operands) > 1:
            continue
        if _is(scores, _SCORES) and _is(values, _VALUES) and _only_user(scores) is softmax:
            yield scores, softmax, values


def _only_user(op: Operation) -> Operation | None:
    """The only user of the results of an op, if it takes one as first operand; else None."""
    uses = [use for result in op.results for use in result.uses]
    return uses[0][0] if len(uses) == 1 and uses[0][1] == 0 else None


def _is(op: Operation, spec: str) -> bool:
    """Whether an op is a product with this rule, up to the names of letters."""
    if not isinstance(op.definition, Einsum) or op.text("to", ""):
        return False
    text = op.text("spec")
    given = "".join(dict.fromkeys(filter(str.isalpha, text)))
    return text.translate(str.maketrans(given, ascii_letters[: len(given)])) == spec
