"""Zamba and Zamba2: layers of Mamba, and attention blocks whose weights several layers share."""

from collections.abc import Sequence
from itertools import groupby

from stagec.importers.common.positions import read_rope
from stagec.importers.common.sizes import begin, read_head, read_size
from stagec.importers.common.state_space import Mamba2Keys, read_mamba1, read_mamba2, skip_steps
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS
from stagec.importers.writing.stack import Decoder, order_text
from stagec.importers.writing.text import Body, Callee, ModelText

_KEYS = Mamba2Keys.of(
    "n_mamba_heads mamba_headdim mamba_ngroups mamba_d_state mamba_d_conv chunk_size "
    "add_bias_linear use_conv_bias mamba_expand"
)
_SYMBOLS = "D H G K F"
#: The shared weights of a block, with their dimensions.
_SHARED = {
    "attn_norm": "2*D",
    "wq": "2*D, H, K",
    "wk": "2*D, G, K",
    "wv": "2*D, G, K",
    "wo": "H, K, D",
    "ffn_norm": "D",
    "w_gate_up": "D, 2, F",
    "w_down": "F, D",
}


@reads("Zamba", "zamba", features="Mamba-1 in heads, shared attention")
def read_zamba(config: Config) -> ModelText:
    """Zamba (arXiv 2405.16712): some layers of Mamba-1 follow a shared block of attention and a
    feed-forward network that reads the stream and the embeddings, with a separate projection for
    each layer. Heads of Mamba-1 have separate step sizes, B and C."""
    text = _begin(config, 3712, 16)
    config.fixed(hidden_mamba_act="silu", mamba_proj_bias=False)
    heads = config.size("n_mamba_heads", default=2)
    read_mamba1(config, text, "mamba_")
    skip_steps(config, text)
    inner = text.value("I")
    if inner % heads or heads > _MOST_HEADS:
        message = f"is {heads}: expected up to {_MOST_HEADS}, and a divisor of {inner}"
        raise config.refuse("n_mamba_heads", message)
    text.replace("I", inner // heads, "mamba_expand * hidden_size / n_mamba_heads")
    shared = text.use("zamba", _SYMBOLS, function="zamba_shared")
    every = config.size("attn_layer_period", default=6)
    offset = config.count("attn_layer_offset", default=4, most=every - 1)
    count = config.layers(default=76)
    order = ["mamba", "mamba", "hybrid"] + ["mamba"] * (count - 3)
    order[3:] = ["hybrid" if i % every == offset else "mamba" for i in range(count - 3)]
    types = config.kinds("layers_block_type", "layer_types", names=_KINDS, length=count)
    order = [{"hybrid": "hybrid0"}.get(t, t) for t in types or order[:count]]
    mamba = _heads_of_mamba(text, heads, config.flag("mamba_conv_bias", default=True))
    return _write_model(config, text, mamba, shared, order)


#: The largest number of heads, each of which is a separate scan in the text.
_MOST_HEADS = 8
_KINDS = {"mamba": "mamba", "linear_attention": "mamba", "hybrid": "hybrid"}


def _heads_of_mamba(text: ModelText, j: int, biased: bool) -> Callee:
    """Add a layer of Mamba-1 whose j heads of I channels are separate scans, and return its
    name."""
    body = Body()
    options = [f"J = {j}", *([] if biased else ["conv_bias = no"])]
    scanned = text.use("zamba", "D I N R W", *options, function="zamba_scanned")
    body.do(f"%u, %dt, %b, %c, %z = stg.call @{scanned}(%x)")
    for name, dims in (("A_log", f"{j}, I, N"), ("skip", f"{j}, I"), ("dt_bias", f"{j}, I")):
        body.param(name, dims)
    for name in ("u", "dt", "b", "c", "A_log", "skip", "dt_bias"):
        dim = 2 if name in ("u", "dt", "b", "c") else 0
        made = ", ".join(f"%{name}_{h}" for h in range(j))
        body.do(f"{made} = stg.unbind[dim = {dim}, count = {j}](%{name})")
    ys: list[str] = []
    for h in range(j):
        operands = ", ".join(f"%{n}_{h}" for n in ("u", "dt", "A_log", "b", "c", "skip", "dt_bias"))
        ys.append(body.let(f"y_{h}", f"stg.selective_scan({operands})"))
    y = body.let("y", f"stg.pack[dim = 2]({', '.join(ys)})")
    body.do(f"stg.return({body.let('o', f'stg.call @zamba_gated[J = {j}]({y}, %z)')})")
    return text.function("mamba", "%x", body)


@reads("Zamba2", "zamba2", features="Mamba-2, shared attention with adapters")
def read_zamba2(config: Config) -> ModelText:
    """Zamba2 (arXiv 2411.15242): some Mamba-2 layers follow a block of attention and a feed-forward
    network that reads the stream and the embeddings. Layers share its weights, and have separate
    low-rank adapters and projections."""
    text = _begin(config, 2560, 32)
    config.skip("kv_channels", "num_query_groups", "ffn_hidden_size")
    config.only("use_long_context", False)
    read_size(config, text, "A", "adapter_rank", default=128)
    mamba = read_mamba2(config, text, _KEYS, heads=80, state=64, norm="groups")
    inner, joined = text.value("H_m") * text.value("P"), config.size("mamba_expand", default=2)
    if inner != joined * text.value("D"):
        raise config.refuse("mamba_headdim", f"gives {inner} elements of all heads, not {joined} D")
    options: list[str] = []
    if config.flag("use_mem_rope", default=False):
        options.append(f"rope = ({read_rope(config, text).statics()})")
    config.skip("rope_theta", "rope_parameters")
    config.only("gated_linear_unit", True)
    options += ["adapters"] * config.flag("use_shared_attention_adapter", default=False)
    options += ["network_adapter"] * config.flag("use_shared_mlp_adapter", default=True)
    shared = text.use("zamba", f"{_SYMBOLS} A theta", *options, function="zamba_shared")
    return _write_model(config, text, mamba.write(text), shared, _order(config))


def _begin(config: Config, width: int, heads: int) -> ModelText:
    """The text with the sizes of the shared block, whose attention is of twice the width."""
    text, _ = begin(config, 4096)
    read_head(config, text)
    d = read_size(config, text, "D", "hidden_size", default=width)
    h = read_size(config, text, "H", "num_attention_heads", default=heads)
    g = read_size(config, text, "G", "num_key_value_heads", default=h)
    config.divides("num_key_value_heads", g, h, "heads")
    config.divides("num_attention_heads", h, 2 * d)
    text.assume("H % G == 0")
    text.symbol("K", 2 * d // h, "2 * hidden_size / num_attention_heads")
    config.fixed(attention_hidden_size=2 * d, attention_head_dim=2 * d // h, hidden_act="gelu")
    config.skip("num_logits_to_keep")
    read_size(config, text, "F", "intermediate_size", default=4 * d)
    read_size(config, text, "V", "vocab_size", default=32000)
    return text


def _order(config: Config) -> list[str]:
    """The kind of each layer: `mamba`, or `hybrid` with the number of its shared block."""
    count = config.layers(default=54)
    types = config.kinds("layers_block_type", "layer_types", names=_KINDS, length=count)
    ids = config.sizes("hybrid_layer_ids", most=count - 1)
    shares = [i for i, t in enumerate(types) if t == "hybrid"] if types else list(ids)
    if types and ids and shares != sorted(ids):
        raise config.refuse(
            "hybrid_layer_ids", "does not list the layers that the other key calls hybrid"
        )
    blocks = config.size("num_mem_blocks", default=1)
    return [f"hybrid{shares.index(i) % blocks}" if i in shares else "mamba" for i in range(count)]


def _write_model(
    config: Config, text: ModelText, mamba: Callee, shared: Callee, order: Sequence[str]
) -> ModelText:
    """Add the main function. All layers carry the embeddings in addition to the stream."""
    body = Body()
    decoder = Decoder(tied=config.flag("tie_word_embeddings", default=True))
    x, table = decoder.embed(body, "x")
    kinds = list(dict.fromkeys(order))
    for kind in kinds:
        if kind != "mamba":
            for name, dims in _SHARED.items():
                body.param(f"{_shared(kind, name)}", dims)
    mixed = len([kind for kind, _ in groupby(order)]) > len(kinds)
    if mixed:
        text.declarations.append(f"stg.order @layers[{order_text(order)}]")
    h = x0 = x
    for number, kind in enumerate(kinds):
        inner = Body()
        s = "%h"
        if kind != "mamba":
            weights = ", ".join(f"%{_shared(kind, name)}" for name in _SHARED)
            t = inner.call("t", shared, "%h", "%x0", weights)
            s = inner.let("s", f"stg.add(%h, {t})")
        n = RMS.write(inner, "n", s, "norm")
        m = inner.call("m", mamba, n)
        inner.do(f"stg.yield({inner.let('r', f'stg.add(%h, {m})')}, %x0)")
        given = str(order.count(kind)), f"%h = {h}, %x0 = {x0}"
        h, x0 = f"%y{number}", f"%e{number}"
        body.repeat(f"{h}, {x0}", kind, *given, inner, "layers" if mixed else "")
    return decoder.end(text, body, h, table)


def _shared(kind: str, name: str) -> str:
    """The name of a shared weight of one block."""
    return f"shared{kind.removeprefix('hybrid')}_{name}"
