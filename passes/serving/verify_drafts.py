"""verify-drafts: a decode step receives the tokens of a draft model, and sends back its own
choice."""

from dataclasses import replace

from stagec.api import Builder, Module, Pass, Phase, Value, const, made_by
from stagec.ir.builder import RawAttr
from stagec.ir.drafts import CHOSEN, DRAFT, DRAFTS, logits_chosen, most_likely, tokens_taken
from stagec.ir.expr import ONE
from stagec.ir_spec.ops.parts import arrive, depart
from stagec.ir_spec.strategy.part import MAIN


class VerifyDrafts(Pass):
    """Receive all tokens of a decode step but the first of each sequence from a draft model in
    another pod, and send it the most likely token after each of them.

    Before:
        stg.symbols[B, S, D, V]
        stg.func @f(%t: i32[B, S], %w: bf16[V, D | frozen], %u: bf16[D, V | frozen])
            -> bf16[B, S, V] {
          %x = stg.embedding(%w, %t) : bf16[B, S, D]
          %z = stg.einsum["bsd,dv->bsv"](%x, %u) : bf16[B, S, V]
          stg.return(%z)
        }
    After:
        stg.symbols[B, S, D, V]
        stg.func @f[part = main] (%t: i32[B, 1], %w: bf16[V, D | frozen],
            %u: bf16[D, V | frozen]) -> bf16[B, S, V] {
          %drafts = stg.arrive[drafts, vocabulary = V, source = draft, to = main,
                               sizes = (B, S - 1), dtype = i32] : i32[B, S - 1]
          %tokens = stg.concat[dim = 1](%t, %drafts) : i32[B, S]
          %x = stg.embedding(%w, %tokens) : bf16[B, S, D]
          %z = stg.einsum["bsd,dv->bsv"](%x, %u) : bf16[B, S, V]
          %chosen = stg.argmax(%z) : i32[B, S]
          stg.depart[chosen, vocabulary = V, source = main, to = draft](%chosen)
          stg.return(%z)
        }
    """

    needs = Phase.SHAPED

    def run(self, module: Module) -> None:
        verify_drafts(module)


def verify_drafts(module: Module) -> None:
    """Let the main function verify drafts, in place. Raises `DiagnosticError` for a step of one
    token."""
    body, tokens, logits = module.main.body, tokens_taken(module), logits_chosen(module)
    size = tokens.tensor.shape[1]
    if size == ONE or module.env.get(size.symbol_name or "") == 1:
        raise tokens.error(
            "the step has one token per sequence, so it cannot verify drafts",
            remedy="give --speculative 4",
        )
    about: dict[str, RawAttr] = {"vocabulary": logits.tensor.shape[2]}
    b = Builder(module.registry, body, 0, loc=made_by(VerifyDrafts.name, tokens.loc))
    _take_drafts(b, tokens, about)
    b = module.before(body.terminator, loc=logits.loc, by=VerifyDrafts.name)
    chosen = most_likely(b, logits, CHOSEN)
    depart(b, chosen, chosen.tensor, {"value": CHOSEN, "source": MAIN, "to": DRAFT, **about})
    module.main.attrs["part"] = MAIN


def _take_drafts(b: Builder, tokens: Value, about: dict[str, RawAttr]) -> None:
    """Let the step take the token that was chosen last, followed by the drafts."""
    batch, rows = tokens.tensor.dims
    first, others = replace(rows, size=ONE), replace(rows, size=rows.size - 1)
    type_ = replace(tokens.tensor, dims=(batch, others))
    ends: dict[str, RawAttr] = {"value": DRAFTS, "source": DRAFT, "to": MAIN, **about}
    tokens.type = replace(tokens.tensor, dims=(batch, first))
    drafts = arrive(b, type_, ends, DRAFTS)
    tokens.replace_with(b.value("stg.concat", [tokens, drafts], {"dim": const(1)}, hint="tokens"))
