"""The rates of dropout of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from stagec.importers.reading.json_text import Object

#: Keys by what is dropped, as configurations of transformers call them: results of blocks, the
#: input of the first one, shares of attention.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden": (
        "resid_pdrop",
        "resid_dropout",
        "residual_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "dropout",
        "dropout_rate",
    ),
    "embedding": ("embd_pdrop", "embed_pdrop", "embedding_dropout", "dropout_rate"),
    "attention": (
        "attn_pdrop",
        "attention_dropout",
        "attention_dropout_prob",
        "attention_probs_dropout_prob",
        "dropout_rate",
    ),
}
_BERT = ["bert", "roberta", "electra", "ernie", "mpnet"]
_T5 = ["t5", "mt5", "umt5", "switch_transformers"]
_GPT2 = ["gpt2", "gpt_bigcode"]
_BART = ["bart", "mbart", "marian", "pegasus", "blenderbot"]
#: Families of which transformers drops a tenth where a configuration states nothing
#: (configuration_gpt2.py: resid_pdrop, and so on), by what is dropped.
_A_TENTH: Mapping[str, tuple[str, ...]] = {
    "hidden": (*_BERT, *_T5, *_GPT2, *_BART, "opt", "seed_oss", "distilbert"),
    "embedding": (*_T5, *_GPT2),
    "attention": (*_BERT, *_T5, *_GPT2, "seed_oss", "distilbert"),
}
#: Families that drop elements of their embeddings with the rate of the blocks.
_ALIKE = (*_BERT, *_BART, "gpt_neox")


def dropout_rates(members: Object, model_type: str) -> dict[str, Fraction]:
    """The rates that a configuration states, or its family has, by what is dropped, without those
    of nothing."""
    rates: dict[str, Fraction] = {}
    for what, keys in _KEYS.items():
        values = (members[key].value for key in keys if key in members)
        usual = Fraction(1, 10) if model_type in _A_TENTH[what] else 0
        rate = next((v for v in values if isinstance(v, int | Fraction)), usual)
        if 0 < rate < 1:
            rates[what] = Fraction(rate)
    if model_type in _ALIKE and "hidden" in rates:
        rates.setdefault("embedding", rates["hidden"])
    return rates
