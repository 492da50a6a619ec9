# cython: boundscheck=False, wraparound=False, annotation_typing=False
"""The loop of the clock: when each node of a step starts and ends, in whole numbers.

Nodes are numbers, from 0 on. `before[begins[i] : begins[i + 1]]` are those that node i waits for; a
node starts when the last of them ends, and takes its `span`. Two stages and two microbatches, of
which forward takes 10 and backward 20, and a message 1:

    node                        waits for   span   start   end   cause
     0  stage 0  forward 0      -             10       0    10      -1
     1           send 0         0              1      10    11       0
     2           forward 1      0             10      10    20       0
     3           send 1         1 2            1      20    21       2
     4  stage 1  receive 0      1              0      11    11       1
     5           forward 0      4             10      11    21       4
     6           backward 0     5             20      21    41       5
     7           send back 0    6              1      41    42       6
     8           receive 1      3 4            0      21    21       3
     9           forward 1      6 8           10      41    51       6
    10           backward 1     9             20      51    71       9
    11           send back 1    7 10           1      71    72      10
    12  stage 0  receive 0      7              0      42    42       7
    13           backward 0     2 12          20      42    62      12
    14           receive 1      11 12          0      72    72      11
    15           backward 1     13 14         20      72    92      14

Stage 0 waits for the message of 12 from 20 on, and for that of 14 from 62 on. The step takes 92.

What this Python says is what it means. `loop.pxd` has the types with which it is compiled: its
arguments are arrays then, else lists.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

Numbers = Sequence[int]
Room = MutableSequence[int]


def run(
    order: Numbers,
    begins: Numbers,
    before: Numbers,
    span: Numbers,
    start: Room,
    end: Room,
    cause: Room,
    gap: Numbers,
    past: Numbers,
    owner: Numbers,
    beside: Numbers,
    low: Room,
    rate: int,
) -> None:
    """Fill in `start`, `end` and `cause`, the node that each waited for last: of several the first,
    -1 for what starts with the step. In `order` nodes come after those that they wait for.

    Computations run at `rate` 1024ths of their speed while collectives run that were issued before:
    those in `beside` up to `past[i]`, which is negative for other nodes. The first `gap` of a span
    is not slower. Up to `low[owner[i]]` all collectives of a class have ended, which this moves on.
    Where nothing is slower the last six are empty, and 1024."""
    for i in order:
        ready, why = 0, -1
        for k in range(begins[i], begins[i + 1]):
            j = before[k]
            if end[j] > ready:
                ready, why = end[j], j
        start[i] = ready
        cause[i] = why
        if rate == 1024 or past[i] < 0:
            end[i] = ready + span[i]
            continue
        k = low[owner[i]]
        while k < past[i] and end[beside[k]] <= ready:
            k += 1
        low[owner[i]] = k
        end[i] = slowed_end(ready + gap[i], span[i] - gap[i], beside, k, past[i], start, end, rate)


def slowed_end(
    now: int,
    work: int,
    beside: Numbers,
    first: int,
    last: int,
    start: Numbers,
    end: Numbers,
    rate: int,
) -> int:
    """When work ends that begins now, while the nodes `beside[first:last]` run at their times."""
    left = work * 1024
    while left > 0:
        slow, free = now, -1  # until when it is slow, or else when that begins
        for k in range(first, last):
            j = beside[k]
            if start[j] <= now < end[j]:
                slow = end[j] if end[j] > slow else slow
            elif start[j] > now and (free < 0 or start[j] < free):
                free = start[j]
        speed = rate if slow > now else 1024
        until = slow if slow > now else free
        if until < 0 or left <= (until - now) * speed:
            return now - -left // speed
        left -= (until - now) * speed
        now = until
    return now


def spend(
    computing: Numbers,
    begun: Numbers,
    ended: Numbers,
    took: Numbers,
    cause: Numbers,
    call: Numbers,
    last: int,
    node: Room,
    since: Room,
    until: Room,
) -> int:
    """What the stream of computations waits for, of a class: its nodes on it are `computing`, the
    node that ends last is `last`. Fills in which `node` each part of a wait counts as, or -1 for
    what other classes are late with, and the times of the part, as far as there is room; how many
    parts there are.

    What it waits for counts while it runs, which `took` so long, and before that what this waited
    for; outside of the class `cause` is -1. A `call` of several classes that it is blocked by
    counts itself."""
    count = now = 0
    for i in computing:
        if begun[i] > now:
            of = -1 if call[i] else cause[i]
            count = trace_back(of, now, begun[i], took, cause, node, since, until, count)
        now = ended[i]
    if last >= 0 and ended[last] > now:
        count = trace_back(last, now, ended[last], took, cause, node, since, until, count)
    return count


def trace_back(
    of: int,
    first: int,
    last: int,
    took: Numbers,
    cause: Numbers,
    node: Room,
    since: Room,
    until: Room,
    count: int,
) -> int:
    """The parts of a wait for a node, from its end backwards, behind so many others."""
    while last > first:
        start = first
        if of >= 0 and last - took[of] > first:
            start = last - took[of]
        if start < last:
            if count < len(node):
                node[count] = of
                since[count] = start
                until[count] = last
            count += 1
        last = start
        if of >= 0:
            of = cause[of]
    return count


def turn_round(
    begins: Numbers,
    before: Numbers,
    later: Numbers,
    earlier: Numbers,
    waiting: Room,
    after_begins: Room,
    after: Room,
) -> None:
    """Fill in for how many nodes each is `waiting`, and those that wait for it, of node i from
    `after_begins[i]` on. Node `later[k]` waits for `earlier[k]`, too. `after_begins` begins as
    zeros, two more than there are nodes."""
    for k in range(len(before)):
        after_begins[before[k] + 2] += 1
    for k in range(len(earlier)):
        after_begins[earlier[k] + 2] += 1
    for i in range(len(waiting)):
        after_begins[i + 2] += after_begins[i + 1]
    for i in range(len(waiting)):
        waiting[i] = begins[i + 1] - begins[i]
        for k in range(begins[i], begins[i + 1]):
            j = before[k] + 1
            after[after_begins[j]] = i
            after_begins[j] += 1
    for k in range(len(later)):
        waiting[later[k]] += 1
        j = earlier[k] + 1
        after[after_begins[j]] = later[k]
        after_begins[j] += 1


def put_in_order(waiting: Room, after_begins: Numbers, after: Numbers, order: Room) -> int:
    """Fill in an `order` in which each node comes after those that it waits for, which
    `turn_round` gives; how many can be put in it. `waiting` is used up."""
    done = at = 0
    for i in range(len(waiting)):
        if waiting[i] == 0:
            order[done] = i
            done += 1
    while at < done:
        i = order[at]
        at += 1
        for k in range(after_begins[i], after_begins[i + 1]):
            j = after[k]
            waiting[j] -= 1
            if waiting[j] == 0:
                order[done] = j
                done += 1
    return done
