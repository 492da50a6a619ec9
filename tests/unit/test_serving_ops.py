"""What bounds the ops of a step: FLOPs for each byte by formulas of their own, sums, the ridge."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from stagec.ir.expr import Expr, const, fraction, ratio, substitute, symbol
from tests.support import crossed, stagec

#: Llama-3 70B: width, heads, heads of keys, head size, feed-forward; bytes of an element.
D, H, G, K, F, BYTES = 8192, 64, 8, 128, 28672, 2
PEAK, BANDWIDTH = 989.4e12, 3.35e12
STEP = ("--set", "L=2", "--serve", "decode")


def analysed(model: str, *words: str) -> dict[str, Any]:
    ran = stagec("analyze", model, *words, "--json")
    assert ran.code == 0, ran.err
    return dict(json.loads(ran.out))


def ops_of(model: str, *words: str) -> dict[str, dict[str, Any]]:
    return {op["op"]: op for op in analysed(model, *words)["serving"]["ops"]}


@crossed(batch=[1, 64, 1024], tp=[1, 8], context=[127, 8191])
def test_products_and_attention_by_formula(batch: int, tp: int, context: int) -> None:
    """A product of T tokens reads the weights and its operand and writes the result; attention
    reads each key and value once for all queries of its group, and each query once."""
    words = ("--batch", str(batch), "--context", str(context), "--tp", str(tp))
    ops = ops_of("llama3-70b", *STEP, *words)

    def product(n: int, k: int) -> float:
        return 2 * batch * n * k / (BYTES * (n * k + batch * (n + k)))

    assert ops["layers/swiglu/gate_up"]["intensity"] == pytest.approx(product(2 * F // tp, D))
    assert ops["layers/swiglu/y"]["intensity"] == pytest.approx(product(D, F // tp))
    assert ops["layers/gqa/k0"]["intensity"] == pytest.approx(product(G * K // tp, D))
    keys = context + 1
    attention = 4 * H * K * keys / (BYTES * (2 * G * K * keys + 2 * H * K))
    assert ops["layers/gqa/a"]["intensity"] == pytest.approx(attention)
    assert ops["layers/gqa/a"]["calls"] == 2


@pytest.mark.parametrize(
    ("model", "op", "limit"),
    [("llama3-70b", "layers/gqa/a", 2 * 64 / (8 * 2)), ("deepseek-v3", "layers/mla/a_latent", 242)],
)
def test_long_contexts_reach_what_is_published(model: str, op: str, limit: float) -> None:
    """2*H/(G*bytes) of grouped queries, 242 of the absorbed latent (facts of serving)."""
    ops = ops_of(model, *STEP, "--batch", "1", "--context", "131072")
    assert 0.99 * limit < ops[op]["intensity"] < 1.001 * limit


JOBS = [
    ("llama3-8b", *STEP, "--batch", "8", "--context", "100", "--tp", "4"),
    ("llama3-8b", "--set", "L=4", "--serve", "prefill", "--batch", "8", "--prompt", "64", "--pp=2"),
    ("qwen3-30b-a3b", *STEP, "--batch", "64", "--context", "9", "--dp", "4", "--ep", "4"),
    ("mamba2-2.7b", *STEP, "--batch", "4", "--context", "9"),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job[0])
def test_ops_add_up_to_the_step(job: tuple[str, ...]) -> None:
    """FLOPs, bytes and communication of the classes, each stage counted once."""
    actual = analysed(*job)
    for entry in actual["classes"]:
        stage = entry["coords"].get("pp", 0)
        mine = [op for op in actual["serving"]["ops"] if stage in op["stages"]]
        moved = [op for op in mine if op["kernel"] == "communication"]
        work = [op for op in mine if op["kernel"] != "communication"]
        assert sum(op["flops"] for op in work) == sum(entry["flops"].values())
        assert sum(op["bytes"] for op in work) == sum(entry["bytes_touched"].values())
        sent = [*entry["collectives"], *entry["p2p"]]
        assert sum(op["bytes"] for op in moved) == sum(c["bytes"] for c in sent)
        assert sum(op["calls"] for op in moved) == sum(c["count"] for c in sent)


def test_a_product_computes_from_the_ridge_on() -> None:
    """The largest batch that waits for memory, found from the sizes, and the next one."""
    n, k, ridge = D, F, PEAK / BANDWIDTH
    first = next(t for t in range(1, 2048) if t * n * k / (n * k + t * (n + k)) >= ridge)
    for batch, bound in ((first - 1, "memory"), (first, "compute")):
        words = ("--batch", str(batch), "--context", "64", "--machine", "h100-sxm")
        op = ops_of("llama3-70b", *STEP, *words)["layers/swiglu/y"]
        assert op["ridge"] == pytest.approx(ridge, rel=1e-3)
        assert op["bound"] == bound


def test_what_is_said_without_a_machine() -> None:
    ops = ops_of("llama3-8b", *STEP, "--batch", "1", "--context", "64", "--tp", "2")
    assert {op["bound"] for op in ops.values()} == {None, "communication"}
    assert all(op["ridge"] is None for op in ops.values())
    moved = ops["layers/swiglu/y_r"]
    assert (moved["kind"], moved["intensity"]) == ("all_reduce", None)


def test_intensities_in_symbols() -> None:
    ops = ops_of("llama3-8b", "--serve", "decode", "--tp", "2", "--symbolic")
    assert ops["layers/gqa/q0"]["intensity"] == "B*D*H*K*S/(B*D*S*tp + B*H*K*S + D*H*K)"
    assert ops["layers/gqa/a"]["intensity"] == "H*S*(1/2 + S/2 + past)/(G*S + G*past + H*S)"
    assert ops["layers/gqa/q0"]["calls"] == "L"
    shown = stagec("analyze", "llama3-8b", "--serve", "decode", "--tp", "2", "--symbolic").out
    assert "B*D*H*K*S/(B*D*S*tp + B*H*K*S + D*H*K)" in shown


def test_a_quotient_is_that_of_its_parts() -> None:
    a, b, tp = (symbol(n) for n in ("a", "b", "tp"))
    above, below = 2 * a * b / tp + 4 * a, 6 * a / tp + 2 * a * b
    actual = ratio(above, below)
    assert "a" not in actual.symbols
    values = {"a": const(3), "b": const(5), "tp": const(7)}

    def at(value: Expr) -> Fraction:
        return fraction(substitute(value, values))

    assert at(actual) == at(above) / at(below)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--machine", "h100"), "takes --machine only for a step of serving"),
        (("--machine", "h100", "--sweep", "tp=1,2"), "does not take --machine with --sweep"),
        ((*STEP, "--context", "9", "--limit", "machine"), "add --machine"),
    ],
)
def test_what_is_no_step_is_refused(words: tuple[str, ...], says: str) -> None:
    ran = stagec("analyze", "llama3-8b", *words)
    assert ran.code == 1
    assert says in ran.err
