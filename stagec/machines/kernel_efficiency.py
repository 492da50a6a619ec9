"""The share of its peaks that a device reaches in kernels: the constants of
`stagec.time.costs.kernels`.

All have a physical meaning. The defaults, for constants that a text does not state, are rounded
means of those that `tools/fit_machines.py` fits for A100, H100 and B200. An empty `fitted` means
that a device has no data of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, field_validator

from stagec.machines.figures import DataType, Seconds, Share, Text

#: How far two activities overlap: with 0, their times add up; with 1, the longer one remains.
Overlap = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Many = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Whole = Annotated[int, Field(gt=0)]
_Block = tuple[_Whole, _Whole]


def _usual_rates() -> dict[DataType, float]:
    return {"bf16": 0.8}


class Rates(Text):
    """Shares of the peak rate of products by the element type of their operands.

    A type that is not listed has the share of a type with the same number of bits, otherwise that
    of bf16, otherwise 0.8.
    """

    rate: dict[DataType, Share] = Field(default_factory=_usual_rates)

    def of(self, dtype: str) -> float:
        """The share of an element type."""
        for name in (dtype, _ALIKE.get(dtype, "bf16"), "bf16"):
            if name in self.rate:
                return self.rate[name]
        return 0.8


_ALIKE: Mapping[str, str] = {"f16": "bf16", "f8e5m2": "f8e4m3", "i8": "f8e4m3"}


class MatmulKernel(Text):
    """The constants of a library's product kernel that differ from those of `MatmulEfficiency`;
    `source` is the source of the measurement. Products of up to `few` rows in all have the
    constants of the kernel of the same name with `_few` behind it."""

    rate: dict[DataType, Share] = Field(default_factory=dict[DataType, Share])
    expanding: _Many | None = None
    expanded_rows: Annotated[int, Field(gt=0)] | None = None
    start: Seconds | None = None
    overlap: Overlap | None = None
    group: Seconds = 0.0
    block: _Block | None = None
    few: _Whole | None = None
    source: Annotated[str, Field(min_length=1)]


class MatmulEfficiency(Rates):
    """Constants of matrix products.

    `rate` is the share of the peak that processors reach inside a tile, `bandwidth` the share of
    the memory's bandwidth. `overlap` is how far data movement and computation overlap if both take
    equally long; the shorter one is hidden better the shorter it is. `start` is the time of an
    empty kernel among kernels of a CUDA graph. `step` is the minimum time of a step along k, 128
    bytes of each row and column: the latency of the memory divided by the number of loads in
    flight. `tile` is the time that a tile of 256 x 128 results adds to fill its pipeline and to
    write the results, `reduction` that of summing the parts of a split product, `group` that of
    turning to the next matrix of a batch, in kernels that load a description of each. `block` is
    the only tile of a kernel, its rows and columns; by default all of a library are tried.
    `expanding` is the number of 4-bit weights that one processor converts to 16 bits per clock, in
    kernels that multiply them by 16-bit activations, once for each block of `expanded_rows` rows;
    by default a weight takes 6 FLOPs of vectors, the middle of three kernels of Hopper, of which
    25, 45 and 90 weights are 11, 6 and 3. `unaligned` is the share that each further load adds to
    the computation if the bytes of a row are not a multiple of 16, so that a load brings only a
    part of these; 0 if no such product was measured. `kernels` has the differences of library
    kernels, by the names that nodes are marked with. Defaults are rounded means of H100 and B200;
    `step` of A100 is three times as long. `tile` follows from the speed of a processor, see
    `tile_defaults`.
    """

    bandwidth: Share = 0.85
    overlap: Overlap = 0.65
    start: Seconds = 2.5e-6
    step: Seconds = 9e-8
    tile: Seconds = 1e-6
    reduction: Seconds = 2.5e-6
    group: Seconds = 0.0
    block: _Block | None = None
    expanding: _Many | None = None
    expanded_rows: int = Field(default=128, gt=0)
    expanding_fitted: str = ""
    unaligned: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    unaligned_fitted: str = ""
    fitted: str = ""
    kernels: dict[str, MatmulKernel] = Field(default_factory=dict[str, MatmulKernel])

    @field_validator("kernels")
    @classmethod
    def _complete(cls, value: dict[str, MatmulKernel]) -> dict[str, MatmulKernel]:
        """Check that a kernel with `few` has one for few rows."""
        for name, kernel in value.items():
            if kernel.few and f"{name}_few" not in value:
                raise ValueError(f"'{name}' has 'few', so expects a kernel '{name}_few'")
        return value

    def of_kernel(self, name: str) -> MatmulEfficiency:
        """The constants of a library kernel; these if it has none of its own."""
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
                "group": kernel.group,
                "block": kernel.block,
                "kernels": {},
            }
        )

    def of_rows(self, name: str, rows: int) -> str:
        """The kernel that a library has for so many rows in all."""
        kernel = self.kernels.get(name)
        return f"{name}_few" if kernel is not None and rows <= (kernel.few or 0) else name


class AttentionKernel(Text):
    """The constants of a library's attention kernel that differ from those of
    `AttentionEfficiency`; `source` is the source of the measurement."""

    rate: dict[DataType, Share] = Field(default_factory=dict[DataType, Share])
    backward: Share | None = None
    queries: Annotated[int, Field(gt=0)] | None = None
    least: Annotated[int, Field(gt=0)] | None = None
    packed: bool | None = None
    exponentials: _Many | None = None
    overlap: Overlap | None = None
    uneven: Overlap | None = None
    start: Seconds | None = None
    tile: Seconds | None = None
    step: Seconds | None = None
    bandwidth: Share | None = None
    source: Annotated[str, Field(min_length=1)]


class AttentionEfficiency(Rates):
    """Constants of fused attention.

    `rate` and `overlap` are as in products. `queries` is the number of queries in a block: 128 in
    FlashAttention; 256, as two tiles of 128 that alternate, in kernels for Blackwell. A block with
    fewer than `least` is filled up to these. `packed`
    means that a block contains queries of all heads that share keys (FlashAttention 3, for
    sequences of different lengths), not of a single head. `exponentials` is the number that one
    processor computes per clock, including the rest of a softmax (16 for exponentials alone:
    NVIDIA, CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", devices 8.0,
    9.0 and 10.0; twice as many on B300: NVIDIA, "Making Softmax More Efficient with NVIDIA
    Blackwell Ultra"). `backward` is the rate of the backward kernel relative to the forward one; no
    table has it, and 0.9 fits arXiv 2407.08608, figure 6. `uneven` is the share of the longest
    block by which the kernel waits at its end, `tile` the time that a block of queries adds,
    `start` the time of an empty kernel, `step` the minimum time of a tile of 128 keys and values of
    128 elements: the latency of the memory divided by the number of loads in flight. `bandwidth` is
    the share of the memory's bandwidth, by default that of products. Elements of a head are padded
    to a multiple of `padding`, the side of a systolic array. `kernels` has the differences of
    library kernels, by their names in `stg.kernels`, and `decoding` is the name of the one for a
    few queries behind cached keys; with `_8bit` behind it, that for caches in 8 bits. `indexer` is
    the name of the one that scores keys for sparse attention, which multiplies in 8 bits, and
    `selecting` of the one whose queries select rows of a latent in 16 bits; without a name it is
    the kernel of attention.
    """

    queries: int = Field(default=128, gt=0)
    least: int = Field(default=16, gt=0)
    packed: bool = False
    exponentials: _Many = 14.0
    overlap: Overlap = 0.6
    backward: Share = 0.9
    uneven: Overlap = 0.4
    start: Seconds = 6e-6
    tile: Seconds = 3e-6
    step: Seconds = 0.0
    bandwidth: Share | None = None
    padding: int = Field(default=1, gt=0)
    decoding: str = ""
    indexer: str = ""
    selecting: str = ""
    fitted: str = ""
    kernels: dict[str, AttentionKernel] = Field(default_factory=dict[str, AttentionKernel])

    def chosen(self, name: str) -> str:
        """The kernel that a name selects: for `sdpa`, the first one in PyTorch's order of
        preference that the device has (ATen/native/transformers/cuda/sdp_utils.cpp,
        `priority_order`)."""
        preferred = ("cudnn", "flash_2") if name == "sdpa" else ()
        return next((each for each in preferred if each in self.kernels), name)

    def decodes(self, narrow: bool) -> str:
        """The kernel for a few queries behind cached keys, which are `narrow` in 8 bits."""
        special = f"{self.decoding}_8bit"
        return special if narrow and special in self.kernels else self.decoding

    def of_kernel(self, name: str) -> AttentionEfficiency:
        """The constants of a library kernel; these if it has none of its own."""
        kernel = self.kernels.get(self.chosen(name))
        if kernel is None:
            return self
        own = {n: v for n in AttentionKernel.model_fields if (v := getattr(kernel, n)) is not None}
        rate = {**self.rate, **kernel.rate}
        return self.model_copy(update={**own, "rate": rate, "kernels": {}})


class MemoryEfficiency(Text):
    """Constants of kernels that are limited by memory: the share of the bandwidth that long kernels
    reach, and the time of an empty one (`start`). `places` is the number of elements per clock and
    processor in kernels that compute the address of each element (`stagec.time.costs.eager`); the
    default was measured on H200 with PyTorch 2.11."""

    bandwidth: Share = 0.85
    start: Seconds = 2.5e-6
    places: _Many = 1.33
    fitted: str = ""


#: FLOPs of a processor at its peak in 16 bits, in the time that a tile of a product adds: 0.8e7 to
#: 1.2e7 on A100, H100, H200, B200 and TPUs; and in that of a block of attention, 2e7 on H100.
_TILE_FLOPS, _BLOCK_FLOPS = 1e7, 2e7
#: FLOPs of a processor per clock for each exponential: as many as B200 has, whose are the slowest.
_EXPONENTIAL_FLOPS = 600


def tile_defaults(flops: float, clock: float) -> tuple[dict[str, float], dict[str, float]]:
    """The default constants of products and of attention that depend on the size of a processor: of
    a few large ones, as matrix units of other accelerators, or of many small ones. `flops` is the
    peak of one in 16 bits, and `clock` its clock."""
    block = AttentionEfficiency.model_fields["tile"].default
    exponentials = AttentionEfficiency.model_fields["exponentials"].default
    attention = {
        "tile": min(_BLOCK_FLOPS / flops, block),
        "exponentials": max(flops / clock / _EXPONENTIAL_FLOPS, exponentials),
    }
    return {"tile": _TILE_FLOPS / flops}, attention
