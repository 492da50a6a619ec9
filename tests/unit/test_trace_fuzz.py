"""Bytes that nobody meant: reading gives a `TraceError` or nodes, checking gives a report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from stagec.check.traces import check_directory
from stagec.formats.chakra.nodes import (
    ATTR_TYPES,
    AttrValue,
    NodeKind,
    TraceError,
    TraceNode,
    encode_metadata,
    encode_node,
)
from stagec.formats.chakra.record_files import read_trace
from stagec.formats.chakra.show import describe, totals
from tests.support import examples

GROUPS = b'{"1": [0, 1], "2": [1, 0]}'


def sample_trace(peer: int) -> bytes:
    cpu: dict[str, AttrValue] = {"is_cpu_op": False}
    nodes = [
        TraceNode(0, "a", NodeKind.COMP, attrs={**cpu, "num_ops": 5, "tensor_size": 6}),
        TraceNode(
            1,
            "b",
            NodeKind.COLL,
            (0,),
            attrs={**cpu, "comm_type": 2, "comm_size": 8, "pg_name": "1"},
        ),
        TraceNode(
            2,
            "c",
            NodeKind.SEND,
            (1,),
            attrs={**cpu, "comm_size": 8, "comm_tag": 1, "comm_dst": peer},
        ),
        TraceNode(
            3,
            "d",
            NodeKind.RECV,
            (),
            (1,),
            attrs={**cpu, "comm_size": 8, "comm_tag": 1, "comm_src": peer},
        ),
        TraceNode(4, "é", NodeKind.COMP, (3,), (0, 2), {"list": (1, 2), "b": b"\xff"}),
    ]
    return encode_metadata("1") + b"".join(map(encode_node, nodes))


SAMPLE = sample_trace(1)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """The sample trace after a few bytes were changed, dropped, repeated or put in."""
    data = bytearray(SAMPLE)
    for _ in range(draw(st.integers(1, 6))):
        position = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 8))
        match draw(st.sampled_from(("change", "drop", "repeat", "insert", "cut"))):
            case "change":
                data[position : position + 1] = draw(st.binary(min_size=1, max_size=1))
            case "drop":
                del data[position : position + length]
            case "repeat":
                data[position:position] = data[position : position + length]
            case "insert":
                data[position:position] = draw(st.binary(max_size=12))
            case _:
                del data[position:]
    return bytes(data)


HOSTILE = st.sampled_from(
    (
        b"\xff" * 64,
        b"\x00" * 64,
        b"\x80" * 64,
        b"\xff\xff\xff\xff\x0f" + SAMPLE,
        encode_metadata("1") + b"\xff\xff\xff\x07" + b"x" * 100,
        encode_metadata("1") + bytes([100]) + b"\x52\x62" * 50,
        encode_metadata("1") + bytes([100]) + b"\x0b" * 100,
    )
)


def consume(reader: Callable[[], object]) -> None:
    """Run a reader to its end; a trace that is none may say so, and nothing else may happen."""
    try:
        reader()
    except TraceError:
        return


@examples(600)
@given(st.one_of(mutated(), st.binary(max_size=300), HOSTILE))
@example(b"")
@example(SAMPLE)
def test_reading_raises_trace_error_only(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.0.et"
        path.write_bytes(data)
        consume(lambda: [*read_trace(path)])
        consume(lambda: [*describe(path, limit=3)])
        consume(lambda: totals(path))


@examples(300)
@given(st.one_of(mutated(), HOSTILE), st.one_of(st.just(GROUPS), st.binary(max_size=40)))
def test_checking_raises_nothing(data: bytes, groups: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "a.0.et").write_bytes(data)
        (Path(directory) / "a.1.et").write_bytes(sample_trace(0))
        (Path(directory) / "a.json").write_bytes(groups)
        report = check_directory(Path(directory))
        assert report.ranks == 2
        assert all(str(finding) for finding in (*report.errors, *report.warnings))


def test_sample_is_sound_before_it_is_mutated(tmp_path: Path) -> None:
    (tmp_path / "a.0.et").write_bytes(SAMPLE)
    assert len([*read_trace(tmp_path / "a.0.et")]) == 5


def merged(parts: tuple[dict[str, AttrValue], dict[str, AttrValue]]) -> dict[str, AttrValue]:
    return parts[0] | parts[1]


U64 = st.integers(0, (1 << 64) - 1)
DEPS = st.lists(U64, max_size=4).map(tuple[int, ...])
LIMITS: dict[str, st.SearchStrategy[AttrValue]] = {
    "int32": st.integers(-(1 << 31), (1 << 31) - 1),
    "int64": st.integers(-(1 << 63), (1 << 63) - 1),
    "uint64": U64,
    "bool": st.booleans(),
    "string": st.text(max_size=20),
    "string_list": st.lists(st.text(max_size=9), max_size=3).map(tuple[str, ...]),
}
TYPED_ATTRS: st.SearchStrategy[dict[str, AttrValue]] = st.fixed_dictionaries(
    {}, optional={n: LIMITS[t] for n, t in ATTR_TYPES.items()}
)
FREE_ATTRS: st.SearchStrategy[dict[str, AttrValue]] = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name not in ATTR_TYPES),
    st.one_of(LIMITS["int64"], st.text(), st.booleans(), st.floats(allow_nan=False), st.binary()),
    max_size=4,
)
ATTRS: st.SearchStrategy[dict[str, AttrValue]] = st.tuples(TYPED_ATTRS, FREE_ATTRS).map(merged)
NODES = st.builds(
    TraceNode,
    attrs=ATTRS,
    id=U64,
    name=st.text(max_size=20),
    kind=st.integers(-(1 << 31), (1 << 31) - 1),
    data_deps=DEPS,
    ctrl_deps=DEPS,
    duration_micros=U64,
    attr_types=st.just({}),
)


@settings(deadline=None)
@given(st.lists(NODES, max_size=4))
def test_any_node_survives_the_round_trip(nodes: list[TraceNode]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.0.et"
        path.write_bytes(encode_metadata("1") + b"".join(map(encode_node, nodes)))
        assert [*read_trace(path)] == nodes
