"""Seconds of kernels: limits, growth, arrays beside numbers, and published times."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stagec
from stagec.machines import Machine, load_machine
from stagec.machines.efficiency import Efficiency
from stagec.machines.kernel_efficiency import (
    AttentionEfficiency,
    AttentionKernel,
    MatmulEfficiency,
    MatmulKernel,
    MemoryEfficiency,
)
from stagec.program.kernels import Kernel
from stagec.support.diagnostics import DiagnosticError
from stagec.time.costs.kernels import (
    attention_seconds,
    kernel_seconds,
    matmul_seconds,
    memory_seconds,
    seconds_in_step,
)

H100 = load_machine("h100-sxm")
PERFECT = H100.efficiency.model_copy(
    update={
        "matmul": MatmulEfficiency.model_validate(
            {
                "rate": {"bf16": 1},
                "bandwidth": 1,
                "overlap": 1,
                "start": "0 s",
                "step": "0 s",
                "tile": "0 s",
                "reduction": "0 s",
            }
        ),
        "attention": AttentionEfficiency.model_validate(
            {
                "rate": {"bf16": 1},
                "overlap": 1,
                "exponentials": 1e6,
                "uneven": 0,
                "start": "0 s",
                "tile": "0 s",
            }
        ),
        "memory": MemoryEfficiency.model_validate({"bandwidth": 1, "start": "0 s"}),
    }
)
SIZES = st.integers(1, 20_000)


def with_efficiency(efficiency: Efficiency) -> Machine:
    return H100.model_copy(update={"efficiency": efficiency})


def operands(m: int, n: int, k: int, element: int = 2) -> int:
    return element * (m * k + k * n) + 2 * m * n


def product(m: int, n: int, k: int, dtype: str = "bf16") -> Kernel:
    size = operands(m, n, k, 1 if dtype.startswith("f8") else 2)
    return Kernel("matmul", dtype, (1, m, n, k), 2 * m * n * k, size)


def test_without_losses_whole_waves_take_flops_over_the_peak() -> None:
    machine = with_efficiency(PERFECT)
    m, n, k = 256 * 12, 128 * 11 * 8, 8192  # 8 waves of 132 tiles
    seconds = matmul_seconds(machine, "bf16", 1, m, n, k, operands(m, n, k))
    assert seconds == pytest.approx(2 * m * n * k / 989e12, rel=1e-12)


def test_a_nearly_empty_last_wave_takes_as_long_as_a_full_one() -> None:
    """132 tiles of 256 x 128 fill the processors once. One tile more takes a wave of the smallest
    tiles more, 128 x 16, which without losses are as good: 17 waves in place of 16."""
    machine = with_efficiency(PERFECT)
    one, more = (
        float(matmul_seconds(machine, "bf16", tiles, 256, 128, 512, 0)) for tiles in (132, 133)
    )
    assert one == pytest.approx(2 * 132 * 256 * 128 * 512 / 989e12)
    assert more / one == pytest.approx(17 / 16)


def perfect_but(**constants: Any) -> Machine:
    """Products without losses but these."""
    matmul = PERFECT.matmul.model_copy(update=constants)
    return with_efficiency(PERFECT.model_copy(update={"matmul": matmul}))


@pytest.mark.parametrize(
    ("dtype", "depth"), [("f32", 32), ("bf16", 64), ("f8e4m3", 128), ("i8", 128)]
)
def test_a_small_product_takes_a_step_for_each_128_bytes_of_k(dtype: str, depth: int) -> None:
    """One tile, which cannot be split below 256 elements of k."""
    machine = perfect_but(step=1e-6, reduction=1.0)
    seconds = [matmul_seconds(machine, dtype, 1, 16, 16, k, 0) for k in (1, depth, 10 * depth)]
    assert seconds == pytest.approx([1e-6, 1e-6, 1e-5])
    assert matmul_seconds(machine, dtype, 1, 16, 16, depth + 1, 0) == pytest.approx(2e-6)


def test_a_step_of_4_bits_has_no_more_elements_than_one_of_8() -> None:
    machine = load_machine("b200").changed({"efficiency.matmul.step": 1.0})
    seconds = [matmul_seconds(machine, t, 1, 16, 16, 384, 0) for t in ("f8e4m3", "f4e2m1")]
    assert seconds == pytest.approx([3, 3], rel=1e-4)


def test_steps_of_full_waves_are_hidden_by_their_products() -> None:
    """A tile of 256 x 128 computes 64 elements of k in 0.56 us, eight times a step."""
    m, n, k = 256 * 12, 128 * 11, 8192
    fast, slow = (
        matmul_seconds(perfect_but(step=step), "bf16", 1, m, n, k, 0) for step in (0, 7e-8)
    )
    assert fast == slow == pytest.approx(2 * m * n * k / 989e12)


def test_each_matrix_of_a_batch_adds_the_time_of_turning_to_it() -> None:
    """In the kernel that has it, beside the time of the same products in the machine's own."""
    kernel = MatmulKernel.model_validate({"group": "300 ns", "source": "-"})
    machine = perfect_but(kernels={"far": kernel})
    for batch in (1, 16):
        args = machine, "bf16", batch, 64, 256, 512, batch * operands(64, 256, 512)
        plain, grouped = (float(matmul_seconds(*args, form=form)) for form in ("", "far"))
        assert grouped - plain == pytest.approx(batch * 3e-7)


def test_a_tile_adds_its_share_of_filling_and_writing() -> None:
    """132 tiles of 256 x 128, or as many results in smaller tiles and more waves."""
    m, n, k = 256 * 12, 128 * 11, 8192
    none, some = (
        float(matmul_seconds(perfect_but(tile=t), "bf16", 1, m, n, k, 0)) for t in (0, 2e-6)
    )
    assert some - none == pytest.approx(2e-6)


@pytest.mark.parametrize(
    ("dtype", "n", "k", "loads"),
    [
        *(("bf16", 4096 + odd, 4096, loads) for odd, loads in ((8, 1), (4, 2), (2, 4), (1, 8))),
        ("bf16", 4096, 4097, 8),
        ("f8e4m3", 4096 + 8, 4096, 2),
        ("bf16", 1, 4096, 1),  # a row of one element is no row
        ("f32", 4097, 4096, 1),
    ],
)
def test_rows_of_no_multiple_of_16_bytes_take_further_loads(
    dtype: str, n: int, k: int, loads: int
) -> None:
    m = 256 * 132  # rows of the left operand are not those of n and k
    plain, more = (perfect_but(unaligned=share) for share in (0.0, 0.5))
    aligned, seconds = (matmul_seconds(x, dtype, 1, m + 1, n, k, 0) for x in (plain, more))
    assert seconds / aligned == pytest.approx(1 + 0.5 * (loads - 1))


@pytest.mark.parametrize(
    ("m", "n", "k", "loads"),
    [(4096, 2048, 8191, 1), (4096, 2048, 8190, 1), (4097, 2048, 8192, 8), (4096, 2044, 8192, 2)],
)
def test_how_many_rows_a_gradient_of_weights_sums_up_takes_no_further_loads(
    m: int, n: int, k: int, loads: int
) -> None:
    plain, more = (perfect_but(unaligned=share) for share in (0.0, 0.5))
    aligned, seconds = (
        float(matmul_seconds(x, "bf16", 1, m, n, k, 0, transposed=True)) for x in (plain, more)
    )
    assert seconds / aligned == pytest.approx(1 + 0.5 * (loads - 1))


@pytest.mark.parametrize("machine", ["a100-80g", "h200"])
@pytest.mark.parametrize("fewer", [1, 2, 7])
def test_a_step_of_some_tokens_less_takes_no_longer(machine: str, fewer: int) -> None:
    def seconds(tokens: int) -> float:
        job = stagec.job("llama3-8b", dp=1, sizes={"B": 1, "S": tokens, "L": 2})
        return job.time(machine, levers=False).step_seconds

    assert seconds(4096 - fewer) == pytest.approx(seconds(4096), rel=0.01)


@pytest.mark.parametrize(
    ("words", "sequences", "measured"),
    [(50257, 2, 8.07), (50257, 8, 30.78), (25128, 8, 5.46), (12564, 8, 4.25), (6282, 2, 0.60)],
)
def test_products_with_a_vocabulary_that_is_not_filled_up(
    words: int, sequences: int, measured: float
) -> None:
    """Milliseconds that embedding and head take longer at width 2,048 than at 1,024 on A100, in the
    sums of validation/deepspeed-single; 50,257 words are what the constant was fitted on."""
    tokens = 1024 * sequences

    def head(width: int) -> float:
        extents = (tokens, words, width), (tokens, width, words), (width, words, tokens)
        return float(
            seconds_in_step(load_machine("a100-80g"), [product(*e) for e in extents]).sum()
        )

    assert 1e3 * (head(2048) - head(1024)) == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_the_shorter_of_two_hides_the_better_the_shorter_it_is(share: float) -> None:
    """Moving takes a share of computing: half of it at the worst, where they take as long."""
    m, n, k = 256 * 12, 128 * 11, 8192
    compute = 2 * m * n * k / 989e12
    machine = perfect_but(overlap=0.5)
    seconds = matmul_seconds(machine, "bf16", 1, m, n, k, share * compute * 3.35e12)
    assert seconds == pytest.approx(compute * (1 + 0.5 * share**2))


def test_without_losses_a_row_times_a_matrix_takes_its_bytes_over_the_bandwidth() -> None:
    size = operands(1, 16384, 16384)
    seconds = matmul_seconds(with_efficiency(PERFECT), "bf16", 1, 1, 16384, 16384, size)
    assert seconds == pytest.approx(size / 3.35e12, rel=1e-12)


def test_without_losses_full_blocks_of_attention_take_their_flops_over_the_peak() -> None:
    batch, heads, length, width = 1, 132, 4096, 128
    flops = 4 * batch * heads * length**2 * width
    arguments = (batch, heads, heads, length, length, width, width, 0)
    machine = with_efficiency(PERFECT)
    assert attention_seconds(machine, "bf16", *arguments) == pytest.approx(flops / 989e12)
    backward = attention_seconds(machine, "bf16", *arguments, backward=True)
    assert backward == pytest.approx(2.5 * flops / 989e12 / AttentionEfficiency().backward)


def test_a_mask_halves_the_tiles_but_for_the_diagonal() -> None:
    """64 blocks meet 1 to 64 tiles: 32.5 of 64."""
    arguments = (1, 132, 132, 8192, 8192, 128, 128, 0)
    machine = with_efficiency(PERFECT)
    full = attention_seconds(machine, "bf16", *arguments)
    causal = attention_seconds(machine, "bf16", *arguments, causal=True)
    assert causal / full == pytest.approx(32.5 / 64)


def blocked(queries: int, packed: bool) -> Machine:
    """Without losses, but for a microsecond a block."""
    block = {"queries": queries, "packed": packed, "tile": 1e-6}
    attention = PERFECT.attention.model_copy(update=block)
    return with_efficiency(PERFECT.model_copy(update={"attention": attention}))


@pytest.mark.parametrize(("queries", "mean"), [(64, 32.5), (128, 32.5), (256, 33)])
def test_a_block_of_more_queries_meets_more_of_the_diagonal(queries: int, mean: float) -> None:
    """Block i of 8,192 queries meets (i + 1) queries / 128 tiles of keys, rounded up."""
    met = [-(-(i + 1) * queries // 128) for i in range(8192 // queries)]
    assert np.mean(met) == mean
    blocks, flops = 8192 // queries, 4 * 132 * 8192**2 * 128
    arguments = (1, 132, 132, 8192, 8192, 128, 128, 0)
    seconds = attention_seconds(blocked(queries, packed=False), "bf16", *arguments, causal=True)
    assert seconds == pytest.approx(flops / 989e12 * mean / 64 + blocks * 1e-6)


def test_packed_heads_share_blocks() -> None:
    """256 sequences of 16 queries, 32 heads of which 4 share keys: 62.06 or 15.5 waves of blocks,
    so 63 or 16; a single query is packed by all kernels."""
    machines = [blocked(128, packed) for packed in (False, True)]
    prefill = (256, 32, 8, 16, 16, 128, 128, 0)
    alone, together = (float(attention_seconds(m, "bf16", *prefill)) for m in machines)
    work = (63 * 16, 16 * 64)  # waves of blocks with so many rows, each of which meets a tile
    row = 4 * 128 * 128 * 132 / 989e12
    assert (alone, together) == pytest.approx(
        [waves * 1e-6 + rows * row for waves, rows in zip((63, 16), work, strict=True)]
    )
    decode = [attention_seconds(m, "bf16", 64, 32, 8, 1, 4096, 128, 128, 0) for m in machines]
    assert decode[0] == decode[1]


def test_a_few_queries_behind_a_cache_have_the_kernel_for_decoding() -> None:
    """It starts later here. Prompts, many queries and the wide heads of latent attention do not
    have it, nor a kernel that a strategy names; caches in 8 bits have one of their own."""
    kernels = {
        name: AttentionKernel.model_validate({"start": f"{start} us", "source": "a test"})
        for name, start in (("few", 10), ("few_8bit", 20), ("named", 30))
    }
    given = {"decoding": "few", "kernels": kernels}
    attention = PERFECT.attention.model_copy(update=given)
    machine = with_efficiency(PERFECT.model_copy(update={"attention": attention}))

    def start(queries: int, keys: int, width: int = 128, size: float = 2.0, form: str = "") -> int:
        elements = (queries * 8 + keys * 2) * 2 * width
        extents = (1, 8, 2, queries, keys, width, width)
        kernel = Kernel("attention", "bf16", extents, 0, int(size * elements), form=form)
        return int(kernel_seconds(machine, [kernel])[0] * 1e5)

    assert start(1, 4096) == start(32, 4096) == 1
    assert start(33, 4096) == start(8, 8) == start(1, 4096, width=257) == 0
    assert start(1, 4096, size=1.0) == 2
    assert start(1, 4096, form="named") == 3


def test_a_tile_of_keys_takes_a_step_at_least() -> None:
    """Its 3/4 power of the width for narrower heads; a longer tile is no longer than before."""
    arguments = (1, 8, 8, 1, 128 * 16 * 16, 128, 128, 0)  # 16 parts for each head

    def seconds(step: float, width: int = 128) -> float:
        attention = PERFECT.attention.model_copy(update={"step": step})
        machine = with_efficiency(PERFECT.model_copy(update={"attention": attention}))
        extents = (*arguments[:5], width, width, 0)
        return float(attention_seconds(machine, "bf16", *extents)) - machine.efficiency.memory.start

    assert seconds(1e-6) == pytest.approx(16e-6)
    assert seconds(1e-6, 64) == pytest.approx(16e-6 * 0.5**0.75)
    assert seconds(1e-9) == seconds(0)


def test_heads_are_padded_to_the_side_of_an_array() -> None:
    """With sides of 256 a head of 128 takes as long as one of 256, and one of 320 as one of 512."""
    attention = PERFECT.attention.model_copy(update={"padding": 256})
    machine = with_efficiency(PERFECT.model_copy(update={"attention": attention}))

    def of(machine: Machine, width: int) -> float:
        return float(attention_seconds(machine, "bf16", 1, 132, 132, 4096, 4096, width, width, 0))

    assert of(machine, 128) == of(machine, 256) == of(with_efficiency(PERFECT), 256)
    assert of(machine, 320) == of(machine, 512) > of(with_efficiency(PERFECT), 320)


def test_memory_without_losses_takes_bytes_over_the_bandwidth() -> None:
    assert memory_seconds(with_efficiency(PERFECT), 67e9) == 67e9 / 3.35e12
    assert memory_seconds(H100, 0) == H100.efficiency.memory.start


def test_the_roofline_has_no_constants() -> None:
    machine = with_efficiency(PERFECT.model_copy(update={"kernels": "roofline"}))
    attention = Kernel("attention", "bf16", (1, 2, 2, 64, 64, 64, 64), 10**9, 10**6)
    kernels = [product(100, 200, 300), attention, Kernel("memory", "", (), 7, 10**8)]
    expected = [max(k.flops / 989e12, k.bytes / 3.35e12) for k in kernels]
    assert kernel_seconds(machine, kernels).tolist() == expected


@given(m=SIZES, n=SIZES, k=SIZES)
def test_products_take_at_least_the_roofline_and_are_symmetric(m: int, n: int, k: int) -> None:
    size = operands(m, n, k)
    seconds = float(matmul_seconds(H100, "bf16", 1, m, n, k, size))
    assert seconds >= max(2 * m * n * k / 989e12, size / 3.35e12)
    assert seconds == float(matmul_seconds(H100, "bf16", 1, n, m, k, size))


@given(m=SIZES, n=SIZES, k=SIZES, axis=st.integers(0, 2))
def test_twice_the_product_takes_no_less_up_to_tile_effects(
    m: int, n: int, k: int, axis: int
) -> None:
    """Small ones may: twice the tiles can keep more processors busy. Large ones never."""
    larger = [s * (2 if i == axis else 1) for i, s in enumerate((m, n, k))]
    before = matmul_seconds(H100, "bf16", 1, m, n, k, operands(m, n, k))
    m, n, k = larger
    after = matmul_seconds(H100, "bf16", 1, m, n, k, operands(m, n, k))
    large = min(m, n, k) >= 4096
    assert after >= before * (1.2 if large else 0.98 if axis == 2 else 0.7)


@given(b=st.integers(1, 8), q=SIZES, heads=st.sampled_from([8, 16, 64]), axis=st.integers(0, 2))
def test_twice_the_attention_takes_no_less_up_to_tile_effects(
    b: int, q: int, heads: int, axis: int
) -> None:
    def seconds(b: int, q: int, heads: int) -> Any:
        size = 4 * b * q * (heads + 8) * 128
        return attention_seconds(H100, "bf16", b, heads, 8, q, q, 128, 128, size, causal=True)

    twice = [s * (2 if i == axis else 1) for i, s in enumerate((b, q, heads))]
    assert seconds(*twice) >= seconds(b, q, heads) * (0.9 if axis == 2 else 1)


def test_arrays_cost_what_their_elements_cost() -> None:
    rng = np.random.default_rng(1)
    m, n, k, size = rng.integers(1, 9000, (4, 50))
    causal = rng.integers(0, 2, 50) == 1

    def seconds(i: Any) -> tuple[Any, Any]:
        attention = (1, 32, 8, m[i], m[i], 128, 128, size[i])
        return (
            matmul_seconds(H100, "bf16", 1, m[i], n[i], k[i], size[i]),
            attention_seconds(H100, "bf16", *attention, causal=causal[i]),
        )

    products, attention = seconds(slice(None))
    assert [(p, a) for p, a in zip(products, attention, strict=True)] == [
        seconds(i) for i in range(50)
    ]


@pytest.mark.parametrize("machine", [H100, load_machine("b200"), load_machine("a100-80g")])
def test_blocks_of_queries_meet_more_keys_than_a_window_has(machine: Machine) -> None:
    """A block of queries meets the keys of the windows of all of them: two tiles or more, where a
    query sees one. A window as long as the sequence is a causal mask."""
    rows, width = 16384, 64

    def seconds(keys: int, *, windowed: bool = False, causal: bool = False) -> float:
        extents = 1, 64, 64, rows, keys, width, width
        return float(
            attention_seconds(machine, "bf16", *extents, 1, windowed=windowed, causal=causal)
        )

    assert seconds(128, windowed=True) > 1.2 * seconds(128)
    windows = [seconds(keys, windowed=True) for keys in (128, 512, 1024, 4096, (rows + 1) // 2)]
    assert windows == sorted(windows)
    assert windows[-1] == pytest.approx(seconds(rows, causal=True), rel=0.05)


def test_kernels_of_all_kinds_stand_in_the_order_that_was_asked() -> None:
    attention = Kernel("attention", "bf16", (1, 32, 8, 4096, 4096, 128, 128), 0, 10**8, causal=True)
    kernels = [
        product(4096, 8192, 8192),
        Kernel("memory", "", (), 0, 10**8),
        attention,
        Kernel("attention_backward", *_of(attention)),
        product(4096, 8192, 8192, "f8e4m3"),
        product(1, 8192, 8192),
    ]
    together = kernel_seconds(H100, kernels).tolist()
    assert together == [float(kernel_seconds(H100, [k])[0]) for k in kernels]
    assert together[3] > 2.5 * together[2]
    assert kernel_seconds(H100, []).tolist() == []


def _of(kernel: Kernel) -> tuple[Any, ...]:
    return kernel.dtype, kernel.extents, kernel.flops, kernel.bytes, "", kernel.causal


@pytest.mark.parametrize(
    ("kernel", "milliseconds"),
    [
        (product(4096, 8192, 8192), 0.738),
        (product(4096, 8192, 8192, "f8e4m3"), 0.476 - 0.092),
        (product(1, 8192, 8192), 0.0477),
    ],
)
def test_products_on_h100_are_near_those_measured(kernel: Kernel, milliseconds: float) -> None:
    """ai-dynamo/aiconfigurator, h100_sxm; of the time in 8 bits its quantization is 0.092 ms."""
    assert kernel_seconds(H100, [kernel])[0] * 1e3 == pytest.approx(milliseconds, rel=0.08)


@pytest.mark.parametrize(
    ("machine", "best"),
    [("a100-80g", 271.2), ("h100-sxm", 794.5), ("b200", 1745), ("gb200-nvl72", 1822)],
)
def test_large_products_reach_the_best_measured_rates(machine: str, best: float) -> None:
    """TFLOP/s: stas00/ml-engineering, compute/accelerator/README.md, "Maximum Achievable Matmul
    FLOPS": the best of many shapes."""
    n = 8192
    seconds = kernel_seconds(load_machine(machine), [product(n, n, n)])[0]
    assert 0.82 * best < 2 * n**3 / seconds / 1e12 < 1.05 * best


@pytest.mark.parametrize(
    ("machine", "dtype", "columns", "measured"),
    [
        ("mi300x", "bf16", 4864, 708),
        ("mi300x", "f8e4m3", 3648, 1273),
        ("mi325x", "bf16", 4864, 843),
        ("mi325x", "f8e4m3", 3648, 1519),
    ],
)
def test_a_large_product_of_amd_has_the_measured_rate(
    machine: str, dtype: str, columns: int, measured: float
) -> None:
    """TFLOP/s that last: AMD ROCm blogs, Measuring Max-Achievable FLOPs, part 2."""
    shape = 4096, columns, 32896
    seconds = seconds_in_step(load_machine(machine), [product(*shape, dtype)])[0]
    assert 2 * np.prod(shape) / seconds / 1e12 == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize("machine", ["mi300x", "h20", "b200"])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (28672, 4096), (4096, 14336)])
def test_sustained_load_sets_in_gradually(machine: str, n: int, k: int) -> None:
    """Between the most rows that lose nothing and the fewest that lose the share of the device the
    number of rows doubles, and no row more loses less."""
    lossy = load_machine(machine).changed({"efficiency.sustained.products": 0.5})
    kernels = [product(m, n, k) for m in range(1, 2048)]
    factors = seconds_in_step(lossy, kernels) / kernel_seconds(lossy, kernels)
    assert np.all(np.diff(factors) >= 0)
    cool, hot = 1 + np.flatnonzero(factors == 1)[-1], 1 + np.flatnonzero(factors > 2 - 1e-9)[0]
    assert hot >= 1.9 * cool


def test_a_narrower_type_without_a_rate_has_that_of_a_type_of_as_many_bits() -> None:
    c = MatmulEfficiency(rate={"bf16": 0.8, "f8e4m3": 0.7})
    actual = [c.of(t) for t in ("bf16", "f16", "f8e5m2", "i8", "f4e2m1")]
    assert actual == [0.8, 0.8, 0.7, 0.7, 0.8]
    assert MatmulEfficiency(rate={}).of("f32") == 0.8


def test_infinite_peaks_cost_nothing() -> None:
    machine = with_efficiency(PERFECT).changed({"compute.matrix": float("inf")})
    size = operands(8192, 8192, 64)
    assert kernel_seconds(machine, [product(8192, 8192, 64)])[0] == size / 3.35e12


#: TFLOP/s of FlashAttention-3 without a mask on H100, 16,384 tokens, width 2,048, by the length of
#: a sequence from 512 to 16,384: arXiv 2407.08608, figures 5 and 6, read from the bars.
FLASH: dict[tuple[int, bool], list[int]] = {
    (128, False): [467, 565, 625, 638, 646, 648],
    (128, True): [316, 424, 501, 542, 559, 561],
    (64, True): [272, 363, 422, 453, 472, 474],
}


@pytest.mark.parametrize(("width", "backward"), FLASH)
def test_attention_on_h100_is_near_published_rates(width: int, backward: bool) -> None:
    """Long ones within 8%; short ones are slower here: the tables hold servers' kernels, which
    take sequences of different lengths and start later."""
    lengths = 512 * 2 ** np.arange(6)
    batch, heads = 16384 // lengths, 2048 // width
    flops = 4 * batch * heads * lengths**2 * width * (2.5 if backward else 1)
    size = 2 * 16384 * 2048 * (8 if backward else 4)
    arguments = (batch, heads, heads, lengths, lengths, width, width, size)
    rates = flops / attention_seconds(H100, "bf16", *arguments, backward=backward) / 1e12
    error = rates / np.array(FLASH[width, backward]) - 1
    assert np.abs(error[3:]).max() < 0.08
    assert np.abs(error).max() < 0.3


#: Milliseconds of causal prefills of vllm by batch, heads, key/value heads, tokens and elements,
#: with what copies keys and values into a cache.
PREFILLS: dict[tuple[str, tuple[int, ...]], float] = {
    ("a100-80g", (1, 32, 8, 8192, 128)): 3.120,
    ("a100-80g", (4, 32, 8, 4096, 128)): 3.396,
    ("h100-sxm", (1, 32, 8, 8192, 128)): 0.9122,
    ("h100-sxm", (4, 64, 8, 4096, 64)): 1.293,
    ("b200", (1, 32, 8, 8192, 128)): 0.5140,
    ("b200", (4, 32, 8, 2048, 128)): 0.1834,
    ("b200", (4, 64, 8, 4096, 64)): 0.8995,
    ("b300", (1, 32, 8, 8192, 128)): 0.4099,
    ("b300", (4, 64, 8, 4096, 64)): 0.6911,
}


@pytest.mark.parametrize(("name", "shape"), PREFILLS)
def test_prefills_are_near_those_measured(name: str, shape: tuple[int, ...]) -> None:
    """aiconfigurator-core 0.12.0, as above, less a copy at the memory's bandwidth."""
    b, h, g, q, width = shape
    machine, keys = load_machine(name), 2 * 2 * b * q * g * width  # bytes of keys and values
    size = keys * (1 + h / g)
    seconds = attention_seconds(
        machine, "bf16", b, h, g, q, q, width, width, size, causal=True
    ) + memory_seconds(machine, 2 * keys)
    assert seconds * 1e3 == pytest.approx(PREFILLS[name, shape], rel=0.1)


def test_a_type_that_is_not_computed_is_named() -> None:
    with pytest.raises(DiagnosticError, match=r"h100-sxm.*no peak for f4e2m1.*bf16"):
        kernel_seconds(H100, [product(64, 64, 64, "f4e2m1")])


def test_copies_of_operands_in_8_bits_are_made_where_products_need_them() -> None:
    """Products of Hopper take 8 bits along the contracted dimension only, those of Blackwell along
    any: there a cast writes once, and no kernel copies what was sent."""
    size = 1 << 30
    b200 = load_machine("b200")
    turns, casts, plain = (
        Kernel("memory", "", (), 0, size, form=f) for f in ("turns", "casts_2", "")
    )
    less = Kernel("memory", "", (), 0, size * 3 // 4)
    assert (kernel_seconds(H100, [turns, casts]) == kernel_seconds(H100, [plain, plain])).all()
    assert kernel_seconds(b200, [turns])[0] == pytest.approx(0, abs=1e-15)
    assert kernel_seconds(b200, [casts])[0] == kernel_seconds(b200, [less])[0]


@pytest.mark.parametrize("machine", ["h100-sxm", "b200"])
def test_a_microbatch_adds_no_casts_of_parameters_that_stay(machine: str) -> None:
    """With `once` and `stored` only the first microbatch casts parameters, so a further one takes
    less time than with `each`; both are the same but for what ZeRO-3 gathers."""

    def added(weights: Literal["each", "once", "stored"], zero: int = 1) -> float:
        def step(n: int) -> float:
            job = stagec.job(
                "llama3-8b",
                sizes={"L": 2, "B": 2 * n, "S": 4096},
                dp=2,
                zero=zero,
                microbatches=n,
                fp8="hybrid",
                fp8_weights=weights,
            )
            return float(job.time(machine).as_json()["step_seconds"])

        return step(8) - step(4)

    assert added("once") < 0.985 * added("each")
    assert added("stored") == added("once")
    assert added("once", zero=3) == added("each", zero=3) > added("stored", zero=3)


def test_hosts_issue_no_casts_of_parameters_that_stay() -> None:
    """A small step waits for its host, which issues what is in the microbatch."""

    def step(**how: Any) -> float:
        sizes = {"L": 8, "B": 32, "S": 64}
        job = stagec.job(
            "llama3-8b", sizes=sizes, dp=1, microbatches=32, host_issue="1 ms", fp8="hybrid", **how
        )
        return float(job.time("h100-sxm").as_json()["step_seconds"])

    products, microbatches = 7, 32
    casts = 2 * 8 * products * microbatches
    assert step(fp8_weights="each") - step(fp8_weights="once") == pytest.approx(
        casts * 1e-3, rel=0.2
    )


@pytest.mark.parametrize("name", ["a100-80g", "h100-sxm", "gb200-nvl72"])
def test_queries_split_over_ranks_have_no_cliffs(name: str) -> None:
    """Ranks with balanced parts of a causal mask have blocks of all lengths, which fill processors
    evenly: 2% more tokens take more time, but at most 6%."""
    tokens = [round(65536 * 1.02**i) // 256 * 256 for i in range(60)]
    kernels = [
        Kernel("attention", "bf16", (1, 8, 1, s // 16, s, 128, 128), 0, 1 << 20, causal=True)
        for s in tokens
    ]
    seconds = kernel_seconds(load_machine(name), kernels)
    assert (seconds[1:] > seconds[:-1]).all()
    assert (seconds[1:] < 1.06 * seconds[:-1]).all()


@pytest.mark.parametrize("name", ["a100-80g", "l40s", "mi300x", "h200", "b200"])
def test_weights_of_4_bits_take_time_to_become_16(name: str) -> None:
    """On every device with units for vectors, not less for more rows, and less than twice the time
    of weights in 16 bits; on a TPU, which states none, no time."""
    n, k = 8192, 8192
    size = n * k / 2

    def seconds(machine: str, rows: int, form: str) -> float:
        moved = size + 2 * rows * (n + k)
        return float(matmul_seconds(load_machine(machine), "bf16", 1, rows, n, k, moved, form=form))

    rows = (1, 16, 64, 128)
    expanded = [seconds(name, m, "expands") for m in rows]
    assert expanded == sorted(expanded)
    for m, own in zip(rows, expanded, strict=True):
        wide = float(
            matmul_seconds(load_machine(name), "bf16", 1, m, n, k, 2 * n * k + 2 * m * (n + k))
        )
        assert seconds(name, m, "") <= own < 2 * wide
    assert seconds(name, rows[-1], "") < expanded[-1]
    assert seconds("tpu-v5e", 16, "expands") == seconds("tpu-v5e", 16, "")


@pytest.mark.parametrize("name", ["a100-80g", "mi300x", "h100-sxm", "b200"])
def test_a_prompt_behind_more_cached_keys_takes_longer(name: str) -> None:
    """1,024 tokens of one sequence, 4 heads on 1, without and behind cached tokens."""
    machine, prompt = load_machine(name), 1024
    seconds = [
        float(
            attention_seconds(
                *(machine, "bf16", 1, 4, 1, prompt, cached + (prompt + 1) / 2, 128, 128),
                2 * (4 * prompt + 2 * (cached + prompt)) * 128,
                causal=True,
            )
        )
        for cached in (0, 256, 500, 520, 1024, 4096)
    ]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("name", ["a100-80g", "l40s", "mi325x", "h200", "b200"])
@pytest.mark.parametrize(("heads", "kv_heads", "qk", "v"), [(32, 1, 576, 512), (16, 2, 128, 128)])
def test_a_few_queries_behind_cached_keys_take_no_more_than_one_by_one(
    name: str, heads: int, kv_heads: int, qk: int, v: int
) -> None:
    """Verified drafts: more of them never take less, and K + 1 of them less than K + 1 steps; no
    further one takes twice as long, as a second block may. Also where the kernel packs no heads of
    prompts."""
    machine, keys, batch = load_machine(name), 16384, 64
    seconds = [
        float(
            attention_seconds(
                *(machine, "bf16", batch, heads, kv_heads, queries, keys, qk, v),
                2 * batch * (queries * heads + keys * kv_heads) * (qk + v),
            )
        )
        for queries in range(1, 17)
    ]
    for queries, (before, after) in enumerate(pairwise(seconds), 2):
        assert before * 0.999 <= after < 2 * before, queries
        assert after < queries * seconds[0], queries
