"""The Chakra format: our schema and our bytes against an independent copy, and reading back."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chakra.schema.protobuf import et_def_pb2 as public_untyped
from google.protobuf import descriptor_pb2

from stagec.formats.chakra import et_def_pb2 as ours
from stagec.formats.chakra.limits import exceeded_limits
from stagec.formats.chakra.nodes import (
    ATTR_TYPES,
    MAX_RECORD_BYTES,
    AttrValue,
    CollKind,
    NodeKind,
    NodeOperands,
    TraceError,
    TraceNode,
    encode_metadata,
    encode_node,
)
from stagec.formats.chakra.record_files import read_trace
from stagec.formats.chakra.show import Row, describe, totals

public: Any = public_untyped
ROOT = Path(__file__).parents[2]

COMP = TraceNode(
    1,
    "layer0.mlp",
    NodeKind.COMP,
    attrs={
        "is_cpu_op": False,
        "num_ops": 1 << 40,
        "tensor_size": (1 << 64) - 1,
        "stage": 3,
        "alloc_bytes": 1 << 63,
        "free_bytes": 1,
    },
    duration_micros=17,
)
COLL = TraceNode(
    2,
    "layer0.ar",
    NodeKind.COLL,
    data_deps=(1,),
    attrs={"is_cpu_op": False, "comm_type": 0, "comm_size": 4096, "pg_name": "12", "op": "add"},
)
SEND = TraceNode(
    3,
    "p2p",
    NodeKind.SEND,
    data_deps=(1, 2),
    ctrl_deps=(2,),
    attrs={"is_cpu_op": False, "comm_size": 64, "comm_tag": 0, "comm_src": 0, "comm_dst": 5},
)
RECV = TraceNode(
    4,
    "back",
    NodeKind.RECV,
    attrs={"is_cpu_op": False, "comm_size": 64, "comm_tag": 9, "comm_src": 5, "comm_dst": 0},
)
#: Attributes of --tensor-names and of chakra{io=yes}.
_OPTIONAL = ("inputs", "outputs", "stream", "dtype")
NODES = (COMP, COLL, SEND, RECV)


def write(path: Path, *records: bytes) -> Path:
    path.write_bytes(b"".join(records))
    return path


def prefixed(body: bytes) -> bytes:
    """A record as the format has it, for bodies below 128 bytes."""
    assert len(body) < 0x80
    return bytes([len(body)]) + body


def refused(path: Path) -> TraceError:
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert caught.value.path == path
    return caught.value


# ---------------------------------------------------------------- the schema


def schema_of(module: Any) -> descriptor_pb2.FileDescriptorProto:
    """The descriptor of a module without what may differ: file name and proto package."""
    proto = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(proto)
    package = proto.package
    proto.name, proto.package = "", ""
    for message in proto.message_type:
        for member in message.field:
            member.type_name = member.type_name.removeprefix(f".{package}")
    return proto


def test_schema_equals_the_public_one() -> None:
    assert len(schema_of(ours).message_type) == 20
    assert schema_of(ours) == schema_of(public)


def test_schema_keeps_out_of_the_way_of_another_copy() -> None:
    assert ours.DESCRIPTOR.name != public.DESCRIPTOR.name
    assert ours.DESCRIPTOR.package != public.DESCRIPTOR.package


@pytest.mark.parametrize(
    "first", ["stagec.formats.chakra.et_def_pb2", "chakra.schema.protobuf.et_def_pb2"]
)
def test_both_schemas_load_in_one_process_in_either_order(first: str) -> None:
    code = f"import {first}, stagec.formats.chakra.et_def_pb2, chakra.schema.protobuf.et_def_pb2"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_generated_schema_is_that_of_the_proto_file(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    out = tmp_path / "set.bin"
    args = ["-I.", f"--descriptor_set_out={out}", "stagec/formats/chakra/et_def.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *args], cwd=ROOT, check=True)
    compiled = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]
    for message in compiled.message_type:
        for member in message.field:
            member.ClearField("json_name")
    generated = descriptor_pb2.FileDescriptorProto()
    ours.DESCRIPTOR.CopyToProto(generated)
    assert compiled == generated


def test_enums_are_those_of_the_schema() -> None:
    def numbers(enum: Any) -> list[int]:
        return [value.number for value in enum.DESCRIPTOR.values]

    assert [*NodeKind] == numbers(public.NodeType)
    schema_names = [value.name for value in public.CollectiveCommType.DESCRIPTOR.values]
    assert [kind.name for kind in CollKind] == schema_names
    assert [*CollKind] == numbers(public.CollectiveCommType)
    assert CollKind.REDUCE_SCATTER.label == "reduce_scatter"
    assert NodeKind.MEM_LOAD.label == "mem_load"


# ---------------------------------------------------------------- writing


def public_records(data: bytes) -> list[bytes]:
    """Cut a file into records by the decoder of protobuf itself."""
    from google.protobuf.internal import decoder

    decode_length: Any = getattr(decoder, "_DecodeVarint32")  # noqa: B009
    records: list[bytes] = []
    position = 0
    while position < len(data):
        length, position = decode_length(data, position)
        records.append(data[position : position + length])
        position += length
    return records


def test_independent_reader_sees_what_was_written() -> None:
    long = TraceNode(1 << 63, "x" * 70_000, NodeKind.COMP, attrs={"note": "é"})
    data = encode_metadata("1.2") + b"".join(encode_node(node) for node in (*NODES, long))
    metadata, *records = public_records(data)
    assert public.GlobalMetadata.FromString(metadata).version == "1.2"
    for node, record in zip((*NODES, long), records, strict=True):
        seen = public.Node.FromString(record)
        assert (seen.id, seen.name, seen.type) == (node.id, node.name, node.kind)
        assert (*seen.data_deps,) == node.data_deps
        assert (*seen.ctrl_deps,) == node.ctrl_deps
        assert seen.duration_micros == node.duration_micros
        values = {a.name: getattr(a, a.WhichOneof("value")) for a in seen.attr}
        assert values == dict(node.attrs)
        assert [a.name for a in seen.attr] == [*node.attrs]


def test_attributes_have_the_types_that_readers_ask_for() -> None:
    expected = {
        "is_cpu_op": "bool_val",
        "num_ops": "int64_val",
        "tensor_size": "uint64_val",
        "alloc_bytes": "uint64_val",
        "free_bytes": "uint64_val",
        "comm_type": "int64_val",
        "comm_size": "int64_val",
        "pg_name": "string_val",
        "comm_tag": "int32_val",
        "comm_src": "int32_val",
        "comm_dst": "int32_val",
        "stage": "int64_val",
        "op": "string_val",
    }
    actual: dict[str, str] = {}
    for node in NODES:
        (record,) = public_records(encode_node(node))
        actual |= {a.name: a.WhichOneof("value") for a in public.Node.FromString(record).attr}
    assert actual == expected
    assert {name: kind.removesuffix("_val") for name, kind in expected.items()} == {
        **{n: t for n, t in ATTR_TYPES.items() if n not in _OPTIONAL},
        "stage": "int64",
        "op": "string",
    }


def test_chakra_jsonizer_reads_our_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.0.et", encode_metadata("1"), *map(encode_node, NODES))
    out = tmp_path / "a.json"
    args = ["--input_filename", str(path), "--output_filename", str(out)]
    module = "chakra.src.jsonizer.jsonizer"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", module, *args], check=True, env=environment)
    assert out.read_text().count('"name": "layer0.') == 2


def test_encoding_is_deterministic() -> None:
    assert encode_node(SEND) == encode_node(SEND)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("comm_tag", 1 << 31, "int32"),
        ("comm_size", 1 << 63, "int64"),
        ("tensor_size", -1, "uint64"),
        ("pg_name", 3, "string"),
        ("num_ops", "many", "int64"),
        ("num_ops", (1, 2), "int64"),
        ("extra", 1 << 70, "int64"),
    ],
)
def test_value_that_does_not_fit_names_node_and_attribute(
    name: str, value: AttrValue, expected: str
) -> None:
    with pytest.raises(ValueError, match=f"node 9 'n': attribute '{name}'.* {expected}"):
        encode_node(TraceNode(9, "n", NodeKind.COMP, attrs={name: value}))


# ---------------------------------------------------------------- reading


def test_read_returns_what_was_written(tmp_path: Path) -> None:
    path = write(tmp_path / "a.0.et", encode_metadata("1"), *map(encode_node, NODES))
    assert [*read_trace(path)] == [*NODES]


ALL_TYPES: dict[str, tuple[AttrValue, AttrValue]] = {
    "double": (0.5, (0.5, -1.0)),
    "float": (0.25, (0.25,)),
    "int32": (-5, (-5, 6)),
    "int64": (-(1 << 60), (1 << 60,)),
    "uint32": (1 << 31, (1,)),
    "uint64": (1 << 63, (1 << 63, 0)),
    "sint32": (-5, (-5,)),
    "sint64": (-6, (-6,)),
    "fixed32": (5, (5,)),
    "fixed64": (6, (6,)),
    "sfixed32": (-5, (-5,)),
    "sfixed64": (-6, (-6,)),
    "bool": (True, (True, False)),
    "string": ("é", ("a", "")),
    "bytes": (b"\xff", (b"\xff", b"")),
}


@pytest.mark.parametrize("kind", ALL_TYPES)
def test_every_attribute_type_reads_back(tmp_path: Path, kind: str) -> None:
    one, many = ALL_TYPES[kind]
    types = {"one": kind, "many": f"{kind}_list", "none": f"{kind}_list"}
    node = TraceNode(1, "n", 2, attrs={"one": one, "many": many, "none": ()}, attr_types=types)
    path = write(tmp_path / "a.0.et", encode_metadata("1"), encode_node(node))
    (seen,) = read_trace(path)
    assert seen == node
    assert seen.attr_types == types


def test_reads_a_trace_of_another_tool(tmp_path: Path) -> None:
    metadata = public.GlobalMetadata(version="0.0.4")
    metadata.attr.add(name="schema", string_val="1.1.1-chakra.0.0.4")
    node = public.Node(id=7, name="aten::mm", type=4, start_time_micros=3, duration_micros=4)
    node.inputs.values = "[1]"
    node.attr.add(name="rf_id", int64_val=3)
    node.attr.add(name="no value")
    body = node.SerializeToString() + b"\xfa\x01\x01x"  # field 31: of a newer schema
    records = prefixed(metadata.SerializeToString()), prefixed(body)
    (seen,) = read_trace(write(tmp_path / "a.0.et", *records))
    assert seen == TraceNode(
        7,
        "aten::mm",
        4,
        attrs={"rf_id": 3},
        duration_micros=4,
        start_micros=3,
        inputs=NodeOperands(values="[1]"),
    )


def test_memory_is_bounded_by_the_record(tmp_path: Path) -> None:
    import tracemalloc

    record = encode_node(TraceNode(1, "n" * 2000, NodeKind.COMP))
    path = write(tmp_path / "a.0.et", encode_metadata("1"), record * 6000)
    tracemalloc.start()
    count = sum(1 for _ in read_trace(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 6000
    assert peak < 8 << 20 < path.stat().st_size


def test_records_across_buffer_ends(tmp_path: Path) -> None:
    nodes = [TraceNode(i, "n" * (i * 37 % 5000), NodeKind.COMP) for i in range(1000)]
    path = write(tmp_path / "a.0.et", encode_metadata("1"), *map(encode_node, nodes))
    assert path.stat().st_size > 2 << 20
    assert [*read_trace(path)] == nodes


META = encode_metadata("1")
NODE = encode_node(COMP)


@pytest.mark.parametrize(
    ("data", "offset", "expected"),
    [
        (META[:-2], 0, "truncated"),
        (b"", 0, "empty file"),
        (bytes(4096), 1, "found an empty record"),
        (b"\x0a", 0, "truncated"),
        (META + NODE[:-1], len(META), "truncated"),
        (META + NODE + b"\x80", len(META) + len(NODE), "ends within the length"),
        (META + b"\xff\xff\xff\xff\x0f" + NODE, len(META), "at most 16777216 bytes"),
        (META + b"\xff" * 9 + NODE, len(META), "at most 5 bytes"),
        (META + b"\xff\xff\xff\x07" + NODE, len(META), "truncated"),
        (META + prefixed(b"\xff" * 20), len(META), "expected a Chakra node"),
        (META + prefixed(b"\x0a\x01x"), len(META), "field of another type"),
        (META + prefixed(b"\x12\x02\xff\xfe"), len(META), "expected a Chakra node"),
        (META + prefixed(b"\x52\x05\x0a\x01a\x48\x01"), None, None),
        (META + prefixed(b"\x52\x06\x0a\x01a\x4a\x01x"), len(META), "attribute 'a' holds"),
        (NODE, 0, "found a node"),
        (encode_node(TraceNode(1, "", NodeKind.COMP)), 0, "found a node"),
        (prefixed(b"\xff\xff"), 0, "GlobalMetadata"),
    ],
)
def test_malformed_file(
    tmp_path: Path, data: bytes, offset: int | None, expected: str | None
) -> None:
    path = write(tmp_path / "a.0.et", data)
    if expected is None:
        assert len([*read_trace(path)]) == 1
        return
    error = refused(path)
    assert expected in error.message
    assert error.byte_offset == offset
    assert str(path) in str(error)


def test_largest_record_is_read(tmp_path: Path) -> None:
    overhead = 9
    node = TraceNode(0, "n" * (MAX_RECORD_BYTES - overhead), 0)
    record = encode_node(node)
    path = write(tmp_path / "a.0.et", META, record)
    assert len(record) >= MAX_RECORD_BYTES - overhead
    assert [*read_trace(path)] == [node]


def test_hostile_length_claims_no_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = write(tmp_path / "a.0.et", META, b"\x80\x80\x80\x08", b"x")  # 16 MiB, 1 byte follows
    tracemalloc.start()
    refused(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 << 20


def test_what_is_not_a_file(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "missing.et").message
    assert "regular file" in refused(tmp_path).message
    assert "cannot be read" in refused(Path("a\0b")).message
    fifo = tmp_path / "fifo.et"
    os.mkfifo(fifo)
    assert "regular file" in refused(fifo).message


def test_length_prefix_is_what_protobuf_writes() -> None:
    from google.protobuf.internal import encoder

    write_varint: Any = getattr(encoder, "_VarintEncoder")()  # noqa: B009
    for size in (0, 1, 127, 128, 16_383, 16_384, 70_000):
        out = io.BytesIO()
        (record,) = public_records(encode_node(TraceNode(0, "n" * size, 4)))
        write_varint(out.write, len(record))
        assert encode_node(TraceNode(0, "n" * size, 4)) == out.getvalue() + record


# ---------------------------------------------------------------- showing, limits


def test_describe_gives_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.0.et", META, *map(encode_node, NODES))
    comp, coll = describe(path, limit=2)
    sizes = (1 << 40, (1 << 64) - 1, None)
    none = (None, None, None, None)
    assert comp == Row(1, "comp", "layer0.mlp", *sizes, *none, (), (), 1 << 63, 1)
    assert (coll.collective, coll.group, coll.comm_bytes) == ("all_reduce", "12", 4096)
    _, _, send, recv = describe(path)
    assert (send.kind, send.peer, send.tag, send.ctrl_deps) == ("send", 5, 0, (2,))
    assert (recv.kind, recv.peer, recv.tag) == ("recv", 5, 9)


def test_describe_takes_unknown_kinds(tmp_path: Path) -> None:
    odd = TraceNode(1, "odd", 99), TraceNode(2, "new", NodeKind.COLL, attrs={"comm_type": 42})
    path = write(tmp_path / "a.0.et", META, *map(encode_node, odd))
    first, second = describe(path)
    assert (first.kind, second.collective) == ("kind 99", "collective 42")


def test_totals_by_kind(tmp_path: Path) -> None:
    path = write(tmp_path / "a.0.et", META, *map(encode_node, (*NODES, COMP, COLL)))
    actual = totals(path)
    assert actual.nodes == 6
    assert [*actual.by_kind] == ["comp", "all_reduce", "send", "recv"]
    assert actual.by_kind["comp"].flops == 2 << 40
    assert actual.by_kind["all_reduce"].comm_bytes == 8192
    assert actual.by_kind["send"].nodes == 1


@pytest.mark.parametrize(
    ("ids", "ranks", "nodes", "expected"),
    [
        (range(1, 501), 1000, 2000, []),
        ([1, 501], 8, 10, ["groups? ids 1 and 501 are congruent modulo 500"]),
        ([2147], 8, 10, []),
        ([2148], 8, 10, ["1 communicator group ids exceed 2147"]),
        ([], 1024, 10, ["1024 ranks: .*open file"]),
        ([], 1000, 100_000, ["about 111 GiB"]),
        ([1, 2501], 4096, 100_000, ["exceed 2147", "congruent", "open file", "GiB"]),
    ],
)
def test_exceeded_limits(ids: list[int], ranks: int, nodes: int, expected: list[str]) -> None:
    import re

    actual = exceeded_limits(ids, ranks, nodes)
    assert len(actual) == len(expected)
    for sentence, pattern in zip(actual, expected, strict=True):
        assert re.search(pattern.replace("groups? ", "group "), sentence)
