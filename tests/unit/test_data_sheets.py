"""Seconds of kernels on devices of which little was measured, and of devices that are faster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.machines import load_machine, read_machine
from stagec.program.kernels import Kernel
from stagec.time.costs.kernels import kernel_seconds, seconds_in_step
from tests.unit.test_kernel_seconds import product

DATA_SHEET = """
title = "a device of 1 PFLOP/s"
compute.processors = { value = 128, source = "x" }
compute.clock = { value = "1.6 GHz", source = "x" }
compute.launch = { value = "2 us", source = "x" }
compute.matrix.bf16 = { value = "1 PFLOP/s", source = "x" }
memory.capacity = { value = "96 GB", source = "x" }
memory.bandwidth = { value = "3 TB/s", source = "x" }
host.bandwidth = { value = "64 GB/s", source = "x" }
host.latency = { value = "10 us", source = "x" }

[[network]]
name = "links"
kind = "switch"
bandwidth = { value = "400 GB/s", source = "x" }
latency = { value = "1 us", source = "x" }
"""


@pytest.mark.parametrize(
    "kernel",
    [
        product(8192, 4096, 4096),
        product(4096, 4096, 14336),
        Kernel(
            "attention", "bf16", (2, 32, 8, 4096, 4096, 128, 128), 1 << 38, 1 << 27, causal=True
        ),
    ],
    ids=lambda kernel: kernel.kind,
)
def test_large_kernels_do_not_depend_on_how_many_processors_share_a_peak(kernel: Kernel) -> None:
    """A few matrix units fill and write their tiles as fast as many processors in all."""
    texts = (DATA_SHEET.replace("128", str(n)) for n in (8, 128))
    few, many = (kernel_seconds(read_machine("x", text), [kernel])[0] for text in texts)
    assert few == pytest.approx(many, rel=0.2)


@pytest.mark.parametrize(
    ("machine", "n", "measured"),
    [
        *(("rtx-4090", n, t) for n, t in ((1024, 126.8), (4096, 151.5), (8192, 160.2))),
        *(("rtx-4090", 10240, 158.5), ("a10g", 1024, 47.9), ("a10g", 4096, 62.5)),
        *(("a10g", 8192, 66.6), ("a10g", 10240, 69.5), ("rtx-3090", 10240, 76.5)),
        *(("rtx-pro-6000", 10240, 418), ("a6000", 10240, 123.3)),
    ],
)
def test_products_with_default_tiles_are_near_those_measured(
    machine: str, n: int, measured: float
) -> None:
    """TFLOP/s of bf16: zzc0721/torch-performance-test-data, issues 78 and 126, database.md (the
    best of several sizes)."""
    seconds = kernel_seconds(load_machine(machine), [product(n, n, n)])[0]
    assert 2 * n**3 / seconds / 1e12 == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize("machine", ["mi300x", "h200", "tpu-v6e", "rtx-4090"])
@pytest.mark.parametrize("figure", ["memory.bandwidth", "compute.matrix"])
@given(st.integers(1, 4096), st.sampled_from([1, 7, 64, 256, 2048]), st.integers(1, 8192))
def test_a_faster_device_makes_no_kernel_slower(
    machine: str, figure: str, m: int, n: int, k: int
) -> None:
    """Also where sustained load sets in."""
    device = load_machine(machine).changed({"efficiency.sustained.products": 0.55})
    kernels = [product(m, n, k), product(k, n, m)]
    times = [seconds_in_step(device.scaled(figure, by), kernels) for by in (1, 1.1, 2, 8)]
    assert np.all(np.diff(times, axis=0) <= 1e-12)


@pytest.mark.parametrize("own", ["", 'efficiency.matmul.tile = "3 us"\n'])
def test_a_swept_figure_has_what_follows_from_it(own: str) -> None:
    """As if the text stated the other figure; what a text or a sweep states stays."""
    text = own + DATA_SHEET
    swept = read_machine("x", text).changed({"compute.processors": 16})
    written = read_machine("x", text.replace("value = 128", "value = 16"))
    assert swept.efficiency == written.efficiency
    tile = {"efficiency.matmul.tile": "5 us"}
    assert swept.changed(tile).scaled("compute.clock", 2).efficiency.matmul.tile == 5e-6


def test_what_was_not_measured_sustains_what_measured_devices_do() -> None:
    """0.83 to 0.95 of current software; at watts that its matrix units cannot use a device loses
    nothing, nor do TPUs, whose rate is that of steps."""
    assert read_machine("x", DATA_SHEET).efficiency.sustained.products == 0.9
    for name in ("h20", "tpu-v5e", "tpu-v6e"):
        assert load_machine(name).efficiency.sustained.products == 1
