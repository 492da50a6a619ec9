"""Encoders of sounds: wav2vec 2.0 and its variants, whose front is a stack of convolutions."""

from stagec.importers.common.idle import Idle
from stagec.importers.common.sizes import begin_text, heads_of, read_size
from stagec.importers.families.encoders import (
    classify,
    classify_each,
    read_activation,
    read_heads_of,
)
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, FeedForward, activation_options
from stagec.importers.writing.stack import Layer, NormedSums, Sublayer, repeated
from stagec.importers.writing.text import Body, Callee, ModelText
from stagec.importers.writing.towers import MultiHead, encoder, linear, projected

_SHORTEST = "Sounds are the shortest ones of S frames."
_WITHOUT_EFFECT = (
    *(f"mask_{what}_{key}" for what in ("time", "feature") for key in ("length", "min_masks")),
    *(f"mask_channel_{key}" for key in ("length", "min_space", "other", "prob", "selection")),
    *(f"mask_time_{key}" for key in ("min_space", "other", "selection")),
    *("apply_spec_augment", "ctc_loss_reduction", "ctc_zero_infinity", "num_feat_extract_layers"),
    *("num_codevectors_per_group", "num_codevector_groups", "contrastive_logits_temperature"),
    *("num_negatives", "codevector_dim", "proj_codevector_dim", "diversity_loss_weight"),
    *("tdnn_dim", "tdnn_kernel", "tdnn_dilation", "xvector_output_dim", "output_hidden_size"),
    *("adapter_kernel_size", "adapter_stride", "num_adapter_layers", "classifier_proj_size"),
    *("tokenizer_class", "feature_extractor_type", "gradient_checkpointing", "num_ctc_classes"),
    *("replace_prob", "num_clusters", "freeze_feat_extract_train"),
    *("no_mask_channel_overlap", "no_mask_time_overlap"),
    *("do_normalize", "sampling_rate", "return_attention_mask"),
)


@reads(
    "wav2vec 2.0",
    "wav2vec2",
    "unispeech",
    "unispeech-sat",
    features="convolutions of samples, positions by one",
)
def read_wav2vec2(config: Config) -> ModelText:
    """wav2vec 2.0 (arXiv 2006.11477): convolutions of samples, positions by a convolution."""
    return _read(config, projected_norm=True)


@reads("HuBERT", "hubert", features="as wav2vec 2.0")
def read_hubert(config: Config) -> ModelText:
    """HuBERT (arXiv 2106.07447): as wav2vec 2.0."""
    config.only("conv_pos_batch_norm", False)
    norm = config.flag("feat_proj_layer_norm", default=True)
    return _read(config, projected_norm=norm)


@reads("WavLM", "wavlm", features="biases by distance behind gates of queries")
def read_wavlm(config: Config) -> ModelText:
    """WavLM (arXiv 2110.13900): wav2vec 2.0 with a bias by distance, gated by each query."""
    return _read(config, projected_norm=True, gated=True)


def _read(config: Config, *, projected_norm: bool, gated: bool = False) -> ModelText:
    text = begin_text(config, "CTC", "SequenceClassification")
    text.symbol("S", 499, "frames of a sound: about 10 s at 16 kHz")
    read_size(config, text, "D", "hidden_size", default=768)
    read_heads_of(config, text, "", "num_attention_heads", 12)
    read_size(config, text, "F", "intermediate_size", default=3072)
    text.symbol("L", config.layers(default=12), "num_hidden_layers")
    config.skip("vocab_size", *_WITHOUT_EFFECT)
    config.fixed(use_weighted_layer_sum=False, add_adapter=False, adapter_attn_dim=None)
    act = read_activation(config, "feat_extract_activation")
    body = Body()
    samples, x = _front(config, text, body, act)
    x = LAYER.write(body, "xn", x, "front_norm", "C") if projected_norm else x
    x = projected(text, body, "f", x, "front", "C, D")
    p = body.call("p", _positions(config, text, act), x)
    pre = config.flag("do_stable_layer_norm", default=False)
    x = body.let("x", f"stg.add({x}, {p})")
    x = x if pre else LAYER.write(body, "x0", x, "norm")
    mlp = FeedForward(read_activation(config, "hidden_act"), gated=False, bias=True)
    if gated:
        mixer = text.use("sounds", "D H K", "as = attention", function="gated_bias_attention")
        norm = LAYER if pre else None
        attention = Sublayer(mixer, "attn", norm, operands=["%bias"])
        parts = [attention, Sublayer(mlp.write(text), "mlp", norm)]
        _bias(config, text, body)
        layer = Layer(parts) if pre else NormedSums(parts)
    else:
        layer = encoder(text, MultiHead(), mlp, post=not pre)
    y = repeated(body, x, layer, "y")
    y = LAYER.write(body, "n", y, "norm") if pre else y
    text.notes.append(_SHORTEST)
    args = f"%sounds: bf16[B, {samples}, 1], "
    return _masked(config, text.train(args + _head(config, text, body, y), body))


def _front(config: Config, text: ModelText, body: Body, act: str) -> tuple[str, str]:
    """Append the convolutions of samples [B, T, 1], and return T in symbols, and the frames
    [B, S, C]."""
    widths = config.sizes("conv_dim", least=1) or (512,) * 7
    count = len(widths)
    strides = config.sizes("conv_stride", length=count, least=1) or (5, *(2,) * 6)
    kernels = config.sizes("conv_kernel", length=count, least=1) or (10, 3, 3, 3, 3, 2, 2)
    if len(strides) != count or len(kernels) != count:
        raise config.wrong("conv_dim", f"{len(strides)} widths, as many as strides")
    biased = config.flag("conv_bias", default=False)
    layered = config.word("feat_extract_norm", among=("group", "layer"), default="group") == "layer"
    text.symbol("C", widths[-1], "the last of conv_dim")
    factor, rest = 1, 0
    for stride, kernel in zip(reversed(strides), reversed(kernels), strict=True):
        factor, rest = factor * stride, rest * stride + max(kernel - stride, 0)
    x, before = "%sounds", "1"
    for i, (width, stride, kernel) in enumerate(zip(widths, strides, kernels, strict=True)):
        size = "C" if width == widths[-1] else str(width)
        sizes = [f"W = {kernel}", f"C_in = {before}", f"C_out = {size}"]
        norm = "channels" if layered else "no" if i else "time"
        given = [*sizes, f"stride = (stride = {stride})", f"norm = {norm}", *["bias"] * biased]
        front = text.use("sounds", "", *given, *activation_options(act), function="front")
        x = body.call(f"c{i}", front.with_(f"as = front_{i}"), x)
        before = size
    return f"{factor}*S {'+' if rest >= 0 else '-'} {abs(rest)}", x


def _positions(config: Config, text: ModelText, act: str) -> Callee:
    """Add the block that makes positions: a convolution in groups, whose weights have a length of
    their own at each place, and return its name."""
    width = config.size("num_conv_pos_embeddings", default=128)
    groups = config.size("num_conv_pos_embedding_groups", default=16)
    d = text.value("D")
    config.divides("num_conv_pos_embedding_groups", groups, d)
    text.symbol("J", d // groups, "hidden_size / num_conv_pos_embedding_groups")
    given = [f"W = {width}", f"pad = (pad = {width // 2})", *["longer"] * (width % 2 == 0)]
    given += [*activation_options(act), "as = positions"]
    return text.use("sounds", "D J S", *given, function="convolved_positions")


def _bias(config: Config, text: ModelText, body: Body) -> None:
    """Append the bias by distance that all layers share."""
    read_size(config, text, "N_near", "num_buckets", default=320)
    most = config.size("max_bucket_distance", default=800)
    table = body.param("bias_table", "N_near, H")
    body.let("bias", f"stg.relative_bias[sizes = (S, S), most = {most}]({table})")


def _head(config: Config, text: ModelText, body: Body, y: str) -> str:
    """Append the head of the architecture, and return the argument of its loss."""
    heads = heads_of(config)
    if "SequenceClassification" in heads:
        read_size(config, text, "E", "classifier_proj_size", default=256)
        text.symbol("N", config.labels(), "num_labels")
        pooled = projected(text, body, "e", y, "projector", "D, E")
        pooled = body.steps("m", pooled, ['stg.sum["bse->be"]({})', "stg.scale[by = 1/S]({})"])
        classify(body, linear(text, body, "z", pooled, "classifier", "E, N"))
        return "%labels: i32[B]"
    if "CTC" in heads:
        text.notes.append("The loss is that of one letter for each frame, not that of CTC.")
        read_size(config, text, "V", "vocab_size", default=32)
        classify_each(text, body, y, "V", "head")
        return "%labels: i32[B, S]"
    text.notes.append("Its vectors are trained towards given ones.")
    body.ends(f"stg.mse[mean = B*S*D]({y}, %target)")
    return "%target: bf16[B, S, D]"


def _masked(config: Config, text: ModelText) -> ModelText:
    """Declare the vector of masked frames, if there are any."""
    if not config.ratio("mask_time_prob", default=1) and not config.ratio(
        "mask_feature_prob", default=0
    ):
        return text
    config.skip("mask_feature_prob")
    idle = Idle(text)
    idle.param("masked_frame", "D")
    return idle.beside("masks", "The vector of masked frames is declared and frozen.")
