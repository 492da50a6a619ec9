"""Serving in tests: a model that is prefilled and then decodes, step after step, on numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stagec.driver.job import JobBuilder
from stagec.driver.options import JobOptions
from stagec.driver.serving import sequence_of
from stagec.interp.data import random_inputs
from stagec.interp.machine import run_module
from stagec.ir.core import Value
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.ir.types import CACHED
from stagec.pipeline.manager import PassManager
from tests.support import loaded, run_passes, tiny_options

#: Up to where the program is text that all ranks run in lockstep.
LOCKSTEP = "fuse-kernels"


def tokens_of(job: JobOptions) -> str:
    """The dimension of the tokens that a model chooses."""
    return sequence_of(JobBuilder(job).module)


def step_module(model: str, mode: str, new: int, past: int, **options: Any) -> Module:
    """A partitioned step of serving on tiny sizes."""
    given = tiny_options(model, **options)
    sizes = {n: v for n, v in given.sizes.items() if n not in (tokens_of(given), "B")}
    counts = {"prompt": new} if mode == "prefill" else {"speculative": new - 1}
    job = given.changed(serve=mode, sizes=sizes, batch=given.sizes["B"], context=past, **counts)
    builder = JobBuilder(job)
    pipeline = loaded().pipeline(builder.pipeline_text())
    names = [p.name for p in pipeline.passes]
    end = names.index(LOCKSTEP)
    passes, locs = pipeline.passes[:end], pipeline.locs[:end]
    PassManager(type(pipeline)(passes, locs)).run(builder.module)
    return builder.module


def whole_logits(model: str, tokens: int, seed: int = 1, **options: Any) -> tuple[Any, Any]:
    """Random inputs, and the logits of the training forward of so many tokens: what its loss
    judges. Dropout is left out, as in inference."""
    given = tiny_options(model, **options)
    job = given.changed(sizes={**given.sizes, tokens_of(given): tokens})
    module = run_passes(JobBuilder(job).module, "inline,infer-shapes")
    for op in list(module.walk()):
        if op.name == "stg.dropout":
            op.results[0].replace_with(op.operands[0])
    losses = [op for op in module.walk() if op.definition.logits(op) is not None]
    module.main.body.terminator.set_operands([_logits(losses[0].definition.logits(losses[0]))])
    inputs = random_inputs(module.main.body.args, module.env, seed)
    return inputs, run_module(module, module.env, inputs)[0]


def _logits(value: Value | None) -> Value:
    assert value is not None
    return value


@dataclass
class Server:
    """A model that serves a batch of sequences: it keeps their caches from step to step."""

    model: str
    inputs: Mapping[str, Array]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    past: int = 0
    caches: dict[str, Array] = field(default_factory=dict[str, Array])

    def step(self, mode: str, new: int) -> Array:
        """The logits of a step of so many tokens."""
        module = step_module(self.model, mode, new, self.past, **self.options)
        args = module.main.body.args
        fresh = random_inputs(args, module.env, 7)
        given = {a.name: self._given(a, fresh[a.name], new) for a in args}
        logits, *caches = run_module(module, module.env, given)
        held = [a for a in args if a.tensor.role in CACHED]
        self.caches = {a.name: found for a, found in zip(held, caches, strict=True)}
        self.past += new
        return logits

    def _given(self, arg: Value, fresh: Array, new: int) -> Array:
        if arg.tensor.role in CACHED:
            return self._held(arg, fresh, new)
        value = self.inputs[arg.name]
        if value.shape == fresh.shape:
            return value
        (along,) = [d for d, n in enumerate(fresh.shape) if n != value.shape[d]]
        return np.take(value, range(self.past, self.past + new), axis=along)

    def _held(self, arg: Value, fresh: Array, new: int) -> Array:
        """What is cached, in the rows that the step has for it; all other rows are noise."""
        old, along = self.caches.get(arg.name), _along(arg)
        if old is None:
            return fresh if along is not None or self.past else np.zeros_like(fresh)
        if along is None:
            return old
        first = [
            max(0, n - a.shape[along]) for n, a in ((self.past, old), (self.past + new, fresh))
        ]
        wanted = range(first[1], self.past)
        assert first[0] <= first[1], "rows that the step needs are cached no more"
        rows = np.moveaxis(fresh.copy(), along, 0)
        source = np.moveaxis(old, along, 0)
        for position in wanted:
            rows[position - first[1]] = source[position - first[0]]
        return np.moveaxis(rows, 0, along)


def _along(arg: Value) -> int | None:
    """The dimension of tokens of a cache; None if it is the same in all steps."""
    for op, index in arg.uses:
        if op.name == "stg.append" and index == 0 and "past" in op.attrs:
            return op.integer("dim", 1)
        if op.region is not None:
            inner = op.body.args[index]
            found = _along(inner)
            if found is not None:
                return found + arg.tensor.rank - inner.tensor.rank
    return None


def assert_serves(model: str, steps: Sequence[tuple[str, int]], **options: Any) -> None:
    """Prefill and decode in these steps give the logits of the whole forward, to 1e-9."""
    tokens = sum(new for _, new in steps)
    plain = {n: v for n, v in options.items() if n == "sizes"}
    inputs, expected = whole_logits(model, tokens, **plain)
    server = Server(model, inputs, options)
    for mode, new in steps:
        found = server.step(mode, new)
        rows = expected[:, server.past - found.shape[1] : server.past]
        np.testing.assert_allclose(found, rows, rtol=1e-9, atol=1e-9)
