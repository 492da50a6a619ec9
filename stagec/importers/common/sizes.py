"""Shared parts of the readers of families: keys of sizes and heads."""

from pathlib import PurePath

from stagec.importers.reading.config import Config
from stagec.importers.writing.text import Among, ModelText

#: The default tokens of a sequence, if the model supports as many.
_LENGTH = 4096
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "seq_length"),
    *("max_seq_len", "max_sequence_length", "model_max_length"),
)


def begin(config: Config, length: int) -> tuple[ModelText, int]:
    """The text of a family, with the symbols of the batch and the sequence, and the largest number
    of tokens: `length` if the configuration does not state it."""
    stated = next(filter(config.has, _LENGTHS), _LENGTHS[0])
    longest = config.size(stated, default=length, most=1 << 30)
    config.skip(*_LENGTHS)  # others may state the length of training
    name = config.text("model_type")
    source = PurePath(config.file).name
    heading = f"{config.family}: a training step, forward. Written by stagec import from {source};"
    text = ModelText(
        identifier(name), heading, ["the comments name the keys of the configuration."]
    )
    text.among = config.among if isinstance(config.among, Among) else None
    text.positions = longest if config.has(*_LENGTHS) else None
    text.symbol("B", None, "sequences")
    text.symbol("S", min(longest, _LENGTH), "tokens of a sequence")
    return text, longest


def begin_text(config: Config, *heads: str) -> ModelText:
    """The text of a family without a sequence of tokens, with one of these heads. Raises
    `DiagnosticError` for other heads."""
    expect_head(config, *heads)
    text, _ = begin(config, 1)
    text.symbols.pop("S")
    return text


def identifier(name: str) -> str:
    """A name of a module: letters, digits and underscores."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)


def read_size(
    config: Config, text: ModelText, symbol: str, *keys: str, default: int | None = None
) -> int:
    """Declare a symbol with the value of a key, and return the value."""
    value = config.size(*keys, default=default)
    text.symbol(symbol, value, next((k for k in keys if config.has(k)), keys[0]))
    return value


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
