"""Tensor parallelism beyond the key/value heads: same numbers, one group, KV parameters summed.

Closed forms of Llama 3 8B (8 key/value heads) with few layers, of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.ir.expr import const, symbol
from stagec.ir.facts import Facts, Relation, divisible
from stagec.ir.opdef import Array
from stagec.sharding.assignment import distribute
from tests.support import (
    LLAMA,
    LONG,
    PLACE,
    STEP,
    analyse,
    each_value,
    inputs_of,
    pairwise,
    parse_expr,
    run_numeric,
    stagec,
    tiny_module,
)

FACTORS: Mapping[str, Sequence[Any]] = {
    "heads": ((8, 2, 4), (8, 2, 8), (8, 1, 4), (4, 2, 4), (8, 4, 8)),
    "sp": (False, True),
    "axes": ({}, {"dp": 2}, {"cp": 2, "cp_mode": "all-gather"}),
    "zero": (0, 1, 3),
    "recompute": ("none", "full", "attention,rope"),
    "microbatches": (1, 2),
    "tp_inputs": ("regather", "save-gathered"),
    "no_vocab_parallel": (False, True),
}


@cache
def plain(h: int, g: int) -> tuple[dict[str, Array], list[Array]]:
    """Inputs and results of the step on one device."""
    module = tiny_module(LLAMA, STEP, sizes={"H": h, "G": g, "S": 16})
    inputs = inputs_of(module, 2)
    return inputs, run_numeric(module, inputs)


@pytest.mark.parametrize("row", each_value(pairwise(FACTORS), str))
def test_a_step_equals_that_on_one_device(row: dict[str, Any]) -> None:
    options = dict(row)
    h, g, tp = options.pop("heads")
    options |= options.pop("axes")
    inputs, expected = plain(h, g)
    sizes = {"H": h, "G": g, "S": 16}
    module = tiny_module(LLAMA, f"{STEP},{PLACE}", sizes=sizes, tp=tp, **options)
    names = [v.name for v in module.main.body.terminator.operands]
    for name, x, y in zip(names, expected, run_numeric(module, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10, err_msg=name)


L, B, S, D, H, G, K, F, V = 2, 1, 8192, 4096, 32, 8, 128, 14336, 128256
MESSAGE = 2 * B * S * D


def rows(**options: Any) -> dict[tuple[str, tuple[str, ...], str, str], tuple[int, int]]:
    result = analyse(LLAMA, sizes={"L": L, "B": B}, **options)
    return {
        (r["op"], tuple(r["over"]), r["phase"], r["dtype"]): (r["count"], r["bytes"])
        for r in result["classes"][0]["collectives"]
        if r["bytes"] > 4
    }


@pytest.mark.parametrize("tp", [16, 32])
def test_activations_move_in_one_group_of_all(tp: int) -> None:
    """As with enough heads, but that the gradients of wk and wv are summed over the replicas."""
    every, both = 2 * L + 1, ("tp", "tpr")
    assert rows(tp=tp) == {
        ("all_reduce", both, "forward", "bf16"): (every, every * MESSAGE),
        ("all_reduce", both, "forward", "f32"): (3, 3 * 4 * B * S),
        ("all_reduce", both, "backward", "bf16"): (every, every * MESSAGE),
        ("all_reduce", ("tpr",), "gradient", "f32"): (1, 4 * L * 2 * D * (G // 8) * K),
    }
    result = analyse(LLAMA, sizes={"L": L, "B": B}, tp=tp)
    sizes = {r["group_size"] for r in result["classes"][0]["collectives"] if len(r["over"]) == 2}
    assert sizes == {tp}
    assert result["ranks"] == tp


def test_messages_are_those_of_any_tensor_parallelism() -> None:
    """Forward and backward of the activations alone, in bf16."""
    result = analyse(LLAMA, sizes={"L": L, "B": B}, tp=16, sp=True)
    actual = {
        (r["op"], r["phase"]): (r["count"], r["bytes"], r["over"])
        for r in result["classes"][0]["collectives"]
        if r["dtype"] == "bf16"
    }
    every, both = 2 * L + 1, ["tp", "tpr"]
    assert actual == {
        ("all_gather", "forward"): (every, every * MESSAGE, both),
        ("reduce_scatter", "forward"): (every, every * MESSAGE, both),
        ("all_gather", "backward"): (2 * every, 2 * every * MESSAGE, both),
        ("reduce_scatter", "backward"): (every, every * MESSAGE, both),
    }


def test_keys_and_values_are_computed_by_every_replica() -> None:
    """FLOPs of q, o and the feed-forward fall with tp, those of k and v stop at the heads."""
    eight, sixteen = (
        analyse(LLAMA, sizes={"L": L, "B": B}, tp=tp)["classes"][0]["matmul_flops"]["forward"]
        for tp in (8, 16)
    )
    kv = L * 2 * B * S * D * 2 * G * K // 8
    assert sixteen - kv == (eight - kv) // 2


def test_the_traces_are_sound(tmp_path: Path) -> None:
    arguments = ["--tp", "16", "--dp", "2", "--set", "L=1", "-o", str(tmp_path / "t")]
    assert stagec("compile", LLAMA, *arguments).code == 0
    checked = stagec("check", tmp_path / "t")
    assert (checked.code, "0 errors" in checked.out) == (0, True)


def test_the_strategy_can_be_given_as_text(tmp_path: Path) -> None:
    path = tmp_path / "kv.stg"
    path.write_text(stagec("analyze", LLAMA, "--tp", "16", "--print-strategy").out)
    shown = stagec("analyze", LLAMA, path)
    assert shown.out == stagec("analyze", LLAMA, "--tp", "16").out
    assert stagec("analyze", LLAMA, path, "--set", "G=4").code == 1  # G == tp does not hold


def test_a_remark_says_so() -> None:
    ran = stagec("analyze", LLAMA, "--tp", "16")
    assert "remark: --tp 16 is more than the 8 key/value heads" in ran.err
    assert "remark" not in stagec("analyze", LLAMA, "--tp", "8").err


@LONG
def test_numbers_are_checked_around_every_pass() -> None:
    sizes = ("--tp", "4", "--set", "L=1,G=2")
    ran = stagec("compile", LLAMA, *sizes, "--check-numerics", "--dry-run")
    assert ran.code == 0, ran.err


def facts(*texts: tuple[str, str]) -> Facts:
    """Facts `left == right`, or `left % right == 0` for right-hand sides in brackets."""
    actual: list[Relation] = []
    for left, right in texts:
        if right.startswith("["):
            actual.append(divisible(parse_expr(left), parse_expr(right.strip("[]"))))
        else:
            actual.append(Relation(parse_expr(left), "==", parse_expr(right)))
    return Facts(actual)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (facts(("G", "[a*b]")), {"g": ("a", "b")}),
        (facts(("G", "a"), ("R", "[b]")), {"g": ("a",), "r": ("b",)}),
        (facts(("G", "1"), ("R", "[a*b]")), {"r": ("a", "b")}),
        (facts(("G", "a*b")), {"g": ("a", "b")}),
        # nothing says that G is split completely: then R must not be split
        (facts(("R", "[a*b]")), {"g": ("a", "b")}),
        (facts(("G", "[a]"), ("R", "[b]")), {"g": ("a", "b")}),
        (facts(("G", "b"), ("R", "[a]")), {"g": ("a", "b")}),
    ],
)
def test_axes_of_a_product_go_to_its_factors(
    known: Facts, expected: dict[str, tuple[str, ...]]
) -> None:
    sizes = {"g": symbol("G"), "r": symbol("R")}
    assert distribute(("g", "r"), ("a", "b"), sizes, known) == expected


def test_axes_of_known_sizes() -> None:
    sizes = {"g": const(3), "r": const(4)}
    known = Facts([], {"a": 4})
    assert distribute(("g", "r"), ("a",), sizes, known) == {"g": ("a",)}
    assert distribute(("g", "r"), ("a",), {**sizes, "g": const(1)}, known) == {"r": ("a",)}
