"""The rates of dropout of a configuration."""

from collections.abc import Mapping
from fractions import Fraction

from stagec.importers.reading.config import Config
from stagec.importers.reading.json_text import Object
from stagec.ir.expr import MAX_INTEGER

#: The keys of transformers' configurations by the kind of dropout: of the results of blocks, the
#: input of the first block, and attention weights.
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
#: The families with a default rate of 0.1 in transformers (configuration_gpt2.py: resid_pdrop, and
#: so on), by the kind of dropout.
_A_TENTH: Mapping[str, tuple[str, ...]] = {
    "hidden": (*_BERT, *_T5, *_GPT2, *_BART, "opt", "seed_oss", "distilbert"),
    "embedding": (*_T5, *_GPT2),
    "attention": (*_BERT, *_T5, *_GPT2, "seed_oss", "distilbert"),
}
#: The families whose embeddings have the dropout rate of the blocks.
_HIDDEN_RATE = (*_BERT, *_BART, "gpt_neox")


def dropout_rates(config: Config, members: Object, model_type: str) -> dict[str, Fraction]:
    """The nonzero rates of a configuration, or the defaults of its family, by the kind of dropout.
    Raises `DiagnosticError` for a value that is not a rate."""
    rates: dict[str, Fraction] = {}
    for what, keys in _KEYS.items():
        key = next((k for k in keys if k in members and members[k].value is not None), "")
        usual = Fraction(1, 10) if model_type in _A_TENTH[what] else 0
        rate = members[key].value if key else usual
        number = rate if isinstance(rate, int | Fraction) and not isinstance(rate, bool) else -1
        if not 0 <= number <= 1 or Fraction(number).denominator > MAX_INTEGER:
            raise config.wrong(key, "a rate from 0 to 1 of at most 18 decimals")
        if 0 < number < 1:
            rates[what] = Fraction(number)
    if model_type in _HIDDEN_RATE and "hidden" in rates:
        rates.setdefault("embedding", rates["hidden"])
    return rates
