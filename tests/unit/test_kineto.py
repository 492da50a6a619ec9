"""Profiler traces: what was put into a trace by hand is what is read, and nothing of the GPU's time
is lost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from stagec.time.measured.kernel_tables import Key
from stagec.time.measured.kineto import Reading, read_trace, rows
from stagec.time.measured.torch_ops import NO_SHAPES, Recorded, row_of, row_of_collective
from tests.unit.kineto_traces import Trace, comms

BF16, F32 = "c10::BFloat16", "float"
US = 1e-6


def measured(*readings: Reading) -> dict[Key, tuple[Any, int]]:
    return {key: (pytest.approx(seconds / US), count) for key, seconds, count in rows(readings)}


def read(trace: Trace, tmp_path: Path, name: str = "trace.json") -> Reading:
    reading = read_trace(trace.write(tmp_path / name))
    message = [
        *(s for actual in reading.kernels.values() for s in actual),
        *(s for actual in reading.collectives.values() for _, s in actual),
        *(s for actual in reading.missed.values() for s in actual),
    ]
    assert sum(message) == pytest.approx(reading.gpu_seconds)
    return reading


MATMUL = Key("matmul", "bf16", (1, 512, 256, 128))
ATTENTION = (2, 16, 4, 1024, 1024, 128, 128)


def product(trace: Trace, *kernels: float) -> None:
    trace.tensors("aten::mm", [[512, 128], [128, 256]], [BF16, BF16], *kernels)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_kernel_has_the_median_of_its_times_and_all_that_it_launched(
    tmp_path: Path, name: str
) -> None:
    trace = Trace()
    for times in ((10.0,), (30.0, 2.5), (20.0,)):
        product(trace, *times)
    random.Random(3).shuffle(trace.events)
    assert measured(read(trace, tmp_path, name)) == {MATMUL: (20.0, 3)}


def test_the_outermost_op_that_is_known_counts(tmp_path: Path) -> None:
    trace = Trace()
    flash = "aten::_scaled_dot_product_flash_attention"
    shape = [[2, 16, 1024, 128], [2, 4, 1024, 128], [2, 4, 1024, 128], [], [], []]
    types = [BF16] * 3 + ["Scalar"] * 3
    trace.op(
        flash,
        *(100.0, 5.0),
        inner=("aten::_flash_attention_forward", "aten::copy_"),
        **{"Input Dims": shape, "Input type": types},
        **{"Concrete Inputs": ["", "", "", "0.", "True", "False"]},
    )
    trace.op("MyFunction", 7.0, inner=("aten::convolution",))
    reading = read(trace, tmp_path)
    assert measured(reading) == {Key("attention", "bf16", ATTENTION, True): (105.0, 1)}
    (missed,) = reading.missed
    assert missed.name == "aten::convolution: some_kernel"


def test_ops_of_other_threads_launched_nothing_here(tmp_path: Path) -> None:
    trace = Trace()
    trace.host("cpu_op", "aten::convolution", 0, 10_000)
    trace.thread += 1
    product(trace, 4.0)
    trace.launch(trace.now, "alone", 1.0)
    reading = read(trace, tmp_path)
    assert measured(reading) == {MATMUL: (4.0, 1)}
    assert [(m.name, m.why) for m in reading.missed] == [("alone", "no op launched it")]


def test_without_a_launch_the_external_id_names_the_op(tmp_path: Path) -> None:
    trace = Trace()
    product(trace)
    trace.events[0]["args"]["External id"] = 77
    trace.gpu("kernel", "gemm", 5000, 6.0, **{"correlation": 900, "External id": 77})
    trace.gpu("kernel", "other", 6000, 2.0, **{"correlation": 901, "External id": 5})
    # old profilers give kernels their correlation as external id: it names no op
    trace.gpu("kernel", "third", 7000, 1.0, **{"correlation": 77, "External id": 77})
    reading = read(trace, tmp_path)
    assert measured(reading) == {MATMUL: (6.0, 1)}
    assert {m.name for m in reading.missed} == {"other", "third"}


def test_the_first_of_several_steps_does_not_count(tmp_path: Path) -> None:
    trace = Trace()
    for step, time in enumerate((500.0, 3.0, 4.0)):
        trace.host("user_annotation", f"ProfilerStep#{step}", trace.now, 95)
        product(trace, time)
    reading = read(trace, tmp_path)
    assert reading.first_left_out
    assert measured(reading) == {MATMUL: (3.5, 2)}


def test_copies_say_their_bytes(tmp_path: Path) -> None:
    trace = Trace()
    trace.gpu("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 3.0, bytes=4096, correlation=1)
    trace.gpu("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 9, 8.0, bytes=4096, correlation=2)
    trace.gpu("gpu_memset", "Memset (Device)", 20, 2.0, bytes=4096, correlation=3)
    reading = read(trace, tmp_path)
    expected = {Key("memory", "", (8192,)): (3.0, 1), Key("memory", "", (4096,)): (2.0, 1)}
    assert measured(reading) == expected
    assert [m.why for m in reading.missed] == ["a copy to or from the host"]


# -- collectives -----------------------------------------------------------------------------------

KINDS = [
    ("allreduce", "all_reduce", 2 * 1024),
    ("_allgather_base", "all_gather", 8 * 2 * 1024),
    ("_reduce_scatter_base", "reduce_scatter", 2 * 1024),
    ("all_to_allv", "all_to_all", 2 * 1024),
]


@pytest.mark.parametrize(("kind", "ours", "size"), KINDS)
def test_of_a_collective_the_larger_side_counts(
    tmp_path: Path, kind: str, ours: str, size: int
) -> None:
    trace = Trace()
    trace.collective(kind, 1024, 8, 12.0)
    assert measured(read(trace, tmp_path)) == {Key(ours, "", (8, size)): (12.0, 1)}


def test_a_message_is_between_two_and_its_receiver_waits(tmp_path: Path) -> None:
    trace = Trace()
    trace.collective("send", 1024, 8, 12.0)
    trace.collective("recv", 1024, 8, 99.0)
    reading = read(trace, tmp_path)
    assert measured(reading) == {Key("message", "", (2, 2048)): (12.0, 1)}
    assert [m.why for m in reading.missed] == ["recv waits for its sender"]


def test_what_the_call_says_counts_where_the_kernel_says_nothing(tmp_path: Path) -> None:
    trace = Trace()
    trace.host("cpu_op", "record_param_comms", trace.now, 50, **comms("allreduce", 64, 4))
    trace.launch(trace.now + 5, "ncclKernel_AllReduce_RING_LL_Sum_bf16(ncclWork*)", 8.0)
    trace.now += 100
    trace.launch(trace.now, "ncclKernel_AllReduce_RING_LL_Sum_bf16(ncclWork*)", 5.0)
    reading = read(trace, tmp_path)
    assert measured(reading) == {Key("all_reduce", "", (4, 128)): (8.0, 1)}
    assert [m.why for m in reading.missed] == ["its sizes are not recorded"]


def ranks_of(tmp_path: Path, *times: tuple[float, ...]) -> list[Reading]:
    readings: list[Reading] = []
    for rank, of_rank in enumerate(times):
        trace = Trace(rank)
        for time in of_rank:
            trace.collective("allreduce", 1024, 2, time)
        readings.append(read(trace, tmp_path, f"rank{rank}.json"))
    return readings


def test_of_each_call_the_rank_that_waits_least_counts(tmp_path: Path) -> None:
    readings = ranks_of(tmp_path, (10.0, 90.0, 14.0), (70.0, 12.0, 14.5))
    assert measured(*readings) == {Key("all_reduce", "", (2, 2048)): (12.0, 3)}


def test_calls_that_do_not_pair_count_each(tmp_path: Path) -> None:
    readings = ranks_of(tmp_path, (10.0, 90.0), (70.0,))
    assert measured(*readings) == {Key("all_reduce", "", (2, 2048)): (70.0, 3)}


def test_two_traces_of_one_rank_are_of_two_times(tmp_path: Path) -> None:
    readings = ranks_of(tmp_path, (10.0,), (30.0,))
    readings[1].rank = 0
    assert measured(*readings) == {Key("all_reduce", "", (2, 2048)): (20.0, 2)}


# -- ops -------------------------------------------------------------------------------------------

Q, K = [2, 16, 1024, 128], [2, 4, 1024, 128]
LSE = [2, 16, 1024]
SCALAR = "Scalar"


def memory(size: int, op: str = "") -> Key:
    return Key("memory", "", (size,), False, op)


OPS: dict[str, tuple[str, Any, Any, Any, Key | str | None]] = {
    "addmm": (
        "aten::addmm",
        [[48], [128, 32], [32, 48], [], []],
        [F32, F32, F32, SCALAR, SCALAR],
        ["", "", "", "1", "1"],
        Key("matmul", "f32", (1, 128, 48, 32)),
    ),
    "bmm": (
        "aten::bmm",
        [[6, 5, 3], [6, 3, 4]],
        [BF16, BF16],
        None,
        Key("matmul", "bf16", (6, 5, 4, 3)),
    ),
    "fp8": (
        "aten::_scaled_mm",
        [[16, 32], [32, 64], [], []],
        ["c10::Float8_e4m3fn", "c10::Float8_e4m3fn", F32, F32],
        None,
        Key("matmul", "f8e4m3", (1, 16, 64, 32)),
    ),
    "two types": (
        "aten::_scaled_mm",
        [[16, 32], [32, 64]],
        ["c10::Float8_e5m2", "c10::Float8_e4m3fn"],
        None,
        "a product of f8e5m2 by f8e4m3",
    ),
    "no fit": ("aten::mm", [[2, 3], [4, 5]], [F32, F32], None, "its operands are not matrices"),
    "no rows": ("aten::mm", [[0, 3], [3, 5]], [F32, F32], None, "it has no elements"),
    "no shapes": ("aten::mm", None, None, None, NO_SHAPES),
    "flash backward": (
        "aten::_scaled_dot_product_flash_attention_backward",
        [Q, Q, K, K, Q, LSE, [], [], [], [], [], [], [], []],
        [BF16] * 5 + [F32] + [SCALAR] * 8,
        [""] * 8 + ["1024", "1024", "0.", "True", "", "", ""],
        Key("attention_backward", "bf16", ATTENTION, True),
    ),
    "cudnn": (
        "aten::_scaled_dot_product_cudnn_attention",
        [Q, K, K, [], [], [], [], []],
        [BF16] * 3 + ["", SCALAR, SCALAR, SCALAR, SCALAR],
        ["", "", "", "", "True", "0.", "False", "False"],
        Key("attention", "bf16", ATTENTION, False),
    ),
    "cudnn backward": (
        "aten::_scaled_dot_product_cudnn_attention_backward",
        [Q, Q, K, K, Q, LSE, [], [], [], [], [], [], [], [], []],
        [BF16] * 5 + [F32] + [""] * 9,
        [""] * 11 + ["1024", "1024", "0.", "True"],
        Key("attention_backward", "bf16", ATTENTION, True),
    ),
    "efficient backward": (
        "aten::_scaled_dot_product_efficient_attention_backward",
        [Q, Q, K, K, [], Q, LSE, [], [], [], [], []],
        [BF16] * 4 + ["", BF16, F32, "", "", SCALAR, "", SCALAR],
        [""] * 9 + ["0.", "[True, True, True, False]", "False"],
        Key("attention_backward", "bf16", ATTENTION, False),
    ),
    "bias": (
        "aten::_scaled_dot_product_efficient_attention",
        [Q, K, K, [2, 16, 1024, 1024], [], [], []],
        [BF16] * 4 + [SCALAR] * 3,
        ["", "", "", "", "True", "0.", "False"],
        "attention with a bias",
    ),
    "flash-attn": (
        "flash_attn::_flash_attn_forward",
        [[2, 1024, 16, 128], [2, 1024, 4, 128], [2, 1024, 4, 128]],
        [BF16] * 3,
        ["", "", "", "0.", "0.088", "True", "-1", "-1", "0."],
        Key("attention", "bf16", ATTENTION, True),
    ),
    "window": (
        "flash_attn::_flash_attn_forward",
        [[2, 1024, 16, 128], [2, 1024, 4, 128], [2, 1024, 4, 128]],
        [BF16] * 3,
        ["", "", "", "0.", "0.088", "True", "255", "0", "0."],
        "attention with a window",
    ),
    "mask unknown": (
        "aten::_scaled_dot_product_flash_attention",
        [Q, K, K],
        [BF16] * 3,
        None,
        "whether it is causal is not recorded",
    ),
    "rmsnorm": (
        "aten::_fused_rms_norm",
        [[2, 64, 48], [], [48], []],
        [BF16, "ScalarList", BF16, ""],
        None,
        memory(2 * (2 * 64 * 48 * 2) + 96, "rmsnorm"),
    ),
    "layernorm backward": (
        "aten::native_layer_norm_backward",
        [[128, 48], [128, 48], [], [128, 1], [128, 1], [48], [48], []],
        [BF16, BF16, "ScalarList", F32, F32, BF16, BF16, "ScalarList"],
        None,
        memory(3 * 128 * 48 * 2 + 96 + 2 * 96, "layernorm_grad"),
    ),
    "softmax to f32": (
        "aten::_softmax",
        [[4, 64], [], []],
        [BF16, SCALAR, SCALAR],
        ["", "-1", "True"],
        memory(4 * 64 * 6, "softmax"),
    ),
    "embedding": (
        "aten::embedding",
        [[1000, 32], [2, 8], [], [], []],
        [BF16, "long int", SCALAR, SCALAR, SCALAR],
        None,
        memory(16 * (2 * 64 + 8), "embedding"),
    ),
    "a sum of two types": (
        "aten::add",
        [[8, 4], [4], []],
        [F32, BF16, SCALAR],
        None,
        memory(128 + 8 + 128),
    ),
    "in place": ("aten::add_", [[8, 4], [8, 4]], [BF16, F32], None, memory(64 + 128 + 64)),
    "with out": ("aten::mul", [[8, 4], [8, 4], [8, 4]], [F32] * 3, None, memory(3 * 128)),
    "copy": ("aten::copy_", [[8, 4], [8, 4], []], [BF16, F32, SCALAR], None, memory(64 + 128)),
    "lists": (
        "aten::_softmax",
        [[[4], [4]]],
        ["TensorList"],
        None,
        "the types of lists of tensors are not recorded",
    ),
    "triton": ("triton_poi_fused_add_0", [[8], [8], []], [F32, F32, SCALAR], None, memory(64)),
    "unknown": ("aten::convolution", [[8]], [F32], None, None),
}


@pytest.mark.parametrize("case", OPS)
def test_what_an_op_is(case: str) -> None:
    name, dims, types, values, expected = OPS[case]
    actual = row_of(Recorded(name, dims, None, types, values))
    if isinstance(expected, str):
        assert isinstance(actual, str)
        assert actual.startswith(expected)
    else:
        assert actual == expected


@pytest.mark.parametrize("dtype", [[], {}, None, 3, "Complex"])
def test_the_type_of_a_collective_may_be_anything(dtype: object) -> None:
    actual = row_of_collective("_allgather_base", (8, 64), dtype, 8)
    assert actual == "its sizes are not recorded"


def test_what_is_broadcast_is_read_once() -> None:
    dims, types = [[8, 4], [8, 4]], [F32, F32]
    actual = row_of(Recorded("aten::mul", dims, [[4, 1], [0, 1]], types, None))
    assert actual == memory(128 + 16 + 128)
