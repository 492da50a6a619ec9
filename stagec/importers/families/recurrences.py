"""Recurrent models: RWKV, of token shifts and scans, xLSTM, of matrix memories, and
RecurrentGemma, of gated linear recurrences."""

from dataclasses import dataclass
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.common.sizes import begin, read_head, read_size
from stagec.importers.common.state_space import begin_scans
from stagec.importers.families.windows import GEMMA_NORM
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, Attention, FeedForward, activation_options
from stagec.importers.writing.stack import (
    ONE,
    Decoder,
    Layer,
    Place,
    Sublayer,
    root,
    stacked,
    times,
)
from stagec.importers.writing.text import Body, Callee, ModelText


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


@reads("RWKV-7", "rwkv7", features="token shift, generalised delta rule")
def read_rwkv7(config: Config) -> ModelText:
    """RWKV-7 (arXiv 2503.14456). All layers except the first blend their values with its values."""
    text, count = begin_scans(config, 2048, 24, 65536)
    if count < 2:
        raise config.wrong("num_hidden_layers", "at least two layers")
    d = text.value("D")
    p = read_size(config, text, "P", "head_dim", "head_size", default=64)
    config.divides("head_dim", p, d)
    text.symbol("H_m", d // p, "hidden_size / head_dim")
    read_size(config, text, "F", "intermediate_size", default=4 * d)
    for symbol, name, rank in (
        ("w", "decay", 64),
        ("a", "a", 64),
        ("v", "v", 32),
        ("g", "gate", 128),
    ):
        read_size(config, text, f"R_{symbol}", f"{name}_low_rank_dim", default=rank)
    text.symbol("L", count, "num_hidden_layers")
    layer = text.use("rwkv7", "D H_m P R_w R_a R_v R_g F", function="rwkv7_layer")
    tied = config.flag("tie_word_embeddings", default=False)
    decoder, body = Decoder(LAYER, tied=tied, embed_norm=LAYER), Body()
    x, table = decoder.embed(body, "x")
    body.do(f"%h0, %v0 = stg.call @{layer.with_('values = own', 'as = first')}({x})")
    inner = Body(f"%r, %v = stg.call @{layer}(%h, %v_first)", "stg.yield(%r, %v_first)")
    body.repeat("%y, %v_last", "layers", "L - 1", "%h = %h0, %v_first = %v0", inner)
    return decoder.end(text, body, "%y", table)


# -- RWKV-6, -5 and -4 ----------------------------------------------------------------------------


@reads("RWKV-6", "rwkv6", features="token shift by data, decays of each element")
def read_rwkv6(config: Config) -> ModelText:
    """RWKV-6, Finch (arXiv 2404.05892), by the keys of RWKV/rwkv-6-world; ranks are those of its
    code, since there is no key for them."""
    text, count = _begin_heads(config)
    wide = text.value("D") >= 4096
    text.symbol("R_m", 64 if wide else 32, "of the mixture: 64 from a width of 4096 on")
    text.symbol("R_w", 128 if wide else 64, "of the decay: 128 from a width of 4096 on")
    text.use("rwkv6", "D H_m P R_m R_w F")
    return _stacked(config, text, count, "rwkv6_time")


@reads("RWKV-5", "rwkv5", features="token shift, decays of each row")
def read_rwkv5(config: Config) -> ModelText:
    """RWKV-5, Eagle (arXiv 2404.05892), by the keys of RWKV/rwkv-5-world: decays are parameters."""
    config.only("model_version", "5_2")
    text, count = _begin_heads(config)
    text.use("rwkv5", "D H_m P")
    text.use("rwkv6", "D F")
    return _stacked(config, text, count, "rwkv5_time")


@reads("RWKV-4", "rwkv", features="token shift, decays of each channel")
def read_rwkv4(config: Config) -> ModelText:
    """RWKV-4, Dove (arXiv 2305.13048): means of values, weighted by keys and decays of channels."""
    text, count = begin_scans(config, 4096, 32, 50277)
    d = text.value("D")
    config.skip("context_length", "rescale_every")
    read_size(config, text, "H_m", "attention_hidden_size", default=d)
    read_size(config, text, "F", "intermediate_size", default=4 * d)
    text.use("rwkv4", "D H_m")
    text.use("rwkv6", "D F")
    return _stacked(config, text, count, "rwkv4_time")


def _begin_heads(config: Config) -> tuple[ModelText, int]:
    """The text with D, H_m, P and F, and the number of layers."""
    text, count = begin_scans(config, 4096, 32, 65536)
    d = text.value("D")
    config.fixed(attention_hidden_size=d, head_size_divisor=8)
    config.skip("num_attention_heads", "context_length", "rescale_every")
    p = read_size(config, text, "P", "head_size", default=64)
    config.divides("head_size", p, d)
    text.symbol("H_m", d // p, "hidden_size / head_size")
    read_size(config, text, "F", "intermediate_size", default=int(d * 3.5) // 32 * 32)
    return text, count


def _stacked(config: Config, text: ModelText, count: int, mixer: str) -> ModelText:
    blocks = {"time": mixer, "channel": "rwkv6_channel"}
    layer = Layer([Sublayer(Callee(block), name, LAYER) for name, block in blocks.items()])
    tied = config.flag("tie_word_embeddings", default=False)
    decoder = Decoder(LAYER, tied=tied, embed_norm=LAYER)
    return decoder.write(text, {"layers": layer}, ["layers"] * count)


# -- xLSTM ----------------------------------------------------------------------------------------


@reads("xLSTM", "xlstm", features="matrix memories behind gates of exponentials")
def read_xlstm(config: Config) -> ModelText:
    """xLSTM 7B (arXiv 2503.13427): cells with matrix memories and a SiLU gate."""
    text, _ = begin(config, 4096)
    read_head(config, text)
    d = read_size(config, text, "D", "hidden_size", "embedding_dim", default=4096)
    read_size(config, text, "V", "vocab_size", default=50304)
    count = config.layers("num_hidden_layers", "num_blocks", default=32)
    heads = read_size(config, text, "H_m", "num_heads", default=8)
    dims: list[int] = []
    for symbol, name, usual in (("K", "qk", Fraction(1, 2)), ("P", "v", ONE)):
        key = f"{name}_dim_factor"
        width = int(d * config.ratio(key, default=usual))
        config.divides("num_heads", heads, width, "elements")
        text.symbol(symbol, width // heads, f"{key} * hidden_size / num_heads")
        dims.append(width // heads)
    multiple = config.size("ffn_round_up_to_multiple_of", default=64)
    width = int(d * config.ratio("ffn_proj_factor", default=Fraction(2667, 1000)))
    inner = -(-width // multiple) * multiple
    text.symbol("F", inner, "ffn_proj_factor * hidden_size")
    read_size(config, text, "Q", "chunk_size", default=64)
    config.fixed(use_bias=False, add_out_norm=True)
    config.word("weight_mode", among=("single", "fused"), default="single")
    config.skip("chunkwise_kernel", "sequence_kernel", "step_kernel", "mode", "eps")
    config.skip("return_last_states", "autocast_kernel_dtype", "inference_state_dtype")
    config.skip("max_inference_chunksize", "norm_reduction_force_float32", "force_bos_token_insert")
    bound = config.positive("gate_soft_cap", default=15)
    scale = f"query_scale = ({times(1 / root(dims[0]))})"
    gates = (f"down = ({times(1 / bound)})", f"up = ({times(bound)})")
    mixer = text.use("xlstm", "D H_m K P Q", scale, *gates)
    parts = [Sublayer(mixer, "attn"), Sublayer(FeedForward().write(text), "ffn")]
    config.skip("tie_word_embeddings")  # its class ties nothing
    cap = config.positive("output_logit_soft_cap", default=30)
    decoder = Decoder(tied=False, logit_cap=cap)
    return decoder.write(text, {"layers": Layer(parts)}, ["layers"] * count)
