"""Time kernels and training steps on a device: `python -m tools.measure_device --out FOLDER`.

Needs PyTorch and nothing else of this project. FOLDER/kernels.csv is a table for `--measured`,
FOLDER/steps.csv has a line for each training step, with its configuration as stagec's model, sizes
and flags. `--device cpu --quick` tries it where there is no GPU.

A kernel is called many times between two events of the GPU's clock. The GPU sleeps first, so that
it does not wait for the host. The median of several such runs counts. `--flush` empties the caches
before each call, which then has its own two events.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import importlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from tools.device_steps import Trainer, steps

#: Creates the operands of a kernel and returns a function that runs it once.
Make: TypeAlias = Callable[[], Callable[[], Any]]
KERNEL_COLUMNS = ("kind", "dtype", "extents", "causal", "op", "microseconds", "count")
STEP_COLUMNS = ("model", "sizes", "flags", "device", "parameters", "seconds")
MEMORY_COLUMNS = ("held_bytes", "allocated_bytes", "reserved_bytes")
_TYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f8e4m3": "float8_e4m3fn"}
_CYCLES = 2_000_000  # about a millisecond
_FLUSHED = 1 << 29
#: Seconds of one run of calls.
_LONGEST = 0.1


@dataclass(frozen=True)
class Case:
    """A kernel to time: its row of the table, and the function that creates it."""

    kind: str
    dtype: str
    extents: tuple[int, ...]
    make: Make
    causal: bool = False
    op: str = ""


class Clock:
    """Times functions that run on a device."""

    def __init__(self, torch: Any, device: str, *, flush: bool, quick: bool) -> None:
        self._torch, self._gpu = torch, device != "cpu"
        self._runs, self._calls = (3, 2) if quick else (7, 20)
        self._scratch = None
        if flush and self._gpu:
            self._scratch = torch.empty(_FLUSHED, dtype=torch.int8, device=device)

    def seconds(self, run: Callable[[], Any]) -> tuple[float, int]:
        """The median time of a call, and the number of timed calls."""
        run()  # initialization at the first call
        once = _host_seconds(self._synchronized(run), 1)
        calls = max(2, min(self._calls, int(_LONGEST / once)))
        if not self._gpu:
            times = [_host_seconds(run, calls) for _ in range(self._runs)]
        elif self._scratch is not None:
            times = [self._flushed(run, calls) for _ in range(self._runs)]
        else:
            times = [self._queued(run, calls) for _ in range(self._runs)]
        return statistics.median(times), self._runs * calls

    def _synchronized(self, run: Callable[[], Any]) -> Callable[[], Any]:
        def whole() -> None:
            run()
            if self._gpu:
                self._torch.cuda.synchronize()

        return whole

    def _queued(self, run: Callable[[], Any], calls: int) -> float:
        cuda = self._torch.cuda
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize()
        cuda._sleep(_CYCLES)
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / calls

    def _flushed(self, run: Callable[[], Any], calls: int) -> float:
        cuda = self._torch.cuda
        events: list[tuple[Any, Any]] = []
        for _ in range(calls):
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            if self._scratch is not None:
                self._scratch.zero_()
            begin.record()
            run()
            end.record()
            events.append((begin, end))
        cuda.synchronize()
        return statistics.median(float(a.elapsed_time(b)) for a, b in events) * 1e-3


def _host_seconds(run: Callable[[], Any], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - began) / calls


# -- kernels ---------------------------------------------------------------------------------------


class Kernels:
    """All kernels to time on a device."""

    def __init__(self, torch: Any, device: str, *, quick: bool) -> None:
        self._torch, self._device, self._quick = torch, device, quick

    def cases(self) -> Iterator[Case]:
        """Products, attention, norms, softmax, element-wise kernels and copies."""
        yield from self._products()
        yield from self._attention()
        yield from self._rows()
        yield from self._streams()

    def _some(self, *shape: int, dtype: str = "bf16") -> Any:
        torch = self._torch
        made = torch.randn(shape, device=self._device, dtype=torch.bfloat16)
        return made.to(getattr(torch, _TYPES[dtype]))

    def _products(self) -> Iterator[Case]:
        if self._quick:
            grid = [(1, 32, 64, 16), (2, 16, 16, 16)]
        else:
            rows = (128, 512, 1024, 2048, 4096, 8192, 16384)
            widths = (1024, 2048, 4096, 8192, 14336, 28672)
            grid = [(1, m, n, k) for m, n, k in product(rows, widths, widths)]
            grid += [
                (b, m, n, k) for b, m, n, k in product((4, 8, 32), rows[:4], widths[:3], widths[:3])
            ]
        for dtype in _TYPES:
            for b, m, n, k in grid:
                if dtype == "f8e4m3":
                    if b == 1:
                        make = functools.partial(self._scaled, m, n, k)
                        yield Case("matmul", dtype, (b, m, n, k), make)
                elif dtype != "f32" or max(m, n, k) <= 8192:
                    make = functools.partial(self._product, b, m, n, k, dtype)
                    yield Case("matmul", dtype, (b, m, n, k), make)

    def _product(self, b: int, m: int, n: int, k: int, dtype: str) -> Callable[[], Any]:
        """A product y = x w^T, whose operands are contiguous along k."""
        left, right = self._some(b, m, k, dtype=dtype), self._some(b, n, k, dtype=dtype)
        if b == 1:
            return functools.partial(self._torch.mm, left[0], right[0].t())
        return functools.partial(self._torch.bmm, left, right.transpose(1, 2))

    def _scaled(self, m: int, n: int, k: int) -> Callable[[], Any]:
        torch = self._torch
        left, right = self._some(m, k, dtype="f8e4m3"), self._some(n, k, dtype="f8e4m3").t()
        one = torch.ones((), device=self._device, dtype=torch.float32)
        return functools.partial(
            torch._scaled_mm, left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )

    def _attention(self) -> Iterator[Case]:
        if self._quick:
            grid = [(1, 2, 1, 32, 16)]
        else:
            batches, groups, lengths = (
                (1, 2, 4),
                ((32, 8), (16, 16), (8, 8)),
                (1024, 2048, 4096, 8192),
            )
            grid = [(b, *h, s, w) for b, h, s, w in product(batches, groups, lengths, (64, 128))]
        for b, heads, shared, length, width in grid:
            extents = (b, heads, shared, length, length, width, width)
            for causal, backward in product((True, False), repeat=2):
                kind = "attention_backward" if backward else "attention"
                make = functools.partial(self._attend, extents, causal, backward)
                yield Case(kind, "bf16", extents, make, causal)

    def _attend(self, extents: tuple[int, ...], causal: bool, backward: bool) -> Callable[[], Any]:
        b, heads, shared, length, _, width, _ = extents
        functional = self._torch.nn.functional
        q = self._some(b, heads, length, width).requires_grad_(backward)
        k, v = (self._some(b, shared, length, width).requires_grad_(backward) for _ in range(2))
        options = {"is_causal": causal, "enable_gqa": heads != shared}
        run = functools.partial(functional.scaled_dot_product_attention, q, k, v, **options)
        if not backward:
            return run
        result = run()
        return functools.partial(
            self._torch.autograd.grad,
            result,
            (q, k, v),
            self._some(*result.shape),
            retain_graph=True,
        )

    def _rows(self) -> Iterator[Case]:
        """Norms and softmax of rows, forward and backward; bytes are those of stagec's ops."""
        widths, counts = ((64,), (8,)) if self._quick else ((2048, 4096, 8192), (512, 4096, 32768))
        for width, count in product(widths, counts):
            size = 2 * width * count
            for op, weights in (("rmsnorm", 1), ("layernorm", 2), ("softmax", 0)):
                of_weights = 2 * width * weights
                for backward in (False, True):
                    read = 2 * width * min(weights, 1)  # backward reads the scale, no bias
                    moved = 3 * size + read + of_weights if backward else 2 * size + of_weights
                    make = functools.partial(self._row_op, op, count, width, backward)
                    name = f"{op}_grad" if backward else op
                    yield Case("memory", "", (moved,), make, op=name)

    def _row_op(self, op: str, count: int, width: int, backward: bool) -> Callable[[], Any]:
        functional = self._torch.nn.functional
        x = self._some(count, width).requires_grad_(backward)
        weights = [self._some(width).requires_grad_(backward) for _ in range(2)]
        run: Callable[[], Any]
        if op == "rmsnorm":
            del weights[1]
            run = functools.partial(functional.rms_norm, x, (width,), *weights)
        elif op == "layernorm":
            run = functools.partial(functional.layer_norm, x, (width,), *weights)
        else:
            weights.clear()
            run = functools.partial(functional.softmax, x, -1)
        if not backward:
            return run
        result = run()
        return functools.partial(
            self._torch.autograd.grad,
            result,
            (x, *weights),
            self._some(count, width),
            retain_graph=True,
        )

    def _streams(self) -> Iterator[Case]:
        """Element-wise kernels and copies: one curve over bytes serves all of them."""
        sizes = (1 << 10,) if self._quick else tuple(1 << i for i in range(12, 29, 2))
        for n in sizes:
            for name, moved in (("copy", 4), ("add", 6), ("silu", 4), ("cast", 6)):
                make = functools.partial(self._stream, name, n)
                yield Case("memory", "", (moved * n,), make)

    def _stream(self, name: str, n: int) -> Callable[[], Any]:
        torch, x, y = self._torch, self._some(n), self._some(n)
        if name == "copy":
            return functools.partial(y.copy_, x)
        if name == "add":
            return functools.partial(torch.add, x, y)
        if name == "silu":
            return functools.partial(torch.nn.functional.silu, x)
        return functools.partial(x.to, torch.float32)


def kernel_rows(torch: Any, device: str, clock: Clock, *, quick: bool) -> Iterator[tuple[Any, ...]]:
    """The rows of the table; kernels that a device does not support are reported and left out."""
    for case in Kernels(torch, device, quick=quick).cases():
        extents = "x".join(map(str, case.extents))
        try:
            seconds, count = clock.seconds(case.make())
        except (RuntimeError, NotImplementedError) as problem:
            message = str(problem).partition("\n")[0]
            print(f"left out: {case.kind} {case.dtype} {extents}: {message:.100}", file=sys.stderr)
            continue
        mask = "true" if case.causal else ""
        yield case.kind, case.dtype, extents, mask, case.op, f"{seconds * 1e6:.6g}", count


# -- steps -----------------------------------------------------------------------------------------


def step_rows(torch: Any, device: str, *, quick: bool, fp8: bool) -> Iterator[tuple[Any, ...]]:
    """A row for each step: its configuration, its median time, the bytes between steps, the peak of
    allocated bytes, and that of reserved bytes."""
    gpu = device != "cpu"
    for step in steps(quick=quick, fp8=fp8):
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            trainer = Trainer(step, device)
            times = [_step_seconds(torch, trainer, gpu) for _ in range(3 if quick else 12)][2:]
        except (RuntimeError, NotImplementedError) as problem:
            message = str(problem).partition("\n")[0]
            what = f"{step.model} {step.size_text} {step.flags}"
            print(f"left out: {what}: {message:.100}", file=sys.stderr)
            continue
        memory = ("memory_allocated", "max_memory_allocated", "max_memory_reserved")
        used = [getattr(torch.cuda, name)() if gpu else "" for name in memory]
        about = step.model, step.size_text, step.flags, device_name(torch, device)
        yield (*about, trainer.parameters, f"{statistics.median(times):.6g}", *used)
        del trainer


def _step_seconds(torch: Any, trainer: Trainer, gpu: bool) -> float:
    if gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    trainer.run()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


# -- files -----------------------------------------------------------------------------------------


def device_name(torch: Any, device: str) -> str:
    """The name of a device, from its driver."""
    return torch.cuda.get_device_name() if device != "cpu" else platform.machine() or "cpu"


def remarks(torch: Any, device: str, flush: bool) -> list[str]:
    """The first lines of the table of kernels: the device, the software and the date."""
    cuda = torch.version.cuda or torch.version.hip or "none"
    caches = "caches empty" if flush else "caches as the call before left them"
    return [
        f"# {device_name(torch, device)}; PyTorch {torch.__version__}, CUDA or HIP {cuda}",
        f"# {datetime.date.today().isoformat()}; {caches}",
    ]


def write(path: Path, columns: tuple[str, ...], rows: Iterator[Any], first: list[str]) -> None:
    """Write rows as they are measured, so that they remain if a later one fails."""
    with path.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in first)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for count, row in enumerate(rows, 1):
            writer.writerow(row)
            file.flush()
            if sys.stderr.isatty():
                print(f"\r{path.name}: {count} rows ", end="", file=sys.stderr)


def main() -> None:
    """Measure kernels and steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="a tiny grid, to try the tool")
    parser.add_argument("--flush", action="store_true", help="empty caches before each call")
    parser.add_argument("--only", choices=("kernels", "steps"), help="only one of the two files")
    given = parser.parse_args()
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        sys.exit("error: PyTorch is not installed\n  help: pip install torch")
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: PyTorch sees no GPU\n  help: --device cpu --quick tries the tool")
    given.out.mkdir(parents=True, exist_ok=True)
    about = remarks(torch, given.device, given.flush)
    if given.only != "steps":
        clock = Clock(torch, given.device, flush=given.flush, quick=given.quick)
        rows = kernel_rows(torch, given.device, clock, quick=given.quick)
        write(given.out / "kernels.csv", KERNEL_COLUMNS, rows, about)
    if given.only != "kernels":
        fp8 = given.device == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
        rows = step_rows(torch, given.device, quick=given.quick, fp8=fp8)
        write(given.out / "steps.csv", (*STEP_COLUMNS, *MEMORY_COLUMNS), rows, about)


if __name__ == "__main__":
    main()
