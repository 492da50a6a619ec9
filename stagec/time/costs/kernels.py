"""Seconds of kernels on a device, without the launch gap before each.

There are three formulas, for products, fused attention, and kernels bound by memory. They take
numbers or numpy arrays. docs/accuracy.md compares them with measured tables;
`stagec.machines.kernel_efficiency` defines their constants.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagec.ir.kernel import EXPANDING, EXPERTS, INDEXER, SELECTS, continues, moved_share
from stagec.ir.types import DTYPE_BYTES
from stagec.ir_spec.strategy.kernels import DEEPGEMM, TRITON_BLOCKS
from stagec.machines import Machine
from stagec.machines.kernel_efficiency import MatmulEfficiency
from stagec.program.kernels import Kernel
from stagec.support.diagnostics import error
from stagec.time.costs.eager import EagerKernels, eager_kernels

Floats: TypeAlias = NDArray[np.float64]
#: A number or an array of them.
Numbers: TypeAlias = Any

#: Rows and columns of the tiles of products that a library chooses among (NVIDIA/cutlass,
#: media/docs/efficient_gemm.md: threadblock tiles of 256 x 128 and less).
_TILES = np.array(
    [
        *((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)),
        *((128, 32), (32, 128), (128, 16), (16, 128)),
    ],
    dtype=float,
)
#: A step of the main loop along k: bytes of a row that are loaded together, and its most elements.
_STEP_BYTES = 128
_STEP_MOST = 128
#: Bytes of the widest load of a thread, and of elements that are loaded alone.
_LOAD_BYTES, _LOADED_ALONE = 16, 4
#: The shortest part of a product that is split along k.
_PART = 256
#: Results of the tile whose filling and writing `tile` states; smaller ones take their share of it.
_TILE = 256 * 128
#: Seconds that stand for 0 where something is divided by them.
_NONE = 1e-30
#: Keys of a tile of attention (arXiv 2307.08691, section 3.3; arXiv 2407.08608).
_KEYS = 128
#: FLOPs for each element that a kernel moves, up to which it does not heat the device: a quarter of
#: what H100 computes at its peaks while it moves an element of 16 or 8 bits, and B200 within 1%.
#: From twice as many on a kernel heats the device as much as any other one. Slower processors have
#: fewer, by the root of their peaks: about a quarter of the same on A100 and MI300X.
_COOL, _PROCESSOR = 989 / 3.35 / 2, 989e12 / 132
#: FLOPs of vectors for a weight that becomes 16 bits, without a measurement: the middle of three
#: kernels of Hopper (H200 has 277 a clock and processor, which turn 25, 45 and 90 weights).
_EXPANDED = 6
#: Rows of a matrix instruction; a block with few queries takes as many instructions as it needs.
_ROWS = 16
#: The most queries of all heads that share keys, and the widest head, that kernels for decoding
#: take: one block (PTX ISA, tcgen05.mma, M = 128), and what their tables have.
_FEW, _WIDEST = 128, 256
#: The type of the products of an indexer in a kernel of its own.
_INDEXED = "f8e4m3"
#: The share of a block above which queries of one head are not packed with those of others.
_FULLER = 0.9
#: The elements of a head for which `step` of attention is stated, and the power of wider ones.
_HEAD, _WIDER = 128, 0.75


def kernel_seconds(machine: Machine, kernels: Sequence[Kernel]) -> Floats:
    """Seconds of each kernel, without the gap before its launch (`machine.compute.launch`).

    Raises `DiagnosticError` for a product whose type the machine does not compute.
    """
    together: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for i, kernel in enumerate(kernels):
        together[(kernel.kind, *_form(machine, kernel))].append(i)
    result = np.zeros(len(kernels))
    for (kind, dtype, form), indices in together.items():
        result[indices] = _seconds(machine, kind, dtype, form, [kernels[i] for i in indices])
    return result


def _form(machine: Machine, kernel: Kernel) -> tuple[str, str]:
    """The type and the name of the constants of a kernel: its own type and mark, of products with
    few rows the mark that the machine has for these. Scores of an indexer have those of the
    machine's kernel for these, at least as many queries as processors those of the kernel whose
    queries select rows, attention without a mark those for a few queries behind cached keys with
    heads of up to 256 elements. Caches are in 8 bits where a kernel moves fewer than 3/2 bytes
    per element."""
    own = kernel.dtype, kernel.form
    if kernel.kind == "matmul" and kernel.form:
        *_, n, k = kernel.extents
        rows = kernel.flops // (2 * n * k)  # those of a batch are rounded
        return kernel.dtype, machine.efficiency.matmul.of_rows(kernel.form, rows)
    attention = machine.efficiency.attention
    if kernel.form == INDEXER:
        return (_INDEXED, attention.indexer) if attention.indexer else (kernel.dtype, "")
    if kernel.form == SELECTS:
        many = kernel.extents[0] >= machine.compute.processors.value
        return kernel.dtype, attention.selecting if many else ""
    if kernel.form or kernel.kind != "attention":
        return own
    batch, heads, kv_heads, queries, keys, qk, v = kernel.extents
    if queries * heads > _FEW * kv_heads or queries >= keys or qk > _WIDEST:
        return own
    elements = batch * (queries * heads + keys * kv_heads) * (qk + v)
    return kernel.dtype, attention.decodes(2 * kernel.bytes < 3 * elements)


def seconds_in_step(machine: Machine, kernels: Sequence[Kernel]) -> Floats:
    """Seconds of each kernel on a device under sustained load, whose clocks drop: products and
    attention keep the share `efficiency.sustained` of their speed. Kernels that mostly wait for
    memory, as in decode, heat the device less and keep more of it (`_busy`)."""
    seconds = kernel_seconds(machine, kernels)
    efficiency = machine.efficiency
    if efficiency.kernels == "roofline":
        return seconds
    kept = efficiency.sustained
    share = np.array([kept.experts if _is_grouped(machine, k) else 1.0 for k in kernels])
    compute = machine.compute
    peaks = (rate.value * float(DTYPE_BYTES[str(t)]) / 2 for t, rate in compute.matrix.items())
    cool = _COOL * min(max(peaks) / compute.processors.value / _PROCESSOR, 1.0) ** 0.5
    busy = np.array([_busy(k, cool) for k in kernels], dtype=float)
    return seconds * (1 + busy * (1 / (kept.products * share) - 1))


def _is_grouped(machine: Machine, kernel: Kernel) -> bool:
    """Whether a kernel is a grouped product of several experts, with the machine's own constants.
    That of a single expert is a plain product, and Megatron-Core sorts no rows for it
    (token_dispatcher.py, `num_local_experts > 1`)."""
    own = kernel.form not in machine.efficiency.matmul.kernels
    return own and kernel.form in (EXPERTS, TRITON_BLOCKS, DEEPGEMM) and kernel.extents[0] > 1


def _busy(kernel: Kernel, cool: float) -> float:
    """How much of the loss of sustained load a product or attention has: none up to `cool` FLOPs
    for each element that it moves, all of it from twice as many on, and a linear share between
    these (an assumption). The bounds do not depend on the memory of the device: otherwise a faster
    one would make the start of small kernels slower."""
    if kernel.kind == "memory":
        return 0.0
    elements = kernel.bytes / float(DTYPE_BYTES[kernel.dtype])
    return min(max(kernel.flops / max(elements, 1) / cool - 1, 0.0), 1.0)


def _seconds(
    machine: Machine, kind: str, dtype: str, form: str, kernels: Sequence[Kernel]
) -> Floats:
    size = np.array([k.bytes for k in kernels], dtype=float)
    if machine.efficiency.kernels == "roofline":
        return _roofline(machine, kind, dtype, np.array([k.flops for k in kernels], float), size)
    if kind == "memory":
        size *= moved_share(form, machine.family)
        if (eager := eager_kernels(form)) is not None:
            return _eager_seconds(machine, size, *eager)
        none = continues(form, machine.family)
        return memory_seconds(machine, size) - machine.efficiency.memory.start * none
    extents: tuple[Floats, ...] = tuple(np.array([k.extents for k in kernels], dtype=float).T)
    if kind == "matmul":
        batch, m, n, k = extents
        rows = np.array([kernel.transposed for kernel in kernels])
        return matmul_seconds(machine, dtype, batch, m, n, k, size, form=form, transposed=rows)
    batch, heads, kv_heads, queries, keys, qk, v = extents
    return attention_seconds(
        *(machine, dtype, batch, heads, kv_heads, queries, keys, qk, v, size),
        causal=np.array([kernel.causal for kernel in kernels]),
        windowed=np.array([kernel.windowed for kernel in kernels]),
        backward=kind == "attention_backward",
        form=form,
    )


def matmul_seconds(
    machine: Machine,
    dtype: str,
    batch: Numbers,
    m: Numbers,
    n: Numbers,
    k: Numbers,
    size: Numbers,
    *,
    form: str = "",
    transposed: Numbers = False,
) -> Floats:
    """Seconds of `batch` products of m x k by k x n elements, which move `size` bytes; `form` is
    how the kernel is marked, whose constants hold where a machine has them. Rows of operands and
    results have n and k elements, or n and m if operands are `transposed`.

    With tiles of `tm` x `tn` results, the product has `T = batch ceil(m/tm) ceil(n/tn)` tiles; if
    they are fewer than the P processors, each may be split in `s <= P/T` parts along k. The tiles
    are computed in `W = ceil(T s / P)` waves, the last of which may be nearly empty, each in
    `K = ceil(k / s / depth)` steps of 128 bytes of k, at most 128 elements (`depth`):

        one = 2 tm tn depth P / (peak rate) (1 + unaligned (16 / piece - 1))
        compute = K max(W one, step) + W tile tm tn / (256 128)
        move = (size + 8 m n s [s > 1]) / (B bandwidth)
        a, b = the longer and the shorter one of compute and move
        seconds = start + a + (1 - overlap) b b / a + reduction [s > 1] + batch group

    and the tile and split of least time are taken, as the heuristics of cuBLAS try to; a kernel of
    one `block` has no other tile. `B` is the
    bandwidth of the memory. `piece` are the bytes that a load brings: 16 where all rows are
    multiples of that, else 8, 4, 2 or 1, and 16 in 32 bits, which have no matrix units. A kernel
    that expands its weights from 4 to 16 bits does so for each block of rows (`expanded_rows`), and
    computes meanwhile nothing else: with w = size - 2 batch m (n + k) bytes of weights and scales

        compute += 2 w ceil(m / rows) / (expanding P clock)

    and without a measured `expanding` with a sixth of the peak of vectors in place of that rate.

    Sources: tiles and waves: NVIDIA, Matrix Multiplication Background User's Guide, "Tile
    Quantization" and "Wave Quantization"; splits: NVIDIA/cutlass, media/docs/efficient_gemm.md,
    "Parallelized Reductions"; pieces: the guide of tiles, "Requirements to use Tensor Cores"
    (multiples of 16 bytes), and NVIDIA/cutlass, the alignments of its kernels; steps of 128 bytes:
    PTX ISA, swizzle modes of tensor copies, of which the widest is 128 bytes, and NVIDIA/cutlass,
    the k of its tiles. That a step takes a time of its own, however small the tile (what is loaded
    comes after the latency of the memory, and few loads are under way), that further loads add to
    it, and how much compute and movement hide each other, are fitted forms.
    """
    given = batch, m, n, k, size, transposed
    batch, m, n, k, size, summed_up = [np.asarray(a, dtype=float)[..., None] for a in given]
    c = machine.efficiency.matmul.of_kernel(form)
    shape = _TILES if c.block is None else np.array([c.block], dtype=float)
    rows, columns = shape.T
    tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
    most = np.maximum(np.floor(k / _PART), 1)
    rest = k + (m - k) * summed_up
    loads = 1 + c.unaligned * (_pieces(dtype, n, rest) - 1) if c.unaligned else np.ones(1)
    expands = form in EXPANDING
    more = _expanding(machine, c, batch, m, n, k, size) if expands else np.zeros(1)
    parts = np.clip(np.floor(machine.compute.processors.value / np.maximum(tiles, 1)), 1, most)
    summed = size + 8 * batch * m * n * parts
    how = machine, c, dtype, shape.prod(axis=1)
    whole = _tiled(*how, tiles, k, size, loads, more).min(axis=-1)
    split = _tiled(*how, tiles * parts, k / parts, summed, loads, more).min(axis=-1)
    seconds: Floats = np.minimum(whole, split + c.reduction) + c.start + c.group * batch[..., 0]
    return seconds


def _pieces(dtype: str, *lengths: Numbers) -> Floats:
    """The number of loads for 16 bytes of rows of so many elements, given their alignment; rows of
    one element do not count."""
    size = DTYPE_BYTES[dtype]
    most = int(_LOAD_BYTES / size) if size < _LOADED_ALONE else 1
    rows = [np.where(row > 1, row, most).astype(np.int64) for row in lengths]
    pieces: Floats = most / np.gcd(np.gcd(*rows), most)
    return pieces


def _expanding(
    machine: Machine,
    c: MatmulEfficiency,
    batch: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    size: Floats,
) -> Floats:
    """Seconds to turn weights of 4 bits into 16 bits, once for each block of rows; none on a device
    without measurements and units for vectors."""
    weights = np.maximum(size - 2 * batch * m * (n + k), 0)
    compute = machine.compute
    vector = compute.vector.get("f32")
    a_second = vector.value / _EXPANDED if vector is not None else inf
    if c.expanding is not None:
        a_second = c.expanding * compute.processors.value * compute.clock.value
    seconds: Floats = 2 * weights * np.ceil(m / c.expanded_rows) / a_second
    return seconds


def _tiled(
    machine: Machine,
    c: MatmulEfficiency,
    dtype: str,
    results: Floats,
    tiles: Floats,
    k: Floats,
    size: Floats,
    loads: Floats,
    more: Floats,
) -> Floats:
    """Seconds of tiles of `results` over k elements each, without the start; the last axis is the
    kind of tile. A step takes `loads` times as long as with loads of 16 bytes, and `more` seconds
    are added to the computation."""
    processors = machine.compute.processors.value
    depth = min(_STEP_BYTES / float(DTYPE_BYTES[dtype]), _STEP_MOST)
    one = 2 * results * depth * processors / (peak(machine, dtype) * c.of(dtype)) * loads
    waves = np.ceil(tiles / processors)
    steps = np.ceil(k / depth)
    compute = steps * np.maximum(waves * one, c.step) + waves * (c.tile * results / _TILE) + more
    move = _moving(machine, size)
    longer = np.maximum(compute, move)
    shorter = np.minimum(compute, move)
    seconds: Floats = longer + (1 - c.overlap) * shorter * (shorter / np.maximum(longer, _NONE))
    return seconds


def attention_seconds(
    machine: Machine,
    dtype: str,
    batch: Numbers,
    heads: Numbers,
    kv_heads: Numbers,
    queries: Numbers,
    keys: Numbers,
    qk: Numbers,
    v: Numbers,
    size: Numbers,
    *,
    causal: Numbers = False,
    windowed: Numbers = False,
    backward: bool = False,
    form: str = "",
) -> Floats:
    """Seconds of fused attention, which moves `size` bytes; `qk` and `v` are elements of a head;
    `form` is the kernel of a library whose constants hold, where a machine has them.

    Blocks of `R` queries (`queries` of the constants) go to the P processors: `N = batch heads
    ceil(queries / R)`. Where kernels pack heads (`packed`), for a single query, and for so few
    behind cached keys that they fill less than 0.9 of what they would with all heads, a block has
    queries of all heads that share keys: `N = batch kv_heads ceil(queries heads / kv_heads / R)`. A
    block meets `K = ceil(keys / 128)` tiles of keys; with a causal mask, and blocks of `t` tokens,
    the mean is `(K + max(t / 128, 1)) / 2`, also of ranks that split the queries so as to balance
    the mask. A tile costs its products and its exponentials:

        products = 2 R 128 (qk' + v') P / (peak rate)
        softmax = R 128 / (exponentials clock)
        one = max(products, softmax) + (1 - overlap) min(products, softmax)
        one = max(one, step ((qk + v) / 256)^(3/4))
        compute = max(K, tiles) one + ceil(N / P) tile

    where `qk'` and `v'` are the next multiples of `padding`, and `tiles` is `ceil(N / P) K` without
    mask, and with one, whose blocks differ in length, the mean of a processor and `uneven` of the
    longest block. Where a window moves with the queries (`windowed`), a block of t tokens meets
    `keys + t - 1` keys, at most the `(queries + t) / 2` of a causal mask. A block with fewer
    queries has as many rows as instructions take, a multiple of 16, and `least` or more. Where
    there is one block of queries only, as in decode, or a part of one behind cached keys, keys are
    split over idle processors (hopper/heuristics.h: `num_splits_heuristic`), and a second kernel
    merges their results. Movement and computation overlap as in products, at the bandwidth of
    products unless the kernel has its own.

    Backward has five products in place of two, so `compute` is `(3 qk + 2 v) / (qk + v)` times as
    long, at `backward` times the rate.

    Sources: blocks and masks: arXiv 2307.08691, sections 3.1 and 3.2; windows:
    Dao-AILab/flash-attention, hopper/block.h, `get_n_block_min_max`; exponentials as the second
    bound: arXiv 2407.08608, section 3; the power of `step`: fitted; keys split: PyTorch,
    "Flash-Decoding for long-context inference"; rows: PTX ISA, mma.m16n8k16; packed heads:
    Dao-AILab/flash-attention, hopper/heuristics.h, and NVIDIA/TensorRT-LLM,
    trtllmGenKernels/fmha/fmhaKernels.h.
    """
    c = machine.efficiency.attention.of_kernel(form)
    given = (batch, heads, kv_heads, queries, keys, qk, v, size)
    floats: list[Floats] = [np.asarray(a, dtype=float) for a in given]
    batch, heads, kv_heads, queries, keys, qk, v, size = floats
    processors = machine.compute.processors.value
    behind = (queries < np.minimum(keys, c.queries)) & (not backward)  # a few, and cached keys
    few = (queries == 1) | (behind & _pack(queries, heads / kv_heads, c.queries))
    share = np.where(c.packed | few, heads / kv_heads, 1)  # heads in a block
    together = queries * share
    rows = np.minimum(c.queries, _ROWS * np.ceil(np.maximum(together, c.least) / _ROWS))
    product = 2 * _KEYS * processors / (peak(machine, dtype) * c.of(dtype))  # of a row's element
    softmax = _KEYS / (c.exponentials * machine.compute.clock.value)  # of a row
    padded = c.padding * (np.ceil(qk / c.padding) + np.ceil(v / c.padding))
    one = rows * _hidden(product * padded, np.asarray(softmax), c.overlap)
    one = np.maximum(one, c.step * ((qk + v) / (2 * _HEAD)) ** _WIDER)
    longer = (3 * qk + 2 * v) / (qk + v) / c.backward if backward else 1

    tokens: Floats = np.minimum(c.queries / share, queries)  # of a block
    seen: Floats = np.minimum(keys + tokens - 1, np.maximum(keys, (queries + tokens) / 2))
    met: Floats = np.where(windowed, seen, keys)
    in_head = np.ceil(together / c.queries)
    blocks = batch * heads / share * in_head
    longest = np.ceil(met / _KEYS)
    most: Floats = np.clip(np.floor(processors / blocks), 1, longest)
    parts: Floats = np.where((in_head == 1) | behind, most, 1)
    longest = np.ceil(longest / parts)
    blocks = blocks * parts
    waves: Floats = np.ceil(blocks / processors)
    diagonal = np.maximum(tokens / _KEYS, 1)
    mean: Floats = np.minimum(longest, (longest + diagonal) / 2)
    uneven: Floats = blocks * mean / processors + c.uneven * longest
    dealt: Floats = np.where(causal, uneven, waves * longest)
    compute = (np.maximum(dealt, longest) * one + waves * c.tile) * longer
    merge = np.where(parts > 1, machine.efficiency.memory.start, 0.0)
    return c.start + merge + _hidden(compute, _moving(machine, size, c.bandwidth), c.overlap)


def _pack(queries: Floats, heads: Floats, block: int) -> NDArray[np.bool_]:
    """Whether queries of these heads fill their blocks better together than those of one head
    alone, by a tenth (Dao-AILab/flash-attention, hopper/heuristics.h: `should_pack_gqa`)."""
    alone, together = (rows / np.ceil(rows / block) for rows in (queries, queries * heads))
    return np.asarray(alone < _FULLER * together)


def _moving(machine: Machine, size: Floats, share: float | None = None) -> Floats:
    """Seconds that bytes take at a share of the memory's bandwidth, by default that of products."""
    used = machine.efficiency.matmul.bandwidth if share is None else share
    moved: Floats = size / (machine.memory.bandwidth.value * used)
    return moved


def memory_seconds(machine: Machine, size: Numbers) -> Floats:
    """Seconds of a kernel bound by memory that moves `size` bytes.

        seconds = start + size / (B bandwidth)

    Small kernels last `start`, and the effective bandwidth grows with the size: half of it is
    reached at `start B bandwidth` bytes. Source: the form of R. W. Hockney, "The Science of
    Computer Benchmarking", 1996, section 1.3 (r_inf and n_1/2).
    """
    c = machine.efficiency.memory
    bandwidth = machine.memory.bandwidth.value * c.bandwidth
    seconds: Floats = c.start + np.asarray(size, dtype=float) / bandwidth
    return seconds


def _eager_seconds(machine: Machine, size: Floats, eager: EagerKernels, width: float) -> Floats:
    """Seconds of the kernels that PyTorch launches for an op that touches `size` bytes, of `width`
    bytes an element (`time.costs.eager`)."""
    c, device = machine.efficiency.memory, machine.compute
    tensor = size / eager.touched
    bandwidth = machine.memory.bandwidth.value * c.bandwidth
    rate = c.places * device.processors.value * device.clock.value
    placing = np.maximum(eager.places * tensor / width / rate, eager.placed * tensor / bandwidth)
    seconds: Floats = eager.launches * c.start + eager.moved * tensor / bandwidth + placing
    return seconds


def peak(machine: Machine, dtype: str) -> float:
    """The peak of dense products of operands of a type, in FLOP/s. Raises `DiagnosticError` for a
    type that the machine does not compute."""
    rates = {**machine.compute.vector, **machine.compute.matrix}
    peaks = {str(name): figure.value for name, figure in rates.items()}
    if dtype not in peaks:
        raise error(
            f"machine '{machine.name}' has no peak for {dtype}; it has {', '.join(peaks)}",
            remedy=f"add compute.matrix.{dtype} to its file, or choose another type",
        )
    return peaks[dtype]


def _roofline(machine: Machine, kind: str, dtype: str, flops: Floats, size: Floats) -> Floats:
    """Seconds by the roofline: the larger of FLOPs over the peak and bytes over the bandwidth
    (Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009)."""
    vector = "f32" if "f32" in machine.compute.vector else dtype
    rate = peak(machine, vector if kind == "memory" else dtype)
    seconds: Floats = np.maximum(flops / rate, size / machine.memory.bandwidth.value)
    return seconds


def _hidden(a: Floats, b: Floats, overlap: float) -> Floats:
    """The time of two activities that overlap: the longer one, and the share of the shorter one
    that is not hidden."""
    seconds: Floats = np.maximum(a, b) + (1 - overlap) * np.minimum(a, b)
    return seconds
