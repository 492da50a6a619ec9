"""Products with weights of few bits compute in the type that engines take on the machine, with its
kernels; where it has no units for that they say that they do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stagec.ir.types import DTYPE_BYTES
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.command_line import job_words
from stagec.jobs.request.machine import machine_of, on_machine
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.program.classes import rank_classes
from stagec.time.costs.kernels import matmul_seconds, peak
from tests.support import LLAMA, stagec

#: Sizes of Llama 3 8B: width, those of the feed-forward network, of all heads, and of keys.
D, F, HEADS, KEYS = 4096, 14336, 4096, 1024
PREFILL = {"sizes": {"L": 1}, "serve": "prefill", "batch": 2, "prompt": 1024}
TOKENS = 2 * 1024
#: Format, machine, type of the products, bytes of an element of activations.
COMPUTES = (
    ("bf16", "b200", "bf16", 2),
    ("fp8", "b200", "f8e4m3", 33 / 32),
    ("nvfp4", "b200", "f4e2m1", 9 / 16),
    ("mxfp4", "b200", "f8e4m3", 33 / 32),
    ("int4", "b200", "bf16", 2),
    ("fp8", "h100-sxm", "f8e4m3", 33 / 32),
    ("nvfp4", "h100-sxm", "bf16", 2),
    ("mxfp4", "h100-sxm", "bf16", 2),
    ("fp8", "a100-80g", "bf16", 2),
)


def job(format: str, machine: str, **more: Any) -> JobOptions:
    options = JobOptions(LLAMA, **PREFILL, weight_dtype=format, **more)
    return on_machine(options, machine_of(machine, Session()))


@pytest.mark.parametrize(("format", "machine", "dtype", "each"), COMPUTES)
def test_products_compute_in_what_engines_take(
    format: str, machine: str, dtype: str, each: float
) -> None:
    """With bytes of activations, weights and results by their types."""
    (only,) = rank_classes(JobBuilder(job(format, machine)).lower())
    kernels = [k for n in only.program().nodes for k in n.kernels if k.kind == "matmul"]
    gate_up = next(k for k in kernels if k.extents[2] == 2 * F)
    assert gate_up.dtype == dtype
    weights = {"bf16": 2.0, "fp8": 1 + 4 / 128**2, "nvfp4": 9 / 16, "mxfp4": 17 / 32}
    weights["int4"] = 0.5 + 2.5 / 128
    assert gate_up.bytes == TOKENS * D * each + weights[format] * D * 2 * F + 2 * TOKENS * 2 * F
    assert gate_up.flops == 2 * TOKENS * D * 2 * F


def test_fewer_bits_take_less_time_where_there_are_units() -> None:
    """By the ratio of the rates that kernels reach, of prefill; on a machine without such units
    it takes longer, since kernels expand the weights."""

    def seconds(machine: str, *words: str) -> float:
        argv = ("time", LLAMA, "--set", "L=2", "--serve", "prefill", "--batch", "8")
        more = ("--prompt", "2048", "--machine", machine, "--no-levers", "--json")
        ran = stagec(*argv, *more, *words)
        assert ran.code == 0, ran.err
        return float(json.loads(ran.out)["step_seconds"])

    def weights(name: str) -> tuple[str, str]:
        return "--weight-dtype", name

    bf16, fp8 = seconds("b200"), seconds("b200", *weights("fp8"))
    nvfp4 = seconds("b200", *weights("nvfp4"))
    assert nvfp4 < fp8 < bf16
    assert seconds("b200", *weights("mxfp4")) == pytest.approx(fp8, rel=0.01)
    assert seconds("b200", *weights("nvfp4"), "--activation-dtype", "bf16") > 1.1 * bf16
    for machine in ("a100", "h100-sxm"):
        assert seconds(machine, *weights("nvfp4")) > 1.1 * seconds(machine)


def test_it_says_where_activations_stay_as_they_are() -> None:
    """And the command of the job says it too, whoever runs it without the machine."""
    few = ("--weight-dtype", "nvfp4")
    words = ("--serve", "decode", "--set", "L=1", "--batch", "1", "--context", "64", *few)
    expected = {m: stagec("time", LLAMA, *words, "--machine", m).err for m in ("h100-sxm", "b200")}
    assert "no units for products of f4e2m1" in expected["h100-sxm"]
    assert "(W4A16)" in expected["h100-sxm"]
    assert "W4A16" not in expected["b200"]
    assert "no units" not in expected["b200"]
    written = [*job_words(job("nvfp4", "h100-sxm"))]
    assert written[written.index("--activation-dtype") + 1] == "bf16"
    assert "--activation-dtype" not in job_words(job("nvfp4", "b200"))


def test_four_bits_have_the_rate_of_the_machine() -> None:
    machine = machine_of("b200", Session())
    shape = (1, 8192, 8192, 8192, 8192 * 8192 * 4.0)
    ratio = matmul_seconds(machine, "f8e4m3", *shape) / matmul_seconds(machine, "f4e2m1", *shape)
    assert 1.2 < ratio < peak(machine, "f4e2m1") / peak(machine, "f8e4m3")
    assert DTYPE_BYTES["f4e2m1s"] == DTYPE_BYTES["f4e2m1"] + DTYPE_BYTES["u8"] / 16
