"""Vision-language models with images in the step (`stagec import --images`): the results of a tower
for patches are inserted among the tokens of the text."""

from dataclasses import replace

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.common.sizes import read_size
from stagec.importers.families.encoders import read_activation, read_heads_of
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, RMS, Attention, FeedForward, Rope
from stagec.importers.writing.stack import Decoder, Layer, Sublayer, write_stack
from stagec.importers.writing.text import Body, Callee, ModelText

#: The default patches of an image, those of 448 x 448.
_PATCHES = 1024


def read_qwen2_vl_images(config: Config) -> ModelText:
    """Qwen2-VL (arXiv 2409.12191) with images: LayerNorm, blocks without a gate, no windows."""
    return _with_images(config, windows=False)


def read_qwen2_5_vl_images(config: Config) -> ModelText:
    """Qwen2.5-VL (arXiv 2502.13923) with images: RMSNorm, a gate, windows."""
    return _with_images(config, windows=True)


def _with_images(config: Config, *, windows: bool) -> ModelText:
    """Qwen-VL with I_v images of N_v patches in each sequence of S tokens, I_v*N_v/4 of which are
    merged patches. The tower of Qwen2.5-VL has `windows`."""
    config.merge("text_config")
    vision = config.needed("vision_config")
    model = DecoderModel(config, Sizes(4096, 22016, 32, 32, 151936, 32768))
    text = model.text
    config.only("use_sliding_window", False)
    config.skip("sliding_window", "max_window_layers", "layer_types")
    rope = _by_axes(model)
    biased = model.flag("attention_bias", True)
    mixer = Attention(qkv_bias=biased, rope=rope)
    attention = Sublayer(mixer.write(text), "attn", operands=["%places"])
    layer = Layer([attention, Sublayer(FeedForward(model.activation()).write(text), "ffn")])
    merged = _read_tower(vision, text, windows)
    body = Body()
    table = body.param("embed", "V, D")
    image = _image_tokens(vision, text, body, merged, windows)
    words = body.let("words", f"stg.embedding({table}, %tokens)")
    x = body.let("x", f"stg.merge_rows({words}, {image}, %merged)")
    y = write_stack(text, body, x, {"layers": layer}, ["layers"] * model.count)
    vision.finish()
    order = ", in the order of windows" if windows else ""
    text.notes += [
        f"%patches are those of images{order}; %rows_and_columns their places.",
        "%merged is the number of each token of an image, and I_v*N_v or more for one of text;",
        "%places are the positions of tokens by time, height and width.",
    ]
    labels = "B" if text.head == "class" else "B, S"
    args = (
        "%patches: bf16[B, I_v, N_v, C, Y_v, P, P], %rows_and_columns: i32[B, I_v, 2, N_v],\n"
        "                   %tokens: i32[B, S], %merged: i32[B, S], %places: i32[B, 3, S], "
        f"%labels: i32[{labels}]"
    )
    return Decoder(tied=model.tied()).end(text, body, y, table, args)


def _by_axes(model: DecoderModel) -> Rope:
    """M-RoPE: the pairs of a head turn by time, height and width."""
    sections: tuple[int, ...] = ()
    for key in ("rope_scaling", "rope_parameters"):
        inner = model.config.section(key)
        sections = sections or (inner.sizes("mrope_section", length=3) if inner else ())
    sections = sections or (16, 24, 24)
    if 2 * sum(sections) != model.dim:
        raise model.config.refuse(
            "rope_scaling",
            f"has 'mrope_section' with the sum {sum(sections)}, expected half of a head of "
            f"{model.dim}",
        )
    rope = model.rope()
    model.text.notes = [n for n in model.text.notes if "on all axes" not in n]
    return replace(rope, sections=f"sections = ({', '.join(map(str, sections))})")


def _read_tower(vision: Config, text: ModelText, windows: bool) -> int:
    """Declare the sizes of the tower, and return the number of patches of a token."""
    if windows:
        read_size(vision, text, "D_v", "hidden_size", default=3584)
        read_size(vision, text, "F_v", "intermediate_size", default=3420)
    else:
        width = read_size(vision, text, "D_v", "embed_dim", default=1280)
        text.symbol("F_v", width * vision.size("mlp_ratio", default=4), "mlp_ratio * embed_dim")
    read_heads_of(vision, text, "_v", "num_heads", 16)
    read_size(vision, text, "C", "in_channels", "in_chans", default=3)
    patch = read_size(vision, text, "P", "patch_size", default=14)
    read_size(vision, text, "Y_v", "temporal_patch_size", default=2)
    merge = vision.size("spatial_merge_size", default=2)
    side = vision.size("window_size", default=112) // patch // merge * merge if windows else 1
    if not side or (text.symbols["K_v"].value or 4) % 4:
        raise vision.refuse(
            "window_size", "is less than one token, or the heads are not a multiple of 4 wide"
        )
    text.symbol("I_v", 1, "images of a sequence")
    text.symbol("N_v", _PATCHES, "patches of an image")
    if windows:
        text.symbol("W_v", side * side, "patches of a window, by window_size")
    text.assume(f"N_v % {merge * merge} == 0")
    text.assume("N_v % W_v == 0")
    vision.only("out_hidden_size" if windows else "hidden_size", text.value("D"))
    vision.skip("spatial_patch_size", "tokens_per_second", "in_chans", "rope_parameters")
    return merge * merge


def _image_tokens(vision: Config, text: ModelText, body: Body, merged: int, windows: bool) -> str:
    """Append the tower and its merger: tokens [B, I_v*N_v/merged, D]."""
    count = vision.layers("depth", default=32)
    full = vision.sizes("fullatt_block_indexes", most=count - 1) if windows else range(count)
    order = ["vision_full" if i in full else "vision_window" for i in range(count)]
    act = read_activation(vision, "hidden_act", default="silu" if windows else "quick_gelu")
    mlp, norm = FeedForward(act, gated=windows, bias=True), RMS if windows else LAYER
    called = mlp.write(text).with_("D = D_v", "F = F_v")
    kinds = {
        name: Layer(
            [
                Sublayer(
                    seen_attention(text, *options), "attn", norm, width="D_v", operands=["%at"]
                ),
                Sublayer(called, "ffn", norm, width="D_v"),
            ]
        )
        for name, options in (("vision_window", ["windowed", "as = windows"]), ("vision_full", []))
        if name in order
    }
    tower, projector = Body(), Body()
    x = tower.call("p", text.use("seen", "C Y_v P D_v", function="seen_patches"), "%patches")
    tower.let("at", 'stg.reshape["bian->(bi)an"](%rows_and_columns)')
    y = write_stack(text, tower, x, kinds, order, name="tower", out="seen")
    text.scope(body, "vision", "%patches, %rows_and_columns", tower, y)
    given = [f"U_v = {merged}", *["norm = rms"] * windows]
    merge = text.use("seen", "D D_v I_v", *given, function="seen_merged")
    text.scope(body, "projector", y, projector, projector.call("image0", merge, y))
    return body.let("image", 'stg.reshape["bsd->bsd"](%image0)')  # a part may end here


def seen_attention(text: ModelText, *given: str) -> Callee:
    """Attention of the tower, over all patches of an image or in windows of W_v patches."""
    symbols = "D_v H_v K_v N_v W_v" if "windowed" in given else "D_v H_v K_v"
    return text.use("seen", symbols, *given, function="seen_attention")
