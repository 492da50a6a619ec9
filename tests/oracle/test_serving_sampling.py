"""The tokens that a step of serving samples are those of the whole logits, however the vocabulary
is split, and what is gathered are logits of the head's element type."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from stagec.interp.data import random_inputs
from stagec.interp.machine import run_module
from stagec.interp.pipeline import run_named
from stagec.jobs.request.options import JobOptions
from tests.served import module_until
from tests.support import LLAMA, stagec, tiny_options

JOBS: list[dict[str, Any]] = [
    {"tp": 4},
    {"tp": 2, "dp": 2, "sampling": "local"},
    {"tp": 2, "dp_attention": True},
    {"tp": 2, "pp": 2, "microbatches": 2},
]


def decode(**options: Any) -> JobOptions:
    job = tiny_options(LLAMA, **options)
    sizes = {n: v for n, v in job.sizes.items() if n not in ("S", "B")}
    return job.changed(serve="decode", sizes=sizes, batch=8, context=5, speculative=1)


@pytest.mark.parametrize("options", JOBS, ids=str)
def test_tokens_are_the_most_likely_ones(options: dict[str, Any]) -> None:
    job = decode(**options)
    stated = module_until(job.changed(sampling="none"), "to-serving")
    ready = module_until(job, "plan-memory")
    inputs = random_inputs(stated.main.body.args, stated.env, 3)
    logits = run_module(stated, stated.env, inputs)[0]
    name = f"{stated.main.body.terminator.operands[0].name}_sampled"
    actual = run_named(ready, ready.env, inputs)
    (tokens,) = (v for n, v in actual.items() if n in (name, f"{name}_sum"))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize(
    ("sampling", "gathered"), [("gather", 2 * 64), ("local", 8 * 4), ("none", 0)]
)
def test_what_is_gathered_for_a_token(sampling: str, gathered: int) -> None:
    """Of V = 64 logits of two bytes; or of each of four ranks a maximum and an index, the
    maximum of four bytes."""
    sizes = "L=1,D=64,F=64,V=64,H=8,G=4,K=8,theta=100"
    line = f"analyze llama3-8b --set {sizes} --serve decode --batch 8 --context 5 --tp 4 --json"
    done = stagec(*line.split(), "--sampling", sampling)
    assert done.code == 0, done.err
    (ranks,) = json.loads(done.out)["classes"]
    actual = [c["bytes"] for c in ranks["collectives"] if c["op"] == "all_gather"]
    assert sum(actual) == 8 * gathered
