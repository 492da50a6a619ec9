"""LongCat-Flash: layers of two attentions and two dense blocks, with experts beside the second
half of a layer."""

from dataclasses import dataclass

from stagec.importers.common.decoder_model import Sizes
from stagec.importers.common.sizes import read_size
from stagec.importers.families.deepseek import LatentSizes, latent_of
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS, FeedForward
from stagec.importers.writing.stack import Decoder
from stagec.importers.writing.text import Body, Callee, ModelText


@dataclass(frozen=True, slots=True)
class ShortcutLayer:
    """Attention and a dense block, twice; the experts take the input of the first dense block, and
    their result is added behind the second one."""

    attention: Callee
    dense: Callee
    experts: Callee

    def write(self, body: Body, x: str) -> str:
        """Append the layer on `x`, and return the name of the result."""
        for number in (1, 2):
            n = RMS.write(body, f"n{number}", x, f"attn_norm{number}")
            a = body.call(f"a{number}", self.attention.with_(f"as = mla{number}"), n)
            r = body.let(f"r{number}", f"stg.add({x}, {a})")
            m = RMS.write(body, f"m{number}", r, f"ffn_norm{number}")
            if number == 1:
                body.call("e", self.experts, m)
            f = body.call(f"f{number}", self.dense.with_(f"as = ffn{number}"), m)
            added = [r, f] if number == 1 else [r, f, "%e"]
            x = body.let(f"h{number}", f"stg.add({', '.join(added)})")
        return x


@reads(
    "LongCat-Flash",
    "longcat_flash",
    features="two attentions and dense blocks beside experts, experts that return their input",
)
def read_longcat_flash(config: Config) -> ModelText:
    """LongCat-Flash (arXiv 2509.01322)."""
    config.only("attention_method", "MLA")
    config.only("zero_expert_type", "identity")
    config.only("router_bias", False)
    config.only("norm_topk_prob", False)
    config.skip("mla_scale_q_lora", "mla_scale_kv_lora")
    if config.has("num_layers"):
        config.drop("num_hidden_layers")  # twice as many
    sizes = Sizes(6144, 12288, 28, 64, 131072, 131072, base=10000000)
    model, mixer = latent_of(config, sizes, LatentSizes(values=128))
    text = model.text
    text.notes.append("Scales of latents are part of the weights of their norms, as in vLLM.")
    keys = ("n_routed_experts", "moe_topk", "expert_ffn_hidden_size")
    experts = model.experts(count=512, top=12, inner=2048, normalize=False, keys=keys)
    read_size(config, text, "Z", "zero_expert_num", default=256)
    route = [*experts.route, "wide_logits", *model.weights(6)]
    mixture = text.use("zero_experts", "D M E T Z", f"route = ({', '.join(route)})")
    dense = FeedForward(model.activation()).write(text)
    layer = ShortcutLayer(mixer.write(text), dense, mixture)
    order = ["layers"] * model.count
    return Decoder(tied=model.tied()).write(text, {"layers": layer}, order)
