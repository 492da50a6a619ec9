# cython: boundscheck=False, wraparound=False, annotation_typing=False
"""The loop of the clock: the start and end of each node of a step, as integers.

Nodes are numbered from 0. Node i waits for `before[begins[i] : begins[i + 1]]`; it starts when the
last of them ends, and takes `span[i]`. An example with two stages and two microbatches, in which a
forward takes 10, a backward 20 and a message 1:

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

Stage 0 waits from 20 on for the message that 12 receives, and from 62 on for that of 14. The step
takes 92.

`loop.pxd` has the types with which this module is compiled; its arguments are then arrays. Without
a compiler it runs as it stands, on lists, with the same results.
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
    """Fill in `start`, `end` and `cause`: the node that each waited for last, of several the first
    one, and -1 for a node that starts with the step. `order` is a topological order.

    Computations run at `rate` 1024ths of their speed while collectives run that were issued before
    them: those in `beside` up to `past[i]`, which is negative for nodes that are not computations.
    The first `gap[i]` of a span is not slowed down. The collectives of a class up to
    `low[owner[i]]` have ended; this function advances `low`. Without slowdown `rate` is 1024, and
    the five arrays before it are empty."""
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
    """The end of `work` that begins at `now` and runs at `rate` 1024ths of its speed while one of
    the nodes `beside[first:last]` runs."""
    left = work * 1024
    while left > 0:
        slow, free = now, -1  # the end of slow work, or else the start of the next
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
    """Fill in what the compute stream of a class waits for, and return the number of parts.

    `computing` are the nodes of the class on the stream, `last` is its node that ends last. A part
    of a wait has the `node` that it is attributed to, or -1 where other classes are late, and the
    times `since` and `until`. Parts are filled in as far as there is room.

    A wait is attributed to the node waited for while that runs, which it `took` so long, and before
    that to what this node waited for in turn. A `cause` outside of the class is -1. A blocking
    `call` of several classes is attributed to itself."""
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
    """Fill in the parts of a wait from `first` to `last` for the node `of`, from its end backwards,
    after `count` earlier parts. Returns the number of parts so far."""
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
    """Turn the edges of a graph round: fill in for how many nodes each is `waiting`, and the nodes
    `after` each, those of node i from `after_begins[i]` on. Node `later[k]` also waits for
    `earlier[k]`. `after_begins` has two elements more than there are nodes, all 0 at first."""
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
    """Fill in a topological `order` of the edges that `turn_round` fills in, and return how many
    nodes it has: fewer than there are if some wait for each other. `waiting` is overwritten.
    Source: Kahn, "Topological sorting of large networks", CACM 5(11), 1962."""
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
