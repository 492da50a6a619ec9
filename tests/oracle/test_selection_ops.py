"""Maximum, argmax, top-k, running sums and permutations over split dimensions: all ranks together
compute what one device computes, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest

from stagec.ir.opdef import Array
from tests.support import compiled, inputs_of, run_numeric, run_one_device

PLACEMENTS = ("B, S, V", "B@dp, S, V@tp", "B, S@tp, V@dp", "B, S, V@(dp, tp)", "B, S@(tp, dp), V")
#: Lines that compute `%y` (and integers `%i`) from `%x: f32[B, S, V]`, and the letters of `%y`.
OPS = {
    "max": ('%y = stg.max["bsv->bs"](%x)', "bs"),
    "max-of-two": ('%y = stg.max["bsv->b"](%x)', "b"),
    "max-of-all": ('%y = stg.max["bsv->"](%x)', ""),
    "topk": ("%y, %i = stg.topk[k = 3](%x)", "bsk"),
    "topk-many": ("%y, %i = stg.topk[k = 7](%x)", "bsk"),
    "cumsum": ("%y = stg.cumsum[dim = 1](%x)", "bsv"),
    "cumsum-last": ("%y = stg.cumsum[dim = 2, exclusive](%x)", "bsv"),
    "cumsum-reverse": ("%y = stg.cumsum[dim = 1, reverse](%x)", "bsv"),
    "cumsum-both": ("%y = stg.cumsum[dim = 2, reverse, exclusive](%x)", "bsv"),
    "permute": ('%y = stg.permute["bsv->vbs"](%x)', "bsv"),
}


def module(lines: str, placement: str, returned: str) -> str:
    return (
        "stg.module @m {\n  stg.symbols[B = 4, S = 8, V = 8]\n"
        f"  stg.mesh @pod[dp = 2, tp = 2]\n  stg.func @f(%x: f32[{placement} | param]) {{\n"
        f"    {lines}\n    stg.return({returned})\n  }}\n}}\n"
    )


def on_all_ranks(text: str, passes: str, x: Array | None = None) -> list[Array]:
    """The results of the partitioned program; its verifier has run."""
    sharded = compiled(text, f"{passes},propagate-sharding,insert-collectives")
    inputs = {**inputs_of(sharded, 5), **({} if x is None else {"x": x})}
    expected = run_one_device(compiled(text, passes), inputs)
    actual = run_numeric(sharded, inputs)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    return actual


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", OPS)
def test_forward_and_backward(name: str, placement: str) -> None:
    lines, letters = OPS[name]
    squared = f'%loss = stg.einsum["{letters},{letters}->"](%y, %y)'
    on_all_ranks(
        module(f"{lines}\n    {squared}", placement, "%loss"), "infer-shapes,differentiate"
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_indices_are_those_of_the_whole_dimension(placement: str) -> None:
    """Also where all elements are equal: the first of them is taken."""
    lines = "%i, %m = stg.argmax(%x)\n    %v, %j = stg.topk[k = 6](%x)"
    text = module(lines, placement, "%i, %m, %v, %j")
    i, m, v, j = on_all_ranks(text, "infer-shapes")
    assert np.array_equal(i, j[..., 0])
    assert np.array_equal(m, v[..., 0])
    i, _, _, j = on_all_ranks(text, "infer-shapes", np.zeros((4, 8, 8)))
    assert not i.any()
    assert np.array_equal(j, np.broadcast_to(np.arange(6), j.shape))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("%y = stg.cumsum[dim = 0](%x)", [3.0, 4.0, 6.0, 9.0]),
        ("%y = stg.cumsum[dim = 0, exclusive](%x)", [0.0, 3.0, 4.0, 6.0]),
        ("%y = stg.cumsum[dim = 0, reverse](%x)", [9.0, 6.0, 5.0, 3.0]),
        ("%y = stg.cumsum[dim = 0, reverse, exclusive](%x)", [6.0, 5.0, 3.0, 0.0]),
        ("%y, %i = stg.topk[k = 3](%x)", [3.0, 3.0, 2.0]),
        ("%v, %y = stg.topk[k = 3](%x)", [0, 3, 2]),
        ("%y = stg.argmax(%x)", 0),
        ('%y = stg.max["a->"](%x)', 3.0),
    ],
)
@pytest.mark.parametrize("mark", ["", "@n"])
def test_meaning(lines: str, expected: list[float], mark: str) -> None:
    text = f"stg.module @m {{\n stg.mesh @pod[n = 2]\n stg.func @f(%x: f32[4{mark}]) {{\n"
    module = compiled(f"{text}{lines}\n stg.return(%y)\n }}\n}}", "place")
    (actual,) = run_numeric(module, {"x": np.array([3.0, 1.0, 2.0, 3.0])})
    assert actual.tolist() == expected


def test_ties_share_the_gradient() -> None:
    """As `torch.amax` does."""
    text = module('%y = stg.max["bsv->bs"](%x)\n %l = stg.sum["bs->"](%y)', "B, S, V@tp", "%l")
    x = np.zeros((4, 8, 8))
    x[..., [1, 6]] = 2.0
    _, dx = on_all_ranks(text, "infer-shapes,differentiate", x)
    assert np.array_equal(dx, x / 4)
