"""The records of Chakra: converts nodes to and from bytes, and records to and from the JSON of
Chakra's own tools.

Only this module uses protobuf; everything malformed raises a `TraceError`.
`stagec.formats.chakra.record_files` reads the files that consist of records.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import cast

from google.protobuf.json_format import MessageToJson, ParseDict, ParseError
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from stagec.formats.chakra.et_def_pb2 import AttributeProto, GlobalMetadata, IOInfo, Node

AttrValue = int | float | str | bool | bytes | tuple[int | float | str | bool | bytes, ...]

MAX_RECORD_BYTES = 16 << 20
"""The longest record that is read: it bounds the memory that a malicious length prefix can
claim."""

ATTR_TYPES: Mapping[str, str] = {
    "is_cpu_op": "bool",
    "num_ops": "int64",
    "tensor_size": "uint64",
    "alloc_bytes": "uint64",
    "free_bytes": "uint64",
    "comm_type": "int64",
    "comm_size": "int64",
    "pg_name": "string",
    "comm_tag": "int32",
    "comm_src": "int32",
    "comm_dst": "int32",
    "stream": "int64",
    "dtype": "string",
    "inputs": "string_list",
    "outputs": "string_list",
}
"""The exact type of each attribute that consumers read; they read other integer types as 0."""

#: The most characters of a name in a message.
_LONGEST = 100
_LAST_NODE_FIELD = 10
_LAST_ATTR_FIELD = 32


class _Labelled(IntEnum):
    @property
    def label(self) -> str:
        """The kind in lower case: `mem_load`, `all_reduce`."""
        return self.name.lower()


class NodeKind(_Labelled):
    """The kind of a node."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    SEND = 5
    RECV = 6
    COLL = 7


class CollKind(_Labelled):
    """The values of the attribute `comm_type`."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


class TraceError(Exception):
    """A file is not a readable trace. `byte_offset` is the start of the bad record; for text files,
    `place` is `line 3, column 1` instead."""

    def __init__(self, path: Path, byte_offset: int, message: str, place: str = "") -> None:
        self.where = place or f"byte {byte_offset}"
        super().__init__(f"{path}: {self.where}: {message}")
        self.path = path
        self.byte_offset = byte_offset
        self.message = message


@dataclass(frozen=True, slots=True)
class NodeOperands:
    """The operands or results of a node as profilers write them: lists as strings, with shapes such
    as `[[4, 8]]` and types such as `['Tensor(float)']`."""

    values: str = ""
    shapes: str = ""
    types: str = ""


@dataclass(frozen=True, slots=True)
class TraceNode:
    """One node of one rank.

    `kind` is a `NodeKind`, or any other integer in a file. Dependencies are ids of nodes of the
    same rank. `attr_types` has the protobuf types of attributes (`int64`, `string_list`); the
    reader sets it, the writer needs it only for types that differ from `ATTR_TYPES`.
    """

    id: int
    name: str
    kind: int
    data_deps: tuple[int, ...] = ()
    ctrl_deps: tuple[int, ...] = ()
    attrs: Mapping[str, AttrValue] = field(default_factory=dict[str, AttrValue])
    duration_micros: int = 0
    attr_types: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    start_micros: int = 0
    inputs: NodeOperands | None = None
    outputs: NodeOperands | None = None

    @property
    def label(self) -> str:
        """The name of the node in messages: `node 7 'layer0.mlp'`. Long names, such as those of
        kernels with template arguments, are truncated."""
        name = self.name if len(self.name) <= _LONGEST else f"{self.name[: _LONGEST - 3]}..."
        return f"node {self.id} {name!r}"


def encode_metadata(version: str) -> bytes:
    """The first record of a file, with its length prefix."""
    return prefixed(GlobalMetadata(version=version).SerializeToString(deterministic=True))


def encode_node(node: TraceNode) -> bytes:
    """The record of a node, with its length prefix.

    Raises ValueError for a value that its protobuf type cannot hold.
    """
    return prefixed(record_of(node))


def record_of(node: TraceNode) -> bytes:
    """The record of a node. Raises ValueError as `encode_node` does."""
    message = Node(id=node.id, name=node.name, duration_micros=node.duration_micros)
    if node.start_micros:
        message.start_time_micros = node.start_micros
    for side, operands in ((message.inputs, node.inputs), (message.outputs, node.outputs)):
        if operands is not None:
            side.values, side.shapes, side.types = operands.values, operands.shapes, operands.types
    message.type = node.kind  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    message.ctrl_deps.extend(node.ctrl_deps)
    message.data_deps.extend(node.data_deps)
    for name, value in node.attrs.items():
        type_name = node.attr_types.get(name) or ATTR_TYPES.get(name) or _default_type(value)
        try:
            _set_value(message.attr.add(name=name), type_name, value)
        except (AttributeError, TypeError, ValueError) as error:
            problem = f"{node.label}: attribute {name!r}: {value!r} does not fit {type_name}"
            raise ValueError(problem) from error
    return message.SerializeToString(deterministic=True)


def decode_node(path: Path, offset: int, record: bytes) -> TraceNode:
    """The node of one record of `read_records`.

    Raises TraceError at `offset` of `path` for bytes that are not a node.
    """
    try:
        message = Node.FromString(record)
    except DecodeError as error:
        raise TraceError(path, offset, f"expected a Chakra node: {error}") from error
    if _has_wrong_type(message, _LAST_NODE_FIELD):
        raise TraceError(path, offset, "expected a Chakra node, found a field of another type")
    attrs: dict[str, AttrValue] = {}
    types: dict[str, str] = {}
    for attr in message.attr:
        member = attr.WhichOneof("value")
        if member is not None:
            attrs[attr.name] = _value(attr, member)
            types[attr.name] = member.removesuffix("_val")
        elif _has_wrong_type(attr, _LAST_ATTR_FIELD):
            problem = f"attribute {attr.name!r} holds a value of another type than its field"
            raise TraceError(path, offset, problem)
    return TraceNode(
        id=message.id,
        name=message.name,
        kind=int(message.type),
        data_deps=tuple(message.data_deps),
        ctrl_deps=tuple(message.ctrl_deps),
        attrs=attrs,
        duration_micros=message.duration_micros,
        attr_types=types,
        start_micros=message.start_time_micros,
        inputs=_operands(message.inputs) if message.HasField("inputs") else None,
        outputs=_operands(message.outputs) if message.HasField("outputs") else None,
    )


def _operands(side: IOInfo) -> NodeOperands:
    return NodeOperands(side.values, side.shapes, side.types)


def verify_metadata(path: Path, offset: int, record: bytes) -> None:
    """Raises TraceError if a record is not the metadata that begins a file."""
    if _is_node(record):
        problem = "expected a GlobalMetadata record, found a node; readers skip the first record"
        raise TraceError(path, offset, problem)
    try:
        GlobalMetadata.FromString(record)
    except DecodeError as error:
        raise TraceError(path, offset, f"expected a GlobalMetadata record: {error}") from error


def _is_node(record: bytes) -> bool:
    try:
        return int(Node.FromString(record).type) != NodeKind.INVALID
    except DecodeError:
        return False


def json_of_record(record: bytes, *, metadata: bool = False) -> str:
    """A record as the JSON that protobuf and `chakra_jsonizer` write. Raises ValueError for bytes
    that are not such a record."""
    try:
        return MessageToJson((GlobalMetadata if metadata else Node).FromString(record))
    except DecodeError as error:
        raise ValueError(str(error)) from error


def record_of_json(value: Mapping[str, object], *, metadata: bool = False) -> bytes:
    """The inverse of `json_of_record`. Fields of newer schemas are ignored. Raises ValueError for
    JSON that is not a node, or not metadata."""
    message = GlobalMetadata() if metadata else Node()
    fields = message.DESCRIPTOR.fields
    if value and not any(f.name in value or f.json_name in value for f in fields):
        raise ValueError(f"it has none of {', '.join(f.name for f in fields)}")
    try:
        ParseDict(cast("dict[str, object]", value), message, ignore_unknown_fields=True)
        return message.SerializeToString(deterministic=True)
    except _NOT_JSON as error:
        raise ValueError(f"{error}") from error


#: Exceptions of protobuf for JSON of another structure; SystemError is for half of a surrogate
#: pair.
_NOT_JSON = ParseError, AttributeError, KeyError, RecursionError, SystemError, TypeError


def prefixed(record: bytes) -> bytes:
    """A record after the varint of its length, as in files."""
    return varint(len(record)) + record


def varint(number: int) -> bytes:
    """The shortest protobuf varint of an unsigned integer."""
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


#: The protobuf types of attributes that are not in `ATTR_TYPES`.
_TYPES = {bool: "bool", int: "int64", float: "double", str: "string", bytes: "bytes"}


def _default_type(value: AttrValue) -> str:
    if isinstance(value, tuple):
        return f"{_default_type(value[0]) if value else 'int64'}_list"
    return next(_TYPES[kind] for kind in type(value).__mro__ if kind in _TYPES)


def _set_value(attr: AttributeProto, type_name: str, value: AttrValue) -> None:
    if not isinstance(value, tuple):
        setattr(attr, f"{type_name}_val", value)
        return
    values = getattr(attr, type_name)
    values.SetInParent()
    values.values.extend(value)


def _value(attr: AttributeProto, member: str) -> AttrValue:
    value: object = getattr(attr, member)
    if member.endswith("_list"):
        return tuple(cast("Iterable[int | float | str]", getattr(value, "values")))  # noqa: B009
    return cast("int | float | str", value)


def _has_wrong_type(message: Message, last_field: int) -> bool:
    """Whether a field of the schema has a wrong wire type: protobuf treats it as unknown.

    Fields beyond the schema belong to a newer one, and are ignored.
    """
    unknown = UnknownFieldSet(message)
    return any(unknown[index].field_number <= last_field for index in range(len(unknown)))
