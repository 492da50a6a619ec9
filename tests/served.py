"""Serving in tests: a model that is prefilled and then decodes, step after step, on numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stagec.interp.data import random_inputs
from stagec.interp.machine import run_module
from stagec.interp.pipeline import run_named
from stagec.ir.core import Value
from stagec.ir.expr import ONE, Env, evaluate
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.ir.types import CACHED
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import sequence_of
from stagec.pipeline.manager import PassManager
from stagec.pipeline.spec import Pipeline
from tests.support import loaded, run_passes


def tokens_of(job: JobOptions) -> str:
    """The dimension of the tokens that a model chooses."""
    return sequence_of(JobBuilder(JobOptions(job.model)).module)


def step_modules(job: JobOptions, mode: str, new: int, past: int) -> tuple[Module, Module]:
    """A step of serving of a job whose sizes are those of training: as it is stated, and as ranks
    run it."""
    sizes = {n: v for n, v in job.sizes.items() if n not in (tokens_of(job), "B")}
    counts = {"prompt": new} if mode == "prefill" else {"speculative": new - 1}
    step = job.changed(serve=mode, sizes=sizes, batch=job.sizes["B"], context=past, **counts)
    step = step.changed(sampling="none")  # what it returns are logits
    return module_until(step, "to-serving"), module_until(step, "plan-memory")


def module_until(job: JobOptions, last: str) -> Module:
    """The module of a job behind a pass."""
    builder = JobBuilder(job)
    text = re.sub("draft-ahead{.*?},", "", builder.pipeline_text)  # all tokens are given
    pipeline = loaded().pipeline(text)
    end = [p.name for p in pipeline.passes].index(last) + 1
    PassManager(Pipeline(pipeline.passes[:end], pipeline.locs[:end])).run(builder.module)
    return builder.module


def whole_logits(
    job: JobOptions, tokens: int, seed: int = 1, prompt: int | None = None
) -> tuple[dict[str, Array], Array]:
    """Random inputs, and the logits of the training forward of so many tokens: what its first loss
    judges. Tokens behind a `prompt` are words, none of an image."""
    inputs, (logits, *_) = _all_logits(job, tokens, seed, prompt)
    return inputs, logits


def _all_logits(
    job: JobOptions, tokens: int, seed: int, prompt: int | None = None
) -> tuple[dict[str, Array], list[Array]]:
    """The same for each loss, as of words after the next one."""
    module = forward(job, tokens)
    inputs = random_inputs(module.main.body.args, module.env, seed)
    for op in module.walk():
        if op.name == "stg.merge_rows" and prompt is not None:
            words = evaluate(op.operands[1].tensor.shape[1], module.env)
            inputs[op.operands[2].name][:, prompt:] = words
    return inputs, run_module(module, module.env, inputs)


def forward(job: JobOptions, tokens: int) -> Module:
    """The training forward of so many tokens, which returns the logits of each loss. Dropout is
    left out, as in inference."""
    plain = JobOptions(job.model, sizes={**job.sizes, tokens_of(job): tokens})
    module = run_passes(JobBuilder(plain).module, "inline,infer-shapes")
    for op in list(module.walk()):
        if op.name == "stg.dropout":
            op.results[0].replace_with(op.operands[0])
    losses = [op for op in module.walk() if op.definition.logits(op) is not None]
    heads = [_logits(loss.definition.logits(loss)) for loss in losses]
    module.main.body.terminator.set_operands(heads)
    return module


def _logits(value: Value | None) -> Value:
    assert value is not None
    return value


@dataclass
class Server:
    """A model that serves a batch of sequences: it keeps their caches from step to step. Steps of
    `decode` run as another job, if one is given: caches are handed over."""

    job: JobOptions
    inputs: Mapping[str, Array]
    decode: JobOptions | None = None
    past: int = 0
    caches: dict[str, Array] = field(default_factory=dict[str, Array])

    def step(self, mode: str, new: int) -> list[Array]:
        """The logits of a step of so many tokens, for each loss of training."""
        job = self.decode if mode == "decode" and self.decode is not None else self.job
        stated, ready = step_modules(job, mode, new, self.past)
        args = stated.main.body.args
        fresh = random_inputs(args, stated.env, 7)
        given = {a.name: self._given(a, fresh[a.name], new, stated.env) for a in args}
        actual = run_named(ready, ready.env, given)
        results = [result_of(actual, v) for v in stated.main.body.terminator.operands]
        kept = [a for a in args if a.tensor.role in CACHED]
        heads = len(results) - len(kept)
        self.caches = {a.name: after for a, after in zip(kept, results[heads:], strict=True)}
        self.past += new
        return results[:heads]

    def _given(self, arg: Value, fresh: Array, new: int, env: Env) -> Array:
        if arg.tensor.role in CACHED:
            return self.cached(arg, fresh, new, env)
        value = self.inputs[arg.name]
        if value.shape == fresh.shape:
            return value
        (along,) = [d for d, n in enumerate(fresh.shape) if n != value.shape[d]]
        if fresh.shape[along] > value.shape[along]:  # a table that training has fewer rows of
            fresh[(slice(None),) * along + (slice(value.shape[along]),)] = value
            return fresh
        return np.take(value, range(self.past, self.past + new), axis=along)

    def cached(self, arg: Value, fresh: Array, new: int, env: Env) -> Array:
        """What is cached, in the rows that the step has for it; all other rows are noise, which no
        query may see. States are 0 before the first token."""
        old, found = self.caches.get(arg.name), _along(arg, env)
        if old is None:
            return np.zeros_like(fresh) if arg.tensor.role == "recurrent" else fresh
        if found is None:
            return old
        along, rate = found
        past, tokens = self.past // rate, (self.past + new) // rate  # complete rows
        before, after = (max(0, n - a.shape[along]) for n, a in ((past, old), (tokens, fresh)))
        rows = np.moveaxis(fresh.copy(), along, 0)
        source = np.moveaxis(old, along, 0)
        for position in range(max(before, after), past):
            rows[position - after] = source[position - before]
        return np.moveaxis(rows, 0, along)


def result_of(actual: Mapping[str, Array], value: Value) -> Array:
    """What a value of the stated step became: the sum or join of microbatches has a new name."""
    return actual[value.name] if value.name in actual else actual[f"{value.name}_sum"]


def _along(arg: Value, env: Env) -> tuple[int, int] | None:
    """The dimension of tokens of a cache, and the tokens of a row; None if it is the same in all
    steps."""
    for op, index in arg.uses:
        if op.name == "stg.append" and index == 0 and "past" in op.attrs:
            return op.integer("dim", 1), evaluate(op.expr("rate", ONE), env)
        if op.region is not None:
            inner = op.body.args[index]
            actual = _along(inner, env)
            if actual is not None:
                return actual[0] + arg.tensor.rank - inner.tensor.rank, actual[1]
    return None


def assert_serves(
    job: JobOptions, steps: Sequence[tuple[str, int]], decode: JobOptions | None = None
) -> None:
    """Prefill and decode in these steps give the logits of the whole forward, to 1e-9; with
    `decode` its steps are those of another job."""
    inputs, expected = _all_logits(job, sum(new for _, new in steps), 1)
    server = Server(job, inputs, decode)
    for mode, new in steps:
        for actual, whole in zip(server.step(mode, new), expected, strict=True):
            rows = whole[:, server.past - actual.shape[1] : server.past]
            np.testing.assert_allclose(actual, rows, rtol=1e-9, atol=1e-9)
