"""A model whose stack has layers of several kinds, in any order: attention, feed-forward, a
mixer without a norm, and one whose layers share a projection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stagec.ir.module import Module
from stagec.ir.order import LayerOrder
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from tests.support import parse_one, run_passes

SIZES = {"B": 8, "S": 4, "D": 8, "H": 4, "K": 2, "F": 16, "V": 16}

#: Regular, irregular, the last kind of the text first, one kind alone.
ORDERS: Sequence[str] = (
    "(2*attn, ffn, mix)*2",
    "mix, 2*attn, ffn, mix, attn, 2*ffn",
    "4*ffn, attn, 3*ffn",
    "8*attn",
)
STRATEGIES: Mapping[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sp": True},
    "ring": {"cp": 2, "cp_mode": "ring"},
    "zero-1": {"dp": 2, "zero": 1, "ddp_bucket": 300},
    "zero-1-first": {"dp": 2, "zero": 1, "overlap_param_gather": True, "microbatches": 2},
    "zero-3": {"dp": 2, "zero": 3},
    "zero-3-never": {"dp": 2, "zero": 3, "reshard_after_forward": "never"},
    "zero-3-last": {"dp": 2, "zero": 3, "reshard_after_forward": "last", "fsdp_prefetch": 2},
    "full": {"recompute": "full"},
    "every": {"recompute": "selective", "recompute_every": 2, "microbatches": 2},
    "first": {"recompute": "full", "recompute_layers": 3, "tp": 2},
    "pp": {"pp": 2, "microbatches": 4, "dp": 2, "zero": 1},
    "pp-uneven": {"pp": 4, "microbatches": 4, "stage_layers": (1, 3, 0, 4), "tp": 2, "sp": True},
    "pp-never": {"pp": 2, "microbatches": 4, "dp": 2, "zero": 3, "reshard_after_forward": "never"},
    "interleaved": {"pp": 2, "chunks": 2, "microbatches": 4, "schedule": "interleaved"},
    "looped": {"pp": 2, "chunks": 4, "microbatches": 4, "schedule": "looped-bfs"},
    "zb-h1": {"pp": 3, "microbatches": 4, "schedule": "zb-h1", "recompute": "full"},
    "zbv": {"pp": 2, "microbatches": 4, "schedule": "zbv"},
    "dualpipe": {"pp": 2, "microbatches": 4, "schedule": "dualpipe"},
    "dualpipev": {"pp": 2, "microbatches": 4, "schedule": "dualpipev", "dp": 2, "zero": 3},
}

_HEAD = """
stg.module @kinds[phase = parsed] {
  stg.symbols[B, S, D, H, K, F, V]
  stg.order @layers[ORDER]
  stg.func @train (
      %tokens: i32[B, S], %labels: i32[B, S], %embed: bf16[V, D | param], %head: bf16[D, V | param]
      ARGS) -> f32[] {
    %x = stg.embedding(%embed, %tokens)
"""
_TAIL = """
    %z = stg.einsum["bsd,dv->bsv"](LAST, %head)
    %logits = stg.cast[f32](%z)
    %loss = stg.cross_entropy[mean = B*S](%logits, %labels)
    stg.return(%loss)
  }
}
"""
#: The parameters of each kind, and its repeat.
KINDS: Mapping[str, tuple[str, str]] = {
    "attn": (
        """, %norm_a: bf16[N, D | param], %wq: bf16[N, D, H, K | param],
      %wk: bf16[N, D, H, K | param], %wo: bf16[N, H, K, D | param]""",
        """
    %y_a = stg.repeat @attn[count = N, carry = 1, order = @layers] (
        %h_a = INPUT, %g_a = %norm_a, %q_w = %wq, %k_w = %wk, %o_w = %wo) {
      %n_a = stg.rmsnorm(%h_a, %g_a)
      %q = stg.einsum["bsd,dhk->bshk"](%n_a, %q_w)
      %k = stg.einsum["bsd,dhk->bshk"](%n_a, %k_w)
      %a = stg.attention[causal](%q, %k, %k)
      %o = stg.einsum["bshk,hkd->bsd"](%a, %o_w)
      %r_a = stg.add(%h_a, %o)
      stg.yield(%r_a)
    }
""",
    ),
    "ffn": (
        """, %norm_f: bf16[N, D | param], %w_up: bf16[N, D, F | param],
      %w_down: bf16[N, F, D | param]""",
        """
    %y_f = stg.repeat @ffn[count = N, carry = 1, order = @layers] (
        %h_f = INPUT, %g_f = %norm_f, %u_w = %w_up, %d_w = %w_down) {
      %n_f = stg.rmsnorm(%h_f, %g_f)
      %u = stg.einsum["bsd,df->bsf"](%n_f, %u_w)
      %m = stg.gelu(%u)
      %d = stg.einsum["bsf,fd->bsd"](%m, %d_w)
      %r_f = stg.add(%h_f, %d)
      stg.yield(%r_f)
    }
""",
    ),
    "mix": (
        ", %w_mix: bf16[N, D, F | param]",
        """
    %y_m = stg.repeat @mix[count = N, carry = 1, order = @layers] (%h_m = INPUT, %m_w = %w_mix) {
      %t = stg.einsum["bsd,df->bsf"](%h_m, %m_w)
      %s = stg.silu(%t)
      %v = stg.einsum["bsf,df->bsd"](%s, %m_w)
      %r_m = stg.add(%h_m, %v)
      stg.yield(%r_m)
    }
""",
    ),
    "tied": (
        ", %norm_t: bf16[N, D | param], %w_all: bf16[D, F | param]",
        """
    %y_t = stg.repeat @tied[count = N, carry = 1, order = @layers] (%h_t = INPUT, %g_t = %norm_t) {
      %n_t = stg.rmsnorm(%h_t, %g_t)
      %u_t = stg.einsum["bsd,df->bsf"](%n_t, %w_all)
      %s_t = stg.silu(%u_t)
      %v_t = stg.einsum["bsf,df->bsd"](%s_t, %w_all)
      %r_t = stg.add(%h_t, %v_t)
      stg.yield(%r_t)
    }
""",
    ),
}
_RESULTS = {"attn": "%y_a", "ffn": "%y_f", "mix": "%y_m", "tied": "%y_t"}


def order_of(text: str) -> LayerOrder:
    """The order that a text states."""
    actual = parse_one(f"stg.order @layers[{text}]").attrs["layers"]
    assert isinstance(actual, LayerOrder)
    return actual


def kinds_text(order: str) -> str:
    """The model with its layers in this order; kinds that are not named are left out."""
    counts, last = order_of(order).counts, "%x"
    args, body = "", ""
    for kind, (parameters, repeat) in KINDS.items():
        if kind in counts:
            number = str(counts[kind])
            args += parameters.replace("[N", f"[{number}")
            body += repeat.replace("= N", f"= {number}").replace("INPUT", last)
            last = _RESULTS[kind]
    head = _HEAD.replace("ORDER", order).replace("ARGS", args)
    return head + body + _TAIL.replace("LAST", last)


def separate_text(order: str) -> str:
    """The same model with a repeat of one iteration for each layer, one behind the other. The n-th
    layer of the stack has the names of its kind with `_n` behind them."""
    args, body, last = "", "", "%x"
    for place, kind in enumerate(order_of(order).layers):
        parameters, repeat = KINDS[kind]
        args += re.sub(r"%(\w+)", rf"%\1_{place}", parameters.replace("[N", "[1"))
        one = re.sub(r"%(\w+)", rf"%\1_{place}", repeat.replace("= N", "= 1"))
        body += one.replace("INPUT", last).replace(", order = @layers", "").replace(f"@{kind}", "")
        last = f"{_RESULTS[kind]}_{place}"
    head = _HEAD.replace("  stg.order @layers[ORDER]\n", "").replace("ARGS", args)
    return head + body + _TAIL.replace("LAST", last)


def kinds_job(path: Any, order: str, **options: Any) -> JobBuilder:
    """A job of the model, whose text is written to `path`."""
    path.write_text(kinds_text(order))
    sizes = {**SIZES, **options.pop("sizes", {})}
    return JobBuilder(JobOptions(str(path), sizes=sizes, **options))


def kinds_module(path: Any, order: str, pipeline: str, **options: Any) -> Module:
    """The model after the passes."""
    return run_passes(kinds_job(path, order, **options).module, pipeline)
