"""What a step reads of the weights of experts: the mean over all choices of a router that loads
them alike, whole rows under loads, and all of them where there are enough tokens."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import combinations, product
from math import comb, floor, prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.ir.expr import call, const, evaluate
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.program.classes import rank_classes
from tests.support import MIXTRAL, crossed, stagec, tiny_options

#: Qwen3-30B-A3B: width, width of an expert, experts, those of a token; Mixtral 8x7B likewise.
D, M, E, K = 2048, 768, 128, 8
GATE_UP, DOWN = "layers/moe/experts/gate_up", "layers/moe/experts/ys"
DECODE = ("--set", "L=1", "--serve", "decode", "--context", "64")


def ops_of(model: str, *words: str) -> dict[str, dict[str, Any]]:
    ran = stagec("analyze", model, *words, "--json")
    assert ran.code == 0, ran.err
    return {op["op"]: op for op in json.loads(ran.out)["serving"]["ops"]}


def nearest(value: Fraction) -> int:
    return floor(value + Fraction(1, 2))


def mean_reached(parts: int, each: int, draws: int) -> Fraction:
    """The parts that are reached, by counting all ways to draw."""
    ways = list(product(list(combinations(range(parts), each)), repeat=draws))
    return Fraction(sum(len({i for way in ways for i in way}) for ways in ways), len(ways))


@crossed(parts=[1, 4, 5], each=[1, 2, 4], draws=[0, 1, 3])
def test_reached_is_the_mean_over_all_ways_to_draw(parts: int, each: int, draws: int) -> None:
    if each > parts:
        return
    whole = 1_000_003
    actual = call("reached", [const(n) for n in (whole, parts, each, draws)])
    assert evaluate(actual, {}) == nearest(whole * mean_reached(parts, each, draws) / parts)


def test_reached_is_whole_where_nothing_is_left() -> None:
    """To the byte, for as many draws as a training step has, and for numbers beyond floats."""
    for whole, parts, draws in ((2**62, 256, 2**22), (2**62 + 1, 2**40, 2**62), (7, 8, 0)):
        actual = evaluate(call("reached", [const(n) for n in (whole, parts, 8, draws)]), {})
        assert actual == (whole if draws else 0)


def largest(parts: int, chance: Fraction, ranks: int) -> Fraction:
    """The mean of the largest of so many binomial numbers, by all their outcomes."""
    chances = [comb(parts, n) * chance**n * (1 - chance) ** (parts - n) for n in range(parts + 1)]
    ways = product(range(parts + 1), repeat=ranks)
    return sum(
        (max(w) * prod((chances[n] for n in w), start=Fraction(1)) for w in ways), Fraction()
    )


@crossed(parts=[1, 3, 5], some=[0, 1, 3, 4], ranks=[1, 2, 4])
def test_the_fullest_rank_has_the_largest_binomial_number(
    parts: int, some: int, ranks: int
) -> None:
    whole = 1_000_003
    actual = call("fullest", [const(n) for n in (whole, some, 4, parts, ranks)])
    expected = nearest(whole * largest(parts, Fraction(some, 4), ranks) / parts)
    assert evaluate(actual, {}) == expected


def test_the_fullest_rank_of_huge_numbers_is_that_of_1_024() -> None:
    """Texts have any numbers, and a power of that many factors would never end."""
    huge, most = (
        evaluate(call("fullest", [const(n) for n in (10**6, 1, 2, parts, ranks)]), {})
        for parts, ranks in ((2**62, 2**62), (1024, 1024))
    )
    assert huge == most


def test_the_fullest_rank_of_a_router_that_prefers_some_experts() -> None:
    """Drawn: probabilities of experts by Beta(1, E/k - 1), each chosen by a token by itself. Ranks
    whose numbers depend on each other have the same mean largest one."""
    random, experts, tokens, ranks = np.random.default_rng(1), 128, 16, 8
    chance = random.beta(1, experts / K - 1, size=(20_000, experts))
    reached = random.random(chance.shape) < 1 - (1 - chance) ** tokens
    drawn = reached.reshape(-1, ranks, experts // ranks).sum(axis=-1).max(axis=-1).mean()
    some, of = tokens * K, experts - K + tokens * K
    whole = 10**6 * experts // ranks
    values = (whole, some, of, experts // ranks, ranks)
    most = evaluate(call("fullest", [const(n) for n in values]), {})
    assert most / 10**6 == pytest.approx(drawn, rel=0.01)


@crossed(batch=[1, 8, 64, 4096], strategy=[(1, 1, 1), (4, 4, 1), (4, 2, 2)])
def test_bytes_of_decode_are_those_of_experts_that_get_tokens(
    batch: int, strategy: tuple[int, int, int]
) -> None:
    """Weights of the mean number of experts, the rows, and the results; all tokens of the ranks
    that share the experts count."""
    dp, ep, tp = strategy
    if batch % dp:
        return
    ranks = ("--dp", str(dp), "--ep", str(ep), "--tp", str(tp))
    ops = ops_of("qwen3-30b-a3b", *DECODE, "--batch", str(batch), *ranks)
    inner, batch = M // tp, batch * ep // dp  # of a group that shares the experts
    share, rows = 1 - (1 - Fraction(K, E)) ** batch, Fraction(batch * K, ep)
    read = nearest(2 * Fraction(E, ep) * D * 2 * inner * share)
    assert ops[GATE_UP]["bytes"] == read + 2 * rows * (D + 2 * inner)
    read = nearest(2 * Fraction(E, ep) * D * inner * share)
    assert ops[DOWN]["bytes"] == read + 2 * rows * (D + inner)


def test_a_token_reads_the_active_weights() -> None:
    """Of one token exactly those that count as active, 3.3 of 30.5 billion (arXiv 2505.09388), but
    for the rows of the embedding and norms."""
    words = ("--serve", "decode", "--batch", "1", "--context", "64")
    ops = ops_of("qwen3-30b-a3b", *words).values()
    products = sum(op["bytes"] for op in ops if op["kernel"] == "matmul")
    active = 48 * (2 * D * 32 * 128 + 2 * D * 4 * 128 + D * E + K * 3 * D * M) + 151936 * D
    assert 2 * active < products < 1.002 * 2 * active


def test_scales_are_read_with_their_experts() -> None:
    words = ("--batch", "1", "--weight-dtype", "mxfp4", "--activation-dtype", "bf16")
    op = ops_of("qwen3-30b-a3b", *DECODE, *words)[GATE_UP]
    each = D * 2 * M
    assert op["bytes"] == K * (each // 2 + each // 32) + 2 * K * (D + 2 * M)


def test_training_reads_all_experts() -> None:
    """A job that pads buffers to the same size, which reads all of them, has the same kernels."""
    given = {"sizes": {"S": 64, "B": 8}, "dp": 2, "ep": 2}
    jobs = (tiny_options(MIXTRAL, **given), tiny_options(MIXTRAL, **given, capacity_factor="1"))
    mine, other = ([c.program() for c in rank_classes(JobBuilder(j).lower())] for j in jobs)
    for a, b in zip(mine, other, strict=True):
        assert [n.kernels for n in a.nodes] == [n.kernels for n in b.nodes]


def test_kernels_have_groups_of_experts_with_tokens() -> None:
    """At least one, and FLOPs stay those of the rows."""
    options = JobOptions(MIXTRAL, sizes={"L": 1}, serve="decode", context=8, batch=2)
    (only,) = rank_classes(JobBuilder(options).lower())
    kernels = [k for n in only.program().nodes for k in n.kernels if k.kind == "matmul"]
    grouped = [k for k in kernels if k.extents[0] > 1]
    assert {k.extents[0] for k in grouped} == {nearest(8 * mean_reached(8, 2, 2) / 8)}
    for kernel in grouped:
        batch, m, n, k = kernel.extents
        assert kernel.flops == 2 * batch * m * n * k


@pytest.mark.parametrize(("ep", "batch"), [(1, 1), (4, 4), (2, 8)])
def test_loads_say_which_experts_have_rows(ep: int, batch: int, tmp_path: Path) -> None:
    """Whole rows, dealt by largest remainders: to the ranks, and on a rank to its experts."""
    loads = [8, 1, 1, 1, 1, 1, 3, 0]
    path = tmp_path / "loads.json"
    path.write_text(json.dumps(loads))
    words = ("--batch", str(batch), "--dp", str(ep), "--ep", str(ep), "--expert-load", str(path))
    op = ops_of(MIXTRAL, *DECODE, *words)[GATE_UP]
    parts = [loads[i : i + 8 // ep] for i in range(0, 8, 8 // ep)]
    rows = dealt(2 * batch, [sum(part) for part in parts])[0]
    used = sum(n > 0 for n in dealt(rows, parts[0]))
    assert op["bytes"] == 2 * used * 4096 * 2 * 14336 + 2 * rows * (4096 + 2 * 14336)


def dealt(total: int, shares: list[int]) -> list[int]:
    """Whole numbers as these shares: each item to the part that lacks most of its share."""
    exact = [Fraction(total * share, sum(shares)) for share in shares]
    rows = [floor(e) for e in exact]
    for _ in range(total - sum(rows)):
        rows[max(range(len(rows)), key=lambda i: (exact[i] - rows[i], -i))] += 1
    return rows
