"""Traces as the PyTorch profiler writes them, made by hand: the fields, categories and ids of its
Chrome export, and nothing else."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST, THREAD = 4000, 4001


@dataclass(slots=True)
class Trace:
    """A trace under construction: ops follow each other on a thread of the host, 100 microseconds
    each."""

    rank: int | None = 0
    thread: int = THREAD
    now: float = 1000.0
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ids: int = 10

    def op(self, name: str, *kernels: float, inner: Sequence[str] = (), **args: Any) -> None:
        """An op, the ops inside of it, and kernels that the innermost one launches."""
        start = self.now
        for depth, each in enumerate((name, *inner)):
            said = args if depth == 0 else {}
            self.host("cpu_op", each, start + depth, 90 - 2 * depth, **said)
        for i, duration in enumerate(kernels):
            self.launch(start + 20 + i, "some_kernel", duration)
        self.now += 100

    def tensors(self, name: str, dims: Any, types: Any, *kernels: float, **args: Any) -> None:
        """An op with shapes."""
        self.op(name, *kernels, **{"Input Dims": dims, "Input type": types}, **args)

    def launch(self, at: float, name: str, duration: float, **args: Any) -> None:
        """A call and the kernel that it launches."""
        self.ids += 1
        self.host("cuda_runtime", "cudaLaunchKernel", at, 5, correlation=self.ids)
        self.gpu("kernel", name, at + 7, duration, correlation=self.ids, **args)

    def collective(self, kind: str, elements: int, ranks: int, duration: float) -> None:
        """A collective of bf16, with what the profiler says of it on the kernel."""
        self.launch(
            self.now,
            f"ncclDevKernel_{kind}(ncclDevKernelArgsStorage<4096ul>)",
            duration,
            **comms(kind, elements, ranks),
        )
        self.now += 100

    def host(self, category: str, name: str, start: float, duration: float, **args: Any) -> None:
        """An event of the host."""
        self._add(category, name, HOST, self.thread, start, duration, args)

    def gpu(self, category: str, name: str, start: float, duration: float, **args: Any) -> None:
        """An event of a GPU."""
        self._add(category, name, 0, 7, start, duration, {"device": 0, "stream": 7, **args})

    def _add(
        self, cat: str, name: str, pid: int, tid: int, ts: float, dur: float, args: Any
    ) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
        self.events.append({**event, "args": args})

    def text(self) -> str:
        """The trace as a text."""
        info = {} if self.rank is None else {"distributedInfo": {"rank": self.rank}}
        device = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "A GPU"}], **info}
        return json.dumps({**device, "traceEvents": self.events, "traceName": "x"}, indent=1)

    def write(self, path: Path) -> Path:
        """The trace as a file, packed if its name says so."""
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def comms(kind: str, elements: int, ranks: int) -> dict[str, Any]:
    """What record_param_comms says of a collective; `elements` are those that go in."""
    out = {"_allgather_base": elements * ranks, "_reduce_scatter_base": elements // ranks}
    return {
        "Collective name": kind,
        "In msg nelems": elements,
        "Out msg nelems": out.get(kind, elements),
        "Group size": ranks,
        "dtype": "BFloat16",
        "Process Group Name": "0",
        "Process Group Ranks": str(list(range(ranks))),
    }
