"""Reads files of Chakra traces from any tool as sequences of records.

    protobuf       a metadata record and the nodes, each after the varint of its length
    JSON           the same records, one after the other (`chakra_jsonizer`), or one object
                   with a list `workload_graph` (Chakra's feeder)
    .gz            any of these

JSON records are converted to protobuf, so the rest of the reader handles only one kind. Memory is
bounded by the longest record; everything malformed raises a `TraceError`.
"""

import gzip
import io
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from stagec.formats.chakra.nodes import (
    MAX_RECORD_BYTES,
    NodeKind,
    TraceError,
    TraceNode,
    decode_node,
    record_of,
    record_of_json,
    verify_metadata,
)
from stagec.support.diagnostics import DiagnosticError
from stagec.support.json_stream import JsonStream
from stagec.support.json_values import is_object
from stagec.support.source import FileLoc

MAX_NODES = 8_000_000
"""The most nodes of a trace that is read: a node may take only three bytes of a file, fewer with
gzip, but hundreds of bytes in memory."""

_CHUNK_BYTES = 1 << 20
_MAX_VARINT_BYTES = 5
_GZIP = b"\x1f\x8b"
#: The beginning of a JSON file. A protobuf file does not begin with it: after `{` (a record of 123
#: bytes) and a line break (the key of the version), `"` would be the length of the version, 34.
_TEXT = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{\s*[\"}]")
_GRAPH = "workload_graph"

Record = tuple[int, bytes]


def read_trace(path: Path) -> Iterator[TraceNode]:
    """The nodes of a file in file order.

    Raises TraceError for anything that is not a well-formed trace.
    """
    for offset, record in read_records(path):
        yield decode_node(path, offset, record)


def read_records(path: Path) -> Iterator[Record]:
    """The byte offset and the undecoded bytes of each node record; the metadata is verified and
    skipped.

    Raises TraceError if the file cannot be opened or split into records.
    """
    return _nodes_only(path, read_all_records(path))


def read_all_records(path: Path) -> Iterator[Record]:
    """As `read_records`, with the metadata as the first record. Offsets in JSON files are 0."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise TraceError(path, 0, "expected a regular file, found a directory or a device")
        with path.open("rb") as file:
            yield from _records(path, file)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise TraceError(path, 0, f"cannot be read: {error}") from error


def split_records(path: Path, data: bytes) -> Iterator[Record]:
    """As `read_records`, for the content of a protobuf file; `path` is its name in errors."""
    return _nodes_only(path, _binary(path, io.BytesIO(data)))


def _nodes_only(path: Path, records: Iterator[Record]) -> Iterator[Record]:
    next(records)
    for count, record in enumerate(records):
        if count >= MAX_NODES:
            raise TraceError(path, record[0], f"expected a trace of at most {MAX_NODES:,} nodes")
        yield record


def _records(path: Path, file: io.BufferedReader) -> Iterator[Record]:
    if file.peek(len(_GZIP))[: len(_GZIP)] != _GZIP:
        yield from _text_or_binary(path, file)
        return
    unpacked = gzip.GzipFile(fileobj=file)
    try:
        yield from _text_or_binary(path, io.BufferedReader(cast("io.RawIOBase", unpacked)))
    except (EOFError, zlib.error) as error:
        raise TraceError(path, 0, f"expected a complete gzip file: {error}") from error


def _text_or_binary(path: Path, file: io.BufferedReader) -> Iterator[Record]:
    head = file.peek(1 << 12)
    if not _TEXT.match(head):
        return _binary(path, file)
    return _text(path, file, _graph if f'"{_GRAPH}"'.encode() in head else _values)


# -- protobuf --------------------------------------------------------------------------------------


def _binary(path: Path, file: BinaryIO) -> Iterator[Record]:
    records = _split(path, file)
    first = next(records, None)
    if first is None:
        raise TraceError(path, 0, "expected a GlobalMetadata record, found an empty file")
    verify_metadata(path, *first)
    yield first
    for record in records:
        if not (record[1] or first[1]):  # as in a file of zeros
            raise TraceError(path, record[0], "expected a node, found an empty record")
        yield record


def _split(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    buffer, start, position = b"", 0, 0
    while True:
        if len(buffer) - position < _MAX_VARINT_BYTES:
            start, buffer, position = start + position, buffer[position:], 0
            buffer += file.read(_CHUNK_BYTES)
            if not buffer:
                return
        offset = start + position
        length, position = _length(path, offset, buffer, position)
        missing = length - (len(buffer) - position)
        if missing > 0:
            start, buffer, position = start + position, buffer[position:], 0
            buffer += file.read(max(missing, _CHUNK_BYTES))
            if len(buffer) < length:
                problem = f"expected a record of {length} bytes, found {len(buffer)}; truncated"
                raise TraceError(path, offset, problem)
        yield offset, buffer[position : position + length]
        position += length


def _length(path: Path, offset: int, buffer: bytes, position: int) -> tuple[int, int]:
    """The length prefix at `position`, and the position after it."""
    length = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(buffer):
            raise TraceError(path, offset, "the file ends within the length of a record")
        byte = buffer[position + index]
        length |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            break
    else:
        raise TraceError(path, offset, "expected a record length of at most 5 bytes")
    if length > MAX_RECORD_BYTES:
        problem = f"expected a record of at most {MAX_RECORD_BYTES} bytes, found {length}"
        raise TraceError(path, offset, problem)
    return length, position + index + 1


# -- texts -----------------------------------------------------------------------------------------

#: Reads the records of a JSON file, the metadata first.
_Reader = Callable[[JsonStream], Iterator[bytes]]


def _text(path: Path, file: BinaryIO, reader: _Reader) -> Iterator[Record]:
    stream = JsonStream(file, str(path), "")
    try:
        for record in reader(stream):
            if len(record) > MAX_RECORD_BYTES:
                raise stream.error(f"expected a record of at most {MAX_RECORD_BYTES} bytes")
            yield 0, record
    except DiagnosticError as problem:
        first = problem.diagnostics[0]
        place = ""
        if isinstance(first.loc, FileLoc):
            place = f"line {first.loc.line}, column {first.loc.col}"
        raise TraceError(path, 0, first.message, place) from None


#: Descriptions of the JSON files of other tools, by a key in them.
_OTHERS = {"nodes": "a host trace", "traceEvents": "a profile"}


def _values(stream: JsonStream) -> Iterator[bytes]:
    """The records in a sequence of protobuf's JSON objects."""
    first = True
    for value in stream.values():
        if not is_object(value):
            raise stream.error("expected an object for each record")
        other = next((what for key, what in _OTHERS.items() if first and key in value), None)
        if other is not None:
            raise stream.error(
                f"expected a Chakra trace, found {other} of PyTorch: chakra_trace_link and "
                "chakra_converter make one of both"
            )
        if first and "schema" in value and not {"version", "attr"} & value.keys():
            raise stream.error("expected a trace, found an answer of --json, as 'diff -u' compares")
        try:
            yield record_of_json(value, metadata=first)
        except ValueError as problem:
            what = "the metadata of a trace" if first else "a Chakra node"
            raise stream.error(f"expected {what}: {problem}") from None
        first = False


def _graph(stream: JsonStream) -> Iterator[bytes]:
    """The records of nodes in the JSON of Chakra's feeder."""
    yield b""  # metadata without a version
    for name, value in stream.members(_GRAPH):
        if name != _GRAPH:
            continue
        try:
            yield record_of(_fed(value))
        except (OverflowError, TypeError, ValueError) as problem:
            raise stream.error(f"expected a Chakra node: {problem}") from None
    if not stream.has_list:
        raise stream.error(f"expects a list '{_GRAPH}'")


#: The types of attributes that only the feeder has.
_FED_TYPES = {"comm_priority": "int32"}


def _fed(value: object) -> TraceNode:
    """The node of a JSON object with the feeder's names; other members become attributes. Raises
    TypeError and ValueError for an invalid one."""
    if not is_object(value):
        raise TypeError("it is not an object")
    given = dict(value)
    number, kind = given.pop("Id", None), given.pop("NodeType", int(NodeKind.INVALID))
    name, runtime = given.pop("Name", ""), given.pop("runtime", 0)
    deps = [given.pop(f"{which}_deps", given.pop(f"{which}Deps", [])) for which in ("data", "ctrl")]
    for each in (number, kind, runtime):
        if type(each) is not int or each < 0:
            raise ValueError("'Id', 'NodeType' and 'runtime' are integers")
    if not all(isinstance(d, list) for d in deps):
        raise TypeError("'data_deps' and 'ctrl_deps' are lists of integers")
    data, control = map(tuple, deps)
    attrs = {k: v for k, v in given.items() if isinstance(v, bool | int | float | str)}
    return TraceNode(number, name, kind, data, control, attrs, runtime, _FED_TYPES)
