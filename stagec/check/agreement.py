"""Checks that the ranks of a job agree on groups, collectives and messages.

Programs are compared per pair of rank classes, so a thousand ranks of one class cost one
comparison. Groups and peers of all ranks are compared as arrays; only ranks with a problem are
examined one by one, to describe it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stagec.check.findings import CheckReport
from stagec.check.links import GroupUses, PeerLinks
from stagec.check.members import GroupMembers
from stagec.check.program import BySlot, IssuedCall
from stagec.check.ranks import RankTrace
from stagec.check.table import RankTable, distinct, lookup, of_each, positions
from stagec.check.trace_files import ALL_RANKS_ID, GroupsFile, group_id
from stagec.formats.chakra.show import collective_label
from stagec.program.nodes import Ints
from stagec.support.words import counted


@dataclass(frozen=True)
class CheckedJob:
    """The traces of a job that could be read, by rank; all ranks with a trace file; and the groups
    file."""

    directory: Path
    traces: RankTable
    ranks: Collection[int]
    groups: GroupsFile | None

    @cached_property
    def members(self) -> GroupMembers:
        """The members of each group by group id."""
        members = GroupMembers.of({}) if self.groups is None else self.groups.members
        if len(self.uses.number) and self.uses.number[0] == ALL_RANKS_ID:
            return members.with_group(ALL_RANKS_ID, self.files)
        return members

    @cached_property
    def files(self) -> Ints:
        """All ranks with a file, ascending."""
        return np.sort(np.fromiter(self.ranks, dtype=np.int64, count=len(self.ranks)))

    @cached_property
    def uses(self) -> GroupUses:
        """The groups over which each rank issues collectives."""
        return GroupUses.of(self.traces)

    @cached_property
    def links(self) -> PeerLinks:
        """The pairs of ranks that exchange messages."""
        return PeerLinks.of(self.traces)


def check_job(job: CheckedJob, report: CheckReport) -> None:
    """Run all checks that concern several ranks, except that for deadlock."""
    _check_groups_file(job, report)
    _check_named(job, report)
    doubtful = _strangers(job)
    doubtful[job.links.here[_unmatched(job)]] = True
    for place in np.flatnonzero(doubtful).tolist():
        trace = job.traces.at(place)
        _check_rank_groups(job, trace, report)
        _check_rank_peers(job, place, trace, report)
    _check_collectives(job, report)


def _strangers(job: CheckedJob) -> npt.NDArray[np.bool_]:
    """Whether each rank names a group that does not exist, or that it is not a member of."""
    outside_any = np.zeros(len(job.traces), dtype=bool)
    for each in job.traces.classes:
        places = job.traces.places(each.ranks)
        for column in each.groups:
            outside_any[places[column < 0]] = True
    if job.groups is not None:
        uses = job.uses
        group = job.members.places(uses.number)
        inside = np.sort(_keys(job, *_memberships(job, np.ones(len(job.members), dtype=bool))))
        outside = positions(inside, _keys(job, group, uses.place)) < 0
        outside_any[uses.place[outside | (group < 0)]] = True
    return outside_any


def _memberships(job: CheckedJob, chosen: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """An entry for each member of the chosen groups that has a trace: the index of its group, and
    its place in the table."""
    groups = np.repeat(np.arange(len(job.members)), job.members.sizes)
    places = job.traces.places(job.members.ranks)
    kept = (places >= 0) & chosen[groups]
    return (groups, places) if kept.all() else (groups[kept], places[kept])


def _keys(job: CheckedJob, groups: Ints, places: Ints) -> Ints:
    return groups * len(job.traces) + places


def _unmatched(job: CheckedJob) -> npt.NDArray[np.bool_]:
    """Whether the two ends of each link differ, or its peer is the rank itself or has no trace."""
    links, classes = job.links, job.traces.classes
    odd: npt.NDArray[np.bool_] = (links.there < 0) | (links.there == links.here)

    def differ(here: int, slot: int, there: int, back: int) -> bool:
        us, them = classes[here].analysis, classes[there].analysis
        ways = (us.sends, them.receives), (us.receives, them.sends)
        return any(_differ(ours, slot, theirs, back) for ours, theirs in ways)

    odd[~odd] = _each_way(job, ~odd, differ)
    return odd


def _each_way(
    job: CheckedJob, chosen: npt.NDArray[np.bool_], holds: Callable[[int, int, int, int], bool]
) -> npt.NDArray[np.bool_]:
    """Whether `holds` is true for each chosen link; its arguments are the class and the slot of
    both ends, -1 for a peer without a slot for the rank."""
    links, class_of = job.links, job.traces.class_of
    here, there = class_of[links.here[chosen]], class_of[links.there[chosen]]
    return of_each(holds, here, links.slot[chosen], there, links.back[chosen])


def check_rank(job: CheckedJob, trace: RankTrace, report: CheckReport) -> None:
    """Run the checks that need only the trace of one rank: its groups, if there is a groups file,
    and messages to itself."""
    _check_named(job, report)
    _check_rank_groups(job, trace, report)
    _check_self_messages(trace, report)


def _check_named(job: CheckedJob, report: CheckReport) -> None:
    """Warn about collectives that name no group, for which simulators assume all ranks."""
    entries = job.uses.of_group(ALL_RANKS_ID)
    places, slots = job.uses.place[entries], job.uses.slot[entries]
    if not len(places):
        return
    first, alike = distinct(job.traces.class_of[places], slots)
    calls = [
        job.traces.classes[int(job.traces.class_of[places[i]])].analysis.collectives[int(slots[i])]
        for i in first.tolist()
    ]
    count = sum(int(n) * len(each) for n, each in zip(np.bincount(alike), calls, strict=True))
    trace = job.traces.at(int(places[0]))
    node = trace.analysis.program.nodes[calls[0][0].index]
    message = (
        f"{counted(count, 'collective')} of {counted(len(places), 'rank')} name no "
        f"group (pg_name), first {node.label}: simulators take all ranks"
    )
    remedy = "write pg_name, and a groups file NAME.json, if they are over some ranks only"
    report.warning(trace.path, "no-group", message, remedy)


def _check_groups_file(job: CheckedJob, report: CheckReport) -> None:
    if job.groups is None:
        if (job.uses.number != ALL_RANKS_ID).any():
            message = "expected a groups file, found none though ranks issue collectives"
            report.error(job.directory, "no-groups-file", message, "write NAME.json")
        return
    path, groups = job.groups.path, job.groups.members
    unused = ~np.isin(groups.ids, job.uses.ids)
    unknown = np.zeros(len(groups), dtype=bool)
    of_member = np.repeat(np.arange(len(groups)), groups.sizes)
    unknown[of_member[positions(job.files, groups.ranks) < 0]] = True
    for place in np.flatnonzero((groups.sizes < 2) | unused | unknown).tolist():
        number = int(groups.ids[place])
        ranks = groups[number]
        if len(ranks) < 2:
            message = f"expected group {number} to have two members or more, found {len(ranks)}"
            remedy = "drop the group and its collectives; a group of one hangs the simulator"
            report.error(path, "small-group", message, remedy)
        for rank in ranks if unknown[place] else ():
            if rank not in job.ranks:
                message = f"group {number} has member {rank}, a rank without a trace"
                report.error(path, "unknown-member", message, "list ranks of the job only")
        if unused[place]:
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
        elif job.groups is not None and trace.rank not in job.members[number]:
            message = (
                f"rank {trace.rank} issues a collective over group {number}, whose members are "
                f"{_members_text(job.members[number])}"
            )
            remedy = "name a group that the rank is a member of"
            report.error(trace.path, "not-a-member", message, remedy, node=where)


def _members_text(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} ranks)"


def _check_rank_peers(job: CheckedJob, place: int, trace: RankTrace, report: CheckReport) -> None:
    _check_self_messages(trace, report)
    backs = job.links.backs(place)
    for slot, (peer, back) in enumerate(zip(trace.peers, backs, strict=True)):
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
    ours: Sequence[IssuedCall],
    theirs: Sequence[IssuedCall],
    what: str,
    report: CheckReport,
) -> None:
    """Report each message of `ours` without a counterpart of the same tag and size in `theirs`."""
    if _contents(ours) == _contents(theirs):
        return
    left = Counter(_contents(theirs))
    other = "receive" if what == "send" else "send"
    for message in ours:
        left[message.content] -= 1
        if left[message.content] >= 0:
            continue
        sizes = sorted({m.size for m in theirs if m.what == message.what} - {message.size})
        others = f"one of {sizes[0]} bytes with that tag" if sizes else "none with that tag left"
        node = trace.analysis.program.nodes[message.index]
        way = "to" if what == "send" else "from"
        text = (
            f"rank {trace.rank}, {node.label}, {what}s {message.size} bytes with tag "
            f"{message.what} {way} rank {peer}; expected a {other} of the same size and tag there, "
            f"found {others}"
        )
        remedy = f"write the {other} on rank {peer}, or make tag and size agree"
        report.error(trace.path, f"unmatched-{what}", text, remedy, node=node.id)


def crossed_messages(job: CheckedJob) -> Iterator[tuple[RankTrace, int, str]]:
    """Messages that two ranks do not issue in the same order: the rank, the node, and a
    description. Libraries match messages in order, whatever their tags."""
    links, classes = job.links, job.traces.classes

    def differ(here: int, slot: int, there: int, back: int) -> bool:
        ours, theirs = classes[here].analysis.sends, classes[there].analysis.receives
        return _differ(ours, slot, theirs, back)

    met = links.back >= 0
    met[met] = _each_way(job, met, differ)
    doubtful = np.array([bool(each.analysis.unordered) for each in classes])[job.traces.class_of]
    doubtful[links.here[met]] = True
    for place in np.flatnonzero(doubtful).tolist():
        trace = job.traces.at(place)
        for slot in sorted(trace.analysis.unordered):
            nodes = trace.analysis.program.nodes
            first, second = (nodes[i] for i in trace.analysis.unordered[slot])
            text = f"no dependency orders {first.label} and {second.label}"
            yield trace, second.id, f"rank {trace.rank}: {text}, two messages of one peer"
        for slot, back in enumerate(links.backs(place)):
            if met[links.starts[place] + slot]:
                there = job.traces[trace.peers[slot]]
                ours = trace.analysis.sends.get(slot, ())
                yield _crossed(trace, there, ours, there.analysis.receives.get(back, ()))


def _contents(calls: Sequence[IssuedCall]) -> list[tuple[int, int]]:
    return [call.content for call in calls]


def _differ(ours: BySlot, slot: int, theirs: BySlot, back: int) -> bool:
    return _contents(ours.get(slot, ())) != _contents(theirs.get(back, ()))


def _first_difference(ours: Sequence[IssuedCall], theirs: Sequence[IssuedCall]) -> int:
    """The place of the first difference; one side may have fewer calls."""
    pairs = enumerate(zip(_contents(ours), _contents(theirs), strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _crossed(
    trace: RankTrace, there: RankTrace, ours: Sequence[IssuedCall], theirs: Sequence[IssuedCall]
) -> tuple[RankTrace, int, str]:
    """The first message on which the ends differ; one of them may have fewer messages."""
    at = _first_difference(ours, theirs)
    sent = trace.analysis.program.nodes[ours[at].index] if at < len(ours) else None
    got = there.analysis.program.nodes[theirs[at].index] if at < len(theirs) else None
    which = f"message {at + 1} from rank {trace.rank} to rank {there.rank}"
    if sent is None:
        assert got is not None  # the ends differ, so not both are exhausted
        return there, got.id, f"{which} is received by {got.label}, but not sent"
    if got is None:
        return trace, sent.id, f"{which} is {sent.label}, but not received"
    text = (
        f"{which} is {sent.label} with tag {ours[at].what}, but {got.label} with tag "
        f"{theirs[at].what} where it is received"
    )
    return trace, sent.id, text


def _check_collectives(job: CheckedJob, report: CheckReport) -> None:
    """Check that the members of each group issue the same collectives in the same order."""
    group, place = _memberships(job, np.isin(job.members.ids, job.uses.ids))
    slot = _slots_of_members(job, group, place)
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    lead = np.repeat(begins, np.diff(begins, append=len(group)))

    def differ(one: int, one_slot: int, other: int, other_slot: int) -> bool:
        ours, theirs = classes[one].analysis.collectives, classes[other].analysis.collectives
        return _differ(ours, one_slot, theirs, other_slot)

    classes, class_of = job.traces.classes, job.traces.class_of[place]
    odd = np.flatnonzero(of_each(differ, class_of[lead], slot[lead], class_of, slot))
    number = job.members.ids[group[odd]]
    for i in odd[np.argsort(number, kind="stable")].tolist():
        one, other = (job.traces.at(int(place[j])) for j in (lead[i], i))
        ours = one.analysis.collectives.get(int(slot[lead[i]]), ())
        theirs = other.analysis.collectives.get(int(slot[i]), ())
        _report_mismatch(int(job.members.ids[group[i]]), one, other, ours, theirs, report)


def _slots_of_members(job: CheckedJob, group: Ints, place: Ints) -> Ints:
    """For each pair of a group and a member, the slot of the group on that rank; -1 if it issues no
    collective over it."""
    uses = job.uses
    key = _keys(job, np.searchsorted(uses.ids, uses.number), uses.place)
    number = np.searchsorted(uses.ids, job.members.ids)
    return lookup(uses.slot, positions(key, _keys(job, number[group], place)))


def _report_mismatch(
    number: int,
    one: RankTrace,
    other: RankTrace,
    ours: Sequence[IssuedCall],
    theirs: Sequence[IssuedCall],
    report: CheckReport,
) -> None:
    place = _first_difference(ours, theirs)
    message = (
        f"collective {place + 1} over group {number}: expected {_named(one, ours, place)} as on "
        f"rank {one.rank}, found {_named(other, theirs, place)} on rank {other.rank}"
    )
    node = other.analysis.program.nodes[theirs[place].index].id if place < len(theirs) else None
    remedy = "issue the same collectives of the same size in the same order on all members"
    report.error(other.path, "collective-mismatch", message, remedy, node=node)


def _named(trace: RankTrace, collectives: Sequence[IssuedCall], place: int) -> str:
    if place >= len(collectives):
        return "no further collective"
    call = collectives[place]
    node = trace.analysis.program.nodes[call.index]
    return f"{collective_label(call.what)} of {call.size} bytes ({node.label})"
