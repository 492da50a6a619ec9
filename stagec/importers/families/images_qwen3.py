"""Qwen3-VL with images in the step (`stagec import --images`): results of intermediate layers of
the tower are added to the stream of the text after its first layers."""

from collections.abc import Sequence
from itertools import pairwise

from stagec.importers.common.idle import tower_of, words_of
from stagec.importers.common.sizes import read_size
from stagec.importers.families.encoders import read_activation, read_heads_of
from stagec.importers.families.images import seen_attention
from stagec.importers.families.llama import read_qwen3
from stagec.importers.families.mixture import read_qwen3_moe
from stagec.importers.family import Reader
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import LAYER, FeedForward
from stagec.importers.writing.stack import Layer, Sublayer, write_stack
from stagec.importers.writing.text import Among, Body, ModelText

_ARGS = (
    "%patches: bf16[B, I_v, N_v, C, Y_v, P_v, P_v], %cells: i32[B, I_v, N_v],\n"
    "    %rows_and_columns: i32[B, I_v, 2, N_v]"
)
_NOTES = (
    "%patches are those of images, four that become one token after each other; %cells are their",
    "rows of the table of positions (the reference interpolates between four), %rows_and_columns",
    "their places. %merged is the number of each token of an image, or for one of text I_v*N_v.",
    "Positions of tokens by three axes are rotated like those of one: the same work.",
)


def _reader(read: Reader) -> Reader:
    def read_images(config: Config) -> ModelText:
        vision, words = tower_of(config), words_of(config)
        count = vision.layers("depth", default=27)
        deep = vision.sizes("deepstack_visual_indexes", most=count - 1)
        if not vision.is_list("deepstack_visual_indexes"):
            deep = (8, 16, 24)
        if list(deep) != sorted(set(deep)) or len(deep) >= words.layers(default=32):
            raise vision.refuse(
                "deepstack_visual_indexes",
                "must increase, and be fewer than the layers of the language model",
            )

        def write(text: ModelText, body: Body) -> str:
            _read_tower(vision, text)
            return _write_tower(vision, text, body, count, deep)

        words.among = Among(_ARGS, write, len(deep))
        text = read(words)
        words.finish()
        vision.finish()
        text.name = config.text("model_type")
        text.notes += _NOTES
        return text

    return read_images


def _read_tower(vision: Config, text: ModelText) -> None:
    """Declare the sizes of the tower."""
    read_size(vision, text, "D_v", "hidden_size", default=1152)
    read_heads_of(vision, text, "_v", "num_heads", 16)
    read_size(vision, text, "F_v", "intermediate_size", default=4304)
    read_size(vision, text, "C", "in_channels", "in_chans", default=3)
    read_size(vision, text, "P_v", "patch_size", default=16)
    read_size(vision, text, "Y_v", "temporal_patch_size", default=2)
    read_size(vision, text, "X_v", "num_position_embeddings", default=2304)
    merge = vision.size("spatial_merge_size", default=2)
    text.symbol("U_v", merge * merge, "spatial_merge_size^2")
    text.symbol("I_v", 1, "images of a sequence")
    text.symbol("N_v", 1024, "patches of an image")
    text.assume("N_v % U_v == 0")
    vision.only("out_hidden_size", text.value("D"))
    vision.skip("rope_parameters")


def _write_tower(
    vision: Config, text: ModelText, body: Body, count: int, deep: Sequence[int]
) -> str:
    """Append the tower and its mergers, and return tokens [B, I_v*N_v/U_v, D]."""
    mlp = FeedForward(
        read_activation(vision, "hidden_act", default="gelu_pytorch_tanh"), gated=False, bias=True
    )
    attention = seen_attention(text)
    block = mlp.write(text).with_("D = D_v", "F = F_v")
    layer = Layer(
        [
            Sublayer(attention, "attn", LAYER, width="D_v", operands=["%at"]),
            Sublayer(block, "ffn", LAYER, width="D_v"),
        ]
    )
    tower, projector = Body(), Body()
    table = tower.param("vision_positions", "X_v, D_v")
    e = tower.let("e", f"stg.embedding({table}, %cells)")
    placed = text.use("seen", "C Y_v D_v", "placed", "P = P_v", function="seen_patches")
    x = tower.call("pe", placed, "%patches", e)
    tower.let("at", 'stg.reshape["bian->(bi)an"](%rows_and_columns)')
    merge = text.use("seen", "D D_v I_v U_v", function="seen_merged")
    ends = [0, *(i + 1 for i in deep), count]
    streams: list[str] = []
    for number, (start, end) in enumerate(pairwise(ends)):
        if end > start:
            kind = f"vision{number}"
            x = write_stack(text, tower, x, {kind: layer}, [kind] * (end - start), out=f"v{number}")
        streams.append(x)
    seen = list(dict.fromkeys(streams))  # the last two are equal if the last layer is a deep one
    text.scope(body, "vision", "%patches, %cells, %rows_and_columns", tower, *seen)
    *inner, last = streams
    merged = [
        projector.call(f"m{n}", merge.with_("norm_of = token"), x) for n, x in enumerate(inner)
    ]
    merged.append(projector.call("image0", merge, last))
    text.scope(body, "projector", ", ".join(seen), projector, *merged)
    for number in range(len(deep)):
        zeros = body.let(f"zeros{number}", f"stg.scale[by = 0]({_WORDS})", "for text")
        body.let(f"deep{number}", f"stg.merge_rows({zeros}, %m{number}, %merged)")
    return body.let("image", 'stg.reshape["bsd->bsd"](%image0)')  # a part may end here


#: The embedded words, as a decoder names them.
_WORDS = "%words"


read_qwen3_vl_images = _reader(read_qwen3)
read_qwen3_vl_moe_images = _reader(read_qwen3_moe)
