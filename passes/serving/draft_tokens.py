"""draft-tokens: a decode step becomes several, each of which takes the token that the previous one
chose."""

from collections.abc import Sequence
from dataclasses import replace

from stagec.api import Builder, Expr, Module, Operation, Pass, Phase, Value, const, error, symbol
from stagec.ir.builder import RawAttr
from stagec.ir.clone import Copier
from stagec.ir.drafts import (
    CHOSEN,
    DRAFT,
    DRAFTS,
    MOST_DRAFTS,
    concatenated,
    logits_chosen,
    most_likely,
    state,
    tokens_taken,
)
from stagec.ir.infer import infer_again
from stagec.ir.serving_step import PAST
from stagec.ir_spec.ops.parts import arrive, depart
from stagec.ir_spec.strategy.part import MAIN

#: Attributes that limit the number of keys that a query sees.
_SPANS = {"span", "window", "chunk"}


class DraftTokens(Pass):
    """Repeat a decode step of one token `count` times, as a draft model does before the model that
    verifies (arXiv 2211.17192).

    Each step takes the most likely token of the previous one and writes its rows after those of
    that step. The drafts are sent to the pod `main`, which returns its tokens: in each sequence the
    drafts up to the first different token were accepted.

    Before:
        stg.symbols[B, S = 1, D, V, past]
        stg.func @f(%t: i32[B, S], %w: bf16[V, D | frozen], %u: bf16[D, V | frozen])
            -> bf16[B, S, V] {
          %x = stg.embedding(%w, %t) : bf16[B, S, D]
          %z = stg.einsum["bsd,dv->bsv"](%x, %u) : bf16[B, S, V]
          stg.return(%z)
        }
    After (draft-tokens{count=2}):
        stg.symbols[B, S = 1, D, V, past]
        stg.func @f[part = draft] (%t: i32[B, S], %w: bf16[V, D | frozen],
            %u: bf16[D, V | frozen]) -> i32[B, 3] {
          %x = stg.embedding(%w, %t) : bf16[B, S, D]
          %z = stg.einsum["bsd,dv->bsv"](%x, %u) : bf16[B, S, V]
          %draft = stg.argmax(%z) : i32[B, S]
          %step1/x = stg.embedding(%w, %draft) : bf16[B, S, D]
          %step1/z = stg.einsum["bsd,dv->bsv"](%step1/x, %u) : bf16[B, S, V]
          %step1/draft = stg.argmax(%step1/z) : i32[B, S]
          %drafts = stg.concat[dim = 1](%draft, %step1/draft) : i32[B, 2*S]
          stg.depart[drafts, vocabulary = V, source = draft, to = main](%drafts)
          %chosen = stg.arrive[chosen, vocabulary = V, source = main, to = draft, sizes = (B, 3),
            dtype = i32] : i32[B, 3]
          stg.return(%chosen)
        }
    """

    needs = Phase.SHAPED

    count: int

    def run(self, module: Module) -> None:
        draft_tokens(module, self.count)


def draft_tokens(module: Module, count: int) -> None:
    """Make `count` steps of the main function, in place.

    Raises `DiagnosticError` for a step of more than one token, one without cached tokens, and one
    with inputs other than tokens.
    """
    body = module.main.body
    tokens, logits, states = tokens_taken(module), logits_chosen(module), state(module)
    _check(module, tokens, count)
    made = kept = body.terminator.operands[1:]
    step, size = body.ops[:-1], tokens.tensor.shape[1]
    _lengthen(tokens, states, count)
    b = module.before(body.terminator, loc=logits.loc, by=DraftTokens.name)
    drafts = [most_likely(b, logits, "draft")]
    for number in range(1, count):
        taken = dict(zip((tokens, *states), (drafts[-1], *kept), strict=True))
        copier = _copier(taken, number)
        for op in step:
            _see_rows(b.insert(copier.copy(op)), size, number, count)
        kept = tuple(copier.values.get(v, v) for v in made)
        drafts.append(most_likely(b, copier.values[logits], copier.named("draft")))
    for op in step:
        _see_rows(op, size, 0, count)
    chosen = _exchange(b, tokens, logits, drafts)
    body.terminator.set_operands([chosen, *kept])
    module.main.attrs["part"] = DRAFT
    infer_again(module)
    body.returns = tuple(v.tensor for v in body.terminator.operands)


def _check(module: Module, tokens: Value, count: int) -> None:
    if not 1 <= count <= MOST_DRAFTS:
        raise error(
            f"a draft model makes 1 to {MOST_DRAFTS} drafts per step, found {count}",
            remedy="give --speculative 4",
        )
    size = tokens.tensor.shape[1]
    if size.symbol_name is None or module.env.get(size.symbol_name) != 1:
        raise tokens.error(
            "a draft model decodes one token at a time, expected a symbol with the value 1, found "
            f"{size}",
            remedy="declare S = 1",
        )
    if PAST not in module.symbols:
        raise module.main.error(
            "a draft model continues cached tokens, but the step has no caches",
            remedy="give --context 4096",
        )


def _lengthen(tokens: Value, states: Sequence[Value], count: int) -> None:
    """Give caches rows for the tokens of all steps."""
    rows = dict.fromkeys(tokens.tensor.shape[1].symbols, const(count))
    for arg in states:
        arg.type = arg.tensor.substitute(rows)


def _copier(taken: dict[Value, Value], number: int) -> Copier:
    """Copies the step after `number` others."""
    sizes = {PAST: symbol(PAST) + number}
    return Copier(taken, sizes, lambda name: f"step{number}/{name}", lambda loc: loc)


def _see_rows(op: Operation, size: Expr, number: int, count: int) -> None:
    """Adapt a step to caches with the rows of all steps: caches of windows keep the rows of later
    steps, and values with one element per row get more."""
    ahead = count - 1 - number
    rows = {symbol(PAST) + size + number: symbol(PAST) + count}
    for each in op.walk():
        if ahead and "ahead" in each.definition.params_by_name and _SPANS & each.attrs.keys():
            each.attrs["ahead"] = const(ahead)
        for name, value in each.attrs.items():
            if isinstance(value, tuple):
                items = (rows.get(v, v) if isinstance(v, Expr) else v for v in value)
                each.attrs[name] = tuple(items)


def _exchange(b: Builder, tokens: Value, logits: Value, drafts: Sequence[Value]) -> Value:
    """Send the drafts, and receive the chosen tokens."""
    batch, vocabulary = tokens.tensor.shape[0], logits.tensor.shape[2]
    sent = concatenated(b, drafts, DRAFTS)
    about: dict[str, RawAttr] = {"vocabulary": vocabulary}
    depart(b, sent, sent.tensor, {"value": DRAFTS, "source": DRAFT, "to": MAIN, **about})
    rows = replace(tokens.tensor.dims[1], size=const(len(drafts) + 1))
    type_ = replace(tokens.tensor.inner, dims=(replace(tokens.tensor.dims[0], size=batch), rows))
    return arrive(b, type_, {"value": CHOSEN, "source": MAIN, "to": DRAFT, **about}, CHOSEN)
