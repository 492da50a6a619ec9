"""What must hold between the ranks of a job: groups, collectives and messages that agree.

Programs are compared per pair of rank classes, so a thousand ranks of one class cost one
comparison; only the lists of groups and peers are looked at rank by rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stagec.check.files import ALL_RANKS_ID, GroupsFile, group_id
from stagec.check.findings import CheckReport
from stagec.check.program import CollectiveCall, MessageEnd
from stagec.check.ranks import RankTrace
from stagec.formats.chakra.show import collective_label
from stagec.support.words import counted


@dataclass(frozen=True)
class CheckedJob:
    """The traces that could be read by rank, all ranks with a file, and the groups file."""

    directory: Path
    traces: Mapping[int, RankTrace]
    ranks: frozenset[int]
    groups: GroupsFile | None

    @cached_property
    def members(self) -> Mapping[int, tuple[int, ...]]:
        """The members of each group by group id."""
        listed = {} if self.groups is None else dict(self.groups.members)
        if ALL_RANKS_ID in self.group_slots:
            listed[ALL_RANKS_ID] = tuple(sorted(self.ranks))
        return listed

    @cached_property
    def member_sets(self) -> Mapping[int, frozenset[int]]:
        """The members of each group, to look one up in a group of thousands."""
        return {number: frozenset(members) for number, members in self.members.items()}

    @cached_property
    def group_slots(self) -> Mapping[int, Mapping[int, int]]:
        """Per group id that a collective names: the slot of the group on each rank using it."""
        slots: dict[int, dict[int, int]] = defaultdict(dict)
        for trace in self.traces.values():
            for slot, text in enumerate(trace.groups):
                number = group_id(text)
                if number is not None:
                    slots[number][trace.rank] = slot
        return slots

    @cached_property
    def peer_slots(self) -> Mapping[int, Mapping[int, int]]:
        """Per rank: the slot of each of its peers."""
        return {
            rank: {peer: slot for slot, peer in enumerate(trace.peers)}
            for rank, trace in self.traces.items()
        }


def check_job(job: CheckedJob, report: CheckReport) -> None:
    """Everything that takes more than one rank to see, short of deadlock."""
    _check_groups_file(job, report)
    _check_named(job, report)
    for trace in job.traces.values():
        _check_rank_groups(job, trace, report)
        _check_rank_peers(job, trace, report)
    _check_collectives(job, report)


def check_rank(job: CheckedJob, trace: RankTrace, report: CheckReport) -> None:
    """What can be seen of one rank without the traces of others: its groups, as far as the groups
    file says who is in them, and messages to itself."""
    _check_named(job, report)
    _check_rank_groups(job, trace, report)
    _check_self_messages(trace, report)


def _check_named(job: CheckedJob, report: CheckReport) -> None:
    """Collectives name their groups, or simulators take all ranks."""
    slots = job.group_slots.get(ALL_RANKS_ID, {})
    if not slots:
        return
    calls = [job.traces[rank].analysis.collectives.get(slot, ()) for rank, slot in slots.items()]
    first = job.traces[next(iter(slots))]
    node = first.analysis.program.nodes[calls[0][0].index]
    message = (
        f"{counted(sum(map(len, calls)), 'collective')} of {counted(len(slots), 'rank')} name no "
        f"group (pg_name), first {node.label}: simulators take all ranks"
    )
    remedy = "write pg_name, and a groups file NAME.json, if they are over some ranks only"
    report.warning(first.path, "no-group", message, remedy)


def _check_groups_file(job: CheckedJob, report: CheckReport) -> None:
    if job.groups is None:
        if job.group_slots.keys() - {ALL_RANKS_ID}:
            message = "expected a groups file, found none though ranks issue collectives"
            report.error(job.directory, "no-groups-file", message, "write NAME.json")
        return
    path = job.groups.path
    for number, ranks in job.groups.members.items():
        if len(ranks) < 2:
            message = f"expected group {number} to have two members or more, found {len(ranks)}"
            remedy = "drop the group and its collectives; a group of one hangs the simulator"
            report.error(path, "small-group", message, remedy)
        for rank in ranks:
            if rank not in job.ranks:
                message = f"group {number} has member {rank}, a rank without a trace"
                report.error(path, "unknown-member", message, "list ranks of the job only")
        if number not in job.group_slots:
            message = f"expected every group to be used, found no collective over group {number}"
            report.warning(path, "unused-group", message, "leave the group out")


def _check_rank_groups(job: CheckedJob, trace: RankTrace, report: CheckReport) -> None:
    for slot, text in enumerate(trace.groups):
        first = trace.analysis.collectives.get(slot)
        node = trace.analysis.program.nodes[first[0].index] if first else None
        where = None if node is None else node.id
        number = group_id(text)
        if number is None:
            message = f"expected pg_name to be a decimal integer > 0, found {text!r}"
            remedy = "name groups by the ids of the groups file"
            report.error(trace.path, "bad-group-id", message, remedy, node=where)
        elif job.groups is not None and number not in job.members:
            message = f"expected group {number} in {job.groups.path.name}, found no such group"
            remedy = "list the group, or name one that is listed"
            report.error(trace.path, "unknown-group", message, remedy, node=where)
        elif job.groups is not None and trace.rank not in job.member_sets[number]:
            message = (
                f"rank {trace.rank} issues a collective over group {number}, whose members are "
                f"{_listed(job.members[number])}"
            )
            remedy = "name a group that the rank is a member of"
            report.error(trace.path, "not-a-member", message, remedy, node=where)


def _listed(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} ranks)"


def _check_rank_peers(job: CheckedJob, trace: RankTrace, report: CheckReport) -> None:
    _check_self_messages(trace, report)
    for slot, peer in enumerate(trace.peers):
        sends = trace.analysis.sends.get(slot, ())
        receives = trace.analysis.receives.get(slot, ())
        if peer == trace.rank:
            continue
        if peer not in job.ranks:
            where = _first_message(trace, slot)
            message = f"expected a peer with a trace, found rank {peer}, which has none"
            remedy = "send to and receive from ranks of the job only"
            report.error(trace.path, "unknown-peer", message, remedy, node=where)
        elif peer in job.traces:
            other = job.traces[peer]
            back = job.peer_slots[peer].get(trace.rank, -1)
            arriving = other.analysis.receives.get(back, ())
            leaving = other.analysis.sends.get(back, ())
            _check_channel(trace, peer, sends, arriving, "send", report)
            _check_channel(trace, peer, receives, leaving, "receive", report)


def _check_self_messages(trace: RankTrace, report: CheckReport) -> None:
    for slot, peer in enumerate(trace.peers):
        if peer == trace.rank:
            message = f"expected messages between two ranks, found one of rank {peer} to itself"
            where = _first_message(trace, slot)
            report.error(trace.path, "self-message", message, "drop the message", node=where)


def _first_message(trace: RankTrace, slot: int) -> int:
    """The id of the first message of a peer slot, sends first."""
    ends = trace.analysis.sends.get(slot, ()), trace.analysis.receives.get(slot, ())
    return trace.analysis.program.nodes[next(end.index for way in ends for end in way)].id


def _check_channel(
    trace: RankTrace,
    peer: int,
    ours: tuple[MessageEnd, ...],
    theirs: tuple[MessageEnd, ...],
    what: str,
    report: CheckReport,
) -> None:
    """Each message of `ours` beyond its number of counterparts in `theirs` is an error."""
    if _contents(ours) == _contents(theirs):
        return
    left = Counter((message.tag, message.size) for message in theirs)
    other = "receive" if what == "send" else "send"
    for message in ours:
        key = message.tag, message.size
        left[key] -= 1
        if left[key] >= 0:
            continue
        sizes = sorted({m.size for m in theirs if m.tag == message.tag} - {message.size})
        found = f"one of {sizes[0]} bytes with that tag" if sizes else "none with that tag left"
        node = trace.analysis.program.nodes[message.index]
        way = "to" if what == "send" else "from"
        text = (
            f"rank {trace.rank}, {node.label}, {what}s {message.size} bytes with tag {message.tag} "
            f"{way} rank {peer}; expected a {other} of the same size and tag there, found {found}"
        )
        remedy = f"write the {other} on rank {peer}, or make tag and size agree"
        report.error(trace.path, f"unmatched-{what}", text, remedy, node=node.id)


def crossed_messages(job: CheckedJob) -> Iterator[tuple[RankTrace, int, str]]:
    """Messages between two ranks that the ends do not issue in one order: the rank, the node, and
    what is wrong. Libraries match them in order, whatever their tags."""
    same: dict[tuple[int, int, int, int], bool] = {}
    for trace in job.traces.values():
        for slot in sorted(trace.analysis.unordered):
            first, second = (
                trace.analysis.program.nodes[i] for i in trace.analysis.unordered[slot]
            )
            text = (
                f"no dependency orders {first.label} and {second.label}, two messages of one peer"
            )
            yield trace, second.id, f"rank {trace.rank}: {text}"
        for slot, peer in enumerate(trace.peers):
            back = job.peer_slots.get(peer, {}).get(trace.rank)
            if back is None:
                continue
            there = job.traces[peer]
            key = trace.class_id, slot, there.class_id, back
            ours = trace.analysis.sends.get(slot, ())
            theirs = there.analysis.receives.get(back, ())
            if key not in same:
                same[key] = _contents(ours) == _contents(theirs)
            if not same[key]:
                yield _crossed(trace, there, ours, theirs)


def _contents(messages: tuple[MessageEnd, ...]) -> list[tuple[int, int]]:
    return [(m.tag, m.size) for m in messages]


def _crossed(
    trace: RankTrace, there: RankTrace, ours: tuple[MessageEnd, ...], theirs: tuple[MessageEnd, ...]
) -> tuple[RankTrace, int, str]:
    """The first message that the ends, which are not alike, do not agree on; one may have none."""
    pairs = enumerate(zip(_contents(ours), _contents(theirs), strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    sent = trace.analysis.program.nodes[ours[at].index] if at < len(ours) else None
    got = there.analysis.program.nodes[theirs[at].index] if at < len(theirs) else None
    which = f"message {at + 1} from rank {trace.rank} to rank {there.rank}"
    if sent is None:
        assert got is not None  # ends that are not alike are not both at their end
        return there, got.id, f"{which} is received by {got.label}, but not sent"
    if got is None:
        return trace, sent.id, f"{which} is {sent.label}, but not received"
    text = (
        f"{which} is {sent.label} with tag {ours[at].tag}, but {got.label} with tag "
        f"{theirs[at].tag} where it is received"
    )
    return trace, sent.id, text


def _check_collectives(job: CheckedJob, report: CheckReport) -> None:
    """The members of each group issue the same collectives, in the same order."""
    compared: dict[tuple[int, int, int, int], bool] = {}
    for number, slots in sorted(job.group_slots.items()):
        members = [rank for rank in job.members.get(number, ()) if rank in job.traces]
        for rank in members[1:]:
            one, other = job.traces[members[0]], job.traces[rank]
            key = one.class_id, slots.get(one.rank, -1), other.class_id, slots.get(rank, -1)
            ours, theirs = (
                trace.analysis.collectives.get(slots.get(trace.rank, -1), ())
                for trace in (one, other)
            )
            if key not in compared:
                compared[key] = _signatures(ours) == _signatures(theirs)
            if not compared[key]:
                _report_mismatch(number, one, other, ours, theirs, report)


def _signatures(collectives: tuple[CollectiveCall, ...]) -> list[tuple[int, int]]:
    return [(collective.kind, collective.size) for collective in collectives]


def _report_mismatch(
    number: int,
    one: RankTrace,
    other: RankTrace,
    ours: tuple[CollectiveCall, ...],
    theirs: tuple[CollectiveCall, ...],
    report: CheckReport,
) -> None:
    pairs = zip(_signatures(ours), _signatures(theirs), strict=False)
    shorter = min(len(ours), len(theirs))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    message = (
        f"collective {place + 1} over group {number}: expected {_named(one, ours, place)} as on "
        f"rank {one.rank}, found {_named(other, theirs, place)} on rank {other.rank}"
    )
    node = other.analysis.program.nodes[theirs[place].index].id if place < len(theirs) else None
    remedy = "issue the same collectives of the same size in the same order on all members"
    report.error(other.path, "collective-mismatch", message, remedy, node=node)


def _named(trace: RankTrace, collectives: tuple[CollectiveCall, ...], place: int) -> str:
    if place >= len(collectives):
        return "no further collective"
    found = collectives[place]
    node = trace.analysis.program.nodes[found.index]
    return f"{collective_label(found.kind)} of {found.size} bytes ({node.label})"
