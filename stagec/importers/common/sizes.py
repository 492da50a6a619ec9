"""Shared parts of the readers of families: keys of sizes and heads."""

from __future__ import annotations

from pathlib import PurePath

from stagec.importers.common.heads import expect_head
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
    longest = config.size(*_LENGTHS, default=length, most=1 << 30)
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
