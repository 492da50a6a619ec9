"""Stacks of engines: what they make of steps of serving, and measured servers beside ours."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import stagec as library
from stagec.analysis.serving_rates import PodStep, chunked, uneven_seconds
from stagec.analysis.steady_server import among_groups, chunks, decoding
from stagec.analysis.time_report import TimeReport
from stagec.jobs.figures import CompiledJob
from stagec.jobs.request.options import JobOptions
from stagec.machines import load_machine
from stagec.machines.figures import quantity
from stagec.program.kernels import Kernel
from stagec.support.diagnostics import DiagnosticError
from stagec.time.costs.durations import Durations
from stagec.time.costs.kernels import (
    kernel_seconds,
    matmul_seconds,
    memory_seconds,
    seconds_in_step,
)
from stagec.time.costs.software import Software
from stagec.validation.closed_loop import ClosedLoop
from stagec.validation.measured_servers import (
    MeasuredServer,
    ServerError,
    measured_servers,
    server_summaries,
)
from tests.support import assert_schema, stagec

ENGINES = ("vllm", "sglang", "trtllm")
MODELS_KEPT_ASIDE = ("minimax", "kimi", "glm-5", "glm5", "glm_5")


def job(model: str = "llama3-8b", **flags: Any) -> CompiledJob:
    how: dict[str, Any] = {
        "tp": 2,
        "serve": "decode",
        "batch": 16,
        "context": 1023,
        "sizes": {"L": 4},
        **flags,
    }
    return CompiledJob.of(library.job(model, **how)._options)  # pyright: ignore[reportPrivateUsage]


def timed(**flags: Any) -> TimeReport:
    return job(**flags).time(load_machine("h200"))


def launches(report: TimeReport) -> int:
    return sum(part.nodes for part in report.critical_path if "all_reduce" not in part.op)


# -- statements ------------------------------------------------------------------------------------


@pytest.mark.parametrize("serve", ["decode", "prefill"])
def test_a_scheduler_adds_its_time_to_each_step(serve: str) -> None:
    prefill = {"serve": serve, "prompt": 256, "context": None}
    how: dict[str, Any] = prefill if serve == "prefill" else {}
    before, after = (timed(host_step=step, **how) for step in ("", "1 ms"))
    assert after.step_seconds - before.step_seconds == pytest.approx(1e-3, rel=1e-9)
    assert after.breakdown["scheduler"] == pytest.approx(1e-3)
    assert sum(after.breakdown.values()) == pytest.approx(after.step_seconds)


@pytest.mark.parametrize("beyond", ["0.5 ms", "0 ms"])
def test_a_scheduler_beside_devices_adds_what_it_takes_longer(beyond: str) -> None:
    plain = timed()
    longer = quantity("time", beyond)
    step = f"{(plain.step_seconds + longer) * 1e6:.6f} us"
    beside = timed(host_step=step, host_scheduler="beside")
    assert beside.step_seconds == pytest.approx(plain.step_seconds + longer, rel=1e-6)
    assert beside.breakdown.get("scheduler", 0.0) == pytest.approx(longer, abs=1e-9)
    assert timed(host_step=step, host_scheduler="between").step_seconds == pytest.approx(
        2 * plain.step_seconds + longer, rel=1e-6
    )


def test_a_scheduler_has_nothing_to_do_in_training() -> None:
    how: dict[str, Any] = {"serve": None, "context": None, "batch": None}
    sizes = {"L": 2, "B": 2}
    before, after = (timed(host_step=s, sizes=sizes, **how) for s in ("", "1 ms"))
    assert before.step_seconds == after.step_seconds


def test_gaps_of_graphs_are_those_of_decode() -> None:
    gap = load_machine("h200").compute.launch.value
    before, after = timed(), timed(graph_gap="0.5 us")
    assert "launch gaps" in before.breakdown
    ratio = after.breakdown["launch gaps"] / before.breakdown["launch gaps"]
    assert ratio == pytest.approx(0.5e-6 / gap)
    prefill: dict[str, Any] = {"serve": "prefill", "prompt": 256, "context": None}
    assert timed(**prefill).step_seconds == timed(graph_gap="0.5 us", **prefill).step_seconds


@pytest.mark.parametrize(
    ("dtype", "bits", "narrow"),
    [("fp8", 8, 16), ("fp8", 4, 0), ("nvfp4", 8, 16), ("nvfp4", 4, 16), ("bf16", 8, 0)],
)
def test_hosts_issue_prompts_and_choose_kernels_on_blackwell(
    dtype: str, bits: int, narrow: int
) -> None:
    """By hand: 4 products of a layer have few bits, those of attention and of the head 16."""
    how: dict[str, Any] = {"serve": "prefill", "prompt": 64, "context": None, "batch": 1}
    how |= {"weight_dtype": dtype, "fuse_products": True, "host_issue": "1 ms"}
    captured = job(**how)
    issued = job(**how, host_prompts="issued", host_product="10 ms", host_product_bits=bits)
    nodes = issued.compiled.issued(issued.values).classes[0].program().nodes
    count = sum(node.is_computation for node in nodes)
    for name, longer in (("b200", 9e-3), ("h200", 0.0)):
        if (name, dtype) != ("h200", "nvfp4"):
            machine = load_machine(name)
            hosts = count * 1e-3 + narrow * longer
            assert captured.time(machine).step_seconds < 1e-3
            assert issued.time(machine).step_seconds == pytest.approx(hosts)


def test_hosts_that_issue_prompts_capture_decode() -> None:
    plain, issued = (timed(host_issue="9 ms", host_prompts=how) for how in ("captured", "issued"))
    assert plain.step_seconds == issued.step_seconds


def test_durations_in_traces_have_the_same_gaps() -> None:
    compiled = job(graph_gap="0.5 us")
    module = compiled.compiled._module  # pyright: ignore[reportPrivateUsage]
    machine = load_machine("h200")
    plain, engine = Durations(machine), Durations(machine).of(module)
    node = next(n for n in compiled.compiled.issued(compiled.values).samples if n.is_computation)
    assert plain(node) - engine(node) == pytest.approx(1.5e-6)


def test_all_reduces_of_engines_are_taken_up_to_a_size_and_where_they_are_faster() -> None:
    part = "exposed tp all_reduce"
    library_, one, two, few = (
        timed(**how).breakdown[part]
        for how in (
            {},
            {"all_reduce": "one-shot"},
            {"all_reduce": "two-shot"},
            {"all_reduce": "two-shot", "all_reduce_below": 1024},
        )
    )
    assert two <= one < library_ / 2
    assert few == library_


def test_ranks_that_would_read_too_much_in_one_shot_reduce_in_two() -> None:
    """Over 8 ranks each would read seven buffers of 256 rows."""
    part, size = "exposed tp all_reduce", 7 * 256 * 4096 * 2
    one, two, most, less = (
        timed(batch=256, tp=8, **how).breakdown[part]
        for how in (
            {"all_reduce": "one-shot"},
            {"all_reduce": "two-shot"},
            {"all_reduce": "one-shot", "all_reduce_reads": size},
            {"all_reduce": "one-shot", "all_reduce_reads": size - 1},
        )
    )
    assert two < one
    assert (most, less) == (one, two)


def test_the_next_norm_adds_up_what_a_layer_ends_with() -> None:
    machine = load_machine("h200")
    plain, added = (
        timed(tp=1, fusion="elementwise", graph_gap="1 us", **how)
        for how in ({}, {"fuse_sums": True})
    )
    each = machine.efficiency.memory.start + 1e-6
    assert plain.step_seconds - added.step_seconds == pytest.approx(4 * each, rel=1e-6)


def test_experts_in_4_bits_order_tokens_and_activate_in_their_product_on_some_devices() -> None:
    how: dict[str, Any] = {"tp": 1, "weight_dtype": "mxfp4", "fusion": "elementwise"}
    for name, launches_less in (("b200", 72), ("h200", 0)):
        machine = load_machine(name)
        plain, fused = (
            job("gpt-oss-120b", **how, graph_gap="1 us", sizes={}, **more).time(machine)
            for more in ({}, {"fuse_experts": "blackwell"})
        )
        each = machine.efficiency.memory.start + 1e-6
        less = plain.step_seconds - fused.step_seconds
        assert less == pytest.approx(launches_less * each, rel=1e-6, abs=1e-12)


def test_kernels_of_all_reduces_add_and_normalize() -> None:
    machine, direct = load_machine("h200"), {"all_reduce": "two-shot"}
    plain, norms = (
        timed(fusion="elementwise", graph_gap="1 us", **direct, **how)
        for how in ({}, {"all_reduce_norms": True})
    )
    each = machine.efficiency.memory.start + 1e-6
    # both norms of 4 layers; that behind the embedding is in the same body
    assert plain.step_seconds - norms.step_seconds == pytest.approx(8 * each, rel=1e-6)


def test_software_of_a_strategy_is_read_once() -> None:
    module = job(host_request="40 ms").compiled._module  # pyright: ignore[reportPrivateUsage]
    assert Software.of(module).request_seconds == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--host-step", "1 parsec"), "--host-step expects a unit among"),
        (("--graph-gap", "fast"), "--graph-gap expects a text such as"),
    ],
)
def test_bad_flags_are_errors(flags: tuple[str, ...], message: str) -> None:
    given = ("llama3-8b", "--serve", "decode", "--batch", "8", "--context", "8", *flags)
    actual = stagec("analyze", *given)
    assert actual.code == 1
    assert message in actual.err


def test_experts_that_some_tokens_choose_more_often() -> None:
    """The share of the closed form is the mean over Beta-distributed probabilities."""
    random = np.random.default_rng(1)
    experts, k = 128, 4
    probability = random.beta(1, experts / k - 1, size=2_000_000)
    for tokens in (1, 4, 64):
        share = 1 - ((1 - probability) ** tokens).mean()
        closed = Fraction(tokens * k, experts - k + tokens * k)
        assert float(closed) == pytest.approx(share, rel=5e-3)


def test_few_tokens_reach_fewer_popular_experts_and_one_reaches_as_many() -> None:
    def weights(batch: int, popularity: str) -> int:
        flags: dict[str, Any] = {"expert_popularity": popularity, "tp": 1, "sizes": {"L": 2}}
        how: dict[str, Any] = {"serve": "decode", "batch": batch, "context": 100, **flags}
        answer = library.job("qwen3-30b-a3b", **how).analyze()
        ops = answer.as_json()["serving"]["ops"]
        return sum(op["bytes"] for op in ops if "experts/gate_up" in op["op"])

    assert weights(1, "even") == weights(1, "spread")
    assert weights(16, "spread") < 0.9 * weights(16, "even")
    assert weights(4096, "spread") > 0.99 * weights(4096, "even")


def test_mixed_steps_of_latent_attention_share_weights() -> None:
    """Behind attention tokens of both classes are one operand, whose weights are quantized."""

    def parameters(step: str) -> int:
        how: dict[str, Any] = {"serve": "mixed", "weight_dtype": "fp8", "sizes": {"L": 4}}
        (kept,) = CompiledJob.of(JobOptions("deepseek-v3", step=step, **how)).figures().by_stage
        return kept["parameters"]

    decode, mixed = parameters("decode=8x1000"), parameters("decode=8x1000,prefill=1x512+0")
    assert decode == pytest.approx(mixed, rel=0.01)


def test_weights_of_4_bits_are_expanded_by_the_kernel() -> None:
    """On Hopper, which has no units for them, and where activations are left in 16 bits."""
    h200 = load_machine("h200")
    compiled = CompiledJob.of(
        JobOptions(
            "gpt-oss-20b",
            serve="decode",
            batch=8,
            context=100,
            weight_dtype="mxfp4",
            activation_dtype="bf16",
        )
    )
    samples = compiled.compiled.issued(compiled.values).samples
    kernels = [n.kernel for n in samples if n.kernel is not None and n.kernel.form]
    assert {k.form for k in kernels} == {"triton"}
    clock = h200.compute.processors.value * h200.compute.clock.value
    for rows, times in ((1, 1), (300, 3)):
        shape = 1, rows, 4096, 65536, 4096 * 65536 // 2 + 2 * rows * (4096 + 65536)
        plain, expanding = (
            float(matmul_seconds(h200, "bf16", *shape, form=form)) for form in ("", "expands")
        )
        assert expanding - plain <= times * 4096 * 65536 / (25 * clock) * 1.001
        assert expanding > plain


def test_experts_of_kernels_of_triton_start_later_and_expand_faster() -> None:
    """Routing is part of them, so a token takes longer; what many experts expand takes less."""
    h200 = load_machine("h200")

    def times(groups: int) -> list[float]:
        size = groups * (4096 * 4096 * 17 // 32 + 4 * 4096)
        shape = groups, 1, 4096, 4096, size
        return [float(matmul_seconds(h200, "bf16", *shape, form=f)) for f in ("expands", "triton")]

    few, many = times(4), times(128)
    assert few[1] > few[0] + 1e-5
    assert many[1] < many[0]


@pytest.mark.parametrize("machine", ["h200", "b200"])
def test_weights_in_int4_have_the_kernels_of_marlin(machine: str) -> None:
    """On devices of all families; mxfp4 has them where it is asked for."""

    def forms(weight_dtype: str, **how: Any) -> set[str]:
        sizes = {"L": 4}
        shape: dict[str, Any] = {"serve": "decode", "batch": 8, "context": 100, "sizes": sizes}
        options = JobOptions("deepseek-v3", weight_dtype=weight_dtype, **shape, **how)
        compiled = CompiledJob.of(options)
        samples = compiled.compiled.issued(compiled.values).samples
        return {n.kernel.form for n in samples if n.kernel is not None and n.kernel.form}

    assert forms("int4") == {"marlin"}
    assert forms("mxfp4", activation_dtype="bf16") == {"triton", "expands"}
    assert forms("nvfp4", activation_dtype="bf16") == {"expands"}
    assert forms("mxfp4", activation_dtype="bf16", expanding_kernel="marlin") == {"marlin"}
    device = load_machine(machine)
    few, many = (
        [
            float(matmul_seconds(device, "bf16", 1, rows, 4096, 65536, 1 << 27, form=form))
            for form in ("", "marlin")
        ]
        for rows in (1, 4096)
    )
    assert 1 < few[1] / few[0] < 3
    assert 3 < many[1] / many[0] < 12


@pytest.mark.parametrize(("rows", "published"), [(64, 69.9), (128, 125.2), (256, 223.5)])
def test_products_in_blocks_take_as_long_as_published(rows: int, published: float) -> None:
    """FlashInfer on B200 (sgl-project/sglang, pull request 13528), of rows from which no rate was
    taken; DeepGEMM takes less than half of it."""
    device, (n, k) = load_machine("b200"), (24576, 7168)
    size = rows * k + n * k + 2 * rows * n
    for form, low, high in (("flashinfer", 0.85, 1.05), ("", 0.1, 0.5)):
        seconds = float(matmul_seconds(device, "f8e4m3", 1, rows, n, k, size, form=form))
        assert low < seconds * 1e6 / published < high


def test_experts_in_blocks_keep_their_kernels() -> None:
    """And products in other types, such as those of routers."""
    shape: dict[str, Any] = {"serve": "decode", "batch": 8, "context": 100, "sizes": {"L": 4}}
    options = JobOptions("deepseek-v3", weight_dtype="fp8", block_kernel="flashinfer", **shape)
    compiled = CompiledJob.of(options)
    samples = compiled.compiled.issued(compiled.values).samples
    kernels = [n.kernel for n in samples if n.kernel is not None and n.kernel.kind == "matmul"]
    forms = {(k.dtype, k.extents[0] > 1): k.form for k in kernels}
    assert forms["f8e4m3", False] == "flashinfer"
    assert {form for (dtype, many), form in forms.items() if many or dtype != "f8e4m3"} == {""}


#: Microseconds of experts of MiniMax-M2 over 4 ranks in kernels of Triton, equal loads, by tokens
#: (aiconfigurator-core 0.12.0, vllm 0.22.0 and 0.24.0: none of these rows was used in a fit).
TRITON_EXPERTS = {
    "b200": (0.3, {4: 50.0, 64: 207.0, 80: 346.0, 256: 357.0, 2048: 479.0, 8192: 1538.0}),
    "h200": (0.15, {4: 65.0, 64: 269.0, 2048: 458.0, 8192: 1418.0}),
}


@pytest.mark.parametrize("machine", TRITON_EXPERTS)
def test_experts_in_kernels_of_triton_take_as_long_as_in_tables(machine: str) -> None:
    """Beside two casts, the activation and the sum; the kernel of the machine is too fast."""
    device, (within, rows) = load_machine(machine), TRITON_EXPERTS[machine]
    for tokens, measured in rows.items():
        experts = min(256, 8 * tokens)
        each = 8 * tokens / experts
        seconds: dict[str, float] = {}
        for form in ("triton_blocks", ""):
            kernel = device.efficiency.matmul.of_rows(form, 8 * tokens)
            products = 0.0
            for n, k in ((768, 3072), (3072, 384)):
                size = experts * (n * k + each * (k + 2 * n))
                args = device, "f8e4m3", experts, each, n, k, size
                products += float(matmul_seconds(*args, form=kernel))
            moved = 8 * tokens * (3 * 3072 + 9 * 384 + 2 * 3072)
            seconds[form] = products + float(memory_seconds(device, moved / 4)) * 4
        assert abs(seconds["triton_blocks"] * 1e6 / measured - 1) < within
        assert seconds[""] * 1e6 < 0.95 * measured


def test_blocks_of_triton_follow_from_all_rows() -> None:
    """On Blackwell blocks of 64 rows begin behind 512 rows, however many experts have them and
    whatever the rows of an expert are rounded to; on Hopper nothing changes there."""
    few, more = (
        [
            Kernel(
                "matmul", "f8e4m3", (170, each, 768, 3072), rows * 2 * 768 * 3072, 170 * 768 * 3072
            )
            for each in (3, 4)
        ]
        for rows in (512, 520)
    )
    for machine, step in (("b200", 1.4), ("h200", 1.0)):
        marked = [k._replace(form="triton_blocks") for k in (*few, *more)]
        a, b, c, d = kernel_seconds(load_machine(machine), marked).tolist()
        assert a == pytest.approx(b, rel=0.05)
        assert c / a == pytest.approx(d / b, rel=0.05)
        assert c / a >= step


#: Microseconds of experts of DeepSeek over 4 ranks with TensorRT-LLM on GB200, equal loads, by
#: tokens (aiconfigurator-core 0.12.0, trtllm 1.3.0rc20); constants are fitted to rows of B200.
BACKENDS = {
    ("deepgemm", "f8e4m3"): {64: 604.6, 256: 625.6, 2048: 778.1, 8192: 1679.9},
    ("cutlass", "f4e2m1"): {64: 385.0, 256: 398.9, 2048: 613.4, 8192: 1550.1},
}


@pytest.mark.parametrize("kernel", BACKENDS)
def test_experts_of_other_backends_take_as_long_as_in_tables(kernel: tuple[str, str]) -> None:
    """Beside casts, the activation and the sum; the kernel of the machine is too fast."""
    device, (form, dtype) = load_machine("gb200-nvl72"), kernel
    width = 1.0 if dtype == "f8e4m3" else 9 / 16
    for tokens, measured in BACKENDS[kernel].items():
        rows = 8 * tokens
        moved = (rows + tokens) * 7168 * (width + 2) + rows * 512 * 8
        other = 5 * float(memory_seconds(device, moved / 5))
        seconds: dict[str, float] = {}
        for name in (form, ""):
            products = other
            for n, k in ((1024, 7168), (7168, 512)):
                size = 256 * n * k * width + rows * (k * width + 2 * n)
                args = device, dtype, 256, rows / 256, n, k, size
                products += float(matmul_seconds(*args, form=name))
            seconds[name] = products * 1e6 / measured
        assert 0.8 < seconds[form] < 1.2
        assert seconds[""] < 0.8


@pytest.mark.parametrize(("machine", "same"), [("mi300x", True), ("h20", False)])
def test_a_machine_without_constants_of_triton_has_its_own(machine: str, same: bool) -> None:
    """In steps too, where grouped products of experts keep less of their speed than others."""
    device = load_machine(machine)
    sustained = device.efficiency.sustained.model_copy(update={"experts": 0.6})
    efficiency = device.efficiency.model_copy(update={"sustained": sustained})
    device = device.model_copy(update={"efficiency": efficiency})
    shape: dict[str, Any] = {"flops": 1 << 40, "bytes": 1 << 28}
    kernels = [
        Kernel("matmul", "f8e4m3", (32, 256, 512, 7168), form=form, **shape)
        for form in ("experts", "triton_blocks")
    ]
    own, named = seconds_in_step(device, kernels).tolist()
    assert (own == named) is same


# -- stacks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_has_as_many_kernels_as_engines_launch(engine: str) -> None:
    """TensorRT-LLM: norm, qkv, rotation and cache, attention, quantization, o, norm, gate and up,
    silu and down; the sum behind it is in the next norm. vLLM quantizes behind both norms and
    behind silu as well."""
    plain, stack = timed(weight_dtype="fp8"), timed(weight_dtype="fp8", stack=engine)
    per_layer = (launches(stack) - 7) / 4
    most, share = (14, 1.25) if engine == "vllm" else (11, 1.5)
    assert per_layer <= most
    assert launches(plain) / launches(stack) > share
    assert stack.step_seconds - stack.breakdown["scheduler"] < plain.step_seconds


def test_ttft_has_the_time_of_a_request() -> None:
    how: dict[str, Any] = {"tp": 2, "prompt": 256, "sizes": {"L": 4}}
    before, after = (
        library.job("llama3-8b", host_request=r, **how).serve("h200", batches="4")
        for r in ("", "40 ms")
    )
    pairs = zip(before.points, after.points, strict=True)
    assert all(b.rates.ttft + 0.04 == pytest.approx(a.rates.ttft) for b, a in pairs)
    assert [p.rates.tpot for p in before.points] == [p.rates.tpot for p in after.points]


def test_steady_prompts_share_steps_with_sequences_that_decode() -> None:
    """By hand: one prompt in each tenth step; and prompts that are more than steps take."""
    decode, mixed = PodStep(10, 0.01, 1), PodStep(1, 0.03, 1, request=0.005)
    work = chunks(10, 1034, 1024, 101)
    assert work is not None
    assert (work.steps, work.prompts) == (1, 1)
    assert work.share == pytest.approx(0.1)
    actual = chunked(decode, mixed, work, 101)
    assert actual.tpot == pytest.approx(0.01 + 0.1 * 0.9 * 0.02)
    assert actual.ttft == pytest.approx(0.035)
    assert actual.tokens_per_second == pytest.approx(10 / (100 * 0.012) * 101)
    whole, running = chunks(10, 522, 1024, 11), decoding(10, 522, 1024, 11)
    assert whole is not None
    assert not whole.keeps_up
    many = chunks(running, 522, 1024, 11)
    assert many is not None
    assert (running, many.steps, many.share) == (5, 2, 1.0)
    assert decoding(10, 1034, 1024, 101) == 10
    assert decoding(10, 522, 1024, 2) == 1, "at least one, although it has to wait as well"
    late = chunked(decode, mixed, many, 11, waits=True)
    assert late.tpot == 0.03
    assert late.tokens_per_second == pytest.approx(11 / (2 * 0.03))
    assert (late.ttft - 0.005 + 10 * late.tpot) / (2 * 0.03) == pytest.approx(10), "Little's law"
    assert chunks(10, 10, 1024, 11) is None


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_steps_of_unlike_seconds_wait_on_stages(stages: int) -> None:
    """Between the mean of their seconds, which one stage has, and those of the longest; and none
    wait if all are alike."""
    shares = [0, 0.0003, 0.002, 0.0199, *(n / 16 for n in range(1, 17))]
    means = [uneven_seconds(1.0, 3.0, share, stages) for share in shares]
    assert means == sorted(means)
    for share, mean in zip(shares, means, strict=True):
        least = 1 + 2 * share
        assert least - 1e-3 <= mean <= 3 + 1e-9
        if stages == 1 or share in (0, 1):
            assert mean == least
        elif 1 / 16 <= share <= 0.5:
            assert mean > 1.1 * least
    assert uneven_seconds(2.0, 2.0, 0.3, stages) == pytest.approx(2)


@pytest.mark.parametrize(("stages", "stack"), [(2, "vllm"), (4, "vllm"), (2, "sglang")])
def test_stages_that_wait_for_prompts_are_those_of_requests_over_time(
    stages: int, stack: str
) -> None:
    """TPOT of batches, whose steps with prompts make other stages wait, and that of a closed loop
    of requests that do not end together."""
    job = library.job("llama3-8b", pp=stages, stack=stack, prompt=2000)
    steady = job.serve("h200", batches="64", output_tokens=200).points[0].rates
    words = ("--concurrency", "64", "--count", "640", "--lengths", "prompt=1500..2500,output=~200")
    server = ("llama3-8b", "--pp", str(stages), "--stack", stack, "--machine", "h200", "--json")
    over_time = json.loads(stagec("serve", *server, *words).out)["times"]["tpot"]["mean"]
    assert steady.tpot == pytest.approx(over_time, rel=0.07)


@pytest.mark.parametrize("stack", ["vllm", "trtllm", "sglang"])
def test_groups_that_share_experts_have_prompts_independently(stack: str) -> None:
    """TPOT and throughput of batches, and of a closed loop."""
    job = ("mixtral-8x7b", "--dp", "4", "--ep", "4", "--stack", stack, "--machine", "h200")
    words = (*job, "--set", "L=8", "--prompt", "1000", "--output-tokens", "100", "--json")
    (steady,) = json.loads(stagec("serve", *words, "--batches", "64").out)["points"]
    drawn = ("--lengths", "prompt=800..1200,output=50..150", "--count", "640")
    loop = json.loads(stagec("serve", *words, "--concurrency", "64", *drawn).out)
    assert steady["tpot"] == pytest.approx(loop["times"]["tpot"]["mean"], rel=0.12)
    assert steady["tokens_per_second"] == pytest.approx(loop["tokens_per_second"], rel=0.12)


@pytest.mark.parametrize("groups", [2, 4, 16])
def test_chunks_of_independent_groups(groups: int) -> None:
    """A step lasts between one with a single chunk and one with chunks of all groups, and as those
    if chunks are rare, or in every step."""
    shares = [0.001, 0.1, 0.5, 0.9, 1.0]
    each = [among_groups(share, groups, 5.0, 2.0) for share in shares]
    assert [some for some, *_ in each] == sorted(some for some, *_ in each)
    for share, (some, mean, own) in zip(shares, each, strict=True):
        assert 2.0 <= mean <= own <= 5.0
        assert share <= some <= min(1.0, groups * share)
    assert each[0][1] == pytest.approx(2.0, abs=0.02)
    assert each[-1] == (1.0, 5.0, 5.0)


def test_a_stack_serves_prompts_beside_decode() -> None:
    how: dict[str, Any] = {"tp": 2, "prompt": 2048, "sizes": {"L": 4}}
    alone, mixed = (
        library.job("llama3-8b", prompt_steps=s, **how).serve("h200", batches="64").points[0].rates
        for s in ("alone", "beside")
    )
    assert mixed.tpot < alone.tpot
    assert mixed.ttft > alone.ttft


@pytest.mark.parametrize(
    ("step", "gaps"), [("decode=4x100", False), ("decode=4x100,prefill=1x64+0", True)]
)
def test_steps_that_only_decode_are_captured(step: str, gaps: bool) -> None:
    """Of a server over time as well: only steps with prompts have the gaps of launches."""
    options = JobOptions("llama3-8b", serve="mixed", step=step, sizes={"L": 1}, graph_gap="0 us")
    report = CompiledJob.of(options).time(load_machine("h200"))
    assert ("launch gaps" in report.breakdown) == gaps


# -- measured servers ------------------------------------------------------------------------------


def loop(batch: int, rounds: int = 3, **flags: Any) -> tuple[float, float]:
    """Means of a closed loop of prompts of 4,096 tokens, two of which fill a step."""
    options = JobOptions("llama3-8b", sizes={"L": 2}, prompt=4096, **flags)
    return ClosedLoop(options, load_machine("h200"), batch, 4096, 100, 1.0, rounds).means()


def test_requests_of_a_closed_loop_wait_for_each_other() -> None:
    one, two, four = loop(1), loop(2, 1), loop(4, 1)
    assert two[0] == pytest.approx(2 * one[0], rel=0.1), "both prompts are in the first step"
    assert four[0] == pytest.approx((2 + 4) / 2 * one[0], rel=0.1)
    later = loop(1, host_request="20 ms")
    assert later[0] - one[0] == pytest.approx(0.02, rel=1e-6)
    assert later[1] == one[1]


def test_one_request_at_a_time_shares_no_step() -> None:
    assert loop(1, prompt_steps="alone") == loop(1)


def test_caches_bound_the_requests_that_run() -> None:
    """Where few fit the others wait, and those that run decode faster."""
    free, few = (loop(64, server_memory=m, reserve_outputs=True) for m in (None, "1/100"))
    assert few[0] > 3 * free[0]
    assert few[1] < free[1]


def test_measured_servers_are_complete_and_none_is_kept_aside() -> None:
    servers = measured_servers()
    assert len(servers) > 300
    assert {server.stack for server in servers} == {*ENGINES}
    for server in servers:
        assert "b300" not in server.machine
        assert not any(name in server.row.lower() for name in MODELS_KEPT_ASIDE)
    fitted = Counter(server.fitted for server in servers if server.judged)
    assert abs(fitted[True] - fitted[False]) <= 1


@pytest.mark.long
def test_dense_servers_are_predicted() -> None:
    """Llama 3.1 70B on H200 and B200 by three rows of each engine: aims of the median and p90."""
    of_llama = [
        server
        for server in measured_servers()
        if server.model == "llama3-70b" and server.judged and server.stack != "sglang"
    ]
    errors = [ServerError(server, server.predicted()) for server in of_llama[::9]]
    between = [abs(each.errors[1]) for each in errors if each.errors is not None]
    assert len(between) >= 6
    assert np.median(between) < 0.08
    assert max(between) < 0.30


def test_errors_are_by_engine_and_machine() -> None:
    def server(stack: str, ttft: float, *, judged: bool = True, batch: int = 4) -> ServerError:
        flags = {"stack": stack}
        row = MeasuredServer(
            *(
                "s",
                "r",
                ttft,
                1.0,
                "h200",
                "llama3-8b",
                batch,
                128,
                10,
                1.0,
                dict[str, int](),
                flags,
                judged,
            )
        )
        return ServerError(row, (1.1, 0.9))

    rows = [server("vllm", 1.0), server("vllm", 2.2, batch=64), server("vllm", 9, judged=False)]
    (actual,) = server_summaries([*rows, ServerError(server("sglang", 1).server, "no")])
    assert (actual.engine, actual.machine, actual.rows) == ("vllm", "h200", 2)
    assert actual.median == pytest.approx(0.1)
    assert actual.bias == pytest.approx(-0.1)
    assert actual.ttft == pytest.approx(0.1)


@pytest.mark.long
def test_validate_refuses_what_does_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = stagec("validate", "--serve", "--time")
    assert actual.code == 1
    assert "--time, --memory, --serve cannot be used together" in actual.err
    with pytest.raises(DiagnosticError, match="unknown source"):
        measured_servers("nothing")
    few = min(measured_servers(), key=lambda server: server.batch)

    def rows(source: str | None) -> list[MeasuredServer]:
        return [few]

    monkeypatch.setattr("stagec.validation.answer.measured_servers", rows)
    shown = json.loads(stagec("validate", "--serve", "--source", "engines", "--json").out)
    assert_schema("validate", shown)
    assert {"rows", "engines"} == shown.keys()
    assert all({"ttft", "tpot"} == row["measured"].keys() for row in shown["rows"])


def test_options_of_a_server_are_those_of_a_command() -> None:
    server = measured_servers()[0]
    assert isinstance(JobOptions(server.model, sizes=server.sizes, **server.flags), JobOptions)


@pytest.mark.parametrize(
    ("machine", "engine", "element", "measured"),
    [
        ("h200", "vllm", 1, (28.7, 42.8, 64.5, 103.7)),
        ("h200", "vllm", 2, (32.3, 51.0, 77.9, 135.3)),
        ("h200", "trtllm", 1, (21.6, 32.5, 47.6, 77.0)),
        ("h100-sxm", "vllm", 1, (29.3, 46.5, 69.9, 114.4)),
        ("h100-sxm", "trtllm", 1, (23.9, 36.9, 57.4, 100.0)),
        ("b200", "vllm", 1, (13.2, 15.2, 31.3, 49.9)),
        ("b200", "trtllm", 1, (15.0, 16.5, 32.3, 51.1)),
    ],
)
def test_decoding_takes_the_kernel_of_the_engine(
    machine: str, engine: str, element: int, measured: tuple[float, ...]
) -> None:
    """32 sequences behind 512 to 4,096 tokens, 64 heads on 8 of 128 elements, in microseconds, as
    tables of aiconfigurator-core 0.12.0 have them; with one kernel for prompts and decoding these
    were up to 30% off."""
    module = job(stack=engine).compiled._module  # pyright: ignore[reportPrivateUsage]
    used = Software.of(module).on(load_machine(machine))
    kernels = [
        Kernel(
            *("attention", "bf16", (32, 64, 8, 1, keys, 128, 128), 0),
            32 * 256 * (64 * 2 + keys * 8 * element),
        )
        for keys in (512, 1024, 2048, 4096)
    ]
    errors = kernel_seconds(used, kernels) * 1e6 / np.array(measured) - 1
    assert np.abs(errors).max() < 0.25
    assert np.abs(errors).mean() < 0.15


@pytest.mark.parametrize(
    ("machine", "measured"),
    [
        ("b200", (45.2, 148.5, 417.2, 1338.9)),
        ("h200", (80.6, 289.7, 902.5, 2744.1)),
        ("b300", (42.0, 141.8, 384.9, 1269.7)),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_scores_of_an_indexer_are_products_in_8_bits(
    machine: str, engine: str, measured: tuple[float, ...]
) -> None:
    """4,096 and 8,192 tokens, and 8,192 behind 8,192 and 32,768 cached ones, in microseconds, as
    tables of aiconfigurator-core 0.12.0 have GLM-5; as attention in 16 bits they take 3.5 times
    as long and longer."""
    module = job(stack=engine).compiled._module  # pyright: ignore[reportPrivateUsage]
    device = load_machine(machine)
    kernels = [
        Kernel(
            *("attention", "bf16", (1, 64, 1, new, past + new // 2 if past else new, 128, 1), 0),
            new * 64 * 256 + (new + past) * (128 + 4 * new),
            form="indexer",
            causal=not past,
        )
        for new, past in ((4096, 0), (8192, 0), (8192, 8192), (8192, 32768))
    ]
    seconds = kernel_seconds(Software.of(module).on(device), kernels)
    assert np.abs(seconds * 1e6 / np.array(measured) - 1).max() < 0.18
    assert (kernel_seconds(device, kernels) > 3.4 * seconds).all()


@pytest.mark.parametrize(
    ("machine", "measured"),
    [
        ("b200", (420, 959, 1957, 4025)),
        ("b300", (388, 924, 1903, 3897)),
        ("h200", (481, 957, 1996, 3958)),
    ],
)
def test_queries_that_select_rows_in_16_bits_fill_up_heads(
    machine: str, measured: tuple[float, ...]
) -> None:
    """1,024 to 8,192 queries of 64 heads, in microseconds, as tables of aiconfigurator-core 0.12.0
    have GLM-5. On Blackwell 64 heads take as long as 128, on Hopper half as long; fewer queries
    than processors, as in decode, have the machine's own kernel."""
    device = load_machine(machine)

    def kernel(queries: int, heads: int, form: str = "selects") -> Kernel:
        shape = (queries, heads, 1, 1, 2048, 576, 512)
        moved = 2 * queries * (heads * 1088 + 576)
        return Kernel("attention", "bf16", shape, 0, moved, form=form)

    many = [kernel(n, 64) for n in (1024, 2048, 4096, 8192)]
    seconds = kernel_seconds(device, many)
    assert np.abs(seconds * 1e6 / np.array(measured) - 1).max() < 0.2
    (more,) = kernel_seconds(device, [kernel(8192, 128)])
    assert (more / seconds[-1] < 1.1) == (machine != "h200")
    few, own = kernel_seconds(device, [kernel(64, 64), kernel(64, 64, "")])
    assert few == own


@pytest.mark.parametrize(("dtype", "mark"), [("bf16", "selects"), ("fp8", "")])
def test_queries_that_select_are_marked_where_caches_have_16_bits(dtype: str, mark: str) -> None:
    how: dict[str, Any] = {"kv_dtype": dtype, "step": "prefill=1x8192+0", "serve": "mixed"}
    compiled = CompiledJob.of(JobOptions("deepseek-v3.2", stack="sglang", tp=8, **how))
    samples = compiled.compiled.issued(compiled.values).samples
    attends = {
        n.kernel.form for n in samples if n.kernel is not None and n.kernel.op == "attention"
    }
    assert attends == {mark}


def test_queries_behind_a_cache_score_the_keys_that_they_see() -> None:
    """The mean of a chunk, whose mask hides the others; few heads that select are filled up."""
    served: dict[str, Any] = {"stack": "sglang", "tp": 8}
    shape: dict[str, Any] = {"serve": "mixed", "step": "prefill=2x1024+3072"}
    compiled = CompiledJob.of(JobOptions("deepseek-v3.2", **served, **shape))
    samples = compiled.compiled.issued(compiled.values).samples
    kernels = {n.kernel.op: n.kernel.extents for n in samples if n.kernel is not None}
    marked = {n.kernel.op for n in samples if n.kernel is not None and n.kernel.form == "indexer"}
    assert marked == {"index_scores"}
    assert kernels["index_scores"] == (2, 64, 1, 1024, 3585, 128, 1)
    assert kernels["attention"][:5] == (2048, 64, 1, 1, 2048)
    topk = next(n.kernel for n in samples if n.kernel is not None and n.kernel.op == "topk")
    assert topk.bytes == 2 * 1024 * 4 * (2 * 4096 + 2 * 2048)  # scores twice, values and indices
