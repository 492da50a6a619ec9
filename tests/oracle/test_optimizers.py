"""Optimizers: one step of each is that of its definition, written here again in NumPy; all ranks
together compute what one device computes, in each form and under each kind of strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from stagec.interp.pipeline import run_named
from stagec.ir.opdef import Array
from stagec.ir_spec.ops.adam8bit import dynamic_map
from tests.oracle.test_lora import assert_same, label
from tests.support import (
    LLAMA,
    MIXTRAL,
    STEP,
    compiled,
    each_value,
    inputs_of,
    pairwise,
    tiny_module,
)

PLACED = f"{STEP},partition,stages,units,plan"
TEXT = """stg.module @m {
  stg.symbols[B = 2, D = 16, F = 256, L = 2]
  stg.strategy @s {
    stg.dtypes[master = MASTER]
    stg.optimizer[OPTIMIZER]
  }
  stg.func @f(%x: bf16[B, D], %w: bf16[L, D, F | param], %u: bf16[L, F, D | param],
      %n: f32[D | param]) {
    %y = stg.repeat[count = L] (%h = %x, %wi = %w, %ui = %u) {
      %a = stg.einsum["bd,df->bf"](%h, %wi)
      %o = stg.einsum["bf,fd->bd"](%a, %ui)
      %r = stg.add(%h, %o)
      stg.yield(%r)
    }
    %c = stg.cast[f32](%y)
    %z = stg.einsum["bd,d->b"](%c, %n)
    %l = stg.sum["b->"](%z)
    stg.return(%l)
  }
}
"""
LR, DECAY, BETA1, BETA2 = 3e-4, 0.1, 0.9, 0.95
#: A parameter, its gradient and its state by name give the same behind the step.
Step = Callable[[Array, Array, dict[str, Array]], tuple[Array, dict[str, Array]]]


def adamw(p: Array, g: Array, s: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    m = BETA1 * s["m"] + (1 - BETA1) * g
    v = BETA2 * s["v"] + (1 - BETA2) * g**2
    below = np.sqrt(v) / np.sqrt(1 - BETA2) + 1e-8
    return p - LR * DECAY * p - LR / (1 - BETA1) * m / below, {"m": m, "v": v}


def sgd(p: Array, g: Array, s: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    if not s:
        return p - LR * g, {}
    m = BETA1 * s["m"] + g
    return p - LR * m, {"m": m}


def lion(p: Array, g: Array, s: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    step = np.sign(BETA1 * s["m"] + (1 - BETA1) * g)
    return p - LR * (step + DECAY * p), {"m": 0.99 * s["m"] + 0.01 * g}


def adam8bit(p: Array, g: Array, s: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    if "m_scale" not in s:
        return adamw(p, g, s)
    tables = {"m": dynamic_map(signed=True), "v": dynamic_map(signed=False)}
    dim = next(i for i, n in enumerate(s["m_scale"].shape) if n != s["m"].shape[i])
    full = {n: t[s[n]] * np.repeat(s[f"{n}_scale"], 256, dim) for n, t in tables.items()}
    new, kept = adamw(p, g, full)
    actual: dict[str, Array] = {}
    for name, table in tables.items():
        x = np.moveaxis(kept[name], dim, -1)
        blocks = x.reshape(*x.shape[:-1], -1, 256)
        scale = np.abs(blocks).max(-1)
        codes = np.abs(blocks[..., None] / scale[..., None, None] - table).argmin(-1)
        actual[name] = np.moveaxis(codes.reshape(x.shape), -1, dim)
        actual[f"{name}_scale"] = np.moveaxis(scale, -1, dim)
    return new, actual


def adafactor(p: Array, g: Array, s: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Of each layer by itself, as transformers.Adafactor has it."""
    if p.ndim == 3:
        each = [adafactor(*a) for a in zip(p, g, _layers(s), strict=True)]
        kept = {name: np.stack([k[name] for _, k in each]) for name in s}
        return np.stack([new for new, _ in each]), kept
    square = g**2 + 1e-30
    if "v" in s:
        v = 0.999 * s["v"] + 0.001 * square
        kept, update = {"v": v}, g / np.sqrt(v)
    else:
        row = 0.999 * s["row"] + 0.001 * square.mean(1)
        column = 0.999 * s["column"] + 0.001 * square.mean(0)
        kept = {"row": row, "column": column}
        update = g * (row / row.mean())[:, None] ** -0.5 * column[None] ** -0.5
    update = update / max(1.0, np.sqrt((update**2).mean()))
    return p - LR * update, kept


def _layers(s: dict[str, Array]) -> list[dict[str, Array]]:
    return [{n: a[i] for n, a in s.items()} for i in range(2)]


def muon(p: Array, g: Array, s: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    if "momentum" not in s:
        return adamw(p, g, s)
    m = 0.95 * s["momentum"] + 0.05 * g
    x = 0.95 * m + 0.05 * g
    actual = list[Array]()
    for matrix in x:
        a = matrix / np.linalg.norm(matrix)
        for _ in range(5):
            gram = a @ a.T
            a = 3.4445 * a + (-4.7750 * gram + 2.0315 * gram @ gram) @ a
        actual.append(a * np.sqrt(max(1, matrix.shape[1] / matrix.shape[0])))
    return p - LR * DECAY * p - LR * np.stack(actual), {"momentum": m}


KINDS: Mapping[str, tuple[str, Step]] = {
    "adamw": ("adamw", adamw),
    "foreach": ("adamw, form = foreach", adamw),
    "for_loop": ("adamw, form = for_loop", adamw),
    "in_backward": ("adamw, clip = 0, form = in_backward", adamw),
    "adam8bit": ("adam8bit", adam8bit),
    "adafactor": ("adafactor", adafactor),
    "muon": ("muon", muon),
    "muon-in_backward": ("muon, clip = 0, form = in_backward", muon),
    "lion": ("lion", lion),
    "sgd": ("sgd", sgd),
    "momentum": ("sgd, momentum", sgd),
}


def step(optimizer: str, master: str = "f32") -> Any:
    text = TEXT.replace("OPTIMIZER", optimizer).replace("MASTER", master)
    passes = "infer-shapes,apply-strategy,differentiate,add-optimizer,eliminate-dead-code"
    return compiled(text, passes)


@pytest.mark.long
@pytest.mark.distinct
@pytest.mark.parametrize("master", ["f32", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_the_definition(kind: str, master: str) -> None:
    text, expected = KINDS[kind]
    module, plain = step(text, master), step("none")
    inputs = inputs_of(module, 3)
    gradients = run_named(plain, plain.env, inputs)
    loss, *grads = gradients.values()
    squares = sum(float((g**2).sum()) for g in grads)
    clip = 1.0 if "clip = 0" in text else min(1.0, 1 / np.sqrt(squares))
    assert "clip = 0" in text or clip < 1
    actual = run_named(module, module.env, inputs)
    assert actual.pop(next(iter(actual))) == loss
    actual = {name.removesuffix("_new"): value for name, value in actual.items()}
    for name, grad in zip("wun", grads, strict=True):
        prefix = f"{name}_"
        kept = {n.removeprefix(prefix): a for n, a in inputs.items() if n.startswith(prefix)}
        old = kept.pop("master", inputs[name])
        new, states = expected(old, grad * clip, kept)
        assert (f"{prefix}master" in inputs) == (master == "f32" and name != "n")
        np.testing.assert_allclose(actual[name], new, rtol=1e-10, err_msg=name)
        for state, value in states.items():
            theirs = actual[prefix + state]
            np.testing.assert_allclose(theirs, value, rtol=1e-9, atol=1e-14, err_msg=state)


FACTORS: Mapping[str, Sequence[Any]] = {
    "model": (LLAMA, MIXTRAL),
    "optimizer": ("adafactor", "muon", "sgd", "lion"),
    "mesh": ((1, 2), (2, 1), (2, 2), (4, 1)),
    "zero": (0, 1, 2, 3),
    "microbatches": (1, 2),
}
FORMS: Sequence[dict[str, Any]] = (
    {"optimizer_form": "foreach", "zero": 1, "tp": 2},
    {"optimizer_form": "for-loop", "zero": 3, "tp": 2, "microbatches": 2},
    {"optimizer_form": "in-backward", "zero": 0, "tp": 2},
    {"optimizer_form": "in-backward", "zero": 1, "tp": 1},
    {"optimizer_form": "in-backward", "zero": 3, "tp": 2},
    {"optimizer": "muon", "optimizer_form": "in-backward", "zero": 3, "tp": 1},
)
PIPELINES: Sequence[dict[str, Any]] = (
    {"schedule": "1f1b", "zero": 1, "optimizer": "muon"},
    {"schedule": "interleaved", "chunks": 2, "zero": 3, "optimizer": "adafactor"},
    {"schedule": "zbv", "chunks": 2, "zero": 0, "optimizer_form": "for-loop"},
    {"schedule": "zbv", "chunks": 2, "zero": 2, "optimizer_form": "foreach"},
)


@cache
def alone(model: str, sizes: tuple[tuple[str, int], ...], **options: Any) -> Any:
    """Inputs and results of the step on one device; parameters large enough to move."""
    actual = tiny_module(model, STEP, sizes=dict(sizes), **options)
    inputs = inputs_of(actual, 2)
    return inputs, run_named(actual, actual.env, inputs)


@pytest.mark.parametrize("row", each_value(pairwise(FACTORS), label))
def test_a_step_on_a_mesh_equals_that_on_one_device(row: dict[str, Any]) -> None:
    options = dict(row)
    model, (dp, tp), kind = options.pop("model"), options.pop("mesh"), options.pop("optimizer")
    inputs, expected = alone(model, (), optimizer=kind)
    passes = f"{STEP},partition,units"
    actual = tiny_module(model, passes, optimizer=kind, dp=dp, tp=tp, **options)
    assert_same(expected, run_named(actual, actual.env, inputs))


@pytest.mark.long
@pytest.mark.distinct
@pytest.mark.parametrize("row", FORMS, ids=label)
def test_forms_on_a_mesh(row: dict[str, Any]) -> None:
    kept = {k: v for k, v in row.items() if k in ("optimizer", "optimizer_form")}
    inputs, expected = alone(LLAMA, (), **kept)
    actual = tiny_module(LLAMA, f"{STEP},partition,units", dp=2, **row)
    assert_same(expected, run_named(actual, actual.env, inputs))


@pytest.mark.long
@pytest.mark.distinct
@pytest.mark.parametrize("row", PIPELINES, ids=label)
def test_a_pipelined_step_equals_that_on_one_device(row: dict[str, Any]) -> None:
    kept = {k: v for k, v in row.items() if k in ("optimizer", "optimizer_form")}
    sizes = {"L": 8, "B": 16}
    inputs, expected = alone(LLAMA, tuple(sizes.items()), **kept)
    actual = tiny_module(LLAMA, PLACED, sizes=sizes, pp=2, dp=2, microbatches=4, **row)
    assert_same(expected, run_named(actual, actual.env, inputs))
