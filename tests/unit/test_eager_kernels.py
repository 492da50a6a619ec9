"""Kernels of PyTorch without a compiler: their seconds by hand, and what one H200 measured."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

import stagec
from stagec.analysis.footprint import footprint
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.option import values_of
from stagec.jobs.request.options import JOB, JobOptions
from stagec.machines import load_machine
from stagec.pipeline.instrument import PLAN
from stagec.program.kernels import Kernel
from stagec.time.costs.eager import KERNELS, eager_kernels, launches_of
from stagec.time.costs.kernels import kernel_seconds
from stagec.validation.sources import validation_sources

H200 = load_machine("h200")
(SOURCE,) = (s for s in validation_sources(kind="steps") if s.name == "transformers-h200")
#: The workspace of cuBLAS on Hopper (ATen/cuda/CublasHandlePool.cpp: 32 MiB and cuBLASLt's).
WORKSPACE = 65 << 20


def seconds(form: str, size: int) -> float:
    return float(kernel_seconds(H200, [Kernel("memory", "", (), 0, size, form=form)])[0])


def test_a_cast_to_a_wider_type_computes_a_place_for_each_element() -> None:
    """1.33 elements per clock of each of 132 processors at 1.83 GHz: 320 G elements/s, where the
    bytes alone would take half of the time."""
    elements = 1 << 27
    by_places = elements / (1.33 * 132 * H200.compute.clock.value)
    start = H200.efficiency.memory.start
    assert seconds("eager_cast_bf16", 6 * elements) == pytest.approx(start + by_places, rel=1e-9)
    assert seconds("", 6 * elements) < 0.6 * by_places


def test_a_norm_launches_five_kernels() -> None:
    elements = 1 << 24
    bandwidth = H200.memory.bandwidth.value * H200.efficiency.memory.bandwidth
    by_places = elements / (1.33 * 132 * H200.compute.clock.value)
    expected = 5 * H200.efficiency.memory.start + 12 * elements / bandwidth + by_places
    assert seconds("eager_rmsnorm_f32", 8 * elements) == pytest.approx(expected, rel=1e-9)
    assert launches_of("eager_rmsnorm_f32") == 5
    assert launches_of("") == 1


def test_a_merge_of_attention_is_no_single_kernel() -> None:
    """A kernel that reads a part in 16 bits and updates a sum in 32 moves ten bytes an element. Of
    PyTorch's, four move 22, and two compute 1.5 places."""
    elements = 1 << 27
    alone, apart = seconds("", 10 * elements), seconds("eager_merge_f32", 10 * elements)
    bandwidth = H200.memory.bandwidth.value * H200.efficiency.memory.bandwidth
    places = 1.5 * elements / (1.33 * 132 * H200.compute.clock.value)
    expected = 11 * H200.efficiency.memory.start + 22 * elements / bandwidth + places
    assert apart == pytest.approx(expected, rel=1e-9)
    assert apart > 4 * alone
    assert launches_of("eager_merge_f32") == 11


def test_a_rotation_of_complex_numbers_launches_three_kernels() -> None:
    """Bytes take longer than the places of half as many products, and of two casts: 20 an
    element, not four."""
    elements = 1 << 26
    bandwidth = H200.memory.bandwidth.value * H200.efficiency.memory.bandwidth
    places = 2.5 * elements / (1.33 * 132 * H200.compute.clock.value)
    expected = 3 * H200.efficiency.memory.start + max(20 * elements / bandwidth, places)
    assert seconds("eager_complex_rope_bf16", 4 * elements) == pytest.approx(expected, rel=1e-9)


def adapters(folder: Path, alpha: int) -> str:
    """A strategy with adapters of queries."""
    text = f"stg.strategy @s {{ stg.lora[targets = wq, rank = 16, alpha = {alpha}] }}"
    (folder / f"{alpha}.stg").write_text(text)
    return str(folder / f"{alpha}.stg")


def test_adapters_in_fp32_are_scaled_and_added_op_by_op(tmp_path: Path) -> None:
    """A sum of two results in 16 bits moves six bytes an element; that of PyTorch reads one of them
    in fp32 and writes fp32, behind a product with the factor, also where that is 1. The gradient is
    cast twice, and scaled."""
    elements = 1 << 27
    bandwidth = H200.memory.bandwidth.value * H200.efficiency.memory.bandwidth
    places = elements / (1.33 * 132 * H200.compute.clock.value)
    start = H200.efficiency.memory.start
    expected = 2 * start + 8 * elements / bandwidth + max(10 * elements / bandwidth, places)
    assert seconds("eager_adapter_bf16", 6 * elements) == pytest.approx(expected, rel=1e-9)
    expected = 3 * start + 14 * elements / bandwidth + places
    assert seconds("eager_adapter_grad_bf16", 6 * elements) == pytest.approx(expected, rel=1e-9)
    once, twice = (
        stagec.job("llama3-8b", adapters(tmp_path, alpha), stack="huggingface", sizes={"L": 2})
        for alpha in (16, 32)
    )
    assert once.time("h200").step_seconds == twice.time("h200").step_seconds


def test_operands_of_two_types_are_not_cast_before() -> None:
    """A sum of fp32 and 16 bits reads 2 and 4 bytes, writes 4, and computes a place for each
    element; its cast is no kernel."""
    elements = 1 << 27
    places = elements / (1.33 * 132 * H200.compute.clock.value)
    bandwidth = H200.memory.bandwidth.value * H200.efficiency.memory.bandwidth
    expected = H200.efficiency.memory.start + max(10 * elements / bandwidth, places)
    assert seconds("eager_mixed_f32", 12 * elements) == pytest.approx(expected, rel=1e-9)
    assert seconds("eager_promoted_bf16", 6 * elements) == launches_of("eager_promoted_bf16") == 0


def test_eager_torchtitan_is_slower_than_compiled() -> None:
    """arXiv 2410.06511, table 1: Llama 3.1 8B on 8 H100, 6,258 tokens/s a GPU against 6,674."""
    flags: dict[str, Any] = {"dp": 8, "zero": 3, "recompute": "selective", "sizes": {"B": 16}}
    eager, compiled = (
        stagec.job("llama3-8b", stack=stack, **flags).time("h100-500w").as_json()["step_seconds"]
        for stack in ("torchtitan", "torchtitan-compiled")
    )
    assert eager / compiled == pytest.approx(6674 / 6258, abs=0.01)


def test_a_bias_is_added_by_its_product() -> None:
    assert seconds("eager_bias_bf16", 1 << 30) == 0
    assert launches_of("eager_bias_bf16") == 0


def test_a_mark_has_a_name_and_a_type() -> None:
    """Names with underscores too."""
    assert eager_kernels("eager_rmsnorm_grad_f32") == (KERNELS["rmsnorm_grad"], 4.0)
    assert eager_kernels("continues_always") is None


def test_programs_have_all_marks_and_no_others(tmp_path: Path) -> None:
    """Of a mixture of experts, of norms with biases, of attention without a kernel, of adapters,
    and of torchtitan, also with a ring."""
    forms = set[str]()
    for model, given in (
        ("mixtral-of-8", {"stack": "huggingface"}),
        ("gpt2-small", {"stack": "huggingface"}),
        ("llama-1b", {"stack": "huggingface", "attention": "eager"}),
        ("llama-1b", {"stack": "huggingface", "strategy": adapters(tmp_path, 32)}),
        ("llama-1b", {"stack": "huggingface", "autocast": "on"}),
        ("phi3-mini-of-12", {"stack": "huggingface"}),
        ("llama-1b", {"stack": "torchtitan"}),
        ("llama-1b", {"stack": "torchtitan", "cp": "2", "cp_mode": "ring"}),
    ):
        strategy = given.pop("strategy", None)
        flags, _ = values_of(JOB, given)
        sizes = {"B": 1, "S": 64}
        options = JobOptions(
            str(SOURCE.folder / f"{model}.json"),
            strategy=strategy,
            sizes=sizes,
            explicit=frozenset(given),
            **{name: flags[name] for name in given},
        )
        module = JobBuilder(options).lower()
        graphs = module.ops("et.graph")
        forms |= {op.text("form", "") for graph in graphs for op in graph.body.walk()}
    marks = {form.removeprefix("eager_").rpartition("_")[0] for form in forms if "eager_" in form}
    assert marks == KERNELS.keys()


@pytest.mark.parametrize(
    "row",
    [
        "Llama 3.1 8B, 8 layers, 2 x 4096",
        "Gemma 2 2B, 13 layers, 1 x 4096, eager attention",
        "OLMoE of 64 experts, 6 layers, 2 x 4096",
        "Llama 3.1 8B, 8 layers, 2 x 4096, LoRA of queries and values",
    ],
)
def test_bytes_are_those_of_a_device(row: str) -> None:
    """What the allocator of one H200 gave at the peak and after forward, less the workspace."""
    with (SOURCE.folder / "rows.csv").open(newline="") as file:
        (measured,) = (each for each in csv.DictReader(file) if each["row"] == row)
    given = {n: measured[f"flags.{n}"] for n in ("attention", "lora") if measured[f"flags.{n}"]}
    flags, _ = values_of(JOB, {"stack": "huggingface", **given})
    options = JobOptions(
        str(SOURCE.folder / measured["model"]),
        sizes={n: int(measured[f"sizes.{n}"]) for n in "BS"},
        explicit=frozenset(given) | {"stack"},
        **{name: flags[name] for name in ("stack", *given)},
    )
    module = JobBuilder(options).lower(until=PLAN)
    (plan,) = footprint(module, measured["model"])["classes"]
    for moment in ("after_forward", "peak"):
        expected = int(measured[f"notes.{moment}"]) - WORKSPACE
        assert plan["moments"][moment]["total"] == pytest.approx(expected, rel=1e-3)
