"""The gradient of every op that has one, against central differences of its numeric reference.

Each case is a small function of parameters; its results are weighted and summed to a loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from stagec.ir.module import Module
from stagec.ir.opdef import Array, OpDef
from tests.support import DISTINCT, compiled, inputs_of, parse, registry, run_numeric, run_passes

pytestmark = DISTINCT

LETTERS = "abcdefg"
STEP = 1e-6


@dataclass(frozen=True)
class Case:
    """A function body: its arguments, the lines that compute `%y`, and the shape of `%y`."""

    args: str
    lines: str
    shape: str
    dtype: str = "f32"

    @property
    def text(self) -> str:
        """The module: the loss is the sum of `%y` weighted by the argument `%c`."""
        if not self.shape:
            weight, loss = "", "%loss = stg.scale[by = 3](%y)"
        else:
            letters = LETTERS[: self.shape.count(",") + 1]
            weight = f", %c: {self.dtype}[{self.shape}]"
            loss = f'%loss = stg.einsum["{letters},{letters}->"](%y, %c)'
        return (
            "stg.module @m {\n"
            "  stg.symbols[B = 2, S = 3, D = 4, E = 2, G = 2, H = 4, V = 5, N = 3]\n"
            f"  stg.func @f({self.args}{weight}) {{\n{self.lines}\n    {loss}\n"
            "    stg.return(%loss)\n  }\n}\n"
        )


X = "%x: f32[B, S, D | param]"
QKV = "%q: f32[B, S, H, E | param], %k: f32[B, S, G, E | param], %v: f32[B, S, G, E | param]"
QPACKED = "%q: f32[B, S, H, E | param], %kv: f32[B, 2, S, G, E | param]"
SHARED_KEY = "%q: f32[B, V, H, E | param], %k: f32[B, V, E | param], %s: f32[H | param]"
LAYERS = f"{X}, %W: f32[N, D, D | param], %G: f32[N, D | param]"

SSM = "%dt: f32[B, S, H | param], %A: f32[H | param], %sk: f32[H | param], %bias: f32[H | param]"

CASES = {
    "causal_conv": Case(
        f"{X}, %w: f32[D, N | param], %b: f32[D | param]",
        "%y = stg.causal_conv(%x, %w, %b)",
        "B, S, D",
    ),
    "causal_conv-silu": Case(
        f"{X}, %w: f32[D, N | param], %b: f32[D | param]",
        "%y = stg.causal_conv[silu](%x, %w, %b)",
        "B, S, D",
    ),
    "causal_conv-heads": Case(
        "%x: f32[B, S, H, E | param], %w: f32[H, E, 2 | param]",
        "%y = stg.causal_conv[silu](%x, %w)",
        "B, S, H, E",
    ),
    "selective_scan": Case(
        f"{X}, %dt: f32[B, S, D | param], %A: f32[D, E | param], %b: f32[B, S, E | param], "
        "%c0: f32[B, S, E | param], %sk: f32[D | param], %bias: f32[D | param]",
        "%y = stg.selective_scan(%x, %dt, %A, %b, %c0, %sk, %bias)",
        "B, S, D",
    ),
    "ssd": Case(
        f"%x: f32[B, S, H, E | param], {SSM}, %b: f32[B, S, N | param], %c0: f32[B, S, N | param]",
        "%y = stg.ssd[chunk = 2](%x, %dt, %A, %b, %c0, %sk, %bias)",
        "B, S, H, E",
    ),
    "ssd-groups": Case(
        f"%x: f32[B, S, H, E | param], {SSM}, %b: f32[B, S, G, N | param], "
        "%c0: f32[B, S, G, N | param]",
        "%y = stg.ssd[chunk = 2](%x, %dt, %A, %b, %c0, %sk, %bias)",
        "B, S, H, E",
    ),
    **{
        f"linear_attention-{d.count(',')}": Case(
            f"%q: f32[B, S, H, E | param], %k: f32[B, S, H, E | param], "
            f"%v: f32[B, S, H, N | param], %d: f32[{d} | param]",
            "%y = stg.linear_attention[chunk = 2](%q, %k, %v, %d)",
            "B, S, H, N",
        )
        for d in ("H", "B, S, H", "B, S, H, E")
    },
    **{
        f"gated_delta_rule{'-keys' if key else ''}{'-double' if more else ''}": Case(
            "%q: f32[B, S, G, E | param], %k: f32[B, S, G, E | param], "
            f"%v: f32[B, S, H, N | param], %a: f32[B, S, H{key} | param], "
            f"%b: f32[B, S, H | param], %A: f32[H | param], %bias: f32[H{key} | param]",
            f"%y = stg.gated_delta_rule[chunk = 2{more}](%q, %k, %v, %a, %b, %A, %bias)",
            "B, S, H, N",
        )
        for key, more in (("", ""), (", E", ""), ("", ", double"))
    },
    "reorder": Case(X, "%y0 = stg.reorder(%x)\n    %y = stg.mul(%x, %y0)", "B, S, D"),
    "shift": Case(X, "%y0 = stg.shift(%x)\n    %y = stg.mul(%x, %y0)", "B, S, D"),
    "wkv6-constant": Case(
        ", ".join(f"%{n}: f32[B, S, H, E | param]" for n in ("r", "k"))
        + ", %w: f32[H, E | param], %v: f32[B, S, H, N | param], %now: f32[H, E | param]",
        "%y = stg.wkv6(%r, %w, %k, %v, %now)",
        "B, S, H, N",
    ),
    "wkv6": Case(
        ", ".join(f"%{n}: f32[B, S, H, E | param]" for n in ("r", "w", "k"))
        + ", %v: f32[B, S, H, N | param], %now: f32[H, E | param]",
        "%y = stg.wkv6(%r, %w, %k, %v, %now)",
        "B, S, H, N",
    ),
    "rg_lru": Case(
        ", ".join(f"%{n}: f32[B, S, H, E | param]" for n in "xri") + ", %a: f32[H, E | param]",
        "%y = stg.rg_lru(%x, %r, %i, %a)",
        "B, S, H, E",
    ),
    "wkv7": Case(
        ", ".join(f"%{n}: f32[B, S, H, E | param]" for n in ("r", "w", "k", "v", "kappa", "a")),
        "%y = stg.wkv7(%r, %w, %k, %v, %kappa, %a)",
        "B, S, H, E",
    ),
    "einsum": Case(
        "%x: f32[B, S | param], %w: f32[S, D | param]",
        '%y = stg.einsum["bs,sd->bd"](%x, %w)',
        "B, D",
    ),
    "einsum-batched": Case(
        "%x: f32[B, S, D | param], %w: f32[B, D, E | param]",
        '%y = stg.einsum["bsd,bde->ebs"](%x, %w)',
        "E, B, S",
    ),
    "einsum-outer": Case(
        "%x: f32[B | param], %w: f32[S | param]", '%y = stg.einsum["b,s->sb"](%x, %w)', "S, B"
    ),
    "einsum-twice": Case(X, '%y = stg.einsum["bsd,btd->bst"](%x, %x)', "B, S, S"),
    "add": Case(f"{X}, %z: f32[B, S, D | param]", "%y = stg.add(%x, %z, %x)", "B, S, D"),
    "add-broadcast": Case(
        f"{X}, %z: f32[D | param], %t: f32[S, D | param]",
        '%y = stg.add["bsd,d,sd->bsd"](%x, %z, %t)',
        "B, S, D",
    ),
    "einsum-summed-alone": Case(
        "%x: f32[B, S | param], %w: f32[S, D | param]", '%y = stg.einsum["bs,sd->d"](%x, %w)', "D"
    ),
    "sum": Case(X, '%y = stg.sum["bsd->d"](%x)', "D"),
    "broadcast": Case(
        "%x: f32[D | param]", '%y = stg.broadcast["d->bsd", sizes = (B, S)](%x)', "B, S, D"
    ),
    "mul": Case(f"{X}, %z: f32[B, S, D | param]", "%y = stg.mul(%x, %z)", "B, S, D"),
    "mul-square": Case(X, "%y = stg.mul(%x, %x)", "B, S, D"),
    "scale": Case(X, "%y = stg.scale[by = 3/7](%x)", "B, S, D"),
    "cast": Case("%x: bf16[B, D | param]", "%y = stg.cast[f32](%x)", "B, D"),
    "quantize": Case(
        "%x: bf16[B, D | param]",
        "%q = stg.quantize[f8e4m3](%x)\n    %y = stg.cast[f32](%q)",
        "B, D",
    ),
    "repeat_heads": Case(
        "%x: f32[B, S, G, E | param]", "%y = stg.repeat_heads[heads = H](%x)", "B, S, H, E"
    ),
    "expand_heads": Case(
        "%x: f32[B, S, G, E | param]", "%y = stg.expand_heads[heads = H](%x)", "B, S, H, E"
    ),
    "gelu": Case(X, "%y = stg.gelu(%x)", "B, S, D"),
    "silu": Case(X, "%y = stg.silu(%x)", "B, S, D"),
    "swiglu": Case("%x: f32[B, 2, S, D | param]", "%y = stg.swiglu(%x)", "B, S, D"),
    "gelu-erf": Case(X, "%y = stg.gelu[form = erf](%x)", "B, S, D"),
    "gelu-quick": Case(X, "%y = stg.gelu[form = quick](%x)", "B, S, D"),
    "relu-squared": Case(X, "%r = stg.relu(%x)\n    %y = stg.mul(%r, %r)", "B, S, D"),
    "expert_bias": Case(
        "%x: f32[E, B, S, D | param], %b: f32[E, D | param]",
        "%y0, %sums = stg.expert_bias(%x, %b)\n    %y = stg.mul(%x, %y0)",
        "E, B, S, D",
    ),
    "clamp": Case(X, "%y = stg.clamp[least = -1/2, most = 1/4](%x)", "B, S, D"),
    "clamp-above": Case(X, "%y = stg.clamp[most = 1/4](%x)", "B, S, D"),
    "sigmoid": Case(X, "%y = stg.sigmoid(%x)", "B, S, D"),
    "soft-cap": Case(
        X,
        "%a = stg.scale[by = 1/3](%x)\n    %b = stg.tanh(%a)\n    %y = stg.scale[by = 3](%b)",
        "B, S, D",
    ),
    "softplus": Case(X, "%y = stg.softplus(%x)", "B, S, D"),
    "power": Case(
        X,
        "%e = stg.exp(%x)\n    %r = stg.power[exponent = 1/2](%e)\n"
        "    %i = stg.power[exponent = -1](%e)\n    %y = stg.add(%r, %i)",
        "B, S, D",
    ),
    "exp": Case(X, "%y = stg.exp(%x)", "B, S, D"),
    "swiglu-clamped": Case(
        "%x: f32[B, 2, S, D | param]",
        "%y = stg.swiglu[slope = 851/500, limit = 1/2, shift = 1](%x)",
        "B, S, D",
    ),
    "geglu": Case("%x: f32[B, 2, S, D | param]", "%y = stg.geglu(%x)", "B, S, D"),
    "geglu-erf": Case("%x: f32[B, 2, S, D | param]", "%y = stg.geglu[form = erf](%x)", "B, S, D"),
    "scale-sqrt": Case(X, "%y = stg.scale[by = 1/S, sqrt = D, rsqrt = E](%x)", "B, S, D"),
    "dropout": Case(X, "%y = stg.dropout[p = 1/3, seed = 5](%x)", "B, S, D"),
    "rmsnorm": Case(f"{X}, %g: f32[D | param]", "%y = stg.rmsnorm(%x, %g)", "B, S, D"),
    "layernorm": Case(
        f"{X}, %g: f32[D | param], %b: f32[D | param]", "%y = stg.layernorm(%x, %g, %b)", "B, S, D"
    ),
    "rmsnorm-zero-centered": Case(
        f"{X}, %g: f32[D | param]", "%y = stg.rmsnorm[zero_centered](%x, %g)", "B, S, D"
    ),
    "rmsnorm-without-scale": Case(X, "%y = stg.rmsnorm[affine = none, eps = 1/100](%x)", "B, S, D"),
    "rmsnorm-over-heads": Case(
        "%x: f32[B, S, G, E | param], %g: f32[G*E | param]",
        '%a = stg.reshape["bsge->bs(ge)"](%x)\n    %n = stg.rmsnorm(%a, %g)\n'
        '    %y = stg.reshape["bs(ge)->bsge", factors = e, sizes = E](%n)',
        "B, S, G, E",
    ),
    "layernorm-without-bias": Case(
        f"{X}, %g: f32[D | param]", "%y = stg.layernorm[affine = scale](%x, %g)", "B, S, D"
    ),
    "layernorm-scaled-by-head": Case(
        "%x: f32[B, S, G, E | param], %g: f32[G, E | param]",
        "%y = stg.layernorm[affine = scale](%x, %g)",
        "B, S, G, E",
    ),
    "rmsnorm-scaled-by-head": Case(
        "%x: f32[B, S, G, E | param], %g: f32[G, E | param]",
        "%y = stg.rmsnorm[zero_centered](%x, %g)",
        "B, S, G, E",
    ),
    "layernorm-without-scale": Case(X, "%y = stg.layernorm[affine = none](%x)", "B, S, D"),
    "modulated": Case(
        f"{X}, %t: f32[B, D | param], %w: f32[D, 2, D | param]",
        "%n = stg.layernorm[affine = none](%x)\n    %a = stg.silu(%t)\n"
        '    %m = stg.einsum["bd,dze->bze"](%a, %w)\n'
        "    %shift, %scale = stg.unbind[dim = 1, count = 2](%m)\n"
        '    %s = stg.einsum["bsd,bd->bsd"](%n, %scale)\n'
        '    %y = stg.add["bsd,bsd,bd->bsd"](%n, %s, %shift)',
        "B, S, D",
    ),
    "slice": Case(X, "%y = stg.slice[dim = 2, start = 1, size = E](%x)", "B, S, E"),
    "pad": Case(X, "%y = stg.pad[dim = 1, start = 2, size = S + 3](%x)", "B, S + 3, D"),
    "take": Case(X, "%y = stg.take[at = 1](%x)", "B, D"),
    "take-where": Case(f"{X}, %t: i32[B]", "%y = stg.take(%x, %t)", "B, D"),
    "patches": Case(
        "%x: f32[B, S, H*G, H*G | param], %w: f32[S, G, G, D | param]",
        '%p = stg.reshape["bc(hp)(wq)->bchpwq", factors = (p, q), sizes = (G, G)](%x)\n'
        '    %y = stg.einsum["bchpwq,cpqd->bhwd"](%p, %w)',
        "B, H, H, D",
    ),
    "conv1d": Case(
        "%x: f32[B, V, E | param], %w: f32[3, E, D | param]",
        "%y = stg.conv1d[pad = 1](%x, %w)",
        "B, V, D",
    ),
    "conv1d-strided": Case(
        "%x: f32[B, 2*S, E | param], %w: f32[3, E, D | param]",
        "%y = stg.conv1d[stride = 2, pad = 1](%x, %w)",
        "B, S, D",
    ),
    "conv1d-within": Case(
        "%x: f32[B, 2*S + 3, E | param], %w: f32[5, E, D | param]",
        "%y = stg.conv1d[stride = 2](%x, %w)",
        "B, S, D",
    ),
    "conv1d-groups": Case(
        "%x: f32[B, S, G, E | param], %w: f32[4, G, E, D | param]",
        "%y = stg.conv1d[pad = 2](%x, %w)",
        "B, S + 1, G, D",
    ),
    "conv2d": Case(
        "%x: f32[B, 4, S, E | param], %w: f32[3, 3, E, D | param]",
        "%y = stg.conv2d[pad = 1](%x, %w)",
        "B, 4, S, D",
    ),
    "conv2d-strided": Case(
        "%x: f32[B, 4, 2*S, E | param], %w: f32[3, 3, E, D | param]",
        "%y = stg.conv2d[stride = 2, pad = 1](%x, %w)",
        "B, 2, S, D",
    ),
    "conv2d-depth-wise": Case(
        "%x: f32[B, 4, S, D, 1 | param], %w: f32[3, 5, D, 1, 1 | param]",
        "%y = stg.conv2d[pad = 2](%x, %w)",
        "B, 6, S, D, 1",
    ),
    "mse": Case(f"{X}, %z: f32[B, S, D]", "%y = stg.mse[mean = B*S*D](%x, %z)", ""),
    "sinusoid": Case(
        "%x: f32[B, D | param], %t: f32[B]",
        "%e = stg.sinusoid[size = D, base = 50](%t)\n    %y = stg.mul(%x, %e)",
        "B, D",
    ),
    "contrastive": Case(
        "%x: f32[H, D | param], %z: f32[H, D | param], %s: f32[| param], %t: i32[H]",
        "%u = stg.rmsnorm[affine = none, eps = 0](%x)\n"
        "    %v = stg.rmsnorm[affine = none, eps = 0](%z)\n"
        '    %d = stg.einsum["id,jd->ij"](%u, %v)\n    %n = stg.scale[by = 1/D](%d)\n'
        '    %e = stg.exp(%s)\n    %l = stg.einsum["ij,->ij"](%n, %e)\n'
        '    %m = stg.permute["ij->ji"](%l)\n'
        "    %p = stg.cross_entropy[mean = H](%l, %t)\n"
        "    %q = stg.cross_entropy[mean = H](%m, %t)\n    %y = stg.add(%p, %q)",
        "",
    ),
    "embedding_bag": Case(
        "%x: f32[V, D | param], %t: i32[B, S]", "%y = stg.embedding_bag(%x, %t)", "B, D"
    ),
    "embedding_bag-tables": Case(
        "%x: f32[N, V, D | param], %t: i32[B, N, E]", "%y = stg.embedding_bag(%x, %t)", "B, N, D"
    ),
    "embedding_bag-bags": Case(
        "%x: f32[V, D | param], %t: i32[B, 6]",
        "%y = stg.embedding_bag[bags = (1, 3, 2)](%x, %t)",
        "B, 3, D",
    ),
    "triangle": Case(
        X, '%g = stg.einsum["bsd,btd->bst"](%x, %x)\n    %y = stg.triangle(%g)', "B, S*(S - 1)/2"
    ),
    "softmax": Case("%x: f32[B, S, S | param]", "%y = stg.softmax(%x)", "B, S, S"),
    "sink_softmax": Case(
        "%x: f32[B, H, S, S | param], %s: f32[H | param]",
        "%y = stg.sink_softmax[causal, rsqrt = D](%x, %s)",
        "B, H, S, S",
    ),
    "softmax-causal": Case(
        "%x: f32[B, S, S | param]", "%y = stg.softmax[causal, rsqrt = D](%x)", "B, S, S"
    ),
    "attention": Case(QKV, "%y = stg.attention(%q, %k, %v)", "B, S, H, E"),
    "attention-causal": Case(QKV, "%y = stg.attention[causal](%q, %k, %v)", "B, S, H, E"),
    "attention-packed": Case(QPACKED, "%y = stg.attention[causal](%q, %kv)", "B, S, H, E"),
    "attention-own-value-size": Case(
        "%q: f32[B, S, H, E | param], %k: f32[B, S, G, E | param], %v: f32[B, S, G, N | param]",
        "%y = stg.attention[causal](%q, %k, %v)",
        "B, S, H, N",
    ),
    "attention-window": Case(
        QKV, "%y = stg.attention[causal, window = 2](%q, %k, %v)", "B, S, H, E"
    ),
    "attention-window-both-sides": Case(
        QKV, "%y = stg.attention[window = 2](%q, %k, %v)", "B, S, H, E"
    ),
    "attention-chunk": Case(QKV, "%y = stg.attention[causal, chunk = 2](%q, %k, %v)", "B, S, H, E"),
    "attention-prefix": Case(
        QKV, "%y = stg.attention[causal, prefix = 2](%q, %k, %v)", "B, S, H, E"
    ),
    "merge-rows": Case(
        f"{X}, %rows: f32[B, V, D | param], %where: i32[B, S]",
        "%y = stg.merge_rows(%x, %rows, %where)",
        "B, S, D",
    ),
    "attention-documents": Case(
        QKV, "%y = stg.attention[causal, documents = (2, S - 2)](%q, %k, %v)", "B, S, H, E"
    ),
    "attention-softcap": Case(
        QKV, "%y = stg.attention[causal, softcap = 1/2, rsqrt = 1/4](%q, %k, %v)", "B, S, H, E"
    ),
    "attention-alibi": Case(QKV, "%y = stg.attention[causal, alibi](%q, %k, %v)", "B, S, H, E"),
    "attention-cross": Case(
        "%q: f32[B, S, H, E | param], %k: f32[B, V, G, E | param], %v: f32[B, V, G, E | param]",
        "%y = stg.attention(%q, %k, %v)",
        "B, S, H, E",
    ),
    "attention-sinks": Case(
        f"{QPACKED}, %sinks: f32[H | param]",
        "%y = stg.attention[causal, window = 2, sinks](%q, %kv, %sinks)",
        "B, S, H, E",
    ),
    "attention-bias": Case(
        f"{QKV}, %sinks: f32[H | param], %bias: f32[H, S, S | param]",
        "%y = stg.attention[sinks, bias, softcap = 3](%q, %k, %v, %sinks, %bias)",
        "B, S, H, E",
    ),
    "attention-selected": Case(
        f"{QKV}, %keys: i32[B, S, G]",
        "%y = stg.attention[causal, selected](%q, %k, %v, %keys)",
        "B, S, H, E",
    ),
    "rope-first": Case(
        "%x: f32[B, S, H, D | param]", "%y = stg.rope[base = 50, first = E](%x)", "B, S, H, D"
    ),
    "rope-interleaved": Case(
        "%x: f32[B, S, H, D | param]", "%y = stg.rope[base = 50, interleaved](%x)", "B, S, H, D"
    ),
    "rope-yarn": Case(
        "%x: f32[B, S, H, D | param]",
        "%y = stg.rope[base = 50, scaling = yarn, factor = 4, original = 64](%x)",
        "B, S, H, D",
    ),
    "rope-sections": Case(
        "%x: f32[B, S, H, D | param], %p: i32[B, 2, S]",
        "%y = stg.rope[base = 50, sections = (1, 1), restart](%x, %p)",
        "B, S, H, D",
    ),
    "temperature": Case(
        "%x: f32[B, S, H, D | param]", "%y = stg.temperature[floor = 2](%x)", "B, S, H, D"
    ),
    "relative-bias": Case(
        "%x: f32[V, H | param]",
        "%y = stg.relative_bias[sizes = (S, H), most = 3, causal](%x)",
        "H, S, H",
    ),
    "relative-bias-both-ways": Case(
        "%x: f32[H, G | param]", "%y = stg.relative_bias[sizes = (S, S), most = 3](%x)", "G, S, S"
    ),
    "by-distance": Case(
        "%x: f32[B, S, H, V | param]", "%y = stg.by_distance[size = S](%x)", "B, H, S, S"
    ),
    "by-distance-of-keys": Case(
        "%x: f32[B, S, H, 8 | param]",
        "%y = stg.by_distance[size = V, keys, most = 9](%x)",
        "B, H, V, S",
    ),
    "index-scores": Case(
        "%q: f32[B, S, H, E | param], %k: f32[B, V, E | param], %w: f32[B, S, H | param]",
        "%y = stg.index_scores(%q, %k, %w)",
        "B, S, V",
    ),
    **{
        f"compress{'-overlap' if wide else ''}": Case(
            f"%k: f32[B, 5, {wide}D | param], %g: f32[B, 5, {wide}D | param], "
            f"%b: f32[2, {wide}D | param]",
            f"%y = stg.compress[rate = 2{', overlap' if wide else ''}](%k, %g, %b)",
            "B, 2, D",
        )
        for wide in ("", "2*")
    },
    "compressed_attention": Case(
        SHARED_KEY, "%y = stg.compressed_attention[window = 2](%q, %k, %s)", "B, V, H, E"
    ),
    "compressed_attention-rows": Case(
        f"{SHARED_KEY}, %c0: f32[B, 2, E | param]",
        "%y = stg.compressed_attention[window = 2, rate = 2](%q, %k, %s, %c0)",
        "B, V, H, E",
    ),
    "compressed_attention-selected": Case(
        f"{SHARED_KEY}, %c0: f32[B, 2, E | param], %l: f32[B, V, 2]",
        "%t, %i = stg.topk[k = 1](%l)\n"
        "    %y = stg.compressed_attention[window = 2, rate = 2, selected](%q, %k, %s, %c0, %i)",
        "B, V, H, E",
    ),
    "stream_weights-read": Case(
        "%l: f32[B, S, D | param], %s: f32[1 | param], %b: f32[D | param]",
        "%y = stg.stream_weights[streams = D](%l, %s, %b)",
        "B, S, D",
    ),
    "stream_weights": Case(
        "%l: f32[B, S, 8 | param], %s: f32[3 | param], %b: f32[8 | param]",
        "%r, %w, %m = stg.stream_weights[streams = 2, iterations = 3](%l, %s, %b)\n"
        '    %y0 = stg.einsum["bsn,bsnm->bsnm"](%w, %m)\n'
        '    %y = stg.einsum["bsm,bsnm->bsnm"](%r, %y0)',
        "B, S, 2, 2",
    ),
    "attend_depth": Case(
        "%x: f32[B, S, D | param], %n: f32[D | param], %q: f32[D | param], "
        "%e: f32[B, S, D | param], %f: f32[B, S, D | param]",
        "%y = stg.attend_depth(%x, %n, %q, %e, %f)",
        "B, S, D",
    ),
    "swiglu-soft": Case(
        "%x: f32[B, 2, S, D | param]", "%y = stg.swiglu[soft = 2, soft_up = 3](%x)", "B, S, D"
    ),
    "index-scores-without-weights": Case(
        "%q: f32[B, S, H, E | param], %k: f32[B, V, E | param]",
        "%y = stg.index_scores(%q, %k)",
        "B, S, V",
    ),
    "rope-last": Case(
        "%x: f32[B, S, H, D | param]", "%y = stg.rope[base = 50, last = E](%x)", "B, S, H, D"
    ),
    "concat": Case(f"{X}, %z: f32[B, S, E | param]", "%y = stg.concat(%x, %z)", "B, S, D + E"),
    "concat-first": Case(
        f"{X}, %z: f32[E, S, D | param]", "%y = stg.concat[dim = 0](%x, %z)", "B + E, S, D"
    ),
    "cut-middle": Case(
        "%x: f32[B, S + E, D | param]",
        "%p, %q = stg.cut[dim = 1, sizes = (S, E)](%x)\n"
        '    %y = stg.einsum["bsd,bed->bse"](%p, %q)',
        "B, S, E",
    ),
    "cut": Case(
        "%x: f32[B, S, D + E | param]",
        '%p, %q = stg.cut[sizes = (D, E)](%x)\n    %y = stg.einsum["bsd,bse->bde"](%p, %q)',
        "B, D, E",
    ),
    "rope": Case("%x: f32[B, S, H, D | param]", "%y = stg.rope[base = 50](%x)", "B, S, H, D"),
    "rope-inverse": Case("%x: f32[B, S, D | param]", "%y = stg.rope[inverse](%x)", "B, S, D"),
    "embedding": Case(
        "%x: f32[V, D | param], %t: i32[B, S]", "%y = stg.embedding(%x, %t)", "B, S, D"
    ),
    "cross_entropy": Case(
        "%x: f32[B, S, V | param], %t: i32[B, S]", "%y = stg.cross_entropy[mean = B*S](%x, %t)", ""
    ),
    "saved_cross_entropy": Case(
        "%x: f32[B, S, V | param], %t: i32[B, S]",
        "%y = stg.saved_cross_entropy[mean = B*S, chunks = 3](%x, %t)",
        "",
    ),
    "linear_cross_entropy": Case(
        "%x: f32[B, S, D | param], %w: f32[D, V | param], %t: i32[B, S]",
        "%y = stg.linear_cross_entropy[mean = B*S, chunks = 3](%x, %w, %t)",
        "",
    ),
    "linear_cross_entropy-rows": Case(
        "%x: f32[B, S, D | param], %w: f32[V, D | param], %t: i32[B, S]",
        "%y = stg.linear_cross_entropy[rows, mean = B*S, chunks = 3](%x, %w, %t)",
        "",
    ),
    "linear_cross_entropy-frozen": Case(
        "%x: f32[B, S, D | param], %w: f32[D, V], %t: i32[B, S]",
        "%y = stg.linear_cross_entropy[frozen, mean = B*S, chunks = 3](%x, %w, %t)",
        "",
    ),
    "scaled_einsum": Case(
        "%x: f32[B, S, D | param], %w: i4[D, E], %f: f32[D/2, E]",
        '%y = stg.scaled_einsum["bs(dw),(dw)e,de->bse", table = nf4](%x, %w, %f)',
        "B, S, E",
    ),
    "log_softmax": Case(
        "%x: f32[B, S, V | param], %z: f32[B, S, V]",
        "%p = stg.log_softmax(%x)\n    %y = stg.mul(%p, %z)",
        "B, S, V",
    ),
    "nll_loss": Case(
        "%x: f32[B, S, V | param], %t: i32[B, S]", "%y = stg.nll_loss[mean = B*S](%x, %t)", ""
    ),
    "reshape": Case(
        "%x: f32[B, S*D | param]",
        '%y = stg.reshape["a(bc)->abc", factors = b, sizes = S](%x)',
        "B, S, D",
    ),
    "reshape-join": Case(X, '%y = stg.reshape["abc->a(bc)"](%x)', "B, S*D"),
    "permute": Case(X, '%y = stg.permute["bsd->dbs"](%x)', "D, B, S"),
    "max": Case(X, '%y = stg.max["bsd->sb"](%x)', "S, B"),
    "max-cast": Case("%x: bf16[B, S, D | param]", '%y = stg.max["bsd->d", to = f32](%x)', "D"),
    "argmax": Case(
        "%x: f32[B, S, D], %g: f32[D, E | param]",
        "%i = stg.argmax(%x)\n    %y = stg.embedding(%g, %i)",
        "B, S, E",
    ),
    "topk": Case(X, "%v, %i = stg.topk[k = E](%x)\n    %y = stg.silu(%v)", "B, S, E"),
    "cumsum": Case(X, "%y = stg.cumsum[dim = 1](%x)", "B, S, D"),
    "cumsum-reverse": Case(X, "%y = stg.cumsum[dim = 2, reverse, exclusive](%x)", "B, S, D"),
    "part_of": Case(
        "%x: f32[B, D | param], %z: f32[B, D | param]",
        "%p, %q = stg.part_of(%x, %z)\n    %y = stg.mul(%p, %q)",
        "B, D",
    ),
    "unbind": Case(
        "%x: f32[B, 3, D | param]",
        "%p, %q, %r = stg.unbind[dim = 1, count = 3](%x)\n"
        "    %a = stg.mul(%p, %q)\n    %y = stg.add(%a, %r)",
        "B, D",
    ),
    "stack": Case(
        "%x: f32[B, D | param], %z: f32[B, D | param]",
        "%s = stg.pack[dim = 1](%x, %z)\n    %y = stg.mul(%s, %s)",
        "B, 2, D",
    ),
    "place": Case(X, "%y = stg.sharding_constraint(%x) : f32[B, S, D | rep]", "B, S, D"),
    "route": Case("%x: f32[B, S, H | param]", "%y, %e = stg.route[k = G](%x)", "B, S, G"),
    "route-normalized": Case(
        "%x: f32[B, S, H | param], %u: f32[H]",
        "%y, %e = stg.route[k = N, normalize, scale = 5/2, groups = 2, top_groups = 1](%x, %u)",
        "B, S, N",
    ),
    **{
        f"route-{scores}": Case(
            "%x: f32[B, S, H | param]",
            f"%y, %e = stg.route[k = G, scores = {scores}, normalize](%x)",
            "B, S, G",
        )
        for scores in ("sigmoid", "sqrtsoftplus")
    },
    "zero_weights": Case(
        "%w: f32[B, S, N | param], %x: f32[B, S, 2*G]",
        "%t, %i = stg.topk[k = N](%x)\n    %y = stg.zero_weights[first = G](%w, %i)",
        "B, S",
    ),
    "dispatch-slots": Case(
        "%x: f32[B, H, D | param], %r: f32[B, H, 2*G | param]",
        "%w, %t = stg.route[k = 2](%r)\n"
        "    %y0 = stg.dispatch[count = G, slots = 2*G](%x, %t)\n"
        "    %y = stg.combine(%y0, %t, %w)",
        "B, H, D",
    ),
    "dispatch": Case(
        "%x: f32[B, H, D | param], %t: i32[B, H, 1]",
        "%y = stg.dispatch[count = G, capacity = 2](%x, %t)",
        "G, B, 2*H/G, D",
    ),
    "dispatch-dropped": Case(
        "%x: f32[B, H, D | param], %t: i32[B, H, 1]",
        "%y = stg.dispatch[count = G](%x, %t)",
        "G, B, H/G, D",
    ),
    "dispatch_weights": Case(
        "%x: f32[B, H, D | param], %w: f32[B, H, 1 | param], %t: i32[B, H, 1]",
        "%s = stg.dispatch[count = G](%x, %t)\n"
        "    %r = stg.dispatch_weights[count = G](%w, %t)\n"
        '    %y = stg.einsum["gbcd,gbc->gbcd"](%s, %r)',
        "G, B, H/G, D",
    ),
    "sort_rows": Case(
        "%x: f32[G, B, H, D | param]",
        "%s = stg.sort_rows(%x)\n    %y = stg.mul(%s, %x)",
        "G, B, H, D",
    ),
    "combine": Case(
        "%x: f32[G, B, 3*S, D | param], %w: f32[B, S, N | param], %t: i32[B, S, N]",
        "%y = stg.combine(%x, %t, %w)",
        "B, S, D",
    ),
    "combine-dropped": Case(
        "%x: f32[G, B, 1, D | param], %w: f32[B, H, 1 | param], %t: i32[B, H, 1]",
        "%y = stg.combine(%x, %t, %w)",
        "B, H, D",
    ),
    "repeat": Case(
        LAYERS,
        "%y = stg.repeat[count = N, carry = 1] (%h = %x, %w = %W, %g = %G) {\n"
        '      %a = stg.einsum["bsd,de->bse"](%h, %w)\n      %b = stg.rmsnorm(%a, %g)\n'
        "      %e = stg.silu(%b)\n      %o = stg.add(%h, %e)\n      stg.yield(%o)\n    }",
        "B, S, D",
    ),
    "repeat-reversed": Case(
        LAYERS,
        "%y = stg.repeat[count = N, carry = 1, reverse] (%h = %x, %w = %W, %g = %G) {\n"
        '      %a = stg.einsum["bsd,de->bse"](%h, %w)\n      %o = stg.rmsnorm(%a, %g)\n'
        "      stg.yield(%o)\n    }",
        "B, S, D",
    ),
    "repeat-two-carried": Case(
        f"{LAYERS}, %z: f32[B, S, D | param]",
        "%p, %q = stg.repeat[count = N, carry = 2] (%h = %x, %k = %z, %w = %W, %g = %G) {\n"
        '      %a = stg.einsum["bsd,de->bse"](%k, %w)\n      %b = stg.rmsnorm(%h, %g)\n'
        "      %o = stg.mul(%h, %a)\n      stg.yield(%o, %b)\n    }\n    %y = stg.add(%p, %q)",
        "B, S, D",
    ),
    "repeat-dropout": Case(
        f"{X}, %G: f32[N, D | param]",
        "%y = stg.repeat[count = N, carry = 1] (%h = %x, %g = %G) {\n"
        "      %a = stg.dropout[p = 1/2, seed = 9](%h)\n      %o = stg.rmsnorm(%a, %g)\n"
        "      stg.yield(%o)\n    }",
        "B, S, D",
    ),
    "used-twice": Case(
        LAYERS,
        "%n = stg.silu(%x)\n    %y0 = stg.repeat[count = N, carry = 1] (%h = %n, %w = %W) {\n"
        '      %o = stg.einsum["bsd,de->bse"](%h, %w)\n      stg.yield(%o)\n    }\n'
        "    %y1 = stg.repeat[count = N, carry = 1] (%h1 = %n, %w1 = %W, %g1 = %G) {\n"
        '      %p = stg.einsum["bsd,de->bse"](%h1, %w1)\n      %o1 = stg.rmsnorm(%p, %g1)\n'
        "      stg.yield(%o1)\n    }\n    %y = stg.mul(%y0, %y1)",
        "B, S, D",
    ),
}


#: How often all elements of a parameter move at once, each by an amount of its own: a wrong
#: element of the gradient changes what the loss gains.
DIRECTIONS = 2


@dataclass(frozen=True)
class Differentiated:
    """A case, its inputs, and the gradient of each parameter as differentiated."""

    forward: Module
    inputs: Mapping[str, Array]
    derived: Mapping[str, Array]

    @classmethod
    def of(cls, case: Case) -> Differentiated:
        """By the pass that differentiates."""
        forward = compiled(case.text, "infer-shapes")
        inputs = inputs_of(forward, seed=3)
        step = run_passes(parse(case.text), "infer-shapes,differentiate")
        names = [p.name for p in forward.parameters()]
        derived = dict(zip(names, run_numeric(step, inputs)[1:], strict=True))
        return cls(forward, inputs, derived)

    def gained(self, name: str, direction: Array) -> float:
        """What the loss gains with a parameter that moves in a direction: a central difference."""
        ends = [
            float(run_numeric(self.forward, {**self.inputs, name: self.inputs[name] + moved})[0])
            for moved in (STEP * direction, -STEP * direction)
        ]
        return (ends[0] - ends[1]) / (2 * STEP)

    def by_elements(self, name: str) -> Array:
        """The gradient of a parameter as central differences, one element at a time."""
        shape = np.shape(self.inputs[name])
        numeric = np.zeros(shape)
        for index in np.ndindex(shape):
            direction = np.zeros(shape)
            direction[index] = 1
            numeric[index] = self.gained(name, direction)
        return numeric


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_central_differences(name: str) -> None:
    case = Differentiated.of(CASES[name])
    random = np.random.default_rng(5)
    for param, derived in case.derived.items():
        gains: list[float] = []
        for _ in range(DIRECTIONS):
            direction = random.uniform(-1, 1, np.shape(case.inputs[param]))
            gains.append(case.gained(param, direction))
            message = float(np.sum(derived * direction))
            np.testing.assert_allclose(message, gains[-1], rtol=1e-6, atol=1e-7, err_msg=param)
        assert np.abs(gains).max() > 1e-3, f"{param} does not influence this loss: a weak case"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_each_element_equals_its_central_difference(name: str) -> None:
    case = Differentiated.of(CASES[name])
    for param, derived in case.derived.items():
        expected = case.by_elements(param)
        np.testing.assert_allclose(derived, expected, rtol=1e-6, atol=1e-7, err_msg=param)


#: Ends of what crosses to another pod, which has the rest of the gradient: test_parts runs both.
ENDS = {"stg.arrive", "stg.depart"}


def test_every_op_with_a_gradient_has_a_case() -> None:
    used = {op.name for case in CASES.values() for op in parse(case.text).walk()}
    differentiable = {op.name for op in registry() if type(op).grad is not OpDef.grad}
    assert differentiable - used == ENDS | {"stg.constant"}  # which has no operand


OUTER_USE = (
    "%y0 = stg.repeat[count = N, carry = 1] (%h = %x, %w = %W) {\n"
    '      %a = stg.einsum["bsd,de->bse"](%h, %w)\n      %o = stg.rmsnorm(%a, %g)\n'
    "      stg.yield(%o)\n    }\n    %y = stg.rmsnorm(%y0, %g)"
)


def test_a_value_used_inside_a_repeat_without_being_bound_is_not_forgotten() -> None:
    """It gets its whole gradient; a part of it would be silently wrong."""
    case = Case(f"{X}, %W: f32[N, D, D | param], %g: f32[D | param]", OUTER_USE, "B, S, D")
    actual = Differentiated.of(case)
    np.testing.assert_allclose(actual.derived["g"], actual.by_elements("g"), rtol=1e-6, atol=1e-7)
