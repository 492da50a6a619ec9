"""How much of its peaks a device reaches in kernels: the constants of `stagec.time.costs.kernels`.

All have a physical meaning. What a text does not state has the defaults below: rounded means of
the constants that `tools/fit_machines.py` finds for A100, H100 and B200. A text whose `fitted` is
empty has no data of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from stagec.machines.figures import DataType, Seconds, Share, Text

#: How much of two times that can hide each other is hidden: 0 is their sum, 1 the longer one.
Overlap = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Many = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _usual_rates() -> dict[DataType, float]:
    return {"bf16": 0.8}


class Rates(Text):
    """Shares of the peak of products by the type of their operands.

    A type that is not there has the share of a type of as many bits, else that of bf16, else 0.8.
    """

    rate: dict[DataType, Share] = Field(default_factory=_usual_rates)

    def of(self, dtype: str) -> float:
        """The share of a type."""
        for name in (dtype, _ALIKE.get(dtype, "bf16"), "bf16"):
            if name in self.rate:
                return self.rate[name]
        return 0.8


_ALIKE: Mapping[str, str] = {"f16": "bf16", "f8e5m2": "f8e4m3", "i8": "f8e4m3"}


class MatmulKernel(Text):
    """What products of a kernel of a library have otherwise than those that a machine was measured
    with, each as in `MatmulEfficiency`; `source` says who measured it."""

    rate: dict[DataType, Share] = Field(default_factory=dict[DataType, Share])
    expanding: _Many | None = None
    expanded_rows: Annotated[int, Field(gt=0)] | None = None
    start: Seconds | None = None
    overlap: Overlap | None = None
    source: Annotated[str, Field(min_length=1)]


class MatmulEfficiency(Rates):
    """Constants of matrix products.

    `rate` is the share of the peak that processors reach inside a tile, `bandwidth` the share of
    the memory's bandwidth. `overlap` is how much of moving and computing hide each other where both
    take as long; the shorter one hides the better, the shorter it is. `start` is the time of a
    kernel that does nothing, as kernels follow each other in a CUDA graph; `step` is the least time
    of a step along k, 128 bytes of each row and column: the latency of the memory over the loads
    that are under way. `tile` is what a tile of 256 x 128 results adds to fill its pipeline and to
    write them, `reduction` what summing the parts of a split product adds. `expanding` are
    the weights of 4 bits that one processor turns into 16 bits a clock, in kernels that multiply
    these by activations of 16 bits; None: no such kernel was measured, and that takes no time. They
    do so once for each block of `expanded_rows` rows. `unaligned` is what each further load adds to
    computing, as a share, where rows are no multiple of 16 bytes and a load brings a part of these;
    0: no such product was measured, and all are as fast. `kernels` has what kernels of libraries
    have otherwise, by the names with which nodes are marked. Defaults are rounded means of H100 and
    B200; `step` and `tile` of A100 are three times as long.
    """

    bandwidth: Share = 0.85
    overlap: Overlap = 0.65
    start: Seconds = 2.5e-6
    step: Seconds = 9e-8
    tile: Seconds = 1e-6
    reduction: Seconds = 2.5e-6
    expanding: _Many | None = None
    expanded_rows: int = Field(default=128, gt=0)
    expanding_fitted: str = ""
    unaligned: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    unaligned_fitted: str = ""
    fitted: str = ""
    kernels: dict[str, MatmulKernel] = Field(default_factory=dict[str, MatmulKernel])

    def of_kernel(self, name: str) -> MatmulEfficiency:
        """The constants of a kernel of a library; of one without, these."""
        kernel = self.kernels.get(name)
        if kernel is None:
            return self
        return self.model_copy(
            update={
                "rate": {**self.rate, **kernel.rate},
                "expanding": kernel.expanding or self.expanding,
                "expanded_rows": kernel.expanded_rows or self.expanded_rows,
                "start": self.start if kernel.start is None else kernel.start,
                "overlap": self.overlap if kernel.overlap is None else kernel.overlap,
                "kernels": {},
            }
        )


class AttentionKernel(Text):
    """What a kernel of attention of a library has otherwise than the one that a machine was
    measured with, each as in `AttentionEfficiency`; `source` says who measured it."""

    rate: dict[DataType, Share] = Field(default_factory=dict[DataType, Share])
    backward: Share | None = None
    queries: Annotated[int, Field(gt=0)] | None = None
    packed: bool | None = None
    exponentials: _Many | None = None
    overlap: Overlap | None = None
    uneven: Overlap | None = None
    start: Seconds | None = None
    tile: Seconds | None = None
    source: Annotated[str, Field(min_length=1)]


class AttentionEfficiency(Rates):
    """Constants of fused attention.

    `rate` and `overlap` are as in products. `queries` are those of a block: 128 in FlashAttention,
    256, two tiles of 128 that take turns, in kernels for Blackwell. `packed` says that a block has
    queries of all heads that share keys (FlashAttention 3, for sequences of different lengths), not
    of one. `exponentials` are those that one processor computes a clock, with the rest of a softmax
    (alone 16: NVIDIA, CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions",
    devices 8.0, 9.0 and 10.0; twice as many on B300: NVIDIA, "Making Softmax More Efficient with
    NVIDIA Blackwell Ultra"). `backward` is the rate of the backward kernel relative to the forward
    one; no table has it, 0.9 is what fits arXiv 2407.08608, figure 6. `uneven` is the share of the
    longest block that is waited for at the end, `tile` what a block of queries adds, `start` the
    time of a kernel that does nothing. Elements of a head are padded to a multiple of `padding`,
    the side of a systolic array. `kernels` has what kernels of libraries have otherwise, by their
    names in `stg.kernels`.
    """

    queries: int = Field(default=128, gt=0)
    packed: bool = False
    exponentials: _Many = 14.0
    overlap: Overlap = 0.6
    backward: Share = 0.9
    uneven: Overlap = 0.4
    start: Seconds = 6e-6
    tile: Seconds = 3e-6
    padding: int = Field(default=1, gt=0)
    fitted: str = ""
    kernels: dict[str, AttentionKernel] = Field(default_factory=dict[str, AttentionKernel])

    def chosen(self, name: str) -> str:
        """The kernel of a name: of `sdpa` the first that PyTorch prefers and the device has
        (ATen/native/transformers/cuda/sdp_utils.cpp, `priority_order`)."""
        preferred = ("cudnn", "flash_2") if name == "sdpa" else ()
        return next((each for each in preferred if each in self.kernels), name)

    def of_kernel(self, name: str) -> AttentionEfficiency:
        """The constants of a kernel of a library; of one without, these."""
        kernel = self.kernels.get(self.chosen(name))
        if kernel is None:
            return self
        own = {n: v for n in AttentionKernel.model_fields if (v := getattr(kernel, n)) is not None}
        rate = {**self.rate, **kernel.rate}
        return self.model_copy(update={**own, "rate": rate, "kernels": {}})


class MemoryEfficiency(Text):
    """Constants of what is bound by memory: the share of the bandwidth that long kernels reach,
    and the time of one that moves nothing. `places` are the elements per clock and processor of
    kernels that compute the place of each (`stagec.time.costs.eager`); the default was measured on
    H200 under PyTorch 2.11."""

    bandwidth: Share = 0.85
    start: Seconds = 2.5e-6
    places: _Many = 1.33
    fitted: str = ""
