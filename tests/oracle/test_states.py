"""Ops that go on from what is kept of the tokens before: any cut of a sequence gives what the whole
sequence gives, however batch, heads and sequence are split."""

from __future__ import annotations

import numpy as np
import pytest

from stagec.interp.machine import run_module
from stagec.ir.expr import evaluate
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.opdef import Array
from stagec.support.diagnostics import DiagnosticError
from tests.oracle.test_scans import OPS, SPLITS
from tests.oracle.test_selection_ops import on_all_ranks
from tests.support import compiled, crossed, inputs_of

#: The state of each op.
STATES = {
    "conv": "B, 3, F",
    "conv-silu": "B, 2, H, K",
    "conv-silu-bias": "B, 2, F",
    "selective_scan": "B, F, N",
    "ssd": "B, H, N, K",
    "ssd-groups": "B, H, N, K",
    **{f"linear_attention-{i}": "B, H, K, N" for i in (0, 2, 3)},
    **{f"gated_delta_rule{end}": "B, H, K, N" for end in ("", "-keys")},
    "wkv7": "B, H, K, K",
    "rg_lru": "B, H, K",
    "shift": "B, 1, F",
}
LOSS = '%loss = stg.sum["bshk->"](%y)\n    stg.return(%loss)'
#: FLOPs of one token: what the recurrence does with each element of a state, and with the result.
EACH = {"selective_scan": (9, 0), "ssd": (5, 2), "linear_attention": (5, 0), "wkv7": (9, 0)}
EACH["gated_delta_rule"] = (7, 0)


def stateful(name: str, tokens: int, splits: str = "", ranks: str = "") -> str:
    """A module with the op and its state."""
    args, lines, _ = OPS[name]
    line = next(part.strip() for part in lines.split("\n") if "stg.mul" not in part)
    head, rest = line.partition(" = ")[2].split("(", 1)
    op = f"{head[:-1]}, state]" if head.endswith("]") else f"{head}[state]"
    strategy = f"stg.mesh @pod[{ranks}]\n  stg.strategy @s[mesh = @pod] {{ {splits} }}"
    return (
        f"stg.module @m {{\n  stg.symbols[B = 4, S = {tokens}, H = 4, G = 2, K = 3, N = 2, F = 4]\n"
        f"  {strategy if ranks else ''}\n"
        f"  stg.func @f ({args}, %h: f32[{STATES[name]}]) {{\n"
        f"    %y, %h1 = {op}({rest[:-1]}, %h)\n    stg.return(%y, %h1)\n  }}\n}}\n"
    )


def run(name: str, inputs: dict[str, Array], tokens: slice, state: Array) -> list[Array]:
    """The op on some tokens, from a state."""
    module = compiled(stateful(name, tokens.stop - tokens.start), "infer-shapes")
    given = {a.name: inputs[a.name] for a in module.main.body.args[:-1]}
    cut = {n: v[:, tokens] if v.ndim > 2 and v.shape[1] == 8 else v for n, v in given.items()}
    return run_module(module, module.env, {**cut, "h": state})


@pytest.mark.parametrize("name", STATES)
def test_parts_one_after_the_other_are_the_sequence(name: str) -> None:
    """Also where a part is a single token."""
    whole = compiled(stateful(name, 8), "infer-shapes")
    inputs = inputs_of(whole, 3)
    expected = run(name, inputs, slice(0, 8), inputs["h"])
    state, actual = inputs["h"], list[Array]()
    for start, end in ((0, 3), (3, 4), (4, 5), (5, 8)):
        y, state = run(name, inputs, slice(start, end), state)
        actual.append(y)
    np.testing.assert_allclose(np.concatenate(actual, 1), expected[0], atol=1e-12)
    np.testing.assert_allclose(state, expected[1], atol=1e-12)


@pytest.mark.parametrize("name", STATES)
def test_a_first_state_of_zeros_is_none(name: str) -> None:
    inputs = inputs_of(compiled(stateful(name, 8), "infer-shapes"), 4)
    line = OPS[name][1].split("\n")[0].replace("%y0", "%y")
    text = stateful(name, 8).partition("%y, %h1")[0] + f"{line}\n stg.return(%y)\n  }}\n}}\n"
    module = compiled(text, "infer-shapes")
    (expected,) = run_module(module, module.env, inputs)
    actual = run(name, inputs, slice(0, 8), np.zeros_like(inputs["h"]))
    np.testing.assert_allclose(actual[0], expected, atol=1e-12)


@crossed(name=list(STATES), splits=list(SPLITS))
def test_sharded_equals_one_device(name: str, splits: str) -> None:
    cp = 2 if splits == "sequence-over-two" else 4
    text = stateful(name, 16, SPLITS[splits], f"dp = 2, cp = {cp}, tp = 2")
    assert len(on_all_ranks(text, "infer-shapes,apply-strategy")) == 2


@pytest.mark.parametrize("name", [n for n in STATES if n.partition("-")[0] in EACH])
def test_one_token_costs_the_recurrence(name: str) -> None:
    """FLOPs of each element of a state, and of each of a result; for more tokens those of chunks,
    as without a state."""
    each, skip = EACH[name.partition("-")[0]]
    flops = dict[int, int]()
    for tokens in (1, 2, 8):
        module = compiled(stateful(name, tokens), "infer-shapes")
        op = module.main.body.ops[0]
        rule = op.definition.rule(op)
        assert rule is not None
        flops[tokens] = evaluate(op.definition.flops(op, factor_sizes(op, rule)), module.env)
        state, y = (
            int(np.prod([evaluate(d, module.env) for d in v.tensor.shape]))
            for v in op.results[::-1]
        )
        if tokens == 1:
            assert flops[1] == each * state + skip * y
    assert flops[8] > flops[2] > flops[1]


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_updated_in_place(name: str) -> None:
    op = compiled(stateful(name, 8), "infer-shapes").main.body.ops[0]
    assert op.definition.reuses(op, 1) == len(op.operands) - 1
    assert op.definition.reuses(op, 0) is None


def test_a_state_has_no_gradient() -> None:
    text = (
        stateful("ssd", 8).replace("stg.return(%y, %h1)", LOSS).replace("f32[H]", "f32[H | param]")
    )
    with pytest.raises(DiagnosticError, match=r"'stg\.ssd' with a state has no gradient"):
        compiled(text, "infer-shapes,differentiate")
