"""The family of traces by the functions behind the commands: a few nodes of every kind in every
form, thousands of inputs a second instead of the tens of `traces`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from zlib import crc32

from stagec.check.compare import compare
from stagec.check.traces import check_directory, check_trace
from stagec.formats.chakra.nodes import (
    AttrValue,
    NodeKind,
    TraceError,
    TraceNode,
    encode_metadata,
    encode_node,
    json_of_record,
    prefixed,
)
from stagec.formats.chakra.record_files import read_all_records, read_trace
from stagec.formats.chakra.show import totals
from stagec.formats.perfetto.encode import perfetto_trace
from stagec.formats.timeline.chrome import chrome_trace
from stagec.formats.timeline.kineto import KinetoWriter
from stagec.formats.timeline.recorded import recorded_timeline
from stagec.support.diagnostics import DiagnosticError
from tools.fuzzing.base import Family, FaultError, quietly, shown
from tools.fuzzing.mutate import mutate_bytes, mutate_json

GROUPS = {1: [0, 1], 2: [0, 1]}
_GZIP = b"\x1f\x8b"
_GRAPH = b'{"workload_graph"'
#: Between the records of a text.
_BETWEEN = b"}{"
#: Most bytes of what is made of a node.
_BYTES = 1 << 16


def sample(rank: int) -> list[TraceNode]:
    """A node of each kind, with durations; what rank 0 sends, rank 1 receives."""
    device: dict[str, AttrValue] = {"is_cpu_op": False}
    size: dict[str, AttrValue] = {**device, "tensor_size": 6}
    comm: dict[str, AttrValue] = {**device, "comm_size": 8}
    tag: dict[str, AttrValue] = {**comm, "comm_tag": 3}
    other = 1 - rank
    n, k = TraceNode, NodeKind
    return [
        n(1, "forward/mb0/a", k.COMP, (), (), {**size, "num_ops": 5, "alloc_bytes": 9}, 2),
        n(2, "b", k.COLL, (1,), (), {**comm, "comm_type": 2, "pg_name": "1"}, 4),
        n(3, "c", k.SEND, (), (2,), {**tag, "comm_dst": other}, 1),
        n(4, "d", k.RECV, (), (3,), {**tag, "comm_src": other}, 1),
        n(5, "é", k.MEM_STORE, (4,), (), size, 1),
        n(6, "f", k.MEM_LOAD, (5,), (), {**size, "list": (1, 2), "b": b"\xff"}, 1),
        n(7, "g", k.COMP, (6,), (1, 2), {"is_cpu_op": True, "tid": 3, "x": 0.5}, 1),
        n(8, "h", k.COLL, (7,), (), {**comm, "comm_type": 0, "pg_name": "2"}, 4),
    ]


def _binary(nodes: Iterable[TraceNode]) -> bytes:
    return encode_metadata("0.0.4") + b"".join(map(encode_node, nodes))


@dataclass(frozen=True)
class _Place:
    """A folder with the groups file and the trace of rank 1, which stay; `path` is the input."""

    path: Path
    seed: Path


@lru_cache(maxsize=1)
def _place(folder: Path) -> _Place:
    inside, seed = folder / "records", folder / "seed"
    for each in (inside, seed):
        each.mkdir(exist_ok=True)
        (each / "a.json").write_text(json.dumps(GROUPS))
    (inside / "a.1.et").write_bytes(_binary(sample(1)))
    (seed / "a.0.et").write_bytes(_binary(sample(0)))
    return _Place(inside / "a.0.et", seed / "a.0.et")


@lru_cache(maxsize=1)
def _seeds() -> list[bytes]:
    """The trace in every form: protobuf, JSON, the JSON of Chakra's feeder, gzip."""
    nodes = sample(0)
    records = enumerate(_cut(_binary(nodes)))
    text = "".join(json_of_record(r, metadata=not i) for i, r in records).encode()
    plain = [{k: v for k, v in n.attrs.items() if type(v) in (bool, int, str)} for n in nodes]
    fed = [
        {"Id": n.id, "Name": n.name, "NodeType": n.kind, "data_deps": n.data_deps, **attrs}
        for n, attrs in zip(nodes, plain, strict=True)
    ]
    started = [
        TraceNode(n.id, n.name, n.kind, n.data_deps, n.ctrl_deps, n.attrs, 1, {}, 5 * n.id)
        for n in nodes
    ]
    graph = json.dumps({"workload_graph": fed}).encode()
    forms = [_binary(nodes), _binary(started), text, graph]
    return [*forms, *(gzip.compress(each, 1, mtime=0) for each in forms)]


def _mutate(chance: Random, seed: bytes, seeds: Sequence[bytes]) -> bytes:
    """Bytes, records, JSON, and what is packed: mostly so that what comes behind the form is
    reached."""
    if seed.startswith(_GZIP) and chance.random() < 0.9:
        return gzip.compress(_mutate(chance, gzip.decompress(seed), seeds), 1, mtime=0)
    if chance.random() < 0.3 or seed.startswith(_GZIP):
        return mutate_bytes(chance, seed)
    if seed.startswith(_GRAPH):
        return mutate_json(chance, seed)
    if seed.startswith(b"{"):
        parts = seed.split(_BETWEEN)
        at = chance.randrange(len(parts))
        whole = b"{" * (at > 0) + parts[at] + b"}" * (at < len(parts) - 1)
        changed = mutate_json(chance, whole)
        parts[at] = changed[at > 0 : len(changed) - (at < len(parts) - 1)]
        return _BETWEEN.join(parts)
    return _other_records(chance, seed)


def _cut(data: bytes) -> list[bytes]:
    """The records of protobuf, each behind the varint of its length."""
    cut: list[bytes] = []
    at = 0
    while at < len(data):
        length = shift = 0
        while True:
            byte, at = data[at], at + 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        cut.append(data[at : at + length])
        at += length
    return cut


def _other_records(chance: Random, seed: bytes) -> bytes:
    """Records of which one is dropped, repeated, moved, or changed behind a right length."""
    records = _cut(seed)
    which = chance.randrange(len(records))
    match chance.randrange(5):
        case 0:
            del records[which]
        case 1:
            records.insert(chance.randrange(len(records) + 1), records[which])
        case _:
            records[which] = mutate_bytes(chance, records[which])
    return b"".join(map(prefixed, records))


# -- what is done with an input --------------------------------------------------------------------


def _run(data: bytes, folder: Path) -> None:
    """What is no trace is refused, by one of the commands in turn; a trace is taken by two of them:
    shown, checked, compared, put on a timeline, and every third is converted there and back."""
    place = _place(folder)
    place.path.write_bytes(data)
    turn = crc32(data)
    try:
        nodes = [*read_trace(place.path)]
    except TraceError as problem:
        str(problem)
        _refused(place, _CONSUMERS[turn % len(_CONSUMERS)])
        return
    for which in (turn, turn + 1 + turn // len(_CONSUMERS) % (len(_CONSUMERS) - 1)):
        quietly(partial(_CONSUMERS[which % len(_CONSUMERS)], place))
    if turn % 3 == 0:
        _converted(place, nodes)


def _refused(place: _Place, consumer: Callable[[_Place], object]) -> None:
    try:
        report = consumer(place)
    except TraceError as problem:
        str(problem)
    except DiagnosticError as problem:
        shown(problem)
    else:
        if report is not True:
            raise FaultError(f"{consumer.__name__} takes what is no trace")


def _totals(place: _Place) -> None:
    totals(place.path)


def _check_alone(place: _Place) -> bool:
    report = check_trace(place.path)
    for finding in (*report.errors, *report.warnings):
        str(finding)
    return bool(report.errors)


def _check_both(place: _Place) -> bool:
    report = check_directory(place.path.parent)
    for finding in (*report.errors, *report.warnings):
        str(finding)
    return bool(report.errors)


def _compare(place: _Place) -> None:
    compare(place.path, place.seed)


def _timelines(place: _Place) -> None:
    timeline = recorded_timeline({0: place.path}, GROUPS)
    members = {str(number): ranks for number, ranks in GROUPS.items()}
    for parts in (
        KinetoWriter(timeline, members).rank(0),
        chrome_trace(timeline),
        perfetto_trace(timeline),
    ):
        _bounded(parts)


def _bounded(parts: Iterable[bytes]) -> None:
    """What is made of a small trace is small."""
    size = 0
    for part in parts:
        size += len(part)
        if size > _BYTES:
            raise FaultError("a timeline of a few nodes is large")


_CONSUMERS = (_totals, _check_alone, _check_both, _compare, _timelines)


def _converted(place: _Place, nodes: Sequence[TraceNode]) -> None:
    """As protobuf and as JSON it is the same trace."""
    records = [record for _, record in read_all_records(place.path)]
    texts = (json_of_record(record, metadata=not i) for i, record in enumerate(records))
    for data in (b"".join(map(prefixed, records)), "".join(texts).encode()):
        place.path.write_bytes(data)
        if repr([*read_trace(place.path)]) != repr(nodes):
            raise FaultError("converted, it is another trace")


RECORDS = (Family("records", _seeds, _mutate, _run),)
