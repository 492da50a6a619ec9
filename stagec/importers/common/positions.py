"""Rotary positions of configurations: their bases, the rotated part of a head, and their scaling
for long contexts."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from math import log

from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import Rope
from stagec.importers.writing.text import ModelText

_KINDS = (
    *("default", "linear", "dynamic", "llama3", "yarn", "longrope", "su", "ntk", "mrope"),
    *("proportional", "deepseek_yarn"),
)
#: The keys of a scaling that its kind does not use.
_UNREAD = """
    factor low_freq_factor high_freq_factor original_max_position_embeddings beta_fast beta_slow
    mscale mscale_all_dim attention_factor attn_factor long_factor short_factor long_mscale
    short_mscale rope_theta partial_rotary_factor truncate finetuned extrapolation_factor alpha
    type rope_type mrope_section mrope_interleaved interleaved
    max_position_embeddings llama_4_scaling_beta
"""
_PRECISION = 10**6
#: The bound of bases.
_MOST = 1 << 60
_LONGEST = "max_position_embeddings"


def read_rope(
    config: Config, text: ModelText, *, base: int = 10000, partial: Fraction = Fraction(1)
) -> Rope:
    """Rotary positions by Llama's keys, or by the object `rope_parameters` that replaces them, or
    `rope_scaling` with the same keys; declares their base, and R, the rotated elements of a head,
    if these are not all."""
    parameters = config.section("rope_parameters")
    inner = _stating("rope_theta", config) or config
    keys = ("rope_theta", "rotary_emb_base")
    theta = inner.ratio(*keys, default=config.ratio(*keys, default=base))
    if theta.denominator != 1 or not 0 < theta < _MOST:
        raise inner.wrong("rope_theta", "a positive whole number")
    text.symbol("theta", int(theta), "rope_theta")
    part = read_part(config, text, _stating("partial_rotary_factor", config), partial)
    return Rope(part="R" if part else None, scaling=_read_scalings(config, text, parameters))


def _stating(key: str, config: Config) -> Config | None:
    """The object for rotary positions that states a key."""
    objects = [config.section(name) for name in ("rope_parameters", "rope_scaling")]
    return next((o for o in objects if o is not None and o.has(key)), None)


def read_bases(
    config: Config,
    text: ModelText,
    kinds: Mapping[str, tuple[str, int]],
    *,
    nested: str = "",
    local_key: str = "rope_local_base_freq",
    share: Fraction = Fraction(1),
) -> dict[str, Rope]:
    """The rotary positions of each kind of layers, by kind; declares their bases: the symbol and
    the default of a missing key. They stand in objects of their own in `rope_parameters`, or the
    kind `nested` has its base in a key `rope_local_base_freq`, and the others have theirs in
    `rope_theta`, or in `rope_scaling`, which stretches them. `share` is what of the pairs turns
    where no key says it, if their positions are proportional."""
    parameters, stretched = config.section("rope_parameters"), config.section("rope_scaling")
    stated = stretched if stretched is not None and stretched.has("rope_theta") else config
    common = _read_scalings(config, text)
    ropes: dict[str, Rope] = {}
    for kind, (symbol, base) in kinds.items():
        inner = parameters.section(kind) if parameters is not None else None
        local = kind == nested or (kind == "sliding_attention" and config.has(local_key))
        key = local_key if local and inner is None else "rope_theta"
        theta = config.size(key, default=base, most=_MOST)
        theta = (inner or (config if local else stated)).size(key, default=theta, most=_MOST)
        text.symbol(symbol, theta, f"{key} of {kind}" if inner else key)
        scaling = "" if kind == nested else common
        if inner is not None:
            scaling = read_scaling(inner, config, text, share)
        ropes[kind] = Rope(symbol, scaling=scaling)
    if parameters is not None:
        parameters.finish()
    return ropes


def shares_of_kinds(config: Config, kinds: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """The rotated share of a head in each kind of layers, by the objects of `read_bases`, else by
    `partial_rotary_factor`, else the default of the kind."""
    parameters, shares = config.section("rope_parameters"), dict(kinds)
    for kind, default in kinds.items():
        inner = parameters.section(kind) if parameters is not None else None
        share = config.ratio("partial_rotary_factor", default=default)
        shares[kind] = inner.ratio("partial_rotary_factor", default=share) if inner else share
    return shares


def read_part(
    config: Config, text: ModelText, parameters: Config | None, default: Fraction
) -> bool:
    """Declare R by the share of a head that is rotated; whether that is less than all of it."""
    keys = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_emb_fraction")
    share = config.ratio(*keys, default=default)
    if parameters is not None:
        share = parameters.ratio("partial_rotary_factor", default=share)
    key = next(filter(config.has, keys), keys[0])
    if not 0 < share <= 1:
        raise config.wrong(key, "a share, from 0 to 1")
    if "R" in text.symbols:
        return _expect_part(config, text, share, key)
    return declare_part(config, text, int(share * text.value("K")), key)


def _expect_part(config: Config, text: ModelText, share: Fraction, key: str) -> bool:
    """Check the share of latent attention, which rotates all of the R elements in addition to K:
    it must be 1, or R / (K + R)."""
    kept, turned = text.symbols["K"].value or 0, text.value("R")
    whole = kept + turned
    if share not in (1, Fraction(turned, whole)):
        raise config.refuse(key, f"is {share}, but the model rotates {turned} of {whole} elements")
    return False


def declare_part(config: Config, text: ModelText, rotated: int, key: str) -> bool:
    """Declare R, the rotated elements of a head; whether that is less than all of it."""
    dim = text.value("K")
    if not 1 < rotated <= dim or rotated % 2:
        raise config.refuse(
            key, f"rotates {rotated} of {dim} elements of a head: expected an even number from 2"
        )
    if rotated < dim:
        text.symbol("R", rotated, f"rotated elements of a head, by {key}")
    return rotated < dim


# -- scalings --------------------------------------------------------------------------------------


def _read_scalings(config: Config, text: ModelText, parameters: Config | None = None) -> str:
    result = ""
    for scaling in (parameters, config.section("rope_scaling")):
        if scaling is not None:
            result = read_scaling(scaling, config, text) or result
    return result


def read_scaling(
    scaling: Config, config: Config, text: ModelText, share: Fraction = Fraction(1)
) -> str:
    """A scaling as static parameters of `stg.rope`, "" if frequencies are not scaled. A kind that
    has no effect in a training step adds a note to the text."""
    kind = _kind_of(scaling)
    if kind == "proportional":
        share = scaling.ratio("partial_rotary_factor", default=share)
        factor = _factor(scaling) if scaling.has("factor") else Fraction(1)
        words = ["scaling = proportional", *_changed("factor", factor, 1), f"share = {share}"]
    elif kind in ("longrope", "su"):
        words = ["scaling = longrope", *_longrope(scaling, config, text)]
    elif kind in _READERS:
        words = [f"scaling = {kind}", *_READERS[kind](scaling, config)]
    else:
        words = []
        if kind == "ntk" or (kind == "dynamic" and scaling.has("alpha")):
            _stretch_base(scaling, text, "factor" if kind == "ntk" else "alpha")
        elif kind in _NOTES:
            text.notes.append(_NOTES[kind])
    scaling.skip(*_UNREAD.split())
    scaling.finish()
    return ", ".join(words)


def _kind_of(scaling: Config) -> str:
    kind = scaling.word("rope_type", "type", among=_KINDS, default="default")
    return kind.removeprefix("deepseek_")


_NOTES = {
    "dynamic": "Dynamic scaling changes no position below max_position_embeddings.",
    "mrope": "The tokens of a text have the same position on all axes.",
}


def _stretch_base(scaling: Config, text: ModelText, key: str) -> None:
    """NTK-aware positions: the base times the number of a key to the power of d/(d - 2), for d
    rotated elements of a head, to the nearest whole number (arXiv 2309.00071, section 3.1; the code
    of Hunyuan in transformers)."""
    by, symbols = scaling.positive(key), text.symbols
    dim = (symbols.get("R") or symbols["K"]).value or 1
    if dim < 4 or "theta" not in symbols:
        raise scaling.refuse(key, "needs heads with at least four rotated elements")
    theta = symbols["theta"].value or 1
    stretched = max(1, round(theta * float(by) ** (dim / (dim - 2))))
    text.replace("theta", stretched, f"rope_theta times {key}^({dim}/{dim - 2})")


def _linear(scaling: Config, _: Config) -> list[str]:
    return [f"factor = {_factor(scaling)}"]


def _llama3(scaling: Config, config: Config) -> list[str]:
    words = [f"factor = {_factor(scaling)}", f"original = {_original(scaling, config)}"]
    low = scaling.ratio("low_freq_factor", default=1)
    high = scaling.ratio("high_freq_factor", default=4)
    if low <= 0 or high < low:
        raise scaling.refuse("high_freq_factor", f"is {high}, less than 'low_freq_factor' {low}")
    return [*words, *_changed("low", low, 1), *_changed("high", high, 4)]


def _yarn(scaling: Config, config: Config) -> list[str]:
    factor = _factor(scaling)
    words = [f"factor = {factor}", f"original = {_original(scaling, config)}"]
    fast = scaling.ratio("beta_fast", default=32)
    slow = scaling.ratio("beta_slow", default=1)
    if slow <= 0 or fast < slow:
        raise scaling.refuse("beta_fast", f"is {fast}, less than 'beta_slow' {slow}")
    words += [*_changed("low", slow, 1), *_changed("high", fast, 32)]
    if not scaling.flag("truncate", default=True):
        words.append("smooth")
    return [*words, *_changed("mscale", _mscale(scaling, factor), 1)]


_READERS: Mapping[str, Callable[[Config, Config], list[str]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _longrope(scaling: Config, config: Config, text: ModelText) -> list[str]:
    """A factor for each pair, from one list up to the original context and from another beyond it;
    all rotated elements are multiplied by a factor (the code of Phi-3 in transformers)."""
    pairs = ((text.symbols.get("R") or text.symbols["K"]).value or 0) // 2
    lists = {name: scaling.ratios(f"{name}_factor", length=pairs) for name in ("short", "long")}
    for name, numbers in lists.items():
        if not numbers or min(numbers) <= 0:
            raise scaling.wrong(f"{name}_factor", f"a list of {pairs} positive numbers")
    original = _original(scaling, config)
    grown = Fraction(config.size(_LONGEST, default=original), original)
    factor = max(scaling.ratio("factor", default=grown), Fraction(1))
    words = [f"factor = {factor}"] if factor != 1 else []
    words.append(f"original = {original}")
    words += [f"{k} = ({', '.join(map(str, map(_short_fraction, v)))})" for k, v in lists.items()]
    scales = {scaling.ratio(key) for key in ("short_mscale", "long_mscale") if scaling.has(key)}
    if len(scales) > 1:
        raise scaling.refuse("long_mscale", "differs from 'short_mscale'")
    scales = scales or {scaling.ratio("attention_factor", default=0)} - {0}
    for wanted in scales:
        if factor == 1 and wanted != 1:
            raise scaling.refuse(
                "attention_factor", f"is {wanted}, but the context is not extended"
            )
        more = (float(wanted) - 1) / log(factor) * 10 if factor != 1 else 0
        words.append(f"mscale = {_short_fraction(more)}")
    return words


def _short_fraction(number: Fraction | float) -> Fraction:
    return Fraction(number).limit_denominator(_PRECISION)


def _factor(scaling: Config) -> Fraction:
    factor = scaling.ratio("factor")
    if factor < 1:
        raise scaling.wrong("factor", "a number from 1 on")
    return factor


def _original(scaling: Config, config: Config) -> int:
    key = "original_max_position_embeddings"
    longest = config.size(_LONGEST, default=8192)
    return scaling.size(key, default=config.size(key, default=longest))


def _changed(name: str, value: Fraction, usual: int) -> list[str]:
    return [f"{name} = {value}"] if value != usual else []


def _mscale(scaling: Config, factor: Fraction) -> Fraction:
    """The `mscale` of `stg.rope`, which multiplies rotated elements by 1 + mscale/10 log(factor):
    1, or the value that yields the `attention_factor`, or the ratio of the factors of `mscale` and
    `mscale_all_dim`, as in the code of YaRN in transformers."""
    grown = log(factor) / 10
    above, below = scaling.ratio("mscale", default=0), scaling.ratio("mscale_all_dim", default=0)
    if not grown:
        return Fraction(1)
    if scaling.has("attention_factor"):
        wanted = float(scaling.ratio("attention_factor"))
    elif above and below:
        wanted = (1 + float(above) * grown) / (1 + float(below) * grown)
    else:
        return Fraction(1)
    return _short_fraction((wanted - 1) / grown)


def score_share(config: Config) -> Fraction:
    """The share of the head size whose square root divides the scores of DeepSeek's attention: YaRN
    multiplies scores by m^2 with m = 1 + mscale_all_dim/10 log(factor), so the share is 1/m^4
    (deepseek-ai/DeepSeek-V3, inference/model.py); 1 without YaRN."""
    for section in (config.section("rope_parameters"), config.section("rope_scaling")):
        kind = _kind_of(section) if section else ""
        if section is not None and kind == "yarn":
            grown = float(section.ratio("mscale_all_dim", default=0)) * log(_factor(section)) / 10
            return _short_fraction((1 + grown) ** -4)
    return Fraction(1)


def growing_temperature(config: Config) -> str:
    """The static parameters of a temperature of queries that grows with the position, as in
    Ministral 3; empty without its keys."""
    parameters = config.section("rope_parameters")
    if parameters is None or not parameters.has("llama_4_scaling_beta"):
        return ""
    beta = parameters.ratio("llama_4_scaling_beta")
    floor = parameters.size("original_max_position_embeddings", default=16384)
    return f"floor = {floor}, scale = {beta}, start = 0" if beta else ""
