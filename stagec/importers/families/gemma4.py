"""Gemma 4: local and global layers with heads of their own sizes, experts beside a dense block,
tables of words for each layer, and layers that take keys and values of earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from stagec.importers.common.idle import gemma4_towers
from stagec.importers.common.kin import Kin, Sizes
from stagec.importers.common.positions import read_bases
from stagec.importers.common.sizes import read_size
from stagec.importers.family import ModelFamily
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS, FeedForward, Norm, Rope
from stagec.importers.writing.stack import Decoder, arguments, root, write_stack
from stagec.importers.writing.text import Body, Callee, ModelText

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_PLAIN = Norm(affine="none")


@dataclass(frozen=True, slots=True)
class SharingHeads:
    """Attention of a kind of layers; `suffix` is that of its symbols G and K. Keys are values too
    where they are `equal`. It takes keys and values where they are `given`, and hands them out to
    later layers where they are `kept`."""

    kind: str
    suffix: str
    rope: Rope
    mask: str
    equal: bool = False
    given: bool = False
    kept: bool = False

    @property
    def name(self) -> str:
        """What the block is called."""
        return f"{'shared_' if self.given else 'kept_' if self.kept else ''}{self.kind}_attention"

    def write(self, text: ModelText) -> Callee:
        """Add the block; its name."""
        body = Body()
        q, k, v = self._projected(body, "q", "H"), "%k", "%v"
        if not self.given:
            if self.equal:
                v = body.let("v", _PLAIN.step(body, "").format(self._product(body, "k", "p")))
                k = body.steps("k", "%p", self._turned(body, "k"))
            else:
                k = self._projected(body, "k", f"G{self.suffix}")
                v = body.let("v", _PLAIN.step(body, "").format(self._product(body, "v", "v0")))
        a = body.let("a", f"stg.attention[{self.mask}, rsqrt = 1]({q}, {k}, {v})")
        wo = body.param("wo", f"H, K{self.suffix}, D")
        o = body.let("o", f'stg.einsum["bshk,hkd->bsd"]({a}, {wo})')
        body.do(f"stg.return({o}, {k}, {v})" if self.kept else f"stg.return({o})")
        return text.function(self.name, "%x, %k, %v" if self.given else "%x", body)

    def _product(self, body: Body, name: str, out: str) -> str:
        weight = body.param(f"w{name}", f"D, G{self.suffix}, K{self.suffix}")
        return body.let(out, f'stg.einsum["bsd,dgk->bsgk"](%x, {weight})')

    def _projected(self, body: Body, name: str, heads: str) -> str:
        weight = body.param(f"w{name}", f"D, {heads}, K{self.suffix}")
        letter = "h" if heads == "H" else "g"
        steps = [f'stg.einsum["bsd,d{letter}k->bs{letter}k"]({{}}, {weight})']
        return body.steps(name, "%x", [*steps, *self._turned(body, name)])

    def _turned(self, body: Body, name: str) -> list[str]:
        return [RMS.step(body, f"{name}_norm", f"K{self.suffix}"), self.rope.step()]


@dataclass(frozen=True, slots=True)
class SharingLayer:
    """A layer; `ffn` calls its feed-forward block, `experts` its experts beside that. With `tables`
    it has a table of words of its own."""

    text: ModelText
    heads: SharingHeads
    ffn: Callee
    experts: Callee | None
    tables: bool

    def write(self, body: Body, x: str) -> str:
        """Append the layer on `x`; the result's name."""
        kind, block = self.heads.kind, self.heads.write(self.text)
        n = RMS.write(body, "n1", x, "attn_norm")
        given = f", %k_{kind}, %v_{kind}" if self.heads.given else ""
        if self.heads.kept:
            body.do(f"%a0, %k, %v = stg.call @{block}({n})")
            a = body.let("a", RMS.step(body, "attn_post_norm").format("%a0"))
        else:
            steps = [f"stg.call @{block}({{}}{given})", RMS.step(body, "attn_post_norm")]
            a = body.steps("a", n, steps)
        r = body.let("r1", f"stg.add({x}, {a})")
        n = RMS.write(body, "n2", r, "ffn_norm")
        steps = [f"stg.call @{self.ffn}({{}})"]
        if self.experts:
            dense = body.steps("f1", n, [*steps, RMS.step(body, "dense_post_norm")])
            n = RMS.write(body, "n3", r, "experts_norm")
            steps = [f"stg.call @{self.experts}({{}}, {r})", RMS.step(body, "experts_post_norm")]
            n, steps = body.steps("f2", n, steps), [f"stg.add({{}}, {dense})"]
        f = body.steps("f", n, [*steps, RMS.step(body, "ffn_post_norm")])
        r = body.let("r2", f"stg.add({r}, {f})")
        if self.tables:
            r = body.let("r3", f"stg.add({r}, {self.from_table(body, r)})")
        scalar = body.param("scalar", "", role="state")
        return body.let("r", f'stg.einsum["bsd,->bsd"]({r}, {scalar})')

    def from_table(self, body: Body, x: str) -> str:
        """What the layer's own table of words gives, behind a gate."""
        table = body.param("table", "V_own, J")
        t = body.steps("t", "%tokens", [f"stg.embedding({table}, {{}})", "stg.scale[sqrt = J]({})"])
        weight = body.param("w_words", "D, J")
        steps = [
            f'stg.einsum["bsd,dj->bsj"]({{}}, {weight})',
            "stg.scale[rsqrt = D]({})",
            "stg.rmsnorm({}, %words_norm)",
            f"stg.add({{}}, {t})",
            "stg.scale[rsqrt = 2]({})",
        ]
        w = body.steps("w", "%x0", steps)
        gate = body.param("w_gate", "D, J")
        steps = [
            f'stg.einsum["bsd,dj->bsj"]({{}}, {gate})',
            "stg.gelu({})",
            f"stg.mul({{}}, {w})",
            f'stg.einsum["bsj,jd->bsd"]({{}}, {body.param("w_back", "J, D")})',
            RMS.step(body, "words_post_norm"),
        ]
        return body.steps("g", x, steps)


def read_gemma4(config: Config) -> ModelText:
    """Gemma 4, the text model."""
    sizes = Sizes(2304, 9216, 30, 8, 262144, 131072, groups=4, dim=256)
    kin = Kin(config, "Gemma 4", sizes)
    text = kin.text
    config.only("use_bidirectional_attention", "vision")
    config.only("attention_bias", False)
    local, whole = _read_heads(kin)
    every: tuple[str, ...] = tuple(
        _GLOBAL if (i + 1) % 6 == 0 else _LOCAL for i in range(kin.count)
    )
    kinds = config.words("layer_types", among=(_LOCAL, _GLOBAL), length=kin.count) or every
    kinds = (*kinds[:-1], _GLOBAL)  # as the reference has it
    block = FeedForward(kin.activation("gelu_pytorch_tanh")).write(text)
    tables = bool(config.count("hidden_size_per_layer_input", default=256))
    if tables:
        read_size(config, text, "J", "hidden_size_per_layer_input", default=256)
        read_size(config, text, "V_own", "vocab_size_per_layer_input", default=262144)
    experts = _experts(kin) if kin.flag("enable_moe_block") else None
    config.skip(
        "num_experts", "top_k_experts", "moe_intermediate_size", "vocab_size_per_layer_input"
    )
    layer = SharingLayer(text, local, block, experts, tables)
    cap = config.ratio("final_logit_softcapping", default=0)
    decoder = Decoder(tied=kin.tied(True), embed_scale=root(kin.width), logit_cap=cap or None)
    body = Body()
    table = body.param("embed", "V, D")
    steps = [f"stg.embedding({table}, {{}})", f"stg.scale[by = {decoder.embed_scale}]({{}})"]
    x = body.steps("x0", "%tokens", steps)
    if tables:
        body.param("words_norm", "J")
    named = [("global" if k == _GLOBAL else "local") for k in kinds]
    layers = {k: replace(layer, heads=heads) for k, heads in (("local", local), ("global", whole))}
    shared = config.count("num_kv_shared_layers", default=0, most=kin.count - 1)
    wide = kin.flag("use_double_wide_mlp")
    if shared and not set(named[-shared - 2 : -shared]) == set(named):
        raise config.refuse("num_kv_shared_layers", "does not follow a layer of each kind")
    x = write_layers(text, body, x, layers, named, shared, wide=wide)
    decoder.write_head(text, body, x, table)
    return text.train(arguments(text), body)


def write_layers(
    text: ModelText,
    body: Body,
    x: str,
    layers: Mapping[str, SharingLayer],
    order: Sequence[str],
    shared: int,
    *,
    wide: bool = False,
) -> str:
    """Append layers of these kinds in this order: all alike, or those before the last ones that
    compute keys and values, these, and the last `shared` ones, which take them; the result's name.
    """
    own = order[: len(order) - shared]
    heads = [layers[name].heads.kind for name in order]
    if shared and set(heads[-shared - 2 : -shared]) != set(heads):
        message = f"{shared} layers share keys and values, but follow no layer of each kind"
        raise ValueError(message)
    last = [len(own) - 1 - heads[: len(own)][::-1].index(k) for k in set(heads)] if shared else []
    kept = min(last, default=len(own))
    if kept:
        kinds = {name: layers[name] for name in dict.fromkeys(own[:kept])}
        x = write_stack(text, body, x, kinds, own[:kept], out="x1" if shared else "y")
    if not shared:
        return x
    for name in own[kept:]:
        layer, kind = layers[name], layers[name].heads.kind
        alone = Body()
        r = replace(layer, heads=replace(layer.heads, kept=True)).write(alone, "%h")
        alone.do(f"stg.return({r}, %k, %v)")
        args = "%h, %tokens, %x0, %words_norm" if layer.tables else "%h"
        text.function(f"last_{kind}", args, alone)
        operands = args.replace("%h", x)
        body.do(f"%x_{kind}, %k_{kind}, %v_{kind} = stg.call @last_{kind}({operands})")
        x = f"%x_{kind}"
    rest = order[len(own) :]
    takers: dict[str, SharingLayer] = {}
    for name in dict.fromkeys(rest):
        layer = layers[name]
        ffn = layer.ffn.with_("F = 2*F") if wide else layer.ffn
        takers[f"shared_{name}"] = replace(layer, ffn=ffn, heads=replace(layer.heads, given=True))
    return write_stack(text, body, x, takers, [f"shared_{k}" for k in rest], name="shared")


def _read_heads(kin: Kin) -> tuple[SharingHeads, SharingHeads]:
    """Attention of local and of global layers."""
    config, text = kin.config, kin.text
    kinds = {_LOCAL: ("theta_local", 10000), _GLOBAL: ("theta", 1000000)}
    ropes = read_bases(config, text, kinds, nested="", share=Fraction(1, 4))
    size = config.size("sliding_window", default=512, most=1 << 30)
    text.symbol("W", size, "sliding_window")
    equal = kin.flag("attention_k_eq_v")
    wide, groups = config.size("global_head_dim", default=512), 0
    number = config.size("num_global_key_value_heads", default=kin.groups_of_heads)
    groups = number if equal else kin.groups_of_heads
    each = config.section("per_layer_config")
    if each is not None:
        found = [each.section(name) for name in each.members]
        pairs = {
            (
                inner.size("head_dim", default=wide),
                inner.size("num_key_value_heads", default=kin.groups_of_heads),
            )
            for inner in found
            if inner is not None
        }
        if len(pairs) > 1:
            raise config.refuse("per_layer_config", "differs between layers of one kind")
        for pair in pairs:
            wide, groups = pair
    if kin.heads % groups:
        raise config.refuse("num_global_key_value_heads", f"is {groups}: {kin.heads} heads")
    text.symbol("K_global", wide, "global_head_dim")
    text.symbol("G_global", groups, "heads of keys and values of global layers")
    return (
        SharingHeads("local", "", ropes[_LOCAL], "causal, window = W"),
        SharingHeads("global", "_global", ropes[_GLOBAL], "causal", equal),
    )


def _experts(kin: Kin) -> Callee:
    """Add the experts: the router sees the stream with a norm and a scale of its own, and each
    expert's result has a scale; the block's name."""
    text = kin.text
    read_size(kin.config, text, "E", "num_experts")
    top = read_size(kin.config, text, "T", "top_k_experts")
    if top > (text.symbols["E"].value or 1):
        raise kin.config.refuse("top_k_experts", f"is {top}, more than there are experts")
    read_size(kin.config, text, "M", "moe_intermediate_size")
    text.assume("E >= T")
    body = Body()
    steps = [
        _PLAIN.step(body, ""),
        f'stg.einsum["bsd,d->bsd"]({{}}, {body.param("router_scale", "D")})',
        "stg.scale[rsqrt = D]({})",
        f'stg.einsum["bsd,de->bse"]({{}}, {body.param("router", "D, E")})',
    ]
    logits = body.steps("logits", "%stream", steps)
    body.do(f"%weights, %chosen = stg.route[k = T, normalize]({logits})")
    xs = body.let("xs", "stg.dispatch[count = E](%x, %chosen)")
    steps = [
        f'stg.einsum["ebcd,edzm->ezbcm"]({{}}, {body.param("w_gate_up", "E, D, 2, M")})',
        "stg.geglu({})",
        f'stg.einsum["ebcm,emd->ebcd"]({{}}, {body.param("w_down", "E, M, D")})',
        f'stg.einsum["ebcd,e->ebcd"]({{}}, {body.param("expert_scale", "E")})',
    ]
    ys = body.steps("ys", xs, steps)
    body.do(f"stg.return({body.let('y', f'stg.combine({ys}, %chosen, %weights)')})")
    return text.function("experts", "%x, %stream", body)


def read_gemma4_towers(config: Config) -> ModelText:
    """Gemma 4 with its towers, which a step of texts does not use."""
    config.merge("text_config")
    return gemma4_towers(config, read_gemma4(config))


FAMILIES = (
    ModelFamily(
        "Gemma 4",
        ("gemma4_text",),
        read_gemma4,
        "heads by kind of layers, experts beside dense, shared keys and values",
    ),
    ModelFamily(
        "Gemma 4 with images", ("gemma4",), read_gemma4_towers, "towers of images and of sounds"
    ),
)
