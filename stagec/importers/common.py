"""What the readers of many families share: keys of sizes, heads, and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import PurePath

from stagec.importers.blocks import Rope
from stagec.importers.config import Config
from stagec.importers.text import ModelText

#: Tokens of a sequence, where the model takes as many.
_LENGTH = 4096
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "seq_length",
    "max_seq_len",
    "max_sequence_length",
    "model_max_length",
)
#: Scalings of rotary positions: they change frequencies, and constants of the softmax.
_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "su", "ntk", "mrope")
_SCALING_KEYS = """
    factor low_freq_factor high_freq_factor original_max_position_embeddings beta_fast beta_slow
    mscale mscale_all_dim attention_factor attn_factor long_factor short_factor long_mscale
    short_mscale rope_theta partial_rotary_factor truncate finetuned extrapolation_factor alpha
    type rope_type mrope_section
"""


def begin(config: Config, title: str, length: int) -> tuple[ModelText, int]:
    """The text of a family, with the symbols of the batch and the sequence, and the tokens that the
    model takes at most: `length` if the configuration does not say it."""
    longest = config.size(*_LENGTHS, default=length, most=1 << 30)
    name = config.text("model_type")
    source = PurePath(config.file).name
    heading = f"{title}: a training step, forward. Written by stagec import from {source};"
    text = ModelText(
        _identifier(name), heading, ["the comments name the keys of the configuration."]
    )
    text.symbol("B", None, "sequences")
    text.symbol("S", min(longest, _LENGTH), "tokens of a sequence")
    return text, longest


def _identifier(name: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)


def read_size(
    config: Config, text: ModelText, symbol: str, *keys: str, default: int | None = None
) -> int:
    """Declare a symbol with the value of a key; the value."""
    value = config.size(*keys, default=default)
    text.symbol(symbol, value, next((k for k in keys if config.has(k)), keys[0]))
    return value


_WIDTH = ("hidden_size", "n_embd", "d_model", "n_embed")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_GROUPS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "kv_n_heads",
)


def read_heads(
    config: Config,
    text: ModelText,
    *,
    width: int,
    heads: int,
    groups: int | None = None,
    dim: int | None = None,
    read_groups: bool = True,
    dim_keys: Sequence[str] = ("head_dim", "kv_channels"),
) -> None:
    """Declare D, H, G and K; the arguments are the values of keys left out. G is not asked for
    unless `read_groups`."""
    d = read_size(config, text, "D", *_WIDTH, default=width)
    h = read_size(config, text, "H", *_HEADS, default=heads)
    if read_groups:
        g = read_size(config, text, "G", *_GROUPS, default=groups or h)
        if h % g:
            raise config.refuse(_GROUPS[0], f"is {g}, which does not divide {h} heads")
    else:
        text.symbol("G", groups or h, "heads of keys and values")
    text.assume("H % G == 0")
    if dim or config.has(*dim_keys):
        read_size(config, text, "K", *dim_keys, default=dim)
        return
    if d % h:
        raise config.refuse(_HEADS[0], f"is {h}, which does not divide {d}")
    text.symbol("K", d // h, "hidden_size / num_attention_heads")


def read_rope(
    config: Config, text: ModelText, *, base: int = 10000, partial: Fraction = Fraction(1)
) -> Rope:
    """Rotary positions by Llama's keys, or by the object `rope_parameters` that replaces them;
    declares their base, and R, the rotated elements of a head, if they are a part of them."""
    parameters = config.section("rope_parameters")
    inner = parameters if parameters is not None and parameters.has("rope_theta") else config
    keys = ("rope_theta", "rotary_emb_base")
    theta = inner.ratio(*keys, default=config.ratio(*keys, default=base))
    if theta.denominator != 1 or not 0 < theta < 1 << 60:
        raise inner.wrong("rope_theta", "a positive whole number")
    text.symbol("theta", int(theta), "rope_theta")
    part = read_part(config, text, parameters, partial)
    for scaling in (parameters, config.section("rope_scaling")):
        if scaling is not None:
            _read_scaling(scaling, text)
    return Rope(part="R" if part else None)


def read_bases(
    config: Config, text: ModelText, kinds: Mapping[str, tuple[str, int]], *, nested: str
) -> None:
    """Declare a base of rotary positions for each kind of layers: by kind, the symbol and the value
    of a key left out. They stand in objects of their own in `rope_parameters`, or the kind `nested`
    has its base in a key `rope_local_base_freq`, and the others in `rope_theta`."""
    parameters = config.section("rope_parameters")
    for kind, (symbol, base) in kinds.items():
        inner = parameters.section(kind) if parameters is not None else None
        key = "rope_local_base_freq" if kind == nested and inner is None else "rope_theta"
        theta = (inner or config).size(key, default=base, most=1 << 60)
        text.symbol(symbol, theta, f"{key} of {kind}" if inner else key)
        if inner is not None:
            _read_scaling(inner, text)
    if parameters is not None:
        parameters.finish()
    scaling = config.section("rope_scaling")
    if scaling is not None:
        _read_scaling(scaling, text)


def read_part(
    config: Config, text: ModelText, parameters: Config | None, default: Fraction
) -> bool:
    """Declare R by the share of a head that is rotated; whether that is less than all of it."""
    keys = ("partial_rotary_factor", "rotary_pct", "rope_pct")
    share = config.ratio(*keys, default=default)
    if parameters is not None:
        share = parameters.ratio("partial_rotary_factor", default=share)
    if not 0 < share <= 1:
        raise config.wrong(next(filter(config.has, keys), keys[0]), "a share, from 0 to 1")
    key = next(filter(config.has, keys), keys[0])
    return declare_part(config, text, int(share * (text.symbols["K"].value or 1)), key)


def declare_part(config: Config, text: ModelText, rotated: int, key: str) -> bool:
    """Declare R, the rotated elements of a head; whether that is less than all of it."""
    dim = text.symbols["K"].value or 1
    if not 1 < rotated <= dim or rotated % 2:
        raise config.refuse(
            key, f"leaves {rotated} of {dim} elements to rotate: expected an even number"
        )
    if rotated < dim:
        text.symbol("R", rotated, f"rotated elements of a head, by {key}")
    return rotated < dim


def _read_scaling(scaling: Config, text: ModelText) -> None:
    kind = scaling.word("rope_type", "type", among=_SCALINGS, default="default")
    scaling.skip(*_SCALING_KEYS.split())
    scaling.finish()
    if kind != "default":
        text.notes.append(f"Scaled positions ({kind}) have other frequencies, and the same work.")
