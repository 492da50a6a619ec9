"""Language models within others: the key `text_config`, read by the family of its type."""

from __future__ import annotations

from stagec.importers.families import deepseek, llama, mixture, windows
from stagec.importers.family import declared_in
from stagec.importers.reading.config import Config
from stagec.importers.writing.text import ModelText

_LANGUAGES = {
    name: family
    for readers in (llama, mixture, windows, deepseek)
    for family in declared_in(readers.__name__)
    for name in family.model_types
}
_KEYS = """
    vision_feature_layer vision_feature_select_strategy image_seq_length image_grid_pinpoints
    ignore_index vocab_size use_image_newline_parameter hidden_size vision_aspect_ratio
"""


def language_of(config: Config, spoken: Config, words: str) -> ModelText:
    """The text of the language model in `spoken`, of the type `words` if it states none."""
    config.skip(*_KEYS.split())
    spoken.inherit(config, "tie_word_embeddings")
    kind = spoken.word("model_type", among=_LANGUAGES, default=words)
    if not spoken.has("model_type"):
        spoken.inherit(config, "model_type")
    prefix = spoken.drop("use_bidirectional_attention")
    text = _LANGUAGES[kind].read(spoken)
    if prefix:
        text.notes.append("Left out: tokens of a prompt see each other in both directions.")
    spoken.skip("num_image_tokens")
    spoken.finish()
    return text
