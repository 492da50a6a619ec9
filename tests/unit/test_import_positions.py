"""Rotary positions of imported models turn as the code of transformers computes them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from stagec.importers.importing import import_model
from stagec.importers.registry import BUILT_IN
from stagec.interp.machine import run_module
from stagec.ir.opdef import Array
from stagec.support.diagnostics import DiagnosticError
from stagec.support.source import Source
from stagec.text.printer import print_module
from tests.configurations import small
from tests.support import compiled

DIM, BASE, LONGEST, TOKENS = 16, 100, 32, 4
LISTS = ("short", "long")
LONGROPE: Mapping[str, Any] = {
    "short_factor": [1, 1.02, 1.5, 2, 2.25, 3, 3, 4.125],
    "long_factor": [1, 1.5, 2, 3, 8, 16, 31.5, 64.0],
}
SCALINGS: Mapping[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    "llama3 borders": {
        "rope_type": "llama3",
        "factor": 32,
        "low_freq_factor": 0.5,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn whole": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn smooth": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "beta_fast": 8},
    "yarn factor": {"rope_type": "yarn", "factor": 40, "attention_factor": 1.25, "beta_slow": 0.5},
    "yarn quotient": {"type": "yarn", "factor": 40, "mscale": 0.5, "mscale_all_dim": 1.0},
    "yarn one": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn of one": {"type": "yarn", "factor": 1.0},
    "longrope short": {**LONGROPE, "type": "longrope", "original_max_position_embeddings": 8},
    "longrope long": {**LONGROPE, "type": "su", "original_max_position_embeddings": 3},
    "longrope factor": {**LONGROPE, "rope_type": "longrope", "factor": 4, "attention_factor": 1.5},
    "longrope of experts": {
        **LONGROPE,
        "type": "longrope",
        "original_max_position_embeddings": 16,
        "short_mscale": 1.25,
        "long_mscale": 1.25,
    },
    "longrope of one": {**LONGROPE, "type": "longrope"},
}


def expected(scaling: Mapping[str, Any]) -> tuple[list[float], float]:
    """Radians a position of each pair, and what is multiplied: transformers, modeling_rope_utils,
    pair by pair."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factor, half = scaling.get("factor", 1), DIM // 2
    original = scaling.get("original_max_position_embeddings", LONGEST)
    low, high = scaling.get("low_freq_factor", 1), scaling.get("high_freq_factor", 4)

    def correction(turns: float) -> float:
        return DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(BASE))

    first = correction(scaling.get("beta_fast", 32))
    last = correction(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, DIM - 1)
    actual: list[float] = []
    for i in range(half):
        plain = 1 / BASE ** (2 * i / DIM)
        if kind == "linear":
            plain /= factor
        elif kind == "llama3":
            length = 2 * math.pi / plain
            if length > original / low:
                plain /= factor
            elif length >= original / high:
                smooth = (original / length - low) / (high - low)
                plain = (1 - smooth) * plain / factor + smooth * plain
        elif kind == "yarn":
            ramp = min(max((i - first) / (max(last - first, 0.001)), 0), 1)
            plain = plain / factor * ramp + plain * (1 - ramp)
        actual.append(plain)
    return actual, grown(scaling) if kind == "yarn" else 1.0


def of_lists(scaling: Mapping[str, Any]) -> tuple[list[float], float]:
    """The same of LongRoPE."""
    original = scaling.get("original_max_position_embeddings", LONGEST)
    numbers = scaling["long_factor" if original < TOKENS else "short_factor"]
    actual = [1 / (number * BASE ** (2 * i / DIM)) for i, number in enumerate(numbers)]
    factor = scaling.get("factor", LONGEST / original)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return actual, float(scaling.get("short_mscale", scaling.get("attention_factor", usual)))


def grown(scaling: Mapping[str, Any]) -> float:
    """The attention factor of YaRN."""
    factor = scaling["factor"]

    def mscale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1)


def imported(model_type: str, **keys: Any) -> str:
    """The text of a family's small configuration with these keys."""
    config = {**small(model_type), "max_position_embeddings": LONGEST, **keys}
    return import_model(Source("config.json", json.dumps(config)), BUILT_IN).text()


def opened(text: str) -> str:
    """A text with its blocks in place of their calls."""
    return print_module(compiled(text, "inline"))


def rotated(text: str) -> Array:
    """What the first rotation of a text makes of 1 in the first half of a head and 0 in the other:
    cosines and sines, at all positions."""
    actual = re.search(r"stg\.rope\[[^\]]*\]", opened(text))
    assert actual is not None
    module = compiled(
        f"""stg.module @m {{
          stg.symbols[S = {TOKENS}, K = {DIM}, R = {DIM}, theta = {BASE}]
          stg.func @f(%x: f32[1, S, 1, K]) {{
            %y = {actual[0]}(%x)
            stg.return(%y)
          }}
        }}""",
        "infer-shapes",
    )
    x = np.zeros((1, TOKENS, 1, DIM))
    x[..., : DIM // 2] = 1
    return run_module(module, module.env, {"x": x})[0][0, :, 0]


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_positions_turn_as_transformers_turns_them(name: str, key: str) -> None:
    turned = rotated(imported("llama", rope_theta=BASE, head_dim=DIM, **{key: SCALINGS[name]}))
    frequencies, factor = (of_lists if "longrope" in name else expected)(SCALINGS[name])
    angles = np.arange(TOKENS)[:, None] * np.array(frequencies)
    np.testing.assert_allclose(turned[:, : DIM // 2], factor * np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(turned[:, DIM // 2 :], factor * np.sin(angles), atol=1e-6)


@pytest.mark.parametrize(
    "scaling",
    [
        SCALINGS["yarn one"],
        {**SCALINGS["yarn"], "mscale": 0.707, "mscale_all_dim": 0.707},
        SCALINGS["yarn"],
        SCALINGS["linear"],
    ],
)
def test_scores_of_latent_attention_grow_with_the_context(scaling: dict[str, Any]) -> None:
    """By the square of YaRN's factor, as deepseek-ai/DeepSeek-V3 has it."""
    text = imported("deepseek_v3", rope_scaling=scaling)
    actual = re.search(r"rsqrt = (\d+)\*\(K \+ R\)/(\d+)", text)
    share = int(actual[1]) / int(actual[2]) if actual else 1
    weight = scaling.get("mscale_all_dim", 0)
    wanted = (1 + 0.1 * weight * math.log(scaling["factor"])) ** 2 if weight else 1
    assert math.isclose(share**-0.5, wanted, rel_tol=1e-6)


def test_long_lists_stand_once() -> None:
    keys = {f"{name}_factor": [Fraction(i, 128) + 1 for i in range(64)] for name in LISTS}
    scaling = {"type": "longrope", **{k: list(map(float, v)) for k, v in keys.items()}}
    text = imported("llama", head_dim=128, rope_scaling=scaling)
    assert text.count("scaling = longrope") == 1
    assert opened(text).count("scaling = longrope") == 2  # of queries and of keys


def test_only_layers_without_a_window_are_stretched() -> None:
    """Gemma 3: `rope_scaling` is that of the base `rope_theta`."""
    text = imported("gemma3_text", rope_scaling=SCALINGS["linear"])
    assert "rope = (base = theta, scaling = linear, factor = 5/2)" in text
    assert "rope = (base = theta_local)" in text


@pytest.mark.parametrize("family", ["gemma3_text", "gemma3n_text"])
def test_a_stretched_base_may_state_its_number(family: str) -> None:
    """`rope_scaling` may have the key `rope_theta`, as transformers 5 writes it."""
    scaling = {**SCALINGS["linear"], "rope_theta": 777}
    assert base_of(imported(family, rope_scaling=scaling)) == 777


def test_sides_of_a_pair_state_their_positions() -> None:
    """As transformers 5 writes T5Gemma's sections."""
    rope = {"rope_theta": 777, "rope_type": "linear", "factor": 2.0}
    given = small("t5gemma")
    sides = {side: {**given[side], "rope_parameters": rope} for side in ("encoder", "decoder")}
    text = imported("t5gemma", **sides)
    assert base_of(text) == 777
    assert "scaling = linear, factor = 2" in text


@pytest.mark.parametrize(("kind", "key"), [("ntk", "factor"), ("dynamic", "alpha")])
def test_the_base_is_stretched(kind: str, key: str) -> None:
    """The slowest pair of a head turns so many times slower, the fastest one as before."""
    plain, by = base_of(imported("llama")), 8.0
    actual = base_of(imported("llama", rope_scaling={"type": kind, key: by}))
    dim = 8  # hidden_size / num_attention_heads of the small configuration
    slowest = [1 / theta ** ((dim - 2) / dim) for theta in (plain, actual)]
    assert math.isclose(slowest[0] / slowest[1], by, rel_tol=0.01)


def base_of(text: str) -> int:
    """The value of the symbol theta."""
    match = re.search(r"theta = (\d+)", text)
    assert match is not None
    return int(match[1])


@pytest.mark.parametrize("kind", ["dynamic", "mrope"])
def test_scalings_without_effect_are_noted(kind: str) -> None:
    text = imported("llama", rope_scaling={"type": kind, "factor": 2.0})
    assert "rope = " not in text
    assert "position" in text.split("stg.module")[0]


ONES: Mapping[str, Any] = {f"{name}_factor": [1] * 4 for name in LISTS}


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "yarn"}, "the key 'rope_scaling.factor' is missing"),
        ({"type": "linear", "factor": 1e30}, "expected a number up to 281474976710656"),
        ({"type": "linear", "factor": 0.5}, "is 0.5, expected a number from 1 on"),
        ({"type": "yarn", "factor": 2, "beta_fast": 0.5}, "'rope_scaling.beta_fast' is 1/2"),
        ({"type": "longrope", "short_factor": [1] * 4}, "'rope_scaling.long_factor'"),
        ({"type": "su", "short_factor": [1], "long_factor": [1]}, "'rope_scaling.short_factor'"),
        (
            {**ONES, "type": "longrope", "attention_factor": 2},
            "'rope_scaling.attention_factor' is 2",
        ),
        (
            {**ONES, "type": "longrope", "short_mscale": 1, "long_mscale": 2},
            "'rope_scaling.long_mscale' differs",
        ),
        (
            {"type": "llama3", "factor": 2, "low_freq_factor": 8},
            "'rope_scaling.high_freq_factor' is 4",
        ),
    ],
)
def test_wrong_scalings_are_reported(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(DiagnosticError, match=re.escape(message)):
        imported("llama", rope_scaling=scaling)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_code_that_may_rotate_a_part_joins_all_parts(share: float) -> None:
    """GPT-NeoX concatenates what it rotates and the rest, which may be empty; Llama rotates all."""
    part = re.search(r"first = (\w+)", imported("gpt_neox", rotary_pct=share))
    assert part is not None
    assert part[1] == ("K" if share == 1 else "R")
    assert "first = " not in imported("llama")


@pytest.mark.parametrize("model_type", ["bart", "marian", "blenderbot", "opt", "gpt2", "whisper"])
def test_sequences_are_no_longer_than_a_table_of_positions(model_type: str) -> None:
    """Each slice of a table is within its rows, by an assumption of the text."""
    text = import_model(Source("c.json", json.dumps(small(model_type))), BUILT_IN).text()
    slices = re.findall(r"stg.slice\[dim = 0, (?:start = (\d+), )?size = ([ST])\]", text)
    assert slices
    for start, size in slices:
        assert re.search(rf">= {size}{rf' [+] {start}' if start else ''}[],]", text)
