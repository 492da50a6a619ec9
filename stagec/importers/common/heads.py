"""The head of a decoder by the key `architectures`: tokens or classes."""

from __future__ import annotations

from stagec.importers.reading.config import Config
from stagec.importers.writing.text import ModelText

#: The suffixes of language models after `For`. A name without `For`, such as GPT2LMHeadModel, is
#: treated as a language model too, since releases with their own code use such names.
_WORDS = ("CausalLM", "ConditionalGeneration", "ImageTextToText")
_SEQUENCE, _TOKEN = "SequenceClassification", "TokenClassification"


def read_head(config: Config, text: ModelText) -> None:
    """Set the head of a text: logits of the vocabulary V for each token, or of N_classes for the
    last token of a sequence or for each token. Raises `DiagnosticError` for other heads."""
    names = config.strings("architectures")
    if not names or any(_head(name) in _WORDS for name in names):
        return
    head = _head(names[0])
    if head not in (_SEQUENCE, _TOKEN):
        known = ", ".join((*_WORDS, _SEQUENCE, _TOKEN))
        raise config.refuse(
            "architectures",
            f"is {names[0]!r:.60}, whose head is not modeled: expected one of {known}",
        )
    text.head = "class" if head == _SEQUENCE else "classes"
    text.symbol("N_classes", config.labels(), "num_labels")


def heads_of(config: Config) -> frozenset[str]:
    """The part of each architecture after its last `For`, or its whole name."""
    return frozenset(name.rpartition("For")[2] for name in config.strings("architectures"))


def is_bare(config: Config) -> bool:
    """Whether the architecture has no head, by a name such as BertModel."""
    names = config.strings("architectures")
    return any(name.endswith("Model") and not name.endswith("LMHeadModel") for name in names)


def _head(name: str) -> str:
    _, separator, head = name.rpartition("For")
    return head if separator else _WORDS[0]


def expect_head(config: Config, *heads: str) -> None:
    """Refuse architectures with other heads than these, or with only a part of the model."""
    names = config.strings("architectures")
    if not names:
        return
    wrong = [n for n in names if "EncoderModel" in n or n.rpartition("For")[2] not in (*heads, n)]
    if len(wrong) == len(names):
        raise config.refuse(
            "architectures",
            f"is {wrong[0]!r:.60}, which is not modeled: expected {' or '.join(heads)}",
        )
