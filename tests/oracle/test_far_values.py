"""Values that are used beyond the layers that a pipeline cuts travel from stage to stage, and their
gradients are added up on the way back: the step equals that on one device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.check.traces import check_directory
from stagec.interp.pipeline import run_named
from stagec.ir.module import Module
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.traces.emit import make_job
from stagec.traces.writer import write_source
from tests.support import STEP, crossed, inputs_of, run_passes

#: Each layer of the decoder attends to the output of the encoder, and the output of the embedding
#: skips all layers.
TEXT = """\
stg.module @encdec[phase = parsed] {
  stg.symbols[B = 16, S = 4, T = 2, Le = 3, Ld = 3, D = 8, H = 4, K = 2, V = 16]
  stg.func @train (
      %source: i32[B, S], %tokens: i32[B, T], %labels: i32[B, T],
      %embed: bf16[V, D | param], %e_norm: bf16[Le, D | param], %e_w: bf16[Le, D, D | param],
      %words: bf16[V, D | param], %c_norm: bf16[Ld, D | param], %c_q: bf16[Ld, D, H, K | param],
      %c_k: bf16[Ld, D, H, K | param], %c_v: bf16[Ld, D, H, K | param],
      %c_o: bf16[Ld, H, K, D | param], %head: bf16[V, D | param]) -> f32[] {
    %x = stg.embedding(%embed, %source)
    %enc = stg.repeat[count = Le, carry = 1] (%h = %x, %n_w = %e_norm, %w = %e_w) {
      %n = stg.rmsnorm(%h, %n_w)
      %u = stg.einsum["bsd,de->bse"](%n, %w)
      %g = stg.gelu(%u)
      %r = stg.add(%h, %g)
      stg.yield(%r)
    }
    %t = stg.embedding(%words, %tokens)
    %dec = stg.repeat[count = Ld, carry = 1] (
        %h = %t, %n_w = %c_norm, %wq = %c_q, %wk = %c_k, %wv = %c_v, %wo = %c_o) {
      %n = stg.rmsnorm(%h, %n_w)
      %q = stg.einsum["btd,dhk->bthk"](%n, %wq)
      %k = stg.einsum["bsd,dhk->bshk"](%enc, %wk)
      %v = stg.einsum["bsd,dhk->bshk"](%enc, %wv)
      %sc = stg.einsum["bthk,bshk->bhts"](%q, %k)
      %pr = stg.softmax[rsqrt = K](%sc)
      %a = stg.einsum["bhts,bshk->bthk"](%pr, %v)
      %o = stg.einsum["bthk,hkd->btd"](%a, %wo)
      %r = stg.add(%h, %o)
      stg.yield(%r)
    }
    %skip = stg.sum["bsd->bd"](%x)
    %y = stg.add["btd,bd->btd"](%dec, %skip)
    %z = stg.einsum["btd,vd->btv"](%y, %head)
    %logits = stg.cast[f32](%z)
    %loss = stg.cross_entropy[mean = B*T](%logits, %labels)
    stg.return(%loss)
  }
}
"""
#: A layer by itself makes keys for all layers of two kinds behind it, and has a gate by the output
#: of the embedding.
SHARED = """\
stg.module @shared[phase = parsed] {
  stg.symbols[B = 16, S = 4, L = 3, D = 8, V = 16]
  stg.order @last[(plain, wide)*2]
  stg.func @train (
      %tokens: i32[B, S], %labels: i32[B, S], %embed: bf16[V, D | param],
      %w1: bf16[L, D, D | param], %w_gate: bf16[D, D | param], %w_key: bf16[D, D | param],
      %norm: bf16[D | param], %w2: bf16[2, D, D | param], %w3: bf16[2, D, D | param]) -> f32[] {
    %x = stg.embedding(%embed, %tokens)
    %y = stg.repeat[count = L, carry = 1] (%h = %x, %w = %w1) {
      %u = stg.einsum["bsd,de->bse"](%h, %w)
      %m = stg.mul(%u, %x)
      %r = stg.add(%h, %m)
      stg.yield(%r)
    }
    %g0 = stg.einsum["bsd,de->bse"](%x, %w_gate)
    %gate = stg.silu(%g0)
    %k0 = stg.einsum["bsd,de->bse"](%y, %w_key)
    %k = stg.rmsnorm(%k0, %norm)
    %gated = stg.mul(%y, %gate)
    %z = stg.add(%y, %gated)
    %z1 = stg.repeat @plain[count = 2, carry = 1, order = @last] (%h = %z, %w = %w2) {
      %u = stg.einsum["bsd,de->bse"](%h, %w)
      %m = stg.mul(%u, %k)
      %r = stg.add(%h, %m)
      stg.yield(%r)
    }
    %z2 = stg.repeat @wide[count = 2, carry = 1, order = @last] (%h = %z1, %w = %w3) {
      %n = stg.mul(%h, %k)
      %u = stg.einsum["bsd,de->bse"](%n, %w)
      %s = stg.silu(%u)
      %r = stg.add(%h, %s)
      stg.yield(%r)
    }
    %l = stg.einsum["bsd,vd->bsv"](%z2, %embed)
    %logits = stg.cast[f32](%l)
    %loss = stg.cross_entropy[mean = B*S](%logits, %labels)
    stg.return(%loss)
  }
}
"""
PLACED = f"{STEP},partition,stages,units,plan"
PIPELINES = {
    "gpipe": (2, 1, 2),
    "1f1b": (4, 1, 4),
    "interleaved": (2, 2, 4),
    "looped-bfs": (2, 2, 4),
    "zb-h1": (3, 1, 4),
    "interleaved-zb": (2, 3, 4),
    "zbv": (3, 2, 4),
    "dualpipe": (2, 2, 4),
    "dualpipev": (2, 2, 4),
}


def staged(directory: Path, pipeline: str, text: str = TEXT, **options: Any) -> Module:
    path = directory / "model.stg"
    path.write_text(text)
    return run_passes(JobBuilder(JobOptions(str(path), **options)).module, pipeline)


def with_pipeline(schedule: str) -> dict[str, Any]:
    pp, chunks, microbatches = PIPELINES[schedule]
    return {"schedule": schedule, "pp": pp, "chunks": chunks, "microbatches": microbatches}


MORE: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"dp": 2, "zero": 3, "recompute": "full"},
    {"tp": 2, "scatter_gather": True},
]


@crossed(schedule=PIPELINES, more=MORE)
def test_a_step_equals_that_on_one_device(
    schedule: str, more: dict[str, Any], tmp_path: Path
) -> None:
    compare(TEXT, tmp_path, 20, **with_pipeline(schedule), **more)


@crossed(schedule=PIPELINES, more=MORE)
def test_keys_of_one_layer_are_those_of_later_stages(
    schedule: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Several kinds of layers add to the gradient of the keys; the layer that makes them waits for
    the sum, and the layers before it wait for this layer."""
    compare(SHARED, tmp_path, 14, **with_pipeline(schedule), **more)


def compare(text: str, directory: Path, count: int, **options: Any) -> None:
    """Compare a step in stages with that on one device, which has more than `count` results."""
    plain = staged(directory, STEP, text)
    inputs = inputs_of(plain, 3)
    expected = run_named(plain, plain.env, inputs)
    module = staged(directory, PLACED, text, **options)
    actual = run_named(module, module.env, inputs)
    (loss, *rest), (expected_loss, *_) = actual, expected
    np.testing.assert_allclose(actual[loss], expected[expected_loss], rtol=1e-9)
    assert len(rest) == len(expected) - 1 > count
    for name in rest:
        theirs = expected[name.removesuffix("_g")]
        np.testing.assert_allclose(actual[name], theirs, rtol=1e-9, atol=1e-9, err_msg=name)


def test_each_value_is_sent_to_the_stages_that_need_it(tmp_path: Path) -> None:
    """One layer on each of six stages: what leaves the second one, and the last."""
    module = staged(tmp_path, PLACED, pp=6, microbatches=2)
    sent = {
        stage: sum(op.name == "stg.send" for op in func.body.walk())
        for func in module.functions
        for stage in func.integers("stages")
    }
    assert sent[1] == 4  # the layer's output and the skipped value; their gradients
    assert sent[4] == 6  # beside them the encoder's output, and its gradient so far
    assert sent[5] == 3  # gradients of all three


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_a_job_is_free_of_deadlock(schedule: str, tmp_path: Path) -> None:
    (tmp_path / "encdec.stg").write_text(TEXT)
    options = JobOptions(str(tmp_path / "encdec.stg"), **with_pipeline(schedule))
    write_source(make_job(JobBuilder(options).lower(), "tiny"), tmp_path / "out", {})
    report = check_directory(tmp_path / "out")
    assert (report.errors, report.warnings, report.eager_only) == ([], [], None)
