"""FLOPs of ops against counts that go through every element."""

from __future__ import annotations

from itertools import product

import pytest

from stagec.ir.expr import evaluate
from stagec.ir.factor_sizes import factor_sizes
from tests.support import compiled

SIZES = {"B": 2, "S": 6, "D": 5, "F": 7, "V": 11, "N": 3, "P": 4}


def counted(args: str, line: str, kind: str = "flops") -> int:
    """The FLOPs (or those of matrix products, or bytes) of the op of that line."""
    sizes = ", ".join(f"{name} = {value}" for name, value in SIZES.items())
    text = (
        f"stg.module @m {{\n  stg.symbols[{sizes}]\n  stg.func @f({args}) {{\n    {line}\n"
        "    stg.return(%y)\n  }\n}\n"
    )
    op = compiled(text, "infer-shapes").main.body.ops[0]
    rule = op.definition.rule(op)
    assert rule is not None
    if kind == "bytes_touched":
        return evaluate(op.definition.bytes_touched(op), SIZES)
    cost = getattr(op.definition, kind)(op, factor_sizes(op, rule))
    return evaluate(cost, SIZES)


@pytest.mark.parametrize(("stride", "pad"), [(1, 1), (2, 1), (3, 0), (2, 0), (1, 0), (1, 2)])
def test_a_convolution_multiplies_each_element_of_each_window(stride: int, pad: int) -> None:
    """Padding is multiplied too, and both gradients cost as much as forward."""
    width = 3 if (stride, pad) != (2, 0) else 2
    b, s, d, f = (SIZES[n] for n in "BSDF")
    windows = range(-pad, s + pad - width + 1, stride)
    adds = sum(1 for _ in product(range(b), windows, range(width), range(d), range(f)))
    how = f"stride = {stride}, pad = {pad}"
    line = f"%y = stg.conv1d[{how}](%x, %w)"
    x, w, dy = "%x: f32[B, S, D]", f"%w: f32[{width}, D, F]", f"%dy: f32[B, {len(windows)}, F]"
    for kind in ("flops", "matmul_flops"):
        assert counted(f"{x}, {w}", line, kind) == 2 * adds
        grad = f"%y = stg.conv1d_dx[{how}, positions = S](%dy, %w)"
        assert counted(f"{dy}, {w}", grad, kind) == 2 * adds
        grad = f"%y = stg.conv1d_dw[{how}, width = {width}](%x, %dy)"
        assert counted(f"{x}, {dy}", grad, kind) == 2 * adds


@pytest.mark.parametrize(("stride", "pad"), [(1, 1), (2, 1), (1, 0)])
def test_a_convolution_of_groups_multiplies_within_each(stride: int, pad: int) -> None:
    b, s, n, d, f = (SIZES[name] for name in "BSNDF")
    rows, columns = (range(-pad, size + pad - 3 + 1, stride) for size in (s, 8))
    adds = sum(1 for _ in product(range(b), rows, columns, range(9), range(n), range(d), range(f)))
    how = f"stride = {stride}, pad = {pad}"
    args = "%x: f32[B, S, 8, N, D], %w: f32[3, 3, N, D, F]"
    for kind in ("flops", "matmul_flops"):
        assert counted(args, f"%y = stg.conv2d[{how}](%x, %w)", kind) == 2 * adds


@pytest.mark.parametrize(
    ("args", "line", "lookups"),
    [
        ("%x: f32[V, D], %t: i32[B, P]", "%y = stg.embedding_bag(%x, %t)", 2 * 4),
        ("%x: f32[N, V, D], %t: i32[B, N, P]", "%y = stg.embedding_bag(%x, %t)", 2 * 3 * 4),
        ("%x: f32[V, D], %t: i32[B, 6]", "%y = stg.embedding_bag[bags = (1, 5)](%x, %t)", 2 * 6),
    ],
)
def test_a_bag_adds_each_row_that_it_looks_up(args: str, line: str, lookups: int) -> None:
    assert counted(args, line) == lookups * SIZES["D"]
    assert counted(args, line, "matmul_flops") == 0


#: One line for each operation that computes an element; constants are not counted.
STEPS = {
    "%y = stg.relu(%x)": ["max"],
    "%y = stg.tanh(%x)": ["tanh"],
    "%y = stg.exp(%x)": ["exp"],
    "%y = stg.power[exponent = 1/2](%x)": ["sqrt"],
    "%y = stg.gelu[form = erf](%x)": ["x/sqrt2", "erf", "1+", "*x", "/2"],
    "%y = stg.gelu[form = quick](%x)": ["1.702x", "exp", "1/(1+)", "*x"],
    "%y = stg.scale[by = 1/S, sqrt = D](%x)": ["*"],
}


@pytest.mark.parametrize("line", STEPS)
def test_an_activation_costs_its_steps(line: str) -> None:
    elements = SIZES["B"] * SIZES["S"]
    assert counted("%x: f32[B, S]", line) == elements * len(STEPS[line])


#: The bytes that each operation of PyTorch moves for an element in bf16, of what is not small.
MOVES = {
    "%y, %s = stg.expert_bias(%x, %b)": {
        "b * p": 4,
        "t + b * p": 2 + 4 + 4,
        "cat": 4 + 4,
        "to": 4 + 2,
    },
    "%y, %d, %s = stg.expert_bias_grad(%x)": {
        "to": 2 + 4,
        "of t": 4 + 2,
        "split": 2 + 2,
        "times p": 4 + 4,
        "its sum": 4,
        "times b": 4 + 4,
        "that sum": 4,
    },
    "%y = stg.rope[scaling = yarn, factor = 4, term = cosine](%x)": {"t * cos": 2 + 2},
    "%y = stg.clamp_grad[most = 7](%x, %x)": {"x <= 7": 2 + 1, "where": 1 + 2 + 2},
    "%y = stg.clamp_grad[least = -7, most = 7](%x, %x)": {
        "x >= -7": 2 + 1,
        "x <= 7": 2 + 1,
        "and": 1 + 1 + 1,
        "where": 1 + 2 + 2,
    },
    "%y = stg.clamp_grad[most = 7, fused = 1](%x, %x)": {"one kernel": 2 + 2 + 2},
}


@pytest.mark.parametrize("line", MOVES)
def test_operations_of_pytorch_move_their_bytes(line: str) -> None:
    args = "%x: bf16[N, B, S, D], %b: bf16[N, D]"
    elements = SIZES["N"] * SIZES["B"] * SIZES["S"] * SIZES["D"]
    assert counted(args, line, "bytes_touched") == elements * sum(MOVES[line].values())


@pytest.mark.parametrize(
    ("line", "less"),
    [
        ("stg.rmsnorm[affine = none](%x)", 1),
        ("stg.rmsnorm[zero_centered](%x, %w)", 0),
        ("stg.layernorm[affine = scale](%x, %w)", 1),
        ("stg.layernorm[affine = none](%x)", 2),
    ],
)
def test_a_norm_without_a_vector_saves_its_step(line: str, less: int) -> None:
    args = "%x: f32[B, D], %w: f32[D], %b: f32[D]"
    vectors = "%w" if "rms" in line else "%w, %b"
    full = counted(args, f"%y = {line.partition('[')[0]}(%x, {vectors})")
    assert full - counted(args, f"%y = {line}") == SIZES["B"] * SIZES["D"] * less


@pytest.mark.parametrize(
    ("spec", "args", "products"),
    [
        ("bsd,df->bsf", "%x: f32[B, S, D], %w: f32[D, F]", True),
        ("bsd,d->bs", "%x: f32[B, S, D], %w: f32[D]", True),
        ("bsd,bsd->bs", "%x: f32[B, S, D], %w: f32[B, S, D]", False),
        ("bsd,bsd->bd", "%x: f32[B, S, D], %w: f32[B, S, D]", False),
    ],
)
def test_a_sum_of_products_of_equal_elements_is_no_matrix_product(
    spec: str, args: str, products: bool
) -> None:
    """Statistics of a norm whose rows are split, and gradients of gates: no dimension of the result
    is of one operand alone, so that each element is used once."""
    line = f'%y = stg.einsum["{spec}"](%x, %w)'
    assert counted(args, line) > 0
    assert counted(args, line, "matmul_flops") == (counted(args, line) if products else 0)
