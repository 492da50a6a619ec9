"""Buffers of gradients that ZeRO reduces: what they add to the peak."""

from __future__ import annotations

import pytest

import stagec

ELEMENTS = 1 << 20
SIZES = {"L": 2, "B": 16, "S": 64}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("zero", [1, 2])
def test_a_second_buffer_never_lowers_a_peak(zero: int, microbatches: int) -> None:
    """Under ZeRO-1 the buffers exist to the end of the last backward, with copies or without."""

    def peak(buffers: int) -> int:
        job = stagec.job(
            "llama3-8b",
            sizes=SIZES,
            dp=4,
            zero=zero,
            microbatches=microbatches,
            stack="deepspeed",
            grad_flat=ELEMENTS,
            grad_flat_buffers=buffers,
        )
        return max(int(each["peak"]) for each in job.memory().classes)

    assert peak(2) >= peak(1)
