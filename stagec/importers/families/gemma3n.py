"""Gemma 3n: several streams that are predicted and corrected around each layer, a low-rank path
parallel to attention, tables of tokens for each layer, and layers that reuse keys of earlier ones.
"""

from dataclasses import replace
from fractions import Fraction
from statistics import NormalDist

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.common.positions import read_bases
from stagec.importers.common.sizes import read_size
from stagec.importers.families.gemma4 import SharingHeads, SharingLayer, write_layers
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import activation_options
from stagec.importers.writing.stack import Decoder, arguments, root
from stagec.importers.writing.text import Body, ModelText

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def read_gemma3n(config: Config) -> ModelText:
    """Gemma 3n, the text model."""
    sizes = Sizes(2048, 16384, 35, 8, 262400, 32768, groups=2, dim=256)
    model = DecoderModel(config, sizes)
    text = model.text
    config.fixed(attention_bias=False, altup_active_idx=0, altup_correct_scale=True)
    config.skip("altup_coef_clip")
    if read_size(config, text, "A", "altup_num_inputs", default=4) < 2:
        raise config.wrong("altup_num_inputs", "at least two streams")
    read_size(config, text, "R_low", "laurel_rank", default=64)
    read_size(config, text, "J", "hidden_size_per_layer_input", default=256)
    read_size(config, text, "V_own", "vocab_size_per_layer_input", default=262144)
    read_size(config, text, "W", "sliding_window", default=512)
    kinds = config.words("layer_types", among=(_LOCAL, _GLOBAL), length=model.count)
    kinds = kinds or tuple(_LOCAL if (i + 1) % 5 else _GLOBAL for i in range(model.count))
    ropes = read_bases(
        config, text, {_GLOBAL: ("theta", 1000000), _LOCAL: ("theta_local", 10000)}, nested=_LOCAL
    )
    gate = [*activation_options(model.activation("gelu_pytorch_tanh"), gated=True)]
    shares = config.ratios("activation_sparsity_pattern", length=model.count)
    few = 10 if model.count > 10 else 0
    shares = shares or (Fraction(19, 20),) * few + (Fraction(0),) * (model.count - few)
    nonzero = {share for share in shares if share}
    if len(nonzero) > 1 or not all(0 < share < 1 for share in nonzero):
        raise config.refuse(
            "activation_sparsity_pattern", "must contain 0 and at most one other share, below 1"
        )
    # the gate passes values above this quantile of a normal distribution
    above = Fraction(NormalDist().inv_cdf(float(min(nonzero)))) if nonzero else Fraction(0)
    sparse = f"above = (by = {-above.limit_denominator(10**6)})"
    layers: dict[str, SharingLayer] = {}
    order: list[str] = []
    symbols = "D F A R_low J V_own"
    for kind, share in zip(kinds, shares, strict=True):
        local = kind == _LOCAL
        mask = "causal, window = W" if local else "causal"
        heads = SharingHeads("local" if local else "global", "", ropes[kind], mask)
        options = [*heads.options(), *gate, *([sparse] if share else [])]
        used = f"{symbols} {heads.symbols}{' W' * local}"
        block = text.use("gemma3n", used, *options, function="gemma3n_layer")
        order.append(f"{heads.kind}_sparse" if share else heads.kind)
        layers[order[-1]] = SharingLayer(heads, block, ("%tokens", "%x0", "%words_norm"))
    shared = config.count("num_kv_shared_layers", default=15, most=model.count - 1)
    if shared and set(kinds[-shared - 2 : -shared]) != set(kinds):
        raise config.refuse(
            "num_kv_shared_layers", "needs a layer of each kind before the layers that share"
        )
    cap = config.ratio("final_logit_softcapping", default=30)
    decoder = Decoder(tied=model.tied(True), embed_scale=root(model.width), logit_cap=cap or None)
    body = Body()
    x, table = decoder.embed(body, "x0")
    body.param("words_norm", "J")
    x = body.let("streams", f"stg.call @gemma3n_streams({x})")
    y = write_layers(text, body, x, layers, order, shared)
    y = body.let("mean", f"stg.call @gemma3n_mean({y})")
    decoder.write_head(text, body, y, table)
    return text.train(arguments(text), body)


@reads(
    "Gemma 3n",
    "gemma3n_text",
    "gemma3n",
    features="streams that are predicted and corrected, shared keys; without towers",
)
def read_gemma3n_towers(config: Config) -> ModelText:
    """Gemma 3n whose towers, a MobileNet and a Conformer, are left out."""
    config.merge("text_config")
    config.skip("vision_config", "audio_config", "vision_soft_tokens_per_image")
    config.skip("audio_soft_tokens_per_image")
    text = read_gemma3n(config)
    text.notes.append("Left out: the towers of images and of sounds, with their parameters.")
    return replace(text, name=config.text("model_type"))
