"""Positions and selections in attention: split, they are what they are on one device; their numbers
are those of the formulas, written down here anew."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from stagec.analysis.report import analysis
from tests.support import PLACE, compiled, crossed, inputs_of, operations, run_numeric

TEXT = """stg.module @positions {{
  stg.symbols[B = 2, S = 24, D = 8, H = 4, G = 4, K = 4, N = 5, I = 4, J = 3]
  {mesh}
  stg.func @f(%x: f32[B, S, D], %wq: f32[D, H, K | param], %wk: f32[D, G, K | param]{args}) {{
    %q = stg.einsum["bsd,dhk->bshk"](%x, %wq)
    %k = stg.einsum["bsd,dhk->bshk"](%x, %wk)
    {lines}
    %sq = stg.mul(%a, %a)
    %loss = stg.sum["bshk->"](%sq)
    stg.return(%loss)
  }}
}}
"""
MESH = """stg.mesh @pod[{mesh}]
  stg.strategy @s[mesh = @pod] {{
    {split}
    stg.optimizer[none]
  }}"""
STRATEGIES = {
    "heads": ("tp = 4", "stg.split[(H, G, I), over = tp]"),
    "ring": ("cp = 4", "stg.split[S, over = cp]\n    stg.ring[S]"),
    "gather": ("cp = 4", "stg.split[S, over = cp]\n    stg.gather[S]"),
    "exchange": ("cp = 4", "stg.split[S, over = cp]\n    stg.exchange[S, into = (H, G)]"),
    "both": (
        "cp = 2, tp = 2",
        "stg.split[S, over = cp]\n    stg.split[(H, G, I), over = tp]\n    stg.gather[S]",
    ),
}
CASES = {
    "rope": (
        "",
        (
            "%q2 = stg.rope[base = 50, first = 2](%q)\n    "
            "%k2 = stg.rope[base = 50, interleaved](%k)\n    "
            "%a = stg.attention[causal](%q2, %k2, %k2)"
        ),
    ),
    "axes": (
        ", %p: i32[B, 3, S]",
        (
            "%q2 = stg.rope[sections = (1, 0, 1)](%q, %p)\n    "
            "%k2 = stg.rope[sections = (1, 0, 1), interleaved](%k, %p)\n    "
            "%a = stg.attention(%q2, %k2, %k2)"
        ),
    ),
    "temperature": (
        "",
        "%q2 = stg.temperature[floor = 3](%q)\n    %a = stg.attention[causal](%q2, %k, %k)",
    ),
    "relative": (
        ", %table: f32[8, H | param]",
        (
            "%b = stg.relative_bias[sizes = (S, S), most = 12](%table)\n    "
            "%a = stg.attention[bias, rsqrt = 1](%q, %k, %k, %b)"
        ),
    ),
    "disentangled": (
        ", %near: f32[12, H, K | param], %far: f32[12, H, K | param], %wh: f32[G, H | param]",
        (
            '%keys = stg.einsum["btgk,gh->bthk"](%k, %wh)\n    '
            '%s0 = stg.einsum["bshk,bthk->bhst"](%q, %keys)\n    '
            '%c0 = stg.einsum["bshk,rhk->bshr"](%q, %near)\n    '
            "%c = stg.by_distance[size = S, most = 20](%c0)\n    "
            '%p0 = stg.einsum["bthk,rhk->bthr"](%keys, %far)\n    '
            "%p = stg.by_distance[size = S, keys](%p0)\n    "
            "%scores = stg.add(%s0, %c, %p)\n    "
            "%weights = stg.softmax[rsqrt = 3*K](%scores)\n    "
            '%a = stg.einsum["bhst,bthk->bshk"](%weights, %keys)'
        ),
    ),
    "indexer": (
        ", %wi: f32[D, I, J], %wj: f32[D, J], %ww: f32[D, I]",
        (
            '%qi = stg.einsum["bsd,dij->bsij"](%x, %wi)\n    '
            '%ki = stg.einsum["bsd,dj->bsj"](%x, %wj)\n    '
            '%w = stg.einsum["bsd,di->bsi"](%x, %ww)\n    '
            "%scores = stg.index_scores[causal](%qi, %ki, %w)\n    "
            "%top, %keys = stg.topk[k = N](%scores)\n    "
            "%a = stg.attention[causal, selected](%q, %k, %k, %keys)"
        ),
    ),
}
GRADIENTS = "infer-shapes,apply-strategy,differentiate,eliminate-dead-code"


def text(case: str, strategy: str = "") -> str:
    args, lines = CASES[case]
    mesh = ""
    if strategy:
        axes, split = STRATEGIES[strategy]
        mesh = MESH.format(mesh=axes, split=split)
    return TEXT.format(mesh=mesh, args=args, lines=lines)


@crossed(strategy=list(STRATEGIES), case=list(CASES))
def test_split_equals_one_device(strategy: str, case: str) -> None:
    """The loss and all gradients."""
    if strategy == "ring" and case in ("relative", "indexer"):
        pytest.skip("a ring takes neither a bias nor a selection")
    if strategy == "exchange" and case == "disentangled":
        pytest.skip("scores are no kernel that an exchange could take apart")
    one = compiled(text(case), GRADIENTS)
    inputs = inputs_of(one, 4)
    module = compiled(text(case, strategy), f"{GRADIENTS},{PLACE}")
    for x, y in zip(run_numeric(one, inputs), run_numeric(module, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strategy", ["", "heads", "gather", "both"])
def test_flops_of_the_indexer(strategy: str) -> None:
    """2 I J + 2 I FLOPs a pair (arXiv 2512.02556: products of heads, and their weighted sum), of
    pairs of a query and an earlier key; masks ignored, of all pairs."""
    pipeline = "infer-shapes,apply-strategy,partition,units,plan,lower-to-trace"
    module = compiled(text("indexer", strategy), pipeline)
    for op in operations(module, "et.comp"):
        if op.text("kind") != "index_scores":
            op.attrs["flops"] = op.expr("flops") * 0
            op.attrs.pop("matmul", None)
    classes = analysis(module, "m")["classes"]
    pair = 2 * (2 * 4 * 3 + 2 * 4)
    for key, pairs in (("flops", 24 * 25 // 2), ("matmul_flops", 24 * 24)):
        assert sum(c["count"] * c[key]["forward"] for c in classes) == pair * pairs


def rotated(attrs: str, size: int, positions: int) -> Any:
    """stg.rope of ones."""
    module = compiled(
        f"""stg.module @m {{
      stg.func @f(%x: f32[1, {positions}, {size}]) {{
        %y = stg.rope[{attrs}](%x)
        stg.return(%y)
      }}
    }}""",
        "infer-shapes",
    )
    (actual,) = run_numeric(module, {"x": np.ones((1, positions, size))})
    return np.asarray(actual)[0]


def angles_of(attrs: str, size: int) -> Any:
    """Radians per position of each pair, from position 1."""
    actual = rotated(attrs, size, 2)[1]
    half = size // 2
    return np.arctan2(actual[half:] - actual[:half], actual[half:] + actual[:half])


def test_llama3_frequencies() -> None:
    """Long waves are stretched, short ones kept, and those between in part."""
    expected: list[float] = []
    for i in range(16):
        plain = 500000.0 ** (-2 * i / 32)
        wave = 2 * math.pi / plain
        if wave < 8192 / 4:
            expected.append(plain)
        elif wave > 8192 / 1:
            expected.append(plain / 8)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            expected.append((1 - smooth) * plain / 8 + smooth * plain)
    attrs = "base = 500000, scaling = llama3, factor = 8, low = 1, high = 4, original = 8192"
    np.testing.assert_allclose(angles_of(attrs, 32), expected, rtol=1e-9)


def test_proportional_frequencies() -> None:
    """The first pairs turn as those of the whole head do, over the factor; the others are still."""
    plain = [1000000.0 ** (-2 * i / 32) for i in range(16)]
    attrs = "base = 1000000, scaling = proportional, share = 1/4"
    np.testing.assert_allclose(angles_of(attrs, 32), [*plain[:4], *[0.0] * 12], rtol=1e-9)
    halved = [each / 2 for each in plain[:4]]
    actual = angles_of(f"{attrs}, factor = 2", 32)
    np.testing.assert_allclose(actual, [*halved, *[0.0] * 12], rtol=1e-9)


@pytest.mark.parametrize("start", [0, 1])
def test_where_a_temperature_rises(start: int) -> None:
    """It rises where the position, counted from `start` on, is a multiple of the floor."""
    module = compiled(
        f"""stg.module @m {{
      stg.func @f(%x: f32[1, 6, 1]) {{
        %y = stg.temperature[floor = 2, scale = 1/2, start = {start}](%x)
        stg.return(%y)
      }}
    }}""",
        "infer-shapes",
    )
    (actual,) = run_numeric(module, {"x": np.ones((1, 6, 1))})
    expected = [1 + math.log1p((i + start) // 2) / 2 for i in range(6)]
    np.testing.assert_allclose(np.asarray(actual)[0, :, 0], expected, rtol=1e-9)


def test_yarn_frequencies() -> None:
    """Between two pairs, found from their turns over the old context, stretching sets in."""
    size, base, factor, original = 64, 10000, 40, 4096

    def place(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(place(32)), 0), min(math.ceil(place(1)), size - 1)
    expected: list[float] = []
    for i in range(size // 2):
        plain = base ** (-2 * i / size)
        ramp = min(max((i - low) / (high - low), 0), 1)
        expected.append(plain / factor * ramp + plain * (1 - ramp))
    attrs = "base = 10000, scaling = yarn, factor = 40, original = 4096"
    np.testing.assert_allclose(angles_of(attrs, size), expected, rtol=1e-9)
    magnitude = np.hypot(*np.split(rotated(attrs, size, 2)[1], 2)) / math.sqrt(2)
    np.testing.assert_allclose(magnitude, 0.1 * math.log(40) + 1, rtol=1e-9)
    still = rotated(f"{attrs}, mscale = 0", size, 2)[1]
    np.testing.assert_allclose(np.hypot(*np.split(still, 2)), math.sqrt(2), rtol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_of_relative_positions(causal: bool) -> None:
    """The function of T5, one pair at a time."""

    def bucket(key: int, query: int) -> int:
        count, actual, distance = 32, 0, key - query
        if not causal:
            count //= 2
            actual = count if distance > 0 else 0
            distance = abs(distance)
        else:
            distance = -min(distance, 0)
        exact = count // 2
        if distance < exact:
            return actual + distance
        grown = math.log(distance / exact) / math.log(128 / exact) * (count - exact)
        return actual + min(exact + int(grown), count - 1)

    flag = ", causal" if causal else ""
    module = compiled(
        f"""stg.module @m {{
      stg.func @f(%t: f32[32, 1]) {{
        %y = stg.relative_bias[sizes = (150, 150){flag}](%t)
        stg.return(%y)
      }}
    }}""",
        "infer-shapes",
    )
    (actual,) = run_numeric(module, {"t": np.arange(32.0)[:, None]})
    expected = [[bucket(j, i) for j in range(150)] for i in range(150)]
    np.testing.assert_array_equal(actual[0], expected)


@pytest.mark.parametrize("most", [0, 30])
def test_rows_of_disentangled_scores(most: int) -> None:
    """Each pair takes the row of its distance, written down anew from the code of the release: all
    rows up to the ends, or logarithmic ones from half of the rows of a side on."""

    def row(distance: int) -> int:
        middle = 4
        if most and abs(distance) > middle:
            grown = math.log(abs(distance) / middle) / math.log((most - 1) / middle)
            distance = int(math.copysign(math.ceil(grown * (middle - 1)) + middle, distance))
        return min(max(distance + 8, 0), 15)

    flag = f", most = {most}" if most else ""
    module = compiled(
        f"""stg.module @m {{
      stg.func @f(%x: f32[1, 40, 1, 16]) {{
        %y = stg.by_distance[size = 40{flag}](%x)
        %z = stg.by_distance[size = 40, keys{flag}](%x)
        stg.return(%y, %z)
      }}
    }}""",
        "infer-shapes",
    )
    x = np.arange(40.0 * 16).reshape(1, 40, 1, 16)
    of_queries, of_keys = run_numeric(module, {"x": x})
    for i in range(40):
        for j in range(40):
            assert of_queries[0, 0, i, j] == x[0, i, 0, row(i - j)]
            assert of_keys[0, 0, i, j] == x[0, j, 0, row(i - j)]
