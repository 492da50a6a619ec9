"""From a configuration to the text of its model, by the reader of its family, with its rates of
dropout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction

from stagec.importers.family import ModelFamily, known_families
from stagec.importers.reading.config import Config, Ignored
from stagec.importers.reading.json_text import JsonText, Object
from stagec.importers.writing.text import ModelText
from stagec.ir.expr import MAX_INTEGER
from stagec.support.diagnostics import Diagnostic, error
from stagec.support.source import Source
from stagec.support.suggest import did_you_mean

#: Files that are often given in place of config.json, by keys that only they have.
_OTHER_FILES: Mapping[str, str] = {
    "added_tokens_decoder": "a tokenizer's configuration",
    "added_tokens": "a tokenizer",
    "chat_template": "a tokenizer's configuration",
    "tokenizer_class": "a tokenizer's configuration",
    "weight_map": "an index of weights",
    "image_processor_type": "a configuration of an image processor",
    "feature_extractor_type": "a configuration of a feature extractor",
    "do_sample": "a configuration of generation",
    "max_new_tokens": "a configuration of generation",
    "_from_model_config": "a configuration of generation",
    "base_model_name_or_path": "a configuration of an adapter",
    "train_batch_size": "a configuration of a training run",
}


def import_model(
    source: Source,
    families: Iterable[ModelFamily],
    ignored: Collection[str] = (),
    *,
    images: bool = False,
    remarks: list[Diagnostic] | None = None,
) -> ModelText:
    """The text of a configuration file; with `images`, that of a step with images. Keys in
    `ignored` are treated as absent; with a list of `remarks` so are unknown keys, each of which
    adds a remark.

    Raises `DiagnosticError` for files that are no configurations, unknown families, invalid values,
    and unknown keys that may change the computation.
    """
    text = JsonText(source)
    members = text.read()
    config = Config(text, members, ignored=Ignored(ignored, remarks))
    known = known_families(families)
    family = _family_of(config, text, members, known)
    read = family.read_images if images else family.read
    if read is None:
        others = dict.fromkeys(f.name for f in known.values() if f.read_images)
        raise error(
            f"{family.name} has no model of images with text",
            config.place("model_type"),
            remedy=f"drop --images, or import one of {', '.join(others)}",
        )
    config.family = family.name
    model = read(config)
    config.finish()
    model.dropout = dropout_rates(config, members, config.text("model_type", default=""))
    return model


def _family_of(
    config: Config, text: JsonText, members: Object, known: Mapping[str, ModelFamily]
) -> ModelFamily:
    key = "model_type" if "model_type" in members or "_class_name" not in members else "_class_name"
    if key not in members:
        other = next((what for k, what in _OTHER_FILES.items() if k in members), None)
        hint = f"; it looks like {other}" if other else ""
        raise error(
            f"{config.file} has no key 'model_type'{hint}",
            text.place(0),
            remedy="give the config.json of a model",
        )
    name = config.text(key)
    if name not in known:
        others = "docs/reference/families.md lists those that are read; a plug-in may add others"
        raise error(
            f"unknown model type {name!r:.60}",
            config.place(key),
            remedy=did_you_mean(name, known) or others,
        )
    return known[name]


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
    Raises `DiagnosticError` for a number that is not a rate."""
    rates: dict[str, Fraction] = {}
    for what, keys in _KEYS.items():
        values = ((key, members[key].value) for key in keys if key in members)
        usual = "", Fraction(1, 10) if model_type in _A_TENTH[what] else 0
        key, rate = next(((k, v) for k, v in values if isinstance(v, int | Fraction)), usual)
        if not 0 <= rate <= 1 or Fraction(rate).denominator > MAX_INTEGER:
            raise config.wrong(key, "a rate from 0 to 1 of at most 18 decimals")
        if 0 < rate < 1:
            rates[what] = Fraction(rate)
    if model_type in _HIDDEN_RATE and "hidden" in rates:
        rates.setdefault("embedding", rates["hidden"])
    return rates
