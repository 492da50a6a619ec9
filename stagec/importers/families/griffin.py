"""RecurrentGemma: gated linear recurrences and windowed attention."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.families.windows import GEMMA_NORM
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import Attention, FeedForward, activation_options
from stagec.importers.writing.stack import ONE, Decoder, Place, root, stacked
from stagec.importers.writing.text import Callee, ModelText


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The recurrent block of Griffin (arXiv 2402.19427, section 2.3): the product of a branch with
    a convolution of W_m tokens and a recurrence, whose gates are products within H heads of P
    channels, and a branch with an activation."""

    activation: str

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        return text.use("recurrent", "D H P W_m", *activation_options(self.activation))


@reads("RecurrentGemma", "recurrent_gemma", features="gated linear recurrences, windows 2:1")
def read_recurrent_gemma(config: Config) -> ModelText:
    """RecurrentGemma (arXiv 2404.07839): two recurrent layers for each layer of windowed attention;
    norms with a scale of 1 + w."""
    sizes = Sizes(2560, 3 * 2560, 26, 10, 256000, 8192)
    model = DecoderModel(config, sizes)
    text = model.text
    if model.inner % 2:
        raise config.refuse(
            "intermediate_size", f"is {model.inner}: expected an even number, gate and up together"
        )
    text.replace("F", model.inner // 2, "intermediate_size / 2")
    width = config.size("lru_width", default=model.width)
    if width % model.heads:
        raise config.refuse("lru_width", f"is {width}, not a multiple of {model.heads} heads")
    text.symbol("P", width // model.heads, "lru_width / num_attention_heads")
    model.size("W_m", "conv1d_width", default=4)
    model.size("W", "attention_window_size", "sliding_window", default=2048)
    config.skip("w_init_variance_scale", "final_w_init_variance_scale")
    act = model.activation("gelu_pytorch_tanh")
    biased = model.flag("attention_bias")
    rope = model.rope(partial=Fraction(1, 2))
    mask = "causal, window = W"
    attention = Attention(qkv_bias=biased, out_bias=True, rope=rope, mask=mask)
    block = FeedForward(act, bias=True)
    names = {"recurrent": "recurrent", "linear_attention": "recurrent"}
    names |= {"attention": "attention", "sliding_attention": "attention"}
    period = config.kinds("block_types", names=names) or ("recurrent", "recurrent", "attention")
    types = config.kinds("layers_block_type", "layer_types", names=names, length=model.count)
    layers: list[list[Place]] = []
    for i in range(model.count):
        attends = (types or period * model.count)[i] == "attention"
        mixer = (
            ("attention", "attn", attention) if attends else ("recurrent", "rec", Recurrent(act))
        )
        layers.append([mixer, ("", "ffn", block)])
    scaled = config.flag("embeddings_scale_by_sqrt_dim", default=True)
    scale, cap = root(model.width) if scaled else ONE, config.ratio("logits_soft_cap", default=30)
    decoder = Decoder(GEMMA_NORM, model.tied(True), embed_scale=scale, logit_cap=cap or None)
    text.notes.append("The first token's input is scaled as all others are (the reference: by 1).")
    return stacked(text, layers, decoder, norm=GEMMA_NORM)
