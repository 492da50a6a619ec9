"""Falcon-H1: Mamba-2 and attention in parallel in each layer, with many multipliers."""

from dataclasses import dataclass, replace
from fractions import Fraction

from stagec.importers.common.decoder_model import DecoderModel, Sizes
from stagec.importers.common.state_space import PREFIXED, read_mamba2
from stagec.importers.family import reads
from stagec.importers.reading.config import Config
from stagec.importers.writing.blocks import RMS, Attention
from stagec.importers.writing.stack import ONE, Decoder, Layer, Sublayer, scaled, times
from stagec.importers.writing.text import Body, Callee, ModelText


@dataclass(frozen=True, slots=True)
class _ScaledMlp:
    """A gated feed-forward block whose gate and result are multiplied by numbers."""

    gate: Fraction
    down: Fraction
    bias: bool

    def write(self, text: ModelText) -> Callee:
        """Add the block."""
        given = ["bias"] * self.bias
        given += [f"gate_scale = ({times(self.gate)})"] if self.gate != 1 else []
        given += [f"scale = ({times(self.down)})"] if self.down != 1 else []
        return text.use("scaled_gate", "D F", *given)


@dataclass(frozen=True, slots=True)
class _Branches(Layer):
    """A layer whose branches read one norm and are multiplied by numbers before and after, followed
    by a feed-forward block, which is the only one of `parts`."""

    branches: tuple[tuple[str, Callee, Fraction, Fraction], ...] = ()

    def write(self, body: Body, x: str) -> str:
        """Append the layer on `x`, and return the name of the result."""
        n = RMS.write(body, "n", x, "norm")
        made = [x]
        for name, block, before, behind in self.branches:
            steps = [*scaled(before), f"stg.call @{block}({{}})", *scaled(behind)]
            made.append(body.steps(name, n, steps))
        r = body.let("r1", f"stg.add({', '.join(made)})")
        return body.let("r2", f"stg.add({r}, {self.parts[0].write(body, r, 2)})")


@reads("Falcon-H1", "falcon_h1", features="Mamba-2 beside attention")
def read_falcon_h1(config: Config) -> ModelText:
    """Falcon-H1 (arXiv 2507.22448): Mamba-2 and attention in parallel in each layer, with many
    multipliers."""
    sizes = Sizes(4096, 14336, 32, 32, 128000, 8192, groups=8)
    model = DecoderModel(config, sizes)
    text = model.text
    inner = config.size("mamba_d_ssm", default=1024)
    normed = model.flag("mamba_rms_norm", False)
    mamba = read_mamba2(
        config, text, PREFIXED, heads=128, state=256, norm="groups" if normed else "no", inner=inner
    )
    if text.value("H_m") * text.value("P") != inner:
        raise config.refuse("mamba_d_ssm", f"is {inner}, expected mamba_n_heads * mamba_d_head")
    if config.flag("mamba_rms_norm", default=False):
        config.only("mamba_norm_before_gate", False)
    config.skip("mamba_norm_before_gate")
    config.only("mamba_use_mlp", True)
    config.only("attn_layer_indices")
    config.skip("num_logits_to_keep", "mlp_expansion_factor")
    mamba = replace(mamba, scales=_multipliers(config, "ssm_multipliers", 5))
    by = config.ratio("key_multiplier", default=1)
    scale = times(by) if by != 1 else ""
    attention = model.biased(Attention(rope=model.rope(), key_scale=scale))
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    mlp = _ScaledMlp(gate, down, model.flag("mlp_bias"))
    config.fixed(hidden_act="silu", projectors_bias=config.flag("mamba_proj_bias", default=False))
    branches = (
        ("m", mamba.write(text), *_around(config, "ssm")),
        ("a", attention.write(text), *_around(config, "attention")),
    )
    layer = _Branches([Sublayer(mlp.write(text), "ffn")], branches=branches)
    decoder = Decoder(
        tied=model.tied(),
        embed_scale=config.ratio("embedding_multiplier", default=1),
        logit_scale=config.ratio("lm_head_multiplier", default=1),
    )
    return decoder.write(text, {"layers": layer}, ["layers"] * model.count)


def _around(config: Config, name: str) -> tuple[Fraction, Fraction]:
    """The multipliers before and after a branch."""
    before = config.ratio(f"{name}_in_multiplier", default=1)
    return before, config.ratio(f"{name}_out_multiplier", default=1)


def _multipliers(config: Config, key: str, count: int) -> tuple[Fraction, ...]:
    """A list of numbers, all 1 if the key is missing."""
    return config.ratios(key, length=count) or (ONE,) * count
