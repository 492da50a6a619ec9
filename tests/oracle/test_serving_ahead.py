"""Drafts of a module of multi-token prediction: the first is the most likely token by the module
behind the tokens that the step chooses, further ones are alike under all strategies, and each draft
costs what a step of one token of the module and one row of the head cost."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from stagec.interp.data import random_inputs
from stagec.interp.machine import run_module
from stagec.interp.pipeline import run_named
from stagec.ir.module import Module
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.pipeline.manager import PassManager
from stagec.pipeline.spec import Pipeline
from tests.support import DEEPSEEK_MTP, loaded, stagec, tiny_options

FIRST = "draft-ahead"


def decode(drafts: int, **options: Any) -> JobOptions:
    job = tiny_options(DEEPSEEK_MTP, **options)
    sizes = {n: v for n, v in job.sizes.items() if n not in ("S", "B")}
    sizes |= {"E": 2, "T": 2, "N": 1, "N_top": 1}  # a token of a sequence fills the experts evenly
    return job.changed(serve="decode", sizes=sizes, batch=8, context=5, speculative=drafts)


def until(job: JobOptions, last: str) -> Module:
    builder = JobBuilder(job)
    text = builder.pipeline_text
    pipeline = loaded().pipeline(re.sub("draft-ahead{.*?},", "", text) if last != FIRST else text)
    if last == "plan-memory":
        pipeline = loaded().pipeline(text)
    end = [p.name for p in pipeline.passes].index(last) + 1
    PassManager(Pipeline(pipeline.passes[:end], pipeline.locs[:end])).run(builder.module)
    return builder.module


def test_the_first_draft_is_what_the_module_predicts() -> None:
    plain, drafts = until(decode(2), "absorb-latent"), until(decode(2), FIRST)
    given = random_inputs(plain.main.body.args, plain.env, 3)
    (name,) = {a.name for a in plain.main.body.args} - {a.name for a in drafts.main.body.args}
    logits, *_ = run_module(plain, plain.env, given)
    _, ahead, *_ = run_module(plain, plain.env, {**given, name: logits.argmax(-1)})
    fresh = random_inputs(drafts.main.body.args, drafts.env, 3)
    for key, value in fresh.items():  # caches of the module have a row more, which nothing has read
        rows = tuple(slice(0, n) for n in given[key].shape)
        value[rows] = given[key]
    chosen, actual, *_ = run_module(drafts, drafts.env, fresh)
    np.testing.assert_allclose(chosen, logits, rtol=1e-9, atol=1e-9)
    assert actual.shape == (8, 2)
    np.testing.assert_array_equal(actual[:, 0], ahead[:, -1].argmax(-1))


@pytest.mark.parametrize(
    "options", [{"tp": 2}, {"dp": 2, "ep": 2, "tp": 2}, {"dp": 2, "microbatches": 2}], ids=str
)
def test_drafts_are_alike_under_strategies(options: dict[str, Any]) -> None:
    stated, ready = until(decode(3), FIRST), until(decode(3, **options), "plan-memory")
    inputs = random_inputs(stated.main.body.args, stated.env, 3)
    drafts = run_module(stated, stated.env, inputs)[1]
    name = stated.main.body.terminator.operands[1].name
    actual = run_named(ready, ready.env, inputs)
    (tokens,) = (v for n, v in actual.items() if n in (name, f"{name}_sum"))
    np.testing.assert_array_equal(tokens, drafts)


def test_each_draft_costs_a_step_of_the_module() -> None:
    """By hand: a draft more is a verified token more in all layers and in the module, and a step
    of the module for one token with one row of the head. In matmul FLOPs, per sequence and
    without attention, whose rows differ."""

    def flops(drafts: int) -> dict[str, int]:
        line = f"analyze {DEEPSEEK_MTP} --serve decode --batch 1 --context 64 --json"
        done = stagec(*line.split(), "--speculative", str(drafts))
        assert done.code == 0, done.err
        ops = json.loads(done.out)["serving"]["ops"]
        return {op["op"]: op["flops"] for op in ops if op["kernel"] == "matmul"}

    one, three = flops(1), flops(3)
    block = {n: f // 2 for n, f in one.items() if n.startswith(("mtp/", "te1", "th1"))}
    assert len(block) > 5
    head = one["ahead0/mtp_loss/z"]
    assert head == 2 * 7168 * 129280
    more = {n: f for n, f in three.items() if re.match("ahead[12]/", n)}
    assert sum(more.values()) == 2 * (sum(block.values()) + head)
