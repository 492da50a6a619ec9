"""The parts of a decode step that speculative decoding uses: input tokens, logits, and state of
sequences."""

from collections.abc import Sequence

from stagec.ir.builder import Builder
from stagec.ir.core import Value
from stagec.ir.expr import const
from stagec.ir.module import Module
from stagec.ir.types import CACHED, TensorType

#: The name of the pod of a draft model, of its drafts where they cross, and of the chosen tokens.
DRAFT, DRAFTS, CHOSEN = "draft", "drafts", "chosen"
#: Most drafts per step: `stg.concat` joins so many values of two dimensions. Engines make up to 10.
MOST_DRAFTS = 25


def tokens_taken(module: Module) -> Value:
    """The argument [B, S] with the tokens of a step of serving. Raises `DiagnosticError` unless
    there is exactly one."""
    given = [a for a in module.main.body.args if not a.tensor.role]
    tokens = [a for a in given if a.tensor.rank == 2 and a.tensor.dtype[0] in "iu"]
    if len(tokens) != 1:
        names = ", ".join(f"%{a.name}" for a in given) or "none"
        raise module.main.error(
            "speculation feeds the chosen tokens to the step, expected one argument of integers "
            f"[B, S], found {names}",
            remedy="serve a language model with tokens [B, S] as its only argument",
        )
    return tokens[0]


def logits_chosen(module: Module) -> Value:
    """The logits [B, S, V] that a step returns. Raises `DiagnosticError` if there are several, such
    as those of multi-token prediction."""
    body = module.main.body
    logits = body.terminator.operands[: len(body.terminator.operands) - len(state(module))]
    if len(logits) != 1:
        raise module.main.error(
            f"the step has {len(logits)} results with logits, expected one to choose tokens by",
            remedy="serve a model with one head",
        )
    return logits[0]


def most_likely(b: Builder, logits: Value, name: str) -> Value:
    """Add the choice of the most likely tokens [B, S] by logits [B, S, V]."""
    type_ = TensorType("i32", logits.tensor.dims[:-1])
    return b.value("stg.argmax", [logits], type=type_, hint=name)


def concatenated(b: Builder, values: Sequence[Value], name: str) -> Value:
    """Add the concatenation of values over their second dimension. One value stays as it is."""
    if len(values) == 1:
        return values[0]
    return b.value("stg.concat", values, {"dim": const(1)}, hint=name)


def state(module: Module) -> Sequence[Value]:
    """The arguments with state of sequences, in order. The last results of the function are their
    updated values."""
    return [a for a in module.main.body.args if a.tensor.role in CACHED]
