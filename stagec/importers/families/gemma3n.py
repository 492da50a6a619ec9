"""Gemma 3n: several streams that are predicted and corrected around each layer, a low-rank path
beside attention, tables of words for each layer, and layers that take keys of earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import NormalDist

from stagec.importers.common.kin import Kin, Sizes
from stagec.importers.common.positions import read_bases
from stagec.importers.common.sizes import read_size
from stagec.importers.families.gemma4 import SharingHeads, SharingLayer, write_layers
from stagec.importers.family import ModelFamily
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS, FeedForward
from stagec.importers.writing.stack import Decoder, arguments, root
from stagec.importers.writing.text import Body, Callee, ModelText

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class AlternatingLayer(SharingLayer):
    """A layer on A streams [B, S, A, D]: what the first one is predicted to be goes through the
    layer, and what comes out corrects all of them (AltUp, arXiv 2301.13310). Beside attention
    stands a path of rank R_low (LAuReL, arXiv 2411.07501)."""

    def write(self, body: Body, x: str) -> str:
        """Append the layer on `x`; the result's name."""
        norm, router = body.param("router_norm", "D"), body.param("router", "D, A")
        seen = [
            f"stg.rmsnorm({{}}, {norm})",
            "stg.scale[by = 1/D]({})",
            f'stg.einsum["bsd,da->bsa"]({{}}, {router})',
            "stg.tanh({})",
        ]
        first = body.let("first", f"stg.take[dim = 2, at = 0]({x})")
        m = body.steps("m", first, seen)
        c = body.let("c", f'stg.einsum["bsa,apq->bspq"]({m}, {body.param("w_predict", "A, A, A")})')
        mixed = body.let("mixed", f'stg.einsum["bsqd,bspq->bspd"]({x}, {c})')
        p = body.let("p", f"stg.add({x}, {mixed})")
        active = body.let("active", f"stg.take[dim = 2, at = 0]({p})")
        r = self._through(body, active)
        back = body.let("back", f"stg.scale[by = -1]({active})")
        new = body.let("new", f"stg.add({r}, {back})")
        weight = body.param("w_correct", "A, A")
        c = body.steps("k_c", r, [*seen, f'stg.einsum["bsa,ap->bsp"]({{}}, {weight})'])
        by = body.let("by", f'stg.einsum["bsd,bsp->bspd"]({new}, {c})')
        each = body.let("each", f'stg.broadcast["bsd->bspd", sizes = A]({new})')
        y = body.let("corrected", f"stg.add({p}, {by}, {each})")
        body.do(f"%head, %rest = stg.cut[dim = 2, sizes = (1, A - 1)]({y})")
        steps = ["stg.take[dim = 2, at = 0]({})"]
        steps.append(f'stg.einsum["bsd,d->bsd"]({{}}, {body.param("correct_scale", "D")})')
        g = self.from_table(body, body.steps("u", "%head", steps))
        more = body.let("more", f'stg.broadcast["bsd->bspd", sizes = A - 1]({g})')
        others = body.let("others", f"stg.add(%rest, {more})")
        return body.let("r", f"stg.concat[dim = 2](%head, {others})")

    def _through(self, body: Body, x: str) -> str:
        """Append attention with its low-rank path, and the feed-forward block."""
        kind, block = self.heads.kind, self.heads.write(self.text)
        n = RMS.write(body, "n1", x, "attn_norm")
        steps = [
            f'stg.einsum["bsd,dr->bsr"]({{}}, {body.param("w_left", "D, R_low")})',
            f'stg.einsum["bsr,rd->bsd"]({{}}, {body.param("w_right", "R_low, D")})',
            RMS.step(body, "low_norm"),
            f"stg.add({{}}, {n})",
        ]
        low = body.steps("low", n, steps)
        given = f", %k_{kind}, %v_{kind}" if self.heads.given else ""
        results = "%a0, %k, %v" if self.heads.kept else "%a0"
        body.do(f"{results} = stg.call @{block}({n}{given})")
        a = body.let("a", RMS.step(body, "attn_post_norm").format("%a0"))
        r = body.steps("r1", x, [f"stg.add({{}}, {a}, {low})", "stg.scale[rsqrt = 2]({})"])
        n = RMS.write(body, "n2", r, "ffn_norm")
        steps = [f"stg.call @{self.ffn}({{}})", RMS.step(body, "ffn_post_norm")]
        return body.let("r2", f"stg.add({r}, {body.steps('f', n, steps)})")


def _sparse(text: ModelText, share: Fraction) -> Callee:
    """Add a feed-forward block whose gate lets through what is far above the mean: so many standard
    deviations that this share of normal numbers is below; its name. The deviation is the mean of
    centered numbers times normed ones."""
    above = Fraction(NormalDist().inv_cdf(float(share))).limit_denominator(10**6)
    body = Body()
    w_up, w_down = body.param("w_gate_up", "D, 2, F"), body.param("w_down", "F, D")
    u = body.let("u", f'stg.einsum["bsd,dzf->bzsf"](%x, {w_up})')
    body.do(f"%gate, %up = stg.unbind[dim = 1, count = 2]({u})")
    mean = ['stg.sum["bsf->bs"]({})', "stg.scale[by = -1/F]({})"]
    low = body.steps("low", "%gate", mean)
    c = body.let("c", f'stg.add["bsf,bs->bsf"](%gate, {low})')
    n = body.let("n", "stg.layernorm[affine = none](%gate)")
    far = ['stg.sum["bsf->bs"]({})', f"stg.scale[by = {-above}]({{}})", "stg.scale[by = 1/F]({})"]
    cut = body.steps("cut", body.let("cn", f"stg.mul({c}, {n})"), far)
    steps = [f'stg.add["bsf,bs->bsf"]({{}}, {cut})', "stg.relu({})", "stg.gelu({})"]
    g = body.steps("g", c, [*steps, "stg.mul({}, %up)"])
    y = body.let("y", f'stg.einsum["bsf,fd->bsd"]({g}, {w_down})')
    body.do(f"stg.return({y})")
    return text.function("sparse_geglu", "%x", body)


def read_gemma3n(config: Config) -> ModelText:
    """Gemma 3n, the text model."""
    sizes = Sizes(2048, 16384, 35, 8, 262400, 32768, groups=2, dim=256)
    kin = Kin(config, "Gemma 3n", sizes)
    text = kin.text
    config.only("attention_bias", False)
    config.only("altup_active_idx", 0)
    config.only("altup_correct_scale", True)
    config.skip("altup_coef_clip")
    if read_size(config, text, "A", "altup_num_inputs", default=4) < 2:
        raise config.wrong("altup_num_inputs", "at least two streams")
    read_size(config, text, "R_low", "laurel_rank", default=64)
    read_size(config, text, "J", "hidden_size_per_layer_input", default=256)
    read_size(config, text, "V_own", "vocab_size_per_layer_input", default=262144)
    read_size(config, text, "W", "sliding_window", default=512)
    kinds = config.words("layer_types", among=(_LOCAL, _GLOBAL), length=kin.count)
    kinds = kinds or tuple(_LOCAL if (i + 1) % 5 else _GLOBAL for i in range(kin.count))
    ropes = read_bases(
        config, text, {_GLOBAL: ("theta", 1000000), _LOCAL: ("theta_local", 10000)}, nested=_LOCAL
    )
    act = kin.activation("gelu_pytorch_tanh")
    dense = FeedForward(act).write(text)
    shares = config.ratios("activation_sparsity_pattern", length=kin.count)
    few = 10 if kin.count > 10 else 0
    shares = shares or (Fraction(19, 20),) * few + (Fraction(0),) * (kin.count - few)
    found = {share for share in shares if share}
    if len(found) > 1 or not all(0 < share < 1 for share in found):
        raise config.refuse("activation_sparsity_pattern", "has other shares than one and 0")
    ffn = {True: _sparse(text, min(found)) if found else dense, False: dense}
    layers: dict[str, AlternatingLayer] = {}
    order: list[str] = []
    for kind, share in zip(kinds, shares, strict=True):
        local = kind == _LOCAL
        mask = "causal, window = W" if local else "causal"
        heads = SharingHeads("local" if local else "global", "", ropes[kind], mask)
        order.append(f"{heads.kind}_sparse" if share else heads.kind)
        layers[order[-1]] = AlternatingLayer(text, heads, ffn[bool(share)], None, True)
    shared = config.count("num_kv_shared_layers", default=15, most=kin.count - 1)
    if shared and set(kinds[-shared - 2 : -shared]) != set(kinds):
        raise config.refuse("num_kv_shared_layers", "does not follow a layer of each kind")
    cap = config.ratio("final_logit_softcapping", default=30)
    decoder = Decoder(tied=kin.tied(True), logit_cap=cap or None)
    body = Body()
    table = body.param("embed", "V, D")
    steps = [f"stg.embedding({table}, {{}})", f"stg.scale[by = {root(kin.width)}]({{}})"]
    x = body.steps("x0", "%tokens", steps)
    body.param("words_norm", "J")
    weight = body.param("w_streams", "A - 1, D, D")
    others = body.let("o", f'stg.einsum["bsd,pde->bspe"]({x}, {weight})')
    first = body.let("alone", f'stg.broadcast["bsd->bspd", sizes = 1]({x})')
    x = body.let("streams", f"stg.concat[dim = 2]({first}, {_like(body, 'o', others, x)})")
    y = write_layers(text, body, x, layers, order, shared)
    body.do(f"%y_head, %y_rest = stg.cut[dim = 2, sizes = (1, A - 1)]({y})")
    first = body.let("y_first", "stg.take[dim = 2, at = 0](%y_head)")
    weight = body.param("w_unstreams", "A - 1, D, D")
    others = body.let("z_o", f'stg.einsum["bspd,pde->bspe"](%y_rest, {weight})')
    total = body.let("z_sum", f'stg.sum["bspd->bsd"]({_like(body, "z", others, first)})')
    y = body.steps("mean", first, [f"stg.add({{}}, {total})", "stg.scale[by = 1/A]({})"])
    decoder.write_head(text, body, y, table)
    return text.train(arguments(text), body)


def _like(body: Body, name: str, x: str, model: str) -> str:
    """Append `x` [B, S, A - 1, D] with the root mean square of `model` [B, S, D], which is the mean
    of its elements times the normed ones."""
    n = body.let(f"{name}_n", f"stg.rmsnorm[affine = none]({model})")
    steps = [f"stg.mul({{}}, {n})", 'stg.sum["bsd->bs"]({})', "stg.scale[by = 1/D]({})"]
    size = body.steps(f"{name}_size", model, steps)
    plain = body.let(f"{name}_plain", f"stg.rmsnorm[affine = none]({x})")
    return body.let(f"{name}_like", f'stg.einsum["bspd,bs->bspd"]({plain}, {size})')


def read_gemma3n_towers(config: Config) -> ModelText:
    """Gemma 3n whose towers, a MobileNet and a Conformer, are left out."""
    config.merge("text_config")
    config.skip("vision_config", "audio_config", "vision_soft_tokens_per_image")
    config.skip("audio_soft_tokens_per_image")
    text = read_gemma3n(config)
    text.notes.append("Left out: the towers of images and of sounds, with their parameters.")
    return replace(text, name=config.text("model_type"))


FAMILIES = (
    ModelFamily(
        "Gemma 3n",
        ("gemma3n_text", "gemma3n"),
        read_gemma3n_towers,
        "streams that are predicted and corrected, shared keys; without towers",
    ),
)
