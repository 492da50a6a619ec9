"""Two pods in tests: one prefills on numbers, the other one decodes with what arrives.

Messages are what the ops say: who sends to whom, under which tag. What of a message a rank uses
follows from the positions that both ends hold.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from stagec.interp.data import random_inputs
from stagec.interp.machine import Locals, Meeting
from stagec.interp.pipeline import run_named
from stagec.ir.core import Operation, Value
from stagec.ir.module import Module
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array
from stagec.ir.serving_step import DECODE, PREFILL
from stagec.ir.types import CACHED, TensorType
from stagec.jobs.planned import Planned
from stagec.jobs.pod_options import options_of_pod
from stagec.jobs.pods import Pods
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import PODS
from stagec.program.crossings import microbatches
from stagec.program.nodes import Ints
from stagec.support.source import Source
from stagec.text.build import parse_module
from stagec.text.printer import print_module
from tests.served import step_modules, tokens_of, whole_logits

_PASS = "hand-over"


@dataclass(frozen=True)
class Letter:
    """What a rank holds as it sends, and the part of the batch: that of its microbatch, and which
    of the `turns` parts of it."""

    value: Array
    type: TensorType
    at: Mapping[str, int]
    microbatch: int
    turn: int
    turns: int


@dataclass
class Post:
    """The messages between two pods: of a prompt, behind which so many new tokens are decoded."""

    pods: Mapping[str, Module]
    far: Mapping[str, Mapping[str, Sequence[Ints]]]
    prompt: int
    new: int
    letters: dict[tuple[int, int, int], Letter] = field(
        default_factory=dict[tuple[int, int, int], Letter]
    )

    def send(self, op: Operation, where: Meeting, parts: Locals) -> Locals:
        """The messages of an `stg.hand_over`."""
        turns = op.integer("turns", 1)
        for at, part in zip(where.ranks, parts, strict=True):
            rank = _rank(self.pods[PREFILL], at)
            for way, number, tag in _messages(op, where):
                key = rank, int(self.far[PREFILL][DECODE][number][rank]), tag
                assert key not in self.letters, "a tag for each message of two ranks"
                type_ = op.operands[0].tensor
                self.letters[key] = Letter(part, type_, at, where.microbatch, way % turns, turns)
        return parts

    def take(self, op: Operation, where: Meeting, parts: Locals) -> Locals:
        """What the ranks get from an `stg.take_over`."""
        actual: Locals = []
        for at, part in zip(where.ranks, parts, strict=True):
            rank = _rank(self.pods[DECODE], at)
            mine: list[Letter] = []
            for _, number, tag in _messages(op, where):
                source = int(self.far[DECODE][PREFILL][number][rank])
                mine.append(self.letters.pop((source, rank, tag)))
            actual.append(self._put(op, np.full_like(part, np.nan), at, mine))
        return actual

    def _put(
        self, op: Operation, mine: Array, at: Mapping[str, int], letters: list[Letter]
    ) -> Array:
        """The part of a rank, put together. Rows that nobody sends are noise."""
        type_ = op.operands[0].tensor
        batch = _batch_dim(type_)
        rows, kept = op.integer("dim", -1), op.integer("rows", 0)
        sources = sorted({self._source(each, batch) for each in letters})
        count = mine.shape[batch] // len(sources)
        place = self._place(DECODE, type_, at, batch)
        ctx = NumericContext(self.pods[DECODE].env, at)
        for each in letters:
            prefill = self.pods[PREFILL]
            theirs = NumericContext(prefill.env, each.at, zigzag=prefill.zigzag)
            to: list[Array] = []
            of: list[Array] = []
            for d, (dim, other) in enumerate(zip(type_.dims, each.type.dims, strict=True)):
                if d == batch:
                    begin = sources.index(self._source(each, batch)) * count
                    to.append(np.arange(begin, begin + count))
                    of.append(_sequences(each, each.value.shape[d], place, count))
                    continue
                here = np.asarray(ctx.positions(dim), dtype=int)
                there = np.asarray(theirs.positions(other), dtype=int)
                if d == rows:  # by tokens: of a window the last ones
                    mine_first = max(self.prompt + self.new - ctx.size(dim.size), 0)
                    first = max(self.prompt - theirs.size(other.size), 0)
                    here, there = here + mine_first, there + first
                    here = np.where(here < self.prompt, here, -1 - here)
                    there = np.where(there >= self.prompt - kept, there, self.prompt)
                _, a, b = np.intersect1d(here, there, return_indices=True)
                to.append(a)
                of.append(b)
            mine[np.ix_(*to)] = each.value[np.ix_(*of)]
        if rows >= 0:
            size = ctx.size(type_.dims[rows].size)
            positions = np.asarray(ctx.positions(type_.dims[rows]))
            behind = positions + max(self.prompt + self.new - size, 0) >= self.prompt
            np.moveaxis(mine, rows, 0)[behind] = 7.0
        assert not np.isnan(mine).any(), "everything has come"
        return mine

    def _source(self, letter: Letter, batch: int) -> tuple[int, int]:
        """Where sequences come from: a part of the batch, and the part of a microbatch."""
        place = self._place(PREFILL, letter.type, letter.at, batch)
        return place, letter.microbatch * letter.turns + letter.turn

    def _place(self, pod: str, type_: TensorType, at: Mapping[str, int], d: int) -> int:
        actual, mesh = 0, self.pods[pod].env
        for axis in type_.dims[d].axes:
            actual = actual * mesh[axis] + at[axis]
        return actual


def _sequences(letter: Letter, kept: int, place: int, count: int) -> Array:
    """The sequences of a letter that are for a rank: each rank of several that share them has a
    part of every turn."""
    ranks = kept // count // letter.turns
    return np.arange(count) + (place % ranks * letter.turns + letter.turn) * count


def _messages(op: Operation, where: Meeting) -> Iterator[tuple[int, int, int]]:
    """The way, the number and the tag of each message of a rank, as the op says."""
    shares, ways = op.integers("shares") or (0,), op.integer("ways")
    share = bisect_right(shares, where.layer) - 1
    turns, streams = op.integer("turns", 1), op.integer("streams")
    for way in range(ways):
        part = where.microbatch * turns + way % turns
        tag = part * streams + op.integer("stream") + where.layer
        yield way, op.integer("first", 0) + share * ways + way, tag


def _batch_dim(type_: TensorType) -> int:
    return next(d for d, dim in enumerate(type_.dims) if "B" in dim.size.symbols)


def _rank(module: Module, at: Mapping[str, int]) -> int:
    """The number of a rank in its pod, row-major."""
    actual = 0
    for axis in module.mesh.axes if module.mesh else ():
        actual = actual * module.env[axis] + at[axis]
    return actual


def places_of(pods: Mapping[str, Module], batch: int) -> Ints:
    """Which sequence each place of the decoding batch has.

    Ranks of decode that share the sequences of a rank have a part of each of its microbatches; one
    that has those of several ranks has them in turn, microbatch by microbatch.
    """
    s, t = (_batch_parts(pods[pod]) for pod in PODS)
    m, n = (microbatches(pods[pod]) for pod in PODS)
    parts, each = max(s, t), max(m, n)
    ids = np.arange(batch).reshape(s, m, parts // s, each // m, -1)
    by_rank = ids.transpose(0, 2, 1, 3, 4).reshape(t, parts // t, n, each // n, -1)
    return by_rank.transpose(0, 2, 1, 3, 4).reshape(-1)


def _batch_parts(module: Module) -> int:
    caches = (a for f in module.functions for a in f.body.args if a.tensor.role in CACHED)
    type_ = next(caches).tensor
    return prod(module.env[a] for a in type_.dims[_batch_dim(type_)].axes)


def assert_hands_over(job: JobOptions, prefill: str, decode: str, *, prompt: int, new: int) -> None:
    """A pod that prefills and one that decodes give the logits of the whole forward, to 1e-9; the
    second one knows of the prompt what crosses."""
    tokens, batch = tokens_of(job), job.sizes["B"]
    assert batch is not None
    sizes = {n: v for n, v in job.sizes.items() if n not in (tokens, "B")}
    asked = job.changed(serve="disaggregated", sizes=sizes, batch=batch, prompt=prompt)
    asked = asked.changed(prefill=prefill, decode=decode, speculative=new - 1, sampling="none")
    plans = {p: Planned(print_module, _PASS) for p in PODS}
    actual = Pods.of(asked).lower({p: [plan] for p, plan in plans.items()})
    registry = actual.modules[PREFILL].registry
    pods = {p: parse_module(Source(p, plan.needed(_PASS)), registry) for p, plan in plans.items()}
    post = Post(pods, actual.peers_in_other_pod, prompt, new)
    inputs, expected = whole_logits(job, prompt + new)
    stated, _ = step_modules(
        options_of_pod(PREFILL, asked).changed(sizes=job.sizes), PREFILL, prompt, 0
    )
    given = inputs_of_step(stated, inputs, slice(0, prompt), np.arange(batch))
    rows = run_named(pods[PREFILL], pods[PREFILL].env, given, post.send)
    first = logits_of(rows, stated)
    np.testing.assert_allclose(
        first, expected[:, prompt - first.shape[1] : prompt], rtol=1e-9, atol=1e-9
    )
    order = places_of(pods, batch)
    assert_decodes(job, asked, post, inputs, order, expected)


def assert_decodes(
    job: JobOptions,
    asked: JobOptions,
    post: Post,
    inputs: Mapping[str, Array],
    order: Ints,
    expected: Array,
) -> None:
    """The pod that decodes gives the logits of sequences in this order."""
    prompt, new, decode = post.prompt, post.new, post.pods[DECODE]
    given_by = options_of_pod(DECODE, asked).changed(sizes=job.sizes)
    stated, _ = step_modules(given_by, DECODE, new, prompt)
    given = inputs_of_step(stated, inputs, slice(prompt, prompt + new), order)
    rows = run_named(decode, decode.env, given, post.take)
    assert not post.letters, "what is sent is taken"
    np.testing.assert_allclose(
        logits_of(rows, stated), expected[order, prompt:], rtol=1e-9, atol=1e-9
    )


def logits_of(actual: Mapping[str, Array], stated: Module) -> Array:
    name = stated.main.body.terminator.operands[0].name
    return actual[name] if name in actual else actual[f"{name}_sum"]


def inputs_of_step(
    stated: Module, inputs: Mapping[str, Array], new: slice, order: Ints
) -> dict[str, Array]:
    """What the arguments of a step are: parameters, the new tokens of sequences in this order, and
    caches of noise. States are 0 before the first token."""
    actual: dict[str, Array] = {}
    for arg in stated.main.body.args:
        fresh = random_inputs([arg], stated.env, 7)[arg.name]
        if arg.tensor.role in CACHED:
            actual[arg.name] = fresh if arg.tensor.role == "cache" else np.zeros_like(fresh)
        else:
            actual[arg.name] = _given(arg, fresh, inputs[arg.name], new, order)
    return actual


def _given(arg: Value, fresh: Array, value: Array, new: slice, order: Ints) -> Array:
    along = [d for d, n in enumerate(fresh.shape) if n != value.shape[d]]
    for d in along:
        if fresh.shape[d] > value.shape[d]:  # a table that training has fewer rows of
            fresh[(slice(None),) * d + (slice(value.shape[d]),)] = value
            return fresh
        value = np.moveaxis(np.moveaxis(value, d, 0)[new], 0, d)
    if arg.tensor.role or "B" not in {s for d in arg.tensor.dims for s in d.size.symbols}:
        return value
    return np.take(value, order, axis=_batch_dim(arg.tensor))
