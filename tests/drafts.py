"""A draft model in tests: its pod and the one that verifies, or both on the same ranks, run on
numbers, behind a prompt that both have seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagec.interp.data import random_inputs
from stagec.interp.machine import run_module
from stagec.ir.drafts import CHOSEN, DRAFT
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.ir.types import CACHED
from stagec.ir_spec.ops.pod_crossings import PodOp
from stagec.ir_spec.strategy.part import MAIN
from stagec.jobs.pod_options import options_of
from stagec.jobs.request.draft import DraftText
from stagec.jobs.request.options import JobOptions
from stagec.program.nodes import Ints
from tests.parts import batch_order, lowered_pods, run_each
from tests.pods import logits_of
from tests.served import Server, forward, module_until, tokens_of, whole_logits

BATCH = 8
_FEW, _WHOLE = 2, 4


@dataclass(frozen=True)
class SeededModel:
    """A model on tiny sizes, unsharded, and random parameters of it."""

    job: JobOptions
    inputs: Mapping[str, Array]

    @classmethod
    def of(cls, job: JobOptions, seed: int) -> SeededModel:
        """The model of a job."""
        return cls(job, whole_logits(job, _FEW, seed)[0])

    def logits(self, words: Array) -> Array:
        """Those behind each of the words, by the forward of training. Words behind these, which
        they do not see, make a number that experts divide."""
        count = words.shape[1]
        more = np.pad(words, ((0, 0), (0, -count % _WHOLE)))
        module = forward(self.job, more.shape[1])
        actual: Array = run_module(module, module.env, self._given(more))[0]
        return actual[:, :count]

    def continued(self, words: Array, count: int) -> Array:
        """The words and `count` more, each the most likely one."""
        for _ in range(count):
            chosen = self.logits(words)[:, -1].argmax(-1)
            words = np.concatenate([words, chosen[:, None]], axis=1)
        return words

    def _given(self, words: Array) -> dict[str, Array]:
        """The inputs with these words; an encoder has others."""
        plain = [
            n for n, a in self.inputs.items() if a.dtype.kind == "i" and a.shape[1:] == (_FEW,)
        ]
        return {**self.inputs, **dict.fromkeys(plain, words)}

    def of_step(self, step: JobOptions, last: str, words: Array, new: int) -> dict[str, Array]:
        """The arguments of a step of which the pass `last` makes its form, behind all `words` but
        the last: this one, parameters, and caches after a prefill of those before. Rows of `new`
        words are noise."""
        past = words.shape[1] - 1
        server = Server(self.job, self._given(words))
        server.step("prefill", past)
        stated = module_until(step, last)
        actual: dict[str, Array] = {}
        for arg in stated.main.body.args:
            fresh = random_inputs([arg], stated.env, 7)[arg.name]
            if arg.tensor.role in CACHED:
                actual[arg.name] = server.cached(arg, fresh, new, stated.env)
            elif not arg.tensor.role:
                actual[arg.name] = words[:, past:]
            else:
                actual[arg.name] = self.inputs[arg.name]
        return actual

    def assert_keeps(
        self, stated: Module, actual: Mapping[str, Array], words: Array, new: int, order: Ints
    ) -> None:
        """The caches of a step of several words are those of a server of one word a step, which
        keeps no more rows of a window than it needs."""
        past = words.shape[1] - 1 - new
        server = Server(self.job, self._given(words))
        server.step("prefill", past)
        for _ in range(new):
            server.step("decode", 1)
        kept = [a for a in stated.main.body.args if a.tensor.role in CACHED]
        results = stated.main.body.terminator.operands[-len(kept) :]
        for arg, value in zip(kept, results, strict=True):
            if value.name not in actual:  # joined of microbatches
                continue
            mine, theirs = actual[value.name], server.caches[arg.name]
            batch = next(d for d, dim in enumerate(arg.tensor.dims) if "B" in dim.size.symbols)
            theirs = np.take(theirs, order, axis=batch)
            for d, size in enumerate(theirs.shape):
                mine = np.take(mine, range(mine.shape[d] - size, mine.shape[d]), axis=d)
            np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9, err_msg=arg.name)


def assert_drafts(
    target: JobOptions,
    draft: JobOptions,
    options: Mapping[str, Any],
    flags: str,
    drafts: int = 3,
    past: int = 5,
    *,
    on_model: bool = False,
) -> None:
    """Under the options of the pod that verifies, and the flags of the one that drafts: the drafts
    are the most likely words of its model, unsharded, and its caches those of a server that chooses
    them one by one, to 1e-9; the logits of the other pod are those of the whole forward on these
    words; what it chose comes back, unless both are on the same ranks."""
    judge, drafter = SeededModel.of(target, 1), SeededModel.of(draft, 2)
    prompt = np.random.default_rng(5).integers(0, 16, (BATCH, past + 1))
    words = drafter.continued(prompt, drafts)
    expected = judge.logits(words)[:, past:]
    job = step_of(target.changed(**options), draft, flags, drafts, past, on_model=on_model)
    pods, far = lowered_pods(job)
    given = {
        MAIN: judge.of_step(options_of(MAIN, job), "verify-drafts", prompt, drafts + 1),
        DRAFT: drafter.of_step(options_of(DRAFT, job), "draft-tokens", prompt, drafts),
    }
    if on_model:
        both = given[MAIN] | {f"{DRAFT}/{name}": value for name, value in given[DRAFT].items()}
        (module,) = pods.values()
        assert not [op for op in module.walk() if isinstance(op.definition, PodOp)]
        each = run_each(pods, far, {MAIN: both})[MAIN]
        front = f"{DRAFT}/"
        own = {n.removeprefix(front): v for n, v in each.items() if n.startswith(front)}
        pods, actual = dict.fromkeys((MAIN, DRAFT), module), {MAIN: each, DRAFT: own}
    else:
        actual = run_each(pods, far, given)
    stated = module_until(options_of(MAIN, job), "verify-drafts")
    logits = logits_of(actual[MAIN], stated)
    wanted = expected[batch_order(pods[MAIN], BATCH)]
    np.testing.assert_allclose(logits, wanted, rtol=1e-9, atol=1e-9)
    order = batch_order(pods[DRAFT], BATCH)
    if not on_model:
        (chosen,) = (v for name, v in actual[DRAFT].items() if name.startswith(CHOSEN))
        np.testing.assert_array_equal(chosen, expected.argmax(-1)[order])
    stated = module_until(options_of(DRAFT, job), "draft-tokens")
    drafter.assert_keeps(stated, actual[DRAFT], words, drafts, order)


def step_of(
    target: JobOptions,
    draft: JobOptions,
    flags: str,
    drafts: int,
    past: int,
    *,
    on_model: bool = False,
) -> JobOptions:
    """The options of a step of decode with both models."""
    sizes = {n: v for n, v in target.sizes.items() if n not in (tokens_of(target), "B")}
    small = {n: v for n, v in draft.sizes.items() if n not in (tokens_of(draft), "B")}
    text = DraftText(draft.model, small, flags, on_model=on_model)
    return target.changed(
        serve="decode",
        sizes=sizes,
        batch=BATCH,
        context=past,
        speculative=drafts,
        draft=text,
        sampling="none",
    )
