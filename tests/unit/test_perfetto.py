"""`stagec time --perfetto`, read back with the schema of Perfetto: the file has what ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as public_untyped

from stagec.answers.time.timed import Timed, time_job
from stagec.formats.timeline import ranks as timeline
from stagec.jobs.session import Session
from stagec.machines import load_machine
from stagec.time.clock.intervals import node_times, stream_name, title_of
from tests.support import LLAMA, stagec, tiny_options

public: Any = public_untyped
JOB = {"pp": 2, "dp": 2, "tp": 2, "microbatches": 4}
SIZES = "B=8,S=4,L=2,D=8,H=8,G=4,K=2,F=16,V=16,theta=100"
COMMAND = (
    *("time", LLAMA, "--set", SIZES, "--pp", "2", "--dp", "2", "--tp", "2"),
    *("--microbatches", "4", "--machine", "h100-sxm", "--no-levers"),
)


@dataclass
class Slice:
    """A slice as a viewer shows it."""

    name: str
    start: int
    end: int
    category: str
    notes: dict[str, int | str]


@dataclass
class Read:
    """A trace as a viewer sees it: slices by process and track, values of counters, flows."""

    slices: dict[tuple[str, str], list[Slice]] = field(default_factory=lambda: defaultdict(list))
    counters: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    units: dict[str, int] = field(default_factory=dict[str, int])
    flows: dict[int, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))


def read(path: Path) -> Read:
    """A file, by the public schema. Names are what was interned before they are used."""
    trace = public.Trace.FromString(path.read_bytes())
    actual, names = Read(), defaultdict[str, dict[int, str]](dict)
    tracks: dict[int, tuple[str, str]] = {}
    open_slices: dict[tuple[str, str], Slice] = {}
    assert trace.packet[0].sequence_flags == public.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id == 1
        for kind in ("event_categories", "event_names", "debug_annotation_names"):
            names[kind] |= {n.iid: n.name for n in getattr(packet.interned_data, kind)}
        texts = packet.interned_data.debug_annotation_string_values
        names["texts"] |= {n.iid: n.str.decode() for n in texts}
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            parent = tracks.get(track.parent_uuid, ("", ""))[0]
            tracks[track.uuid] = (track.process.process_name or parent, track.name)
            if track.HasField("counter"):
                actual.units[tracks[track.uuid][0]] = track.counter.unit
        if packet.HasField("track_event"):
            assert packet.sequence_flags == public.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
            _event(actual, packet, names, tracks[packet.track_event.track_uuid], open_slices)
    assert not open_slices
    return actual


def _event(actual: Read, packet: Any, names: Any, where: tuple[str, str], open_slices: Any) -> None:
    event, kinds = packet.track_event, public.TrackEvent
    if event.type == kinds.TYPE_COUNTER:
        actual.counters[where[0]].append((packet.timestamp, event.counter_value))
    elif event.type == kinds.TYPE_SLICE_END:
        open_slices.pop(where).end = packet.timestamp
    else:
        assert event.type == kinds.TYPE_SLICE_BEGIN
        notes = {
            names["debug_annotation_names"][n.name_iid]: names["texts"][n.string_value_iid]
            if n.string_value_iid
            else n.uint_value
            for n in event.debug_annotations
        }
        name, category = event.name_iid, event.category_iids[0]
        made = Slice(
            names["event_names"][name],
            packet.timestamp,
            -1,
            names["event_categories"][category],
            notes,
        )
        assert where not in open_slices
        open_slices[where] = made
        actual.slices[where].append(made)
        for flow in event.flow_ids:
            actual.flows[flow].append((where[0], made.name))
        for flow in event.terminating_flow_ids:
            actual.ends[flow].append((where[0], made.name))


@pytest.fixture(scope="module")
def timed() -> Timed:
    options = tiny_options(LLAMA, **JOB)
    return time_job(options, load_machine("h100-sxm"), Session(), levers=False, memory=True)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Read:
    file = tmp_path_factory.mktemp("perfetto") / "step.pftrace"
    ran = stagec(*COMMAND, "--perfetto", file)
    assert ran.code == 0, ran.err
    return read(file)


def test_slices_are_the_nodes(timed: Timed, trace: Read) -> None:
    """Of the first rank of each class, on each stream of each node, with what a node is."""
    for each, program in zip(timed.step.devices, timed.issued.programs, strict=True):
        times = node_times(program, each).spread(timed.step.devices.end, timed.step.picoseconds)
        rank = timed.issued.members[each.number][0]
        process = f"rank {rank} ({each.name})"
        expected: defaultdict[str, list[tuple[object, ...]]] = defaultdict(list)
        for step, microbatch, _, start, end, _ in times.rows():
            node = step.node
            ns = start // 1000, end // 1000
            what = node.kind, node.size, node.flops, node.phase, max(0, microbatch)
            for stream in step.streams:
                expected[stream_name(stream, timed.issued.mesh)].append(
                    (title_of(node.name), *ns, *what)
                )
        actual = {
            track: [
                (
                    *(s.name, s.start, s.end, s.notes["op"], s.notes.get("bytes", 0)),
                    *(s.notes.get("flops", 0), s.category, s.notes.get("microbatch", 0)),
                )
                for s in slices
            ]
            for (name, track), slices in trace.slices.items()
            if name == process
        }
        assert actual == expected


def test_slices_of_a_track_follow_each_other(trace: Read) -> None:
    for slices in trace.slices.values():
        now = 0
        for each in slices:
            assert now <= each.start <= each.end
            now = each.end


def test_messages_flow_to_where_they_are_received(trace: Read) -> None:
    assert trace.flows.keys() == trace.ends.keys()
    assert len(trace.flows) == 8  # a forward and a backward of each of four microbatches
    for flow, (source,) in trace.flows.items():
        (target,) = trace.ends[flow]
        assert {source[0], target[0]} == {"rank 0 (stage0)", "rank 4 (stage1)"}
        assert source[0] != target[0]


def test_memory_is_a_counter_with_the_planned_peak(timed: Timed, trace: Read) -> None:
    peaks = Counter({name: max(b for _, b in actual) for name, actual in trace.counters.items()})
    plans = timed.plans
    assert plans is not None
    for each, ranks in zip(timed.issued.classes, timed.issued.members, strict=True):
        events = plans.annotate(each, each.program()).events
        assert events is not None
        process = f"rank {ranks[0]} ({each.name})"
        assert peaks[process] == events.peak
        assert trace.counters[process][-1][1] == events.static + sum(events.alloc - events.free)
        times = [time for time, _ in trace.counters[process]]
        assert times == sorted(times)
        assert trace.units[process] == public.CounterDescriptor.UNIT_SIZE_BYTES


def test_ranks_are_chosen(tmp_path: Path) -> None:
    """Flows are there where both ends are."""
    file = tmp_path / "step.pftrace"
    assert stagec(*COMMAND, "--perfetto", file, "--perfetto-ranks", "1,5-6").code == 0
    actual = read(file)
    processes = {process for process, _ in actual.slices}
    assert processes == {"rank 1 (stage0)", "rank 5 (stage1)", "rank 6 (stage1)"}
    ends = {where for ((where, _),) in actual.flows.values()}
    assert ends == {"rank 1 (stage0)", "rank 5 (stage1)"}


@pytest.mark.parametrize(
    ("ranks", "message"), [("8", "the job has no rank 8"), ("x", "'x' is not a range of ranks")]
)
def test_wrong_ranks(tmp_path: Path, ranks: str, message: str) -> None:
    file = tmp_path / "step.pftrace"
    ran = stagec(*COMMAND, "--perfetto", file, "--perfetto-ranks", ranks)
    assert (ran.code, message in ran.err) == (1, True), ran.err
    assert not file.exists()


def test_ranks_without_a_trace() -> None:
    ran = stagec(*COMMAND, "--perfetto-ranks", "0")
    assert ran.code == 1
    assert "--perfetto-ranks needs --perfetto" in ran.err


def test_big_jobs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default by classes, with a remark; what is asked for is refused."""
    monkeypatch.setattr(timeline, "MOST_NODES", 400)
    file = tmp_path / "step.pftrace"
    ran = stagec(*COMMAND, "--perfetto", file)
    assert ran.code == 0
    assert "the trace has 1 of 2 rank classes" in ran.err
    assert len({process for process, _ in read(file).slices}) == 1
    ran = stagec(*COMMAND, "--perfetto", file, "--perfetto-ranks", "0-7")
    assert ran.code == 1
    assert "but viewers open about" in ran.err
