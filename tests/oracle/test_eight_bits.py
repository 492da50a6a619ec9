"""8-bit products: numbers are those of one device, sizes those of the recipe."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from stagec.interp.pipeline import run_named
from stagec.ir.expr import evaluate
from stagec.ir.module import is_parameter
from stagec.ir.traits import Repeats
from tests.oracle.test_combinations import PLACED, SIZES, plain
from tests.support import DEEPSEEK, EXHAUSTIVE, GPT, LLAMA, LONG, MIXTRAL, analyse, crossed, stagec
from tests.support import tiny_module as tiny

STRATEGIES: tuple[dict[str, Any], ...] = (
    {"dp": 2, "tp": 2, "sp": True, "zero": 3},
    {"dp": 2, "tp": 2, "recompute": "full"},
    {"dp": 2, "tp": 2, "sp": True, "recompute": "full", "fp8_scaling": "current"},
    {"dp": 2, "recompute": "selective", "recompute_layers": 1},
    {"dp": 2, "zero": 3, "pp": 2, "reshard_after_forward": "never", "microbatches": 4},
    {"dp": 2, "zero": 1, "pp": 2, "schedule": "zbv", "microbatches": 4},
)
#: Bytes of f8 and of bf16.
BYTE, TWO = 1, 2


@crossed(model=[LLAMA, GPT, MIXTRAL, DEEPSEEK], options=STRATEGIES)
@pytest.mark.parametrize(
    "recipe", ["hybrid", *(pytest.param(r, marks=EXHAUSTIVE) for r in ("block", "mxfp8", "nvfp4"))]
)
def test_a_step_equals_that_on_one_device(model: str, options: dict[str, Any], recipe: str) -> None:
    """Casts change no number in the interpreter, so nothing but casts may have been added."""
    if recipe != "hybrid":  # which scales what is cast where it is cast
        options = {name: value for name, value in options.items() if name != "fp8_scaling"}
    inputs, expected = plain(model, 16, "bf16")
    module = tiny(model, PLACED, sizes={**SIZES, "B": 16}, fp8=recipe, **options)
    actual = run_named(module, module.env, inputs)
    (loss, *rest), (expected_loss, *_) = actual, expected
    assert len(actual) == len(expected)
    np.testing.assert_allclose(actual[loss], expected[expected_loss], rtol=1e-10)
    for name in rest:
        theirs = expected[name.removesuffix("_g")]
        np.testing.assert_allclose(actual[name], theirs, rtol=1e-9, atol=1e-10, err_msg=name)


def of_first(actual: dict[str, Any]) -> dict[str, Any]:
    (entry,) = actual["classes"]
    return dict(entry)


def moved(entry: dict[str, Any], kind: str, **where: str) -> dict[str, int]:
    """Bytes of collectives by element type."""
    return {
        r["dtype"]: r["bytes"]
        for r in entry["collectives"]
        if r["op"] == kind and all(r[k] == v for k, v in where.items())
    }


def test_bytes_of_a_dense_model() -> None:
    layers, tokens, width, hidden, tp = 32, 8192, 4096, 14336, 2
    options: dict[str, Any] = {"dp": 2, "tp": tp, "sp": True}
    plain_, eight = (
        of_first(analyse("llama3-8b", fp8=fp8, **options)) for fp8 in ("none", "hybrid")
    )
    assert eight["flops"] == plain_["flops"]
    # Inputs of two products of normalized values and of the last of the feed-forward take a byte
    # less; attention keeps its result for itself, beside the one-byte copy for its projection.
    saved = layers * tokens * (2 * width + hidden - width) // tp
    assert plain_["memory"]["stash"] - eight["memory"]["stash"] == saved
    # Gathered are inputs of attention and feed-forward; in backward again, and their gradients.
    block = 2 * layers * tokens * width
    head = tokens * width * TWO
    forward = moved(eight, "all_gather", phase="forward")
    assert forward == {"f8e4m3": block * BYTE, "bf16": head}
    backward = moved(eight, "all_gather", phase="backward")
    assert backward == {"f8e4m3": block, "f8e5m2": block, "bf16": 2 * head}
    for phase in ("forward", "backward"):
        assert moved(eight, "reduce_scatter", phase=phase) == moved(
            plain_, "reduce_scatter", phase=phase
        )


@pytest.mark.parametrize("reshard", ["always", "never", "last"])
def test_parameters_are_gathered_in_their_own_type(reshard: str) -> None:
    """So all that is known of them holds: one call for a block, ahead of it, kept or not."""
    options: dict[str, Any] = {"dp": 4, "zero": 3, "reshard_after_forward": reshard}
    plain_, eight = (of_first(analyse("llama3-8b", fp8=f, **options)) for f in ("none", "e4m3"))
    assert eight["collectives"] == plain_["collectives"]


@pytest.mark.long
def test_tokens_are_dispatched_in_eight_bits_and_combined_in_sixteen() -> None:
    """As DeepSeek-V3 does (arXiv 2412.19437, section 3.3)."""
    plain_, eight = (of_first(analyse("deepseek-v3", dp=8, ep=8, fp8=f)) for f in ("none", "e4m3"))
    for phase in ("forward", "backward"):
        (whole,) = moved(plain_, "all_to_all", phase=phase).values()
        half = whole // 2
        expected = {"f8e4m3": half // 2, "bf16": half}
        assert moved(eight, "all_to_all", phase=phase) == expected


@LONG
def test_a_block_moves_its_scale() -> None:
    """An f32 for 128 elements of what is gathered, dispatched and stashed: a token of DeepSeek-V3
    is sent in 7,168 + 4 * 56 bytes. Parameters, and products, cost what they cost."""
    options: dict[str, Any] = {"dp": 8, "ep": 8}
    plain_, block = (of_first(analyse("deepseek-v3", fp8=f, **options)) for f in ("e4m3", "block"))
    width, blocks = 7168, 7168 // 128
    for phase in ("forward", "backward"):
        tokens = moved(plain_, "all_to_all", phase=phase)["f8e4m3"] // width
        sent = moved(block, "all_to_all", phase=phase)
        assert sent["f8e4m3s"] == tokens * (width + 4 * blocks)
    assert block["matmul_flops"] == plain_["matmul_flops"]
    assert block["memory"]["parameters"] == plain_["memory"]["parameters"]
    options = {"dp": 2, "tp": 2, "sp": True}
    plain_, block = (of_first(analyse("llama3-8b", fp8=f, **options)) for f in ("e4m3", "block"))
    for phase in ("forward", "backward"):
        whole = moved(plain_, "all_gather", phase=phase)["f8e4m3"]
        assert moved(block, "all_gather", phase=phase)["f8e4m3s"] == whole + whole // 128 * 4
    layers, tokens, width, hidden = 32, 8192, 4096, 14336
    stashed = layers * tokens * (3 * width + hidden) // 2
    assert block["memory"]["stash"] - plain_["memory"]["stash"] == stashed // 128 * 4


def test_what_is_computed_again_is_cast_again() -> None:
    """Norms computed again leave neither their results nor the 8-bit copies in the stash."""
    layers, tokens, width = 32, 8192, 4096
    options: dict[str, Any] = {"dp": 2, "fp8": "hybrid"}
    kept, again = (
        of_first(analyse("llama3-8b", recompute=r, **options)) for r in ("none", "rmsnorm")
    )
    saved = kept["memory"]["stash"] - again["memory"]["stash"]
    assert saved == 2 * layers * tokens * width * BYTE


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_two_products_sum_over_different_dimensions_is_written_twice(recompute: str) -> None:
    """A cast with its own scale reads two bytes of each element twice, for the largest one first,
    and writes one, or two: one for the product of forward, one for the gradient of the parameter.
    What is gathered before its products is written once."""
    options: dict[str, Any] = {"dp": 2, "tp": 2, "sp": True, "recompute": recompute}
    module = tiny(LLAMA, PLACED, fp8="e4m3", fp8_scaling="current", **options)
    actual: dict[str | None, Counter[Any]] = {}
    for op in module.walk():
        if op.name == "stg.quantize" and not is_weight(op.operands[0]):
            elements = evaluate(op.result.tensor.local_elements, module.env)
            each = Fraction(evaluate(op.definition.bytes_touched(op), module.env), elements)
            actual.setdefault(op.phase, Counter())[each] += 1
        elif op.name == "stg.quantize":
            touched = 5 * op.result.tensor.local_elements
            assert evaluate(op.definition.bytes_touched(op), module.env) == evaluate(
                touched, module.env
            )
    # Inputs of attention, of its projection, of the feed-forward and of its last product, which is
    # not computed again; gradients of the results of the six products. Gathered are inputs of
    # attention and feed-forward, and gradients of what both return.
    if recompute == "none":
        assert actual == {"forward": {5: 2, 6: 2}, "backward": {5: 2, 6: 4}}
    else:
        again = {5: 3, 6: 1}
        assert actual == {"forward": {5: 4}, "recompute": again, "backward": {5: 2, 6: 4}}


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_recipes_of_blackwell(recipe: str) -> None:
    """An activation of bf16 is read once and written twice, 33/32 bytes each. With 4 bits and a
    scale of 8 for 16 of them, 9/16 bytes each, it is read three times: for its largest element, for
    one result and, transformed, for the other; a parameter twice."""
    size = Fraction(33, 32) if recipe == "mxfp8" else Fraction(9, 16)
    reads = (1, 1) if recipe == "mxfp8" else (3, 2)
    module = tiny(LLAMA, PLACED, fp8=recipe, dp=2, sizes={**SIZES, "B": 16})
    actual: dict[bool, set[Fraction]] = {True: set(), False: set()}
    for op in module.walk():
        if op.name == "stg.quantize":
            elements = evaluate(op.result.tensor.local_elements, module.env)
            touched = Fraction(evaluate(op.definition.bytes_touched(op), module.env), elements)
            actual[is_weight(op.operands[0])].add(touched)
    assert actual == {False: {2 * reads[0] + 2 * size}, True: {2 * reads[1] + size}}


def is_weight(value: Any) -> bool:
    """Whether it is a parameter, gathered or not."""
    op = value.producer
    return is_parameter(value) or (op is not None and is_weight(op.operands[0]))


@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK])
def test_routers_and_all_outside_of_blocks_stay_as_they_are(model: str) -> None:
    module = tiny(model, PLACED, fp8="hybrid", dp=2)
    products = [op for op in module.walk() if op.name == "stg.einsum" and op.phase == "forward"]
    eight = [op for op in products if op.operands[0].tensor.dtype.startswith("f8")]
    assert all(op.results[0].tensor.dtype == "bf16" for op in eight)
    routers = [p.producer for p in _scores(module.walk())]
    outside = [op for op in products if not _in_repeat(op)]
    assert routers
    assert outside
    assert not {*routers, *outside} & {*eight}
    around = [op for op in products if op not in eight]
    assert len(around) == len(routers) + len(outside)


def _scores(ops: Any) -> Any:
    return [op.operands[0] for op in ops if op.name == "stg.route" and op.phase == "forward"]


def _in_repeat(op: Any) -> bool:
    return op.parent_op is not None and op.parent_op.has(Repeats)


def test_blocks_in_32_bits_are_refused() -> None:
    ran = stagec("analyze", LLAMA, "--param-dtype", "f32", "--fp8", "hybrid")
    assert ran.code == 1
    assert "products of hybrid have results of 16 bits" in ran.err
