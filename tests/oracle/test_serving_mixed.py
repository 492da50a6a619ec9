"""A mixed step gives what its classes give when they step apart: logits and caches, to 1e-9."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from stagec.driver.job import JobBuilder
from stagec.interp.data import random_inputs
from stagec.interp.machine import run_module
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.ir.types import CACHED
from stagec.pipeline.manager import PassManager
from stagec.serving.step import SequenceClass, Step, parse_step

from tests.support import GPT, LLAMA, loaded, tiny_options

#: Up to where the program is text that all ranks run in lockstep.
LAST = "plan-memory"

#: All kinds of classes: several and single sequences, with and without cached tokens.
EVERY = "decode=3x4,decode=1x2,prefill=2x2+3,prefill=1x3+0,chunk=2x2+0,verify=1x3+2"
POSITIONS = 9


def module_of(model: str, step: Step, batch: int, **options: Any) -> Module:
    """A partitioned step: mixed for `batch` groups, or, of a single class, the plain one of
    `batch` times as many sequences."""
    given = tiny_options(model, **options)
    sizes = {n: v for n, v in given.sizes.items() if n not in ("S", "B")}
    builder = JobBuilder(
        given.changed(serve="mixed", sizes={**sizes, "B": batch}, step=str(step))
    )
    text = builder.pipeline_text()
    if len(step.classes) == 1:
        (only,) = step.classes
        builder.module.set_values({"B": batch * only.count, "S": only.new})
        mode = "decode" if only.sampled == only.new else "prefill"
        text = re.sub(r'mode=.*?classes=".*?"', f"mode={mode},context={only.cached}", text)
    text = re.sub("longest=[0-9]+", f"longest={POSITIONS}", text)
    pipeline = loaded().pipeline(text)
    end = [p.name for p in pipeline.passes].index(LAST) + 1
    PassManager(type(pipeline)(pipeline.passes[:end], pipeline.locs[:end])).run(builder.module)
    return builder.module


def assert_mixed_is_apart(model: str, text: str, groups: int, **options: Any) -> None:
    """Run the step, and each of its classes by itself, on the same numbers."""
    step = parse_step(text)
    mixed = module_of(model, step, groups, **options)
    args = mixed.main.body.args
    inputs = random_inputs(args, mixed.env, 3)
    found = run_module(mixed, mixed.env, inputs)
    held = [a.name for a in args if a.tensor.role in CACHED]
    caches = dict(zip(held, found[-len(held) :], strict=True))
    logits = found[0] if step.sampled else None
    row = at = 0
    for number, mine in enumerate(step.classes):
        plain = module_of(model, Step((mine,)), groups)
        plain_args = plain.main.body.args
        given: dict[str, Array] = {}
        names: dict[str, str] = {}
        for arg in plain_args:
            name = arg.name
            if arg.tensor.role in CACHED:
                name = names[arg.name] = _of_class(arg.name, number, held)
            given[arg.name] = inputs[name]
            if not arg.tensor.role:
                cut = inputs[name][:, at : at + mine.tokens]
                given[arg.name] = cut.reshape(groups * mine.count, mine.new, *cut.shape[2:])
        expected = run_module(plain, plain.env, given)
        for arg, value in zip(names, expected[-len(names) :], strict=True):
            np.testing.assert_allclose(caches[names[arg]], value, rtol=1e-9, atol=1e-9)
        if mine.sampled:
            assert logits is not None
            rows = mine.count * mine.sampled
            part = logits[:, row : row + rows]
            apart = expected[0].reshape(groups, rows, -1)
            np.testing.assert_allclose(part, apart, rtol=1e-9, atol=1e-9)
            row += rows
        at += mine.tokens
    assert at == inputs_tokens(inputs, args) and row == step.sampled


def _of_class(name: str, number: int, held: list[str]) -> str:
    """The cache of a class: `layers/k_cache` is `layers/k_1_cache`."""
    (found,) = [h for h in held if re.sub(r"_\d+(_\d+)*_cache", "_cache", h) == name
                and re.search(rf"_{number}(_\d+)?_cache", h)]
    return found


def inputs_tokens(inputs: dict[str, Array], args: Any) -> int:
    """Tokens of a group in the inputs of a step."""
    return next(int(inputs[a.name].shape[1]) for a in args if not a.tensor.role)


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("text", [EVERY, "chunk=2x3+1,chunk=1x2+0", "decode=2x3,verify=2x2+1"])
def test_mixed_steps_are_their_classes(model: str, text: str) -> None:
    assert_mixed_is_apart(model, text, groups=2)


@pytest.mark.parametrize(
    "options",
    [{"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2, "sp": True}, {"tp": 4}],
    ids=lambda o: "-".join(f"{n}{v}" for n, v in o.items()),
)
def test_mixed_steps_under_strategies(options: dict[str, Any]) -> None:
    assert_mixed_is_apart(LLAMA, "decode=3x4,prefill=2x2+3,prefill=1x3+0,chunk=1x2+0", 2, **options)
