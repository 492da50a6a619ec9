"""Liveness against brute force: the bytes of a program are the worst moment of all buffers that
were made and are still used, and no buffer is used after it was freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import evaluate
from stagec.ir.module import Module
from stagec.memory.lifetimes import lifetimes
from stagec.memory.liveness import Roots
from stagec.support.diagnostics import DiagnosticError
from tests.support import GPT, LLAMA, STEP, compiled, examples, operations, tiny_module

PLAN = "place,plan"
SIZES = {"B": 3, "D": 5}
BYTES = {True: 4 * 3 * 5, False: 4 * 3}  # of a matrix and of a vector


def memory(module: Module) -> dict[str, int]:
    """The bytes that the plan states, at the known sizes."""
    (op,) = operations(module, "stg.memory")
    return {n: evaluate(op.expr(n), module.env) for n in op.attrs if n != "phase"}


@st.composite
def lines(draw: st.DrawFn) -> list[tuple[str, str, tuple[str, ...], bool]]:
    """A program without views: (name, op, operands, whether it is a matrix)."""
    matrices, vectors = ["x"], list[str]()
    program: list[tuple[str, str, tuple[str, ...], bool]] = []
    for i in range(draw(st.integers(1, 9))):
        kinds = ["gelu", "mul", "softmax", "row"] + (["spread", "vmul"] if vectors else [])
        kind, name = draw(st.sampled_from(kinds)), f"v{i}"
        pool = vectors if kind in ("spread", "vmul") else matrices
        count = 2 if kind in ("mul", "vmul") else 1
        operands = tuple(draw(st.sampled_from(pool)) for _ in range(count))
        is_matrix = kind not in ("row", "vmul")
        (matrices if is_matrix else vectors).append(name)
        program.append((name, kind, operands, is_matrix))
    return program


TEXTS = {
    "gelu": "stg.gelu({0})",
    "mul": "stg.mul({0}, {1})",
    "vmul": "stg.mul({0}, {1})",
    "softmax": "stg.softmax({0})",
    "row": 'stg.einsum["bd,bd->b"]({0}, %x)',
    "spread": 'stg.einsum["b,bd->bd"]({0}, %x)',
}


def text_of(program: list[tuple[str, str, tuple[str, ...], bool]], returned: list[str]) -> str:
    body = "".join(
        f"    %{name} = {TEXTS[kind].format(*('%' + o for o in operands))}\n"
        for name, kind, operands, _ in program
    )
    return (
        f"stg.module @m {{\n  stg.symbols[B = {SIZES['B']}, D = {SIZES['D']}]\n"
        f"  stg.func @f(%x: f32[B, D]) {{\n{body}"
        f"    stg.return({', '.join('%' + r for r in returned)})\n  }}\n}}\n"
    )


def worst(program: list[tuple[str, str, tuple[str, ...], bool]], returned: list[str]) -> int:
    """The most bytes at any moment: of values made by then that this or a later op uses."""
    peak = 0
    for now in range(len(program)):
        size = 0
        for made, (name, _, _, is_matrix) in enumerate(program[: now + 1]):
            later = any(name in operands for _, _, operands, _ in program[now:])
            if made == now or later or name in returned:
                size += BYTES[is_matrix]
        peak = max(peak, size)
    return peak


@examples(80)
@given(lines(), st.data())
def test_the_peak_of_a_straight_program(
    program: list[tuple[str, str, tuple[str, ...], bool]], data: st.DataObject
) -> None:
    names = [name for name, *_ in program]
    returned = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    module = compiled(text_of(program, returned), PLAN)
    expected = worst(program, returned)
    actual = memory(module)
    assert actual["transient"] == expected
    assert actual["peak"] == expected
    check_frees(module)


REPEAT = """stg.module @m {
  stg.symbols[B = 3, D = 5, N = COUNT]
  stg.func @f(%x: f32[B, D], %w: f32[N, B, D]) {
    %y = stg.repeat[count = N, carry = 1] (%h = %x, %s = %w) {
BODY
      stg.yield(%o)
    }
    stg.return(%y)
  }
}
"""


@pytest.mark.parametrize(
    "body",
    [
        "      %o = stg.mul(%h, %s)",
        "      %a = stg.gelu(%h)\n      %o = stg.mul(%a, %s)",
        "      %a = stg.gelu(%s)\n      %b = stg.gelu(%a)\n      %o = stg.mul(%b, %h)",
        (
            "      %a = stg.gelu(%h)\n      %b = stg.mul(%a, %h)\n      %c = stg.mul(%b, %a)\n"
            "      %o = stg.mul(%c, %b)"
        ),
    ],
)
def test_a_repeat_needs_what_its_iterations_one_after_the_other_need(body: str) -> None:
    """The worst iteration of a repeat against the same three iterations written out."""
    repeated = memory(compiled(REPEAT.replace("COUNT", "3").replace("BODY", body), PLAN))
    written: list[str] = []
    for i in range(3):
        text = body.replace("%h", f"%h{i}").replace("%s", f"%s{i}").replace("%o", f"%h{i + 1}")
        for name in "abc":
            text = text.replace(f"%{name} ", f"%{name}{i} ").replace(f"%{name},", f"%{name}{i},")
            text = text.replace(f"%{name})", f"%{name}{i})")
        written.append(text)
    straight = memory(
        compiled(
            "stg.module @m {\n  stg.symbols[B = 3, D = 5]\n  stg.func @f(%h0: f32[B, D], "
            "%s0: f32[B, D], %s1: f32[B, D], %s2: f32[B, D]) {\n"
            + "\n".join(written)
            + "\n    stg.return(%h3)\n  }\n}\n",
            PLAN,
        )
    )
    assert repeated["transient"] == straight["transient"]


# -- hostile texts


def body_of(lines: str, symbols: str = "B = 3, D = 5") -> Region:
    func = f"  stg.func @f(%x: f32[B, D]) {{\n{lines}  }}\n"
    text = f"stg.module @m {{\n  stg.symbols[{symbols}]\n{func}}}\n"
    return compiled(text, "infer-shapes,propagate-sharding,insert-collectives").main.body


def test_a_long_chain_of_views() -> None:
    chain = "".join(f'    %v{i + 1} = stg.reshape["bd->bd"](%v{i})\n' for i in range(1200))
    body = body_of(f"    %v0 = stg.gelu(%x)\n{chain}    stg.return(%v1200)\n")
    (buffer,) = lifetimes(body, {}).buffers
    assert buffer.value.name == "v0"


@pytest.mark.long
def test_too_many_iterations_end_in_a_diagnostic() -> None:
    repeat = "%y = stg.repeat[count = N, carry = 1] (%h = %x) {\n stg.yield(%h)\n}\n"
    body = body_of(f"{repeat} stg.return(%y)\n", f"B, D, N = {10**12}")
    assert len(lifetimes(body, {"N": 10**12}).steps) < 10
    with pytest.raises(DiagnosticError, match="the memory plan takes more than") as actual:
        lifetimes(body, {"N": 10**12}, whole=True)
    assert actual.value.diagnostics[0].remedy


# -- frees


def check_frees(module: Module) -> None:
    """Every buffer is freed once, after its last use, or outlives its region."""
    for region in regions(module.main.body):
        freed: set[Value] = set()
        for op in region.ops:
            used = {Roots()(v) for v in uses(op)}
            assert not used & freed, f"{op!r} uses what was freed"
            if op.name == "stg.free":
                freed |= {Roots()(v) for v in op.operands}
            else:
                assert not {Roots()(r) for r in op.results} & freed


def regions(region: Region) -> Iterator[Region]:
    yield region
    for op in region.ops:
        if op.region is not None:
            yield from regions(op.region)


def uses(op: Operation) -> Iterator[Value]:
    yield from op.operands
    if op.region is not None:
        for inner in op.region.walk():
            yield from inner.operands


STRATEGIES: dict[str, dict[str, Any]] = {
    "one": {},
    "fsdp": {"dp": 2, "tp": 2, "sp": True, "zero": 3},
    "zero1": {"dp": 2, "tp": 2, "zero": 1, "microbatches": 2},
    "zero2": {"dp": 2, "zero": 2},
    "kept": {"tp": 2, "sp": True, "tp_inputs": "save-gathered", "no_vocab_parallel": True},
}
TRAIN = f"{STEP},partition,units"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", [LLAMA, GPT])
def test_a_training_step_uses_nothing_that_it_freed(model: str, strategy: str) -> None:
    module = tiny_module(model, f"{TRAIN},plan-memory", **STRATEGIES[strategy])
    check_frees(module)
    named = {v for op in operations(module, "stg.free") for v in op.operands}
    assert len(named) == sum(len(op.operands) for op in operations(module, "stg.free"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", [LLAMA, GPT])
def test_the_parts_of_the_plan(model: str, strategy: str) -> None:
    """Static parts are sums over arguments; the peak holds them and at most all of the rest."""
    module = tiny_module(model, f"{TRAIN},plan-memory", **STRATEGIES[strategy])
    actual = memory(module)
    for part, role in (("parameters", "param"), ("optimizer", "state")):
        args = [a for a in module.main.body.args if a.tensor.role == role]
        assert actual[part] == sum(evaluate(a.tensor.local_bytes, module.env) for a in args)
    static = actual["parameters"] + actual["optimizer"] + actual["gradients"]
    assert static < actual["peak"] <= static + actual["stash"] + actual["transient"]


def test_zero_shards_what_its_stage_says() -> None:
    """Bytes of 16-bit parameters, fp32 gradients and optimizer state, by stage over four ranks."""
    sizes: dict[int, dict[str, int]] = {}
    for zero in range(4):
        module = tiny_module(LLAMA, f"{TRAIN},plan-memory", dp=4, zero=zero, microbatches=2)
        sizes[zero] = memory(module)
    whole = sizes[0]
    assert whole["gradients"] == 2 * whole["parameters"]
    assert whole["optimizer"] == 6 * whole["parameters"]
    for zero, parts in (
        (1, ["optimizer"]),
        (2, ["optimizer", "gradients"]),
        (3, ["optimizer", "gradients", "parameters"]),
    ):
        for part in ("parameters", "gradients", "optimizer"):
            divided = 4 if part in parts else 1
            assert sizes[zero][part] * divided == whole[part], (zero, part)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_zero_one_holds_whole_gradients(microbatches: int) -> None:
    plain = tiny_module(LLAMA, f"{TRAIN},plan-memory", dp=4, microbatches=microbatches)
    zero = tiny_module(LLAMA, f"{TRAIN},plan-memory", dp=4, zero=1, microbatches=microbatches)
    assert memory(zero)["gradients"] == memory(plain)["gradients"]
