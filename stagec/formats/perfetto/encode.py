"""Encodes timelines for Perfetto (ui.perfetto.dev) as protobuf TrackEvents.

A rank is a process, each of its streams a track, each node a slice on each of its streams; messages
are flows from rank to rank, memory is a counter. The format has whole nanoseconds: picoseconds are
rounded down.

Most of a slice is the same for all nodes of a prototype. This part is serialised once, and records
are concatenated from such parts.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from stagec.formats.chakra.nodes import varint
from stagec.formats.perfetto.trace_pb2 import (
    CounterDescriptor,
    DebugAnnotation,
    InternedData,
    InternedName,
    ProcessDescriptor,
    Trace,
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)
from stagec.formats.timeline.ranks import ShownRank, Timeline, streams_in
from stagec.time.clock.graph import OnStreams
from stagec.time.clock.intervals import NONE, stream_name, title_of
from stagec.time.clock.residency import ResidentBytes
from stagec.time.streams import Stream

_PICOSECONDS = 1000
_SEQUENCE = TracePacket(
    trusted_packet_sequence_id=1, sequence_flags=TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
).SerializeToString()
_TIMESTAMP = varint(TracePacket.TIMESTAMP_FIELD_NUMBER << 3)


def perfetto_trace(timeline: Timeline) -> Iterator[bytes]:
    """The bytes of a trace, in parts. Messages are flows if both ends are shown."""
    return _Writer(timeline).trace()


@dataclass
class _Names:
    """Interned names: written once, then referred to by a number."""

    known: dict[str, int] = field(default_factory=dict[str, int])
    new: list[InternedName] = field(default_factory=list[InternedName])

    def number(self, name: str) -> int:
        iid = self.known.get(name)
        if iid is None:
            iid = self.known[name] = len(self.known) + 1
            self.new.append(InternedName(iid=iid, name=name))
        return iid

    def unwritten(self) -> list[InternedName]:
        """The names that were added since the last call."""
        new, self.new = self.new, []
        return new


class _Writer:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._categories, self._names = _Names(), _Names()
        self._labels, self._texts = _Names(), _Names()
        self._flows: dict[Hashable, int] = {}
        self._bodies: dict[int, bytes] = {}
        self._tracks = 0

    def trace(self) -> Iterator[bytes]:
        cleared = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        start = TracePacket(trusted_packet_sequence_id=1, sequence_flags=cleared)
        yield _delimited(Trace.PACKET_FIELD_NUMBER, start.SerializeToString())
        for each in self._timeline.traces():
            yield from self._rank(each)

    def _rank(self, each: ShownRank) -> Iterator[bytes]:
        times = each.times
        streams = streams_in(times)
        process = self._track()
        tracks = {stream: self._track() for stream in streams}
        name = f"rank {each.rank} ({each.name})"
        about = ProcessDescriptor(pid=each.rank + 1, process_name=name)
        order = TrackDescriptor.EXPLICIT
        yield _described(TrackDescriptor(uuid=process, process=about, child_ordering=order))
        mesh = self._timeline.mesh(self._timeline.chosen[each.rank])
        for place, (stream, track) in enumerate(tracks.items()):
            yield _described(_inside(process, track, stream_name(stream, mesh), place))
        slices = b"".join(self._slices(each, tracks))
        interned = InternedData(
            event_categories=self._categories.unwritten(),
            event_names=self._names.unwritten(),
            debug_annotation_names=self._labels.unwritten(),
            debug_annotation_string_values=self._texts.unwritten(),
        )
        yield _packet(TracePacket(interned_data=interned))
        yield slices
        if each.memory is not None:
            yield from self._memory(each.memory, process, len(tracks))

    def _track(self) -> int:
        self._tracks += 1
        return self._tracks

    # -- slices ------------------------------------------------------------------------------------

    def _slices(self, each: ShownRank, tracks: Mapping[Stream, int]) -> Iterator[bytes]:
        """The starts and ends of nodes, in the order of issue, in which each stream runs its
        nodes."""
        numbered = self._labels.number("microbatch")
        placed = {s: (_begins(track), _ends(track)) for s, track in tracks.items()}
        for step, microbatch, tag, start, end, _ in each.times.rows():
            body = self._body(step)
            if microbatch != NONE:
                body += _annotated(DebugAnnotation(name_iid=numbered, uint_value=microbatch))
            if step.node.is_message:
                body += self._flow(each.rank, step, tag)
            for begins, ends in (placed[stream] for stream in step.streams):
                yield _event(start // _PICOSECONDS, body + begins)
                yield _event(end // _PICOSECONDS, ends)

    def _body(self, step: OnStreams) -> bytes:
        """The part of a slice that is the same for all nodes of a prototype."""
        body = self._bodies.get(id(step.node))
        if body is None:
            node, kernel = step.node, step.node.kernel
            texts = {"op": node.kind, "phase": node.phase, "counts as": step.part}
            if kernel is not None:
                texts["kernel"] = str(kernel)
            numbers = {"bytes": node.size, "flops": node.flops}
            notes = [
                DebugAnnotation(
                    name_iid=self._labels.number(name), string_value_iid=self._texts.number(text)
                )
                for name, text in texts.items()
                if text
            ]
            notes += [
                DebugAnnotation(name_iid=self._labels.number(name), uint_value=number)
                for name, number in numbers.items()
                if number
            ]
            body = self._bodies[id(step.node)] = TrackEvent(
                category_iids=[self._categories.number(node.phase or "other")],
                name_iid=self._names.number(title_of(node.name)),
                debug_annotations=notes,
            ).SerializeToString()
        return body

    def _flow(self, rank: int, step: OnStreams, tag: int) -> bytes:
        """The flow of a message, empty if its other end is not shown."""
        message = self._timeline.message(step.node, rank, tag)
        if message is None:
            return b""
        flow = [self._flows.setdefault(message, len(self._flows) + 1)]
        sends = step.node.kind == "send"
        event = TrackEvent(flow_ids=flow) if sends else TrackEvent(terminating_flow_ids=flow)
        return event.SerializeToString()

    # -- memory ------------------------------------------------------------------------------------

    def _memory(self, memory: ResidentBytes, process: int, place: int) -> Iterator[bytes]:
        track = self._track()
        unit = CounterDescriptor(unit=CounterDescriptor.UNIT_SIZE_BYTES)
        yield _described(_inside(process, track, "memory", place, unit))
        for time, size in zip(
            (memory.time // _PICOSECONDS).tolist(), memory.bytes.tolist(), strict=True
        ):
            event = TrackEvent(type=TrackEvent.TYPE_COUNTER, track_uuid=track, counter_value=size)
            yield _event(time, event.SerializeToString())


def _begins(track: int) -> bytes:
    return TrackEvent(type=TrackEvent.TYPE_SLICE_BEGIN, track_uuid=track).SerializeToString()


def _ends(track: int) -> bytes:
    return TrackEvent(type=TrackEvent.TYPE_SLICE_END, track_uuid=track).SerializeToString()


# -- records ---------------------------------------------------------------------------------------


def _event(time: int, event: bytes) -> bytes:
    body = _delimited(TracePacket.TRACK_EVENT_FIELD_NUMBER, event)
    return _delimited(Trace.PACKET_FIELD_NUMBER, _TIMESTAMP + varint(time) + body + _SEQUENCE)


def _inside(
    process: int, track: int, name: str, place: int, counter: CounterDescriptor | None = None
) -> TrackDescriptor:
    """A track of a process, at index `place` among its tracks."""
    return TrackDescriptor(
        uuid=track, parent_uuid=process, name=name, sibling_order_rank=place, counter=counter
    )


def _described(track: TrackDescriptor) -> bytes:
    return _packet(TracePacket(track_descriptor=track))


def _packet(packet: TracePacket) -> bytes:
    return _delimited(Trace.PACKET_FIELD_NUMBER, packet.SerializeToString() + _SEQUENCE)


def _annotated(note: DebugAnnotation) -> bytes:
    return _delimited(TrackEvent.DEBUG_ANNOTATIONS_FIELD_NUMBER, note.SerializeToString())


def _delimited(number: int, data: bytes) -> bytes:
    """A serialised message as field `number` of another one."""
    return varint(number << 3 | 2) + varint(len(data)) + data
