"""A mixed step gives what its classes give when they step apart: logits and caches, to 1e-9."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.interp.data import random_inputs
from stagec.interp.machine import run_module
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.ir.types import CACHED
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.pipeline.manager import PassManager
from stagec.pipeline.spec import Pipeline
from stagec.serving.step import Step, parse_step
from tests.configurations import sizes_of, small
from tests.oracle.test_serving import ATTENDED, ROUTED, first, named
from tests.support import GPT, LLAMA, MIXTRAL, PALM, QWEN, loaded, tiny_options

#: All kinds of classes: several and single sequences, with and without cached tokens.
EVERY = "decode=3x4,decode=1x2,prefill=2x2+3,prefill=1x3+0,chunk=2x2+0,verify=1x2+2"
#: Sixteen tokens of a group, which experts share evenly.
SIXTEEN = "decode=2x4,decode=2x6,prefill=2x2+3,prefill=1x4+0,chunk=2x2+0"
#: Up to where the program is text that all ranks run in lockstep.
LAST = "plan-memory"
POSITIONS = 9


def module_of(job: JobOptions, step: Step, groups: int, *, apart: bool = False) -> Module:
    """A partitioned mixed step of so many groups; or, `apart`, the plain step of its only class,
    whose sequences are those of all groups."""
    sizes = {n: v for n, v in job.sizes.items() if n not in ("S", "B")}
    builder = JobBuilder(
        job.changed(serve="mixed", sizes={**sizes, "B": groups}, step=str(step), sampling="none")
    )
    text = re.sub("longest=[0-9]+", f"longest={POSITIONS}", builder.pipeline_text)
    if apart:
        (only,) = step.classes
        assert builder.serving is not None
        builder.module.set_values({"B": groups * only.count, builder.serving.sequence: only.new})
        mode = "decode" if only.sampled == only.new and only.cached else "prefill"
        text = re.sub(
            'mode=mixed(.*?),classes=".*?"', rf"mode={mode},context={only.cached}\1", text
        )
    pipeline = loaded().pipeline(text)
    end = [p.name for p in pipeline.passes].index(LAST) + 1
    PassManager(Pipeline(pipeline.passes[:end], pipeline.locs[:end])).run(builder.module)
    return builder.module


def assert_mixed_is_apart(
    job: JobOptions, text: str, groups: int, plain: JobOptions | None = None
) -> None:
    """Run the step of a job, and each of its classes by itself as the job `plain`, on the same
    numbers."""
    step = parse_step(text)
    mixed = module_of(job, step, groups)
    args = mixed.main.body.args
    inputs = random_inputs(args, mixed.env, 3)
    actual = run_module(mixed, mixed.env, inputs)
    kept = [a.name for a in args if a.tensor.role in CACHED]
    caches = dict(zip(kept, actual[len(actual) - len(kept) :], strict=True))
    row = at = 0
    for number, mine in enumerate(step.classes):
        module = module_of(plain or job, Step((mine,)), groups, apart=True)
        given: dict[str, Array] = {}
        names: dict[str, str] = {}
        for arg in module.main.body.args:
            name = arg.name
            if arg.tensor.role in CACHED:
                name = names[arg.name] = _of_class(arg.name, number, kept)
            given[arg.name] = inputs[name]
            if not arg.tensor.role and len(inputs[name]) == groups:  # not that of an encoder
                cut = inputs[name][:, at : at + mine.tokens]
                given[arg.name] = cut.reshape(groups * mine.count, mine.new, *cut.shape[2:])
        expected = run_module(module, module.env, given)
        for name, value in zip(names.values(), expected[-len(names) :], strict=True):
            rows = caches[name][tuple(map(slice, value.shape))]  # splits leave empty rows behind
            np.testing.assert_allclose(rows, value, rtol=1e-9, atol=1e-9)
        sampled = mine.count * mine.sampled
        if sampled:
            apart = expected[0].reshape(groups, sampled, -1)
            part = actual[0][:, row : row + sampled]
            np.testing.assert_allclose(part, apart, rtol=1e-9, atol=1e-9)
        at, row = at + mine.tokens, row + sampled
    assert at == _tokens(inputs, args, groups)
    assert row == step.sampled


def _of_class(name: str, number: int, kept: Sequence[str]) -> str:
    """The cache of a class: `layers/k_cache` is `layers/k_1_cache`, of a state likewise."""
    stem, _, kind = name.rpartition("_")
    (actual,) = [h for h in kept if h == f"{stem}_{number}_{kind}"]
    return actual


def _tokens(inputs: Mapping[str, Array], args: Any, groups: int) -> int:
    """Tokens of a group in the inputs of a step, but for those of an encoder."""
    given = (inputs[a.name] for a in args if not a.tensor.role)
    return next(int(each.shape[1]) for each in given if len(each) == groups)


@pytest.mark.parametrize("text", [EVERY, "chunk=2x3+1,chunk=1x2+0", "decode=2x3", "verify=2x2+1"])
@pytest.mark.parametrize("model", [LLAMA, GPT, PALM], ids=["llama", "gpt", "palm"])
def test_mixed_steps_are_their_classes(model: str, text: str) -> None:
    assert_mixed_is_apart(tiny_options(model), text, groups=2)


@pytest.mark.parametrize(
    "options",
    [{"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2, "sp": True}, {"tp": 4}, {"tp": 8}],
    ids=named,
)
def test_mixed_steps_under_strategies(options: dict[str, Any]) -> None:
    text = "decode=3x4,prefill=2x2+3,prefill=1x3+0,chunk=1x2+0"
    assert_mixed_is_apart(tiny_options(LLAMA, **options), text, 2, tiny_options(LLAMA))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dp": 2, "ep": 2},
        {"dp": 2, "ep": 4, "tp": 2, "etp": 1, "dp_attention": True},
        {"tp": 4, "ep": 4, "etp": 1, "dp_attention": True},
    ],
    ids=named,
)
@pytest.mark.parametrize("model", [MIXTRAL, QWEN])
def test_mixed_steps_of_experts(model: str, options: dict[str, Any]) -> None:
    """Experts take the tokens of all classes together; without a bound on their rows each token is
    treated by itself."""
    wide = {"capacity_factor": Fraction(16)}
    groups = 4 if "dp_attention" in options else 2
    job, plain = tiny_options(model, **wide, **options), tiny_options(model, **wide)
    assert_mixed_is_apart(job, SIXTEEN, groups, plain)


@pytest.mark.parametrize("options", [{"cp": 2}, {"cp": 2, "tp": 2}, {"tp": 8, "dcp": 2}], ids=named)
@pytest.mark.parametrize(
    "text", ["decode=2x4,prefill=2x2+2", "decode=2x4,prefill=1x6+0,prefill=2x4+2"]
)
def test_mixed_steps_with_split_contexts(text: str, options: dict[str, Any]) -> None:
    job = tiny_options(LLAMA, cp_mode="all-gather", **options)
    assert_mixed_is_apart(job, text, 2, tiny_options(LLAMA))


@pytest.mark.parametrize("options", [{}, {"tp": 2, "dp": 2}], ids=named)
@pytest.mark.parametrize("format", ["fp8", "int4"])
@pytest.mark.parametrize("model", [LLAMA, QWEN])
def test_mixed_steps_of_weights_of_few_bits(
    model: str, format: str, options: dict[str, Any]
) -> None:
    few = {"weight_dtype": format, "weight_block": 2}
    wide = {"capacity_factor": Fraction(16)} if model == QWEN else {}
    job = tiny_options(model, **few, **wide, **options)
    assert_mixed_is_apart(job, SIXTEEN, 2, tiny_options(model, **few, **wide))


@pytest.mark.parametrize("model_type", first(*ATTENDED.split()))
def test_mixed_steps_of_families(model_type: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small(model_type)))
    job = JobOptions(str(path), sizes=sizes_of(model_type, 4, 8))
    job = job.changed(capacity_factor=Fraction(16)) if model_type in ROUTED.split() else job
    assert_mixed_is_apart(job, SIXTEEN, 2)


@pytest.mark.parametrize(
    "text", ["decode=2x4,decode=3x2,prefill=2x2+3,prefill=2x4+0,verify=2x2+1", "prefill=2x1+0"]
)
@pytest.mark.parametrize("model_type", ["t5", "whisper", "bart"])
def test_mixed_steps_behind_an_encoder(model_type: str, text: str, tmp_path: Path) -> None:
    """It has the sequences of the class that begins; all have its keys and values."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small(model_type)))
    assert_mixed_is_apart(JobOptions(str(path), sizes=sizes_of(model_type, 4, 8)), text, 2)
