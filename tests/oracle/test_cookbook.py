"""The strategies of docs/cookbook.md: same numbers as on one device, collectives as in closed
forms.

The closed forms are per rank and step of a Llama of two layers, written from the layout that each
strategy states; messages are in elements of one rank's share of the batch.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from stagec.ir.opdef import Array
from tests.support import (
    LLAMA,
    PLACE,
    STEP,
    analyse,
    compiled,
    inputs_of,
    operations,
    run_numeric,
    stagec,
    tiny_module,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cookbook.md"
TEXTS = dict(
    re.findall(r"^<!-- file: (\S+) -->\n```stg\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.M)
)
STRATEGIES = [name for name in TEXTS if name != "pinned.stg"]
Rows = dict[tuple[str, tuple[str, ...], str, str], tuple[int, int]]

L, B, S, DP = 2, 4, 8192, 2
D, H, G, K, F, V = 4096, 32, 8, 128, 14336, 128256
TOKENS = B // DP * S
MESSAGE = 2 * TOKENS * D
#: Bytes of what a layer's products give, all of q, k, v and of gate and up
WIDE = 2 * TOKENS * (H * K + 2 * G * K + 2 * F)
STATISTICS = (3, 3 * 4 * TOKENS)


@cache
def plain() -> tuple[dict[str, Array], list[Array]]:
    """Inputs and results of the step on one device."""
    module = tiny_module(LLAMA, STEP)
    inputs = inputs_of(module, 2)
    return inputs, run_numeric(module, inputs)


@pytest.fixture
def strategy(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The file of a strategy of the page."""
    path = tmp_path / request.param
    path.write_text(TEXTS[request.param])
    return str(path)


@pytest.mark.parametrize("strategy", STRATEGIES, indirect=True)
def test_a_step_equals_that_on_one_device(strategy: str) -> None:
    inputs, expected = plain()
    module = tiny_module(LLAMA, f"{STEP},{PLACE}", strategy=strategy)
    names = [v.name for v in module.main.body.terminator.operands]
    for name, x, y in zip(names, expected, run_numeric(module, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10, err_msg=name)


def test_the_page_has_what_is_tested() -> None:
    assert list(EXPECTED) == STRATEGIES


def activations(strategy: str, *phases: str) -> Rows:
    """Count and bytes of the collectives of activations."""
    (entry,) = analyse(LLAMA, strategy=strategy, sizes={"L": L, "B": B})["classes"]
    return {
        (r["op"], tuple(r["over"]), r["phase"], r["dtype"]): (r["count"], r["bytes"])
        for r in entry["collectives"]
        if r["phase"] in phases
    }


def fstp() -> Rows:
    """Forward: norms sum their rows up, every product is scattered. Backward: what the products
    with q, k, v and o, and those for weights of gate and up, contract is gathered, and the gradient
    of the head's output. Weights of gate and up are smaller than the gradients that they meet, so
    they change sides, in one call a block, and leave a sum for the norm, which is scattered."""
    tp, heads = 4, 2 * TOKENS * (H * K + 2 * G * K)
    return {
        ("all_reduce", ("tp",), "forward", "f32"): _sums(STATISTICS, 2 * L + 1),
        ("reduce_scatter", ("tp",), "forward", "bf16"): (
            6 * L + 1,
            L * (WIDE + 2 * MESSAGE) + 2 * TOKENS * V,
        ),
        ("all_gather", ("tp",), "backward", "bf16"): (
            7 * L + 1,
            L * (4 * MESSAGE + heads) + 2 * TOKENS * V,
        ),
        ("all_to_all", ("tp",), "backward", "bf16"): (L, L * 2 * D * 2 * F // tp),
        ("reduce_scatter", ("tp",), "backward", "bf16"): (L, L * MESSAGE),
        ("all_reduce", ("tp",), "backward", "f32"): _sums((0, 0), 2 * L + 1, of=2),
    }


def _sums(others: tuple[int, int], norms: int, of: int = 1) -> tuple[int, int]:
    """The all_reduces of the sums of rows, `of` for each norm in one call, beside others."""
    return others[0] + norms, others[1] + norms * of * 4 * TOKENS


def fstp_blocks() -> Rows:
    """Two gathers and two scatters a layer, one each for the ends; backward the gradients of norms
    are scattered, and the norms' results gathered again."""
    calls = 2 * L + 1
    every = (calls, calls * MESSAGE)
    return {
        ("reduce_scatter", ("tp",), "forward", "bf16"): every,
        ("all_gather", ("tp",), "forward", "bf16"): every,
        ("all_reduce", ("tp",), "forward", "f32"): _sums(STATISTICS, calls),
        ("all_gather", ("tp",), "backward", "bf16"): (2 * calls, 2 * calls * MESSAGE),
        ("reduce_scatter", ("tp",), "backward", "bf16"): every,
        ("all_reduce", ("tp",), "backward", "f32"): _sums((0, 0), calls, of=2),
    }


def tp_2d() -> Rows:
    """Over x whatever contracts D, the norms' rows too; over y what contracts heads, F or V."""
    x, y, ends = 2, 4, 2 * L + 1
    return {
        ("all_reduce", ("tpy",), "forward", "bf16"): (ends, ends * MESSAGE // x),
        ("all_reduce", ("tpx",), "forward", "bf16"): (4 * L, L * WIDE // y),
        ("all_reduce", ("tpx",), "forward", "f32"): _sums((1, 4 * TOKENS * V // y), ends),
        ("all_reduce", ("tpy",), "forward", "f32"): STATISTICS,
        ("all_reduce", ("tpy",), "backward", "bf16"): (ends, ends * MESSAGE // x),
        ("all_reduce", ("tpx",), "backward", "f32"): _sums((0, 0), ends, of=2),
        ("all_reduce", ("tpx",), "backward", "bf16"): (2 * L, L * 2 * TOKENS * (H * K + F) // y),
    }


def sp_ffn() -> Rows:
    """A layer scatters o and down, and gathers for gate and up and at its end; backward three
    gathers (one of them again what forward gathered) and two scatters; the ends are whole.
    """
    return {
        ("all_reduce", ("tp",), "forward", "bf16"): (1, MESSAGE),
        ("reduce_scatter", ("tp",), "forward", "bf16"): (2 * L, 2 * L * MESSAGE),
        ("all_gather", ("tp",), "forward", "bf16"): (2 * L, 2 * L * MESSAGE),
        ("all_reduce", ("tp",), "forward", "f32"): STATISTICS,
        ("reduce_scatter", ("tp",), "backward", "bf16"): (2 * L + 1, (2 * L + 1) * MESSAGE),
        ("all_gather", ("tp",), "backward", "bf16"): (3 * L + 1, (3 * L + 1) * MESSAGE),
    }


EXPECTED = {
    "fstp.stg": (fstp, ("forward", "backward")),
    "fstp_blocks.stg": (fstp_blocks, ("forward", "backward")),
    "tp_2d.stg": (tp_2d, ("forward", "backward")),
    "sp_ffn.stg": (sp_ffn, ("forward", "backward")),
}


@pytest.mark.parametrize("strategy", STRATEGIES, indirect=True)
def test_collectives(strategy: str) -> None:
    expected, phases = EXPECTED[Path(strategy).name]
    assert activations(strategy, *phases) == expected()


@pytest.mark.parametrize(
    ("name", "placed"),
    [
        ("fstp.stg", {"wq": "[D@tp, H, K |", "wo": "[H@tp, K, D |", "w_down": "[F@tp, D |"}),
        ("tp_2d.stg", {"wq": "[D@tpx, H@tpy, K |", "w_down": "[F@tpy, D@tpx |", "norm": "[D |"}),
    ],
)
def test_weights_rest_as_the_page_says(name: str, placed: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(TEXTS[name])
    module = tiny_module(LLAMA, "inline,infer-shapes,apply-strategy", strategy=str(path))
    actual = {a.name.rpartition("/")[2]: str(a.type) for a in module.main.body.args}
    for argument, text in placed.items():
        assert text in actual[argument].replace("L, ", "")


def test_pins_in_the_text_gather_multiply_and_scatter() -> None:
    module = compiled(TEXTS["pinned.stg"], "infer-shapes,propagate-sharding,insert-collectives")
    kinds = ("stg.all_gather", "stg.einsum", "stg.reduce_scatter", "stg.all_reduce")
    actual = [op.name.removeprefix("stg.") for op in operations(module, *kinds)]
    assert actual == ["all_gather", "einsum", "reduce_scatter"]


def test_what_is_summed_in_forward_is_not_summed_again_in_backward(tmp_path: Path) -> None:
    """The parts of a sum take as many bytes as the sum, so the sum is stashed."""
    path = tmp_path / "tp_2d.stg"
    path.write_text(TEXTS["tp_2d.stg"])
    module = tiny_module(LLAMA, f"{STEP},{PLACE}", strategy=str(path))
    backward = [op for op in operations(module, "stg.all_reduce") if op.phase == "backward"]
    sums = {op.operands[0].name for op in backward}
    assert not sums & {"gate_up", "q0", "k0", "v", "logits"}


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("stg.split[S, over = tp, of = r7]", "no value '%r7'"),
        ("stg.split[F, over = tp, of = r1]", "%r1 has no dimension F"),
        ("stg.gather[V, of = (r1, r2)]", "%r1 has no dimension V"),
        ("stg.gather[S, of = rr]", "no value '%rr'"),
    ],
)
def test_names_of_values_are_checked(statement: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.stg"
    path.write_text(
        "stg.module @m {\n  stg.mesh @pod[tp = 2]\n"
        f"  stg.strategy @s[mesh = @pod] {{\n    {statement}\n  }}\n}}\n"
    )
    ran = stagec("analyze", LLAMA, path)
    assert ran.code == 1
    assert message in ran.err
    assert "wrong.stg:4:5" in ran.err
    assert "help:" in ran.err
