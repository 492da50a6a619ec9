"""Parts of a step of serving in tests: what the pods of a step of prefill give, and what a pod
decodes with the caches that one of them hands over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stagec.interp.data import random_inputs
from stagec.interp.machine import run_module
from stagec.ir.serving_step import DECODE, PREFILL
from stagec.ir_spec.strategy.part import MAIN
from stagec.jobs.request.options import JobOptions
from tests.parts import batch_order, lowered_pods, part_text, run_pods
from tests.pods import Post, assert_decodes, inputs_of_step, logits_of, places_of
from tests.served import step_modules, tokens_of, whole_logits


def assert_parts_serve(
    path: str, parts: Sequence[str], sizes: Mapping[str, int], prompt: int, **options: Any
) -> None:
    """The pods of a step of prefill give the logits and the caches of the step on one device, to
    1e-9."""
    job = JobOptions(path, sizes={"B": 8, **sizes})
    stated, _ = step_modules(job, PREFILL, prompt, 0)
    inputs = random_inputs(stated.main.body.args, stated.env, 3)
    values = stated.main.body.terminator.operands
    expected = run_module(stated, stated.env, inputs)
    asked = _served(job, prompt, options).changed(serve=PREFILL)
    pods, far = lowered_pods(asked.changed(part=tuple(map(part_text, parts))))
    results = run_pods(pods, far, inputs)
    assert len(results) == len(values)
    order = batch_order(pods[MAIN], 8)
    for value, theirs in zip(values, expected, strict=True):
        actual = results[value.name] if value.name in results else results[f"{value.name}_sum"]
        d = next(d for d, dim in enumerate(value.tensor.dims) if "B" in dim.size.symbols)
        wanted = np.take(theirs, order, axis=d)
        np.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-9, err_msg=value.name)


def assert_parts_hand_over(
    path: str,
    parts: Sequence[str],
    sizes: Mapping[str, int],
    flags: tuple[str, str],
    steps: tuple[int, int],
) -> None:
    """A pod that prefills with what parts send it, and one that decodes, give the logits of the
    whole forward, to 1e-9."""
    prompt, new = steps
    job = JobOptions(path, sizes={"B": 8, **sizes})
    inputs, expected = whole_logits(job, prompt + new, prompt=prompt)
    asked = _served(job, prompt, {}).changed(serve="disaggregated", speculative=new - 1)
    asked = asked.changed(prefill=flags[0], decode=flags[1], part=tuple(map(part_text, parts)))
    pods, far = lowered_pods(asked)
    letters = Post(pods, far, prompt, new)
    stated, _ = step_modules(job, PREFILL, prompt, 0)
    given = inputs_of_step(stated, inputs, slice(0, prompt), np.arange(8))
    rows = run_pods({p: m for p, m in pods.items() if p != DECODE}, far, given, letters.send)
    order = batch_order(pods[PREFILL], 8)
    first = logits_of(rows, stated)
    wanted = expected[order, prompt - first.shape[1] : prompt]
    np.testing.assert_allclose(first, wanted, rtol=1e-9, atol=1e-9)
    assert_decodes(job, asked, letters, inputs, order[places_of(pods, 8)], expected)


def _served(job: JobOptions, prompt: int, options: Mapping[str, Any]) -> JobOptions:
    sizes = {n: v for n, v in job.sizes.items() if n not in (tokens_of(job), "B")}
    return job.changed(sizes=sizes, batch=job.sizes["B"], prompt=prompt, sampling="none", **options)
