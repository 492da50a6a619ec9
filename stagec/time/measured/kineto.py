"""Traces of the PyTorch profiler (Kineto): which op launched each piece of work on a GPU, and the
table of the medians of all traces.

The correlation id of work on the GPU names the call that launched it; the ops active on the thread
of this call at its time launched it. The outermost of these that `torch_ops` knows is measured: its
time is that of all work that it launched. A trace is kept as columns of numbers and its distinct
ops, so memory grows slowly with its length.

A collective ends on all ranks at one time and begins on each rank when that reaches it, so its time
on a rank includes the wait for the others. The time of a call is therefore the least over the
ranks.
"""

from __future__ import annotations

import gzip
import json
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from stagec.support.diagnostics import error
from stagec.support.json_stream import JsonStream
from stagec.support.json_values import is_list, is_object
from stagec.support.source import FileLoc
from stagec.time.measured.kernel_tables import Key
from stagec.time.measured.torch_ops import Recorded, row_of, row_of_collective

REMEDY = "give a trace of torch.profiler (export_chrome_trace), plain or gzip, copied whole"
_EVENTS = "traceEvents"
_GPU = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_LAUNCHES = frozenset(("cuda_runtime", "cuda_driver"))
_COLLECTIVE = "Collective name"
_EVERY = 1 << 14
#: Called after every `_EVERY` events with the bytes of the file read so far.
Progress = Callable[[int], None]


class Missed(NamedTuple):
    """Work on the GPU that is not in a row: its name, and why."""

    name: str
    why: str


class Group(NamedTuple):
    """A group of ranks, as the profiler names it."""

    name: str
    ranks: str
    size: int


@dataclass(slots=True)
class Reading:
    """The contents of a trace: seconds of each measured op and, by group, of each collective in the
    order in which they ran; counts of events, and seconds of work on the GPU."""

    path: Path
    rank: int | None = None
    device: str = ""
    events: int = 0
    gpu_events: int = 0
    gpu_seconds: float = 0.0
    first_left_out: bool = False
    kernels: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))
    collectives: dict[Group, list[tuple[Key, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    missed: dict[Missed, list[float]] = field(default_factory=lambda: defaultdict(list))


def read_trace(path: Path, progress: Progress | None = None) -> Reading:
    """Read a trace, plain or gzip.

    Raises `DiagnosticError` with the place of an error for a file that is not a trace, and for a
    trace in which nothing ran on a GPU; `OSError` for a file that cannot be read.
    """
    columns = _Columns()
    result = Reading(path)
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        stream: Any = gzip.GzipFile(fileobj=file) if packed else file
        try:
            _read(stream, result, columns, lambda: progress(file.tell()) if progress else None)
        except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
            raise error(f"{path}: not a complete gzip file: {problem}", remedy=REMEDY) from None
    if not columns.duration:
        raise error(
            f"{path}: none of {result.events:,} events ran on a GPU",
            remedy="profile with ProfilerActivity.CUDA, on a machine with a GPU",
        )
    _join(result, columns)
    return result


def _read(stream: BinaryIO, result: Reading, columns: _Columns, report: Callable[[], None]) -> None:
    text = JsonStream(stream, str(result.path), REMEDY)
    for name, value in text.members(_EVENTS):
        if name != _EVENTS or not text.has_list:
            _note(result, name, value)
            continue
        result.events += 1
        if result.events % _EVERY == 0:
            report()
        try:
            columns.add(value)
        except ValueError as problem:
            raise text.error(str(problem)) from None
    if not text.has_list:
        place = FileLoc(str(result.path), 1, 1)
        raise error(f"not a trace: it has no '{_EVENTS}'", place, remedy=REMEDY)


def _note(result: Reading, name: str, value: Any) -> None:
    if name == "distributedInfo" and type(rank := _object(value).get("rank")) is int:
        result.rank = rank
    if name == "deviceProperties" and is_list(value):
        names = (_object(device).get("name") for device in value)
        result.device = next((n for n in names if isinstance(n, str)), "")


class _Op(NamedTuple):
    """A distinct op: its name, its row or why it has none (None if the op is not known), and the
    group of a collective."""

    name: str
    row: Key | str | None
    group: Group | None = None


class _Columns:
    """The relevant events as columns of numbers: ops, launches and work on the GPU."""

    def __init__(self) -> None:
        self.ops: list[_Op] = []
        self._known: dict[str, int] = {}
        self._threads: dict[tuple[Any, Any], int] = {}
        self.op, self.op_thread = array("q"), array("q")
        self.op_start, self.op_end = array("d"), array("d")
        self.op_id = array("q")
        self.launch, self.launch_thread, self.launch_time = array("q"), array("q"), array("d")
        self.work, self.correlation, self.external = array("q"), array("q"), array("q")
        self.duration, self.work_start = array("d"), array("d")
        self.steps: list[float] = []  # the ends of profiler steps

    def add(self, event: Any) -> None:
        """Add an event. Raises `ValueError` for a value that is not an event."""
        if not is_object(event):
            raise ValueError("expects an event, an object")
        if event.get("ph") != "X":
            return
        category = str(event.get("cat"))
        if category == "cpu_op":
            self._add_op(event)
        elif category in _GPU:
            self._add_work(event)
        elif category in _LAUNCHES:
            self.launch.append(_whole(_args(event), "correlation"))
            self.launch_thread.append(self._thread(event))
            self.launch_time.append(_number(event, "ts"))
        elif category == "user_annotation" and str(event.get("name")).startswith("ProfilerStep#"):
            self.steps.append(_number(event, "ts") + _number(event, "dur"))

    def _thread(self, event: dict[str, Any]) -> int:
        key = (event.get("pid"), event.get("tid"))
        if not all(isinstance(part, (int, str)) for part in key):
            raise ValueError("expects 'pid' and 'tid'")
        return self._threads.setdefault(key, len(self._threads))

    def _add_op(self, event: dict[str, Any]) -> None:
        args = _args(event)
        start = _number(event, "ts")
        self.op_start.append(start)
        self.op_end.append(start + _number(event, "dur"))
        self.op_thread.append(self._thread(event))
        self.op_id.append(_whole(args, "External id"))
        self.op.append(self._distinct(event, args))

    def _distinct(self, event: dict[str, Any], args: dict[str, Any]) -> int:
        recorded = Recorded(
            _name(event),
            dims=args.get("Input Dims"),
            strides=args.get("Input Strides"),
            types=args.get("Input type"),
            values=args.get("Concrete Inputs"),
        )
        if _COLLECTIVE in args:
            return self._collective(recorded.name, args)
        return self._number_of(
            json.dumps(
                [recorded.name, recorded.dims, recorded.strides, recorded.types, recorded.values]
            ),
            lambda: _Op(recorded.name, row_of(recorded)),
        )

    def _collective(self, name: str, args: dict[str, Any]) -> int:
        kind, size = str(args[_COLLECTIVE]), args.get("Group size")
        elements = args.get("In msg nelems"), args.get("Out msg nelems")
        group = Group(
            str(args.get("Process Group Name", "")),
            str(args.get("Process Group Ranks", "")),
            size if type(size) is int else 0,
        )
        dtype = args.get("dtype")
        return self._number_of(
            json.dumps([name, kind, elements, dtype, group]),
            lambda: _Op(f"nccl {kind}", row_of_collective(kind, elements, dtype, size), group),
        )

    def _number_of(self, key: str, make: Callable[[], _Op]) -> int:
        if key not in self._known:
            self._known[key] = len(self.ops)
            self.ops.append(make())
        return self._known[key]

    def _add_work(self, event: dict[str, Any]) -> None:
        args, name = _args(event), _name(event)
        self.duration.append(_number(event, "dur"))
        self.work_start.append(_number(event, "ts"))
        self.correlation.append(_whole(args, "correlation"))
        self.external.append(_whole(args, "External id"))
        if _COLLECTIVE in args:
            self.work.append(self._collective(name, args))
        else:
            size = args.get("bytes") if event["cat"] != "kernel" else None
            key = json.dumps([name, event["cat"], size])
            self.work.append(self._number_of(key, lambda: _work(name, event["cat"], size)))


def _work(name: str, category: str, size: Any) -> _Op:
    """Work on the GPU that no known op launched. Copies and fills state their bytes."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    short = plain.partition("<")[0].partition("(")[0].strip() or name
    if category == "kernel" or type(size) is not int or size <= 0:
        return _Op(short, None)
    if category == "gpu_memset":
        return _Op(short, Key("memory", "", (size,)))
    inside = "Device -> Device" in name or "DtoD" in name
    return _Op(name, Key("memory", "", (2 * size,)) if inside else "a copy to or from the host")


def _object(value: Any) -> dict[str, Any]:
    return value if is_object(value) else {}


def _args(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args", {})
    if not is_object(args):
        raise ValueError("'args': expects an object")
    return args


def _name(event: dict[str, Any]) -> str:
    name = event.get("name")
    if not isinstance(name, str):
        raise ValueError(f"'name': expects a string, found {name!r:.40}")
    return name


def _number(event: dict[str, Any], name: str) -> float:
    value: Any = event.get(name)
    if type(value) not in (int, float) or not abs(value) < 1e18 or (name == "dur" and value < 0):
        raise ValueError(f"'{name}': expects microseconds, found {value!r:.40}")
    return float(value)


def _whole(args: dict[str, Any], name: str) -> int:
    """An integer argument of an event; -1 if it has none. Raises `ValueError`."""
    value = args.get(name, -1)
    if type(value) is not int or not abs(value) < 1 << 62:
        raise ValueError(f"'{name}': expects a whole number, found {value!r:.40}")
    return value


# -- joining ---------------------------------------------------------------------------------------


def _join(result: Reading, c: _Columns) -> None:
    """Assign work on the GPU to kernels and collectives, and to `missed` where neither fits."""
    launch = _launches(c)
    measured, inner = _under_way(c, launch)
    launched = [c.launch_time[call] if call >= 0 else np.inf for call in launch]
    first = min(c.steps) if len(c.steps) > 1 else -np.inf
    result.first_left_out = min(launched) < first <= max(launched)
    totals: dict[int, float] = {}
    for i in sorted(range(len(launch)), key=c.work_start.__getitem__):
        if result.first_left_out and launched[i] < first:
            continue
        seconds = c.duration[i] * 1e-6
        result.gpu_events += 1
        result.gpu_seconds += seconds
        work, op = c.ops[c.work[i]], measured[i]
        outer = c.ops[c.op[op]] if op >= 0 else None
        if "nccl" in work.name.lower() or "rccl" in work.name.lower():
            _add_collective(result, work, outer, seconds)
        elif work.row == "a copy to or from the host":
            result.missed[Missed(work.name, str(work.row))].append(seconds)
        elif outer is not None and outer.group is None and isinstance(outer.row, Key):
            totals[op] = totals.get(op, 0.0) + seconds
        elif isinstance(work.row, Key):
            result.kernels[work.row].append(seconds)
        elif outer is not None and isinstance(outer.row, str):
            result.missed[Missed(outer.name, outer.row)].append(seconds)
        else:
            result.missed[_unknown(c, inner[i], launch[i], work)].append(seconds)
    for op, seconds in totals.items():
        row = c.ops[c.op[op]].row
        if isinstance(row, Key) and seconds > 0:
            result.kernels[row].append(seconds)


def _add_collective(result: Reading, work: _Op, outer: _Op | None, seconds: float) -> None:
    said = work if work.group is not None or outer is None else outer
    if said.group is not None and isinstance(said.row, Key):
        result.collectives[said.group].append((said.row, seconds))
        return
    known = said.group is not None and isinstance(said.row, str)
    why = str(said.row) if known else "its sizes are not recorded"
    result.missed[Missed(said.name, why)].append(seconds)


def _unknown(c: _Columns, op: int, launch: int, work: _Op) -> Missed:
    if op >= 0:
        return Missed(f"{c.ops[c.op[op]].name}: {work.name}", "no op that is measured")
    return Missed(work.name, "no op launched it" if launch >= 0 else "its launch is not recorded")


def _launches(c: _Columns) -> list[int]:
    """For each piece of work the call that launched it; -1 if the trace does not have it."""
    known, wanted = np.array(c.launch, dtype=np.int64), np.array(c.correlation, dtype=np.int64)
    if not len(known):
        return [-1] * len(wanted)
    order = np.argsort(known, kind="stable")
    place = np.clip(np.searchsorted(known, wanted, sorter=order, side="right") - 1, 0, None)
    rows = order[place]
    result: list[int] = np.where((known[rows] == wanted) & (wanted > 0), rows, -1).tolist()
    return result


def _under_way(c: _Columns, launch: list[int]) -> tuple[list[int], list[int]]:
    """For each piece of work the outermost known op and the innermost op that were active when it
    was launched; -1 where there is none. Where no op was active, the external id may name one."""
    outer, inner = [-1] * len(launch), [-1] * len(launch)
    threads = np.array(c.op_thread, dtype=np.int64)
    starts, ends = np.array(c.op_start), np.array(c.op_end)
    called: dict[int, list[int]] = defaultdict(list)
    for work, call in enumerate(launch):
        if call >= 0:
            called[c.launch_thread[call]].append(work)
    for thread, works in called.items():
        ops = np.flatnonzero(threads == thread)
        ops = ops[np.lexsort((-ends[ops], starts[ops]))]
        works.sort(key=lambda work: c.launch_time[launch[work]])
        moments = [c.launch_time[launch[work]] for work in works]
        for work, stack in zip(works, _stacks(ops.tolist(), c, moments), strict=True):
            inner[work] = stack[-1] if stack else -1
            outer[work] = next((op for op in stack if c.ops[c.op[op]].row is not None), -1)
    named = {number: op for op, number in enumerate(c.op_id) if number > 0}
    for work, (external, correlation) in enumerate(zip(c.external, c.correlation, strict=True)):
        if inner[work] < 0 and external != correlation and external in named:
            inner[work] = named[external]
            known = c.ops[c.op[inner[work]]].row is not None
            outer[work] = inner[work] if known else -1
    return outer, inner


def _stacks(ops: list[int], c: _Columns, moments: list[float]) -> Iterator[list[int]]:
    """The ops of a thread that are active at each moment, the outermost first. `ops` are in the
    order of their starts, the longer first; `moments` are sorted."""
    stack: list[int] = []
    at = 0
    for moment in moments:
        while at < len(ops) and c.op_start[ops[at]] <= moment:
            while stack and c.op_end[stack[-1]] < c.op_start[ops[at]]:
                stack.pop()
            stack.append(ops[at])
            at += 1
        while stack and c.op_end[stack[-1]] < moment:
            stack.pop()
        yield stack


Row = tuple[Key, float, int]


def rows(readings: Sequence[Reading]) -> list[Row]:
    """The rows of a table: kernel or collective, the median of its seconds, and their number."""
    together: dict[Key, list[float]] = defaultdict(list)
    for reading in readings:
        for key, times in reading.kernels.items():
            together[key] += times
    for key, seconds in _collectives(readings):
        together[key].append(seconds)
    medians = [(key, float(np.median(times)), len(times)) for key, times in together.items()]
    return [row for row in medians if row[1] > 0]


def _collectives(readings: Sequence[Reading]) -> Iterator[tuple[Key, float]]:
    """Each call of a group, once, with the least time over the ranks that were traced."""
    calls: dict[tuple[int, Group], list[list[tuple[Key, float]]]] = defaultdict(list)
    seen: dict[int | None, int] = defaultdict(int)
    for number, reading in enumerate(readings):
        # several traces of one rank were recorded one after the other
        rank = reading.rank if reading.rank is not None else -1 - number
        for group, some in reading.collectives.items():
            calls[seen[rank], group].append(some)
        seen[rank] += 1
    for of_ranks in calls.values():
        alike = len({tuple(key for key, _ in some) for some in of_ranks}) == 1
        if alike:
            for same in zip(*of_ranks, strict=True):
                yield same[0][0], min(seconds for _, seconds in same)
        else:
            yield from (call for some in of_ranks for call in some)
