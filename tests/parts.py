"""The pods of a training step in tests: all run at once on numbers, each waits for its messages.

Messages are what the ops say: who sends to whom, under which tag. What of a message a rank uses
follows from the positions that both ends hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from threading import Condition, Thread, get_ident
from typing import Any

import numpy as np

from stagec.interp.machine import DisagreementError, Locals, Meet, Meeting
from stagec.interp.pipeline import run_named
from stagec.ir.core import Operation
from stagec.ir.expr import evaluate
from stagec.ir.module import Module
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array
from stagec.ir.types import CACHED, TensorType
from stagec.ir_spec.ops.pod_crossings import message_bytes
from stagec.jobs.builder import JobBuilder
from stagec.jobs.planned import Planned
from stagec.jobs.pod_options import pod_names
from stagec.jobs.pods import Pods
from stagec.jobs.request.flags import PartText
from stagec.jobs.request.options import JobOptions
from stagec.program.crossings import microbatches
from stagec.program.nodes import Ints
from stagec.support.source import Source
from stagec.text.build import parse_module
from stagec.text.printer import print_module
from tests.support import STEP, inputs_of, run_passes

#: Makes gradients long.
SCALE = 3.0
#: The sender's pod and rank, the receiver's pod and rank, and the tag.
Key = tuple[str, int, str, int, int]


@dataclass(frozen=True)
class Letter:
    """What a rank holds as it sends, and which part of the value that is."""

    value: Array
    type: TensorType
    at: Mapping[str, int]
    bytes: int


@dataclass
class Post:
    """The messages between the pods. Whoever takes a message waits until it is there; where all
    wait, none comes."""

    pods: Mapping[str, Module]
    far: Mapping[str, Mapping[str, Sequence[Ints]]]
    letters: dict[Key, Letter] = field(default_factory=dict[Key, Letter])
    running: int = 0
    waiting: dict[int, Key] = field(default_factory=dict[int, Key])
    news: Condition = field(default_factory=Condition)

    def meet(self, pod: str, op: Operation, where: Meeting, parts: Locals) -> Locals:
        """Send the messages of an end, or take them."""
        if op.name == "stg.take_over":
            return [self._take(pod, op, where, at) for at in where.ranks]
        size = evaluate(message_bytes(op), self.pods[pod].env)
        with self.news:
            for at, part in zip(where.ranks, parts, strict=True):
                for to, rank, peer, tag in self._messages(pod, op, where, at):
                    key = pod, rank, to, peer, tag
                    assert key not in self.letters, "a tag for each message of two ranks"
                    self.letters[key] = Letter(part, op.operands[0].tensor, at, size)
            self.news.notify_all()
        return parts

    def _take(self, pod: str, op: Operation, where: Meeting, at: Mapping[str, int]) -> Array:
        """What a rank puts together. Scalars come whole from each sender."""
        type_, module = op.result.tensor, self.pods[pod]
        ctx = NumericContext(module.env, at)
        mine = np.full([ctx.size(d.local) for d in type_.dims], np.nan)
        came = 0
        for source, rank, peer, tag in self._messages(pod, op, where, at):
            letter = self._wait((source, peer, pod, rank, tag))
            came += letter.bytes
            theirs = NumericContext(self.pods[source].env, letter.at)
            to: list[Array] = []
            of: list[Array] = []
            for dim, other in zip(type_.dims, letter.type.dims, strict=True):
                here, there = ctx.positions(dim), theirs.positions(other)
                _, a, b = np.intersect1d(np.asarray(here), np.asarray(there), return_indices=True)
                assert a.size, "a message has something of what the rank holds"
                to.append(a)
                of.append(b)
            mine[np.ix_(*to)] = letter.value[np.ix_(*of)]
        assert not np.isnan(mine).any(), "everything has come"
        if type_.rank:
            assert came == evaluate(type_.local_bytes, module.env), "each byte comes once"
        return mine.astype(int) if type_.dtype.startswith("i") else mine

    def _messages(
        self, pod: str, op: Operation, where: Meeting, at: Mapping[str, int]
    ) -> Iterator[tuple[str, int, int, int]]:
        """The other pod, the rank here and there, and the tag of each message of a rank."""
        other, rank = op.text("to") or op.text("source"), _rank(self.pods[pod], at)
        tag = where.microbatch * op.integer("streams") + op.integer("stream") + where.layer
        for number in range(op.integer("first"), op.integer("first") + op.integer("ways")):
            yield other, rank, int(self.far[pod][other][number][rank]), tag

    def _wait(self, key: Key) -> Letter:
        with self.news:
            self.waiting[get_ident()] = key
            while key not in self.letters:
                if self._stuck():
                    del self.waiting[get_ident()]
                    self.news.notify_all()
                    raise DisagreementError(f"all pods wait, one of them for {key}")
                self.news.wait()
            del self.waiting[get_ident()]
            return self.letters.pop(key)

    def _stuck(self) -> bool:
        waits = len(self.waiting) == self.running
        return waits and not any(key in self.letters for key in self.waiting.values())

    def done(self) -> None:
        """A pod has ended."""
        with self.news:
            self.running -= 1
            self.news.notify_all()


def run_pods(
    pods: Mapping[str, Module],
    far: Mapping[str, Mapping[str, Sequence[Ints]]],
    inputs: Mapping[str, Array],
    send: Meet | None = None,
) -> dict[str, Array]:
    """The results of all pods by name; `send` has what goes to a pod that is none of these. Raises
    `DisagreementError` where they wait for each other."""
    actual = run_each(pods, far, dict.fromkeys(pods, inputs), send)
    return {name: value for results in actual.values() for name, value in results.items()}


def run_each(
    pods: Mapping[str, Module],
    far: Mapping[str, Mapping[str, Sequence[Ints]]],
    inputs: Mapping[str, Mapping[str, Array]],
    send: Meet | None = None,
) -> dict[str, dict[str, Array]]:
    """The same by pod, each of which has inputs of its own."""
    post, actual = Post(pods, far, running=len(pods)), dict[str, dict[str, Array]]()
    problems: list[Exception] = []

    def meet(pod: str, op: Operation, where: Meeting, parts: Locals) -> Locals:
        inside = (op.text("to") or op.text("source")) in pods
        return send(op, where, parts) if send and not inside else post.meet(pod, op, where, parts)

    def run(pod: str) -> None:
        module = pods[pod]
        try:
            given = _inputs(module, inputs[pod])
            actual[pod] = run_named(module, module.env, given, partial(meet, pod))
        except Exception as problem:
            problems.append(problem)
        finally:
            post.done()

    threads = [Thread(target=run, args=(pod,)) for pod in pods]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    assert not post.letters, "what is sent is taken"
    return actual


def _inputs(module: Module, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The arguments of a pod. The samples of a microbatch are the same in all pods, whatever ranks
    they lie on."""
    args = {a.name: a for f in module.functions for a in f.body.args}
    actual: dict[str, Array] = {}
    for name, arg in args.items():
        base = arg.tensor.part[0] if arg.tensor.part is not None else name
        value: Array = inputs[base]
        split = [d for d, dim in enumerate(arg.tensor.dims) if "B" in dim.size.symbols]
        if split and arg.tensor.role in ("", *CACHED):
            order = order_of(module, arg.tensor, split[0], int(value.shape[split[0]]))
            value = np.take(value, order, axis=split[0])
        actual[base] = value
    return actual


def order_of(module: Module, type_: TensorType, d: int, batch: int) -> Ints:
    """Which sample each place of the batch has, dimension `d` of values of a pod."""
    ranks = prod(module.env[a] for a in type_.dims[d].axes)
    ids: Ints = np.arange(batch, dtype=np.int64)
    return ids.reshape(microbatches(module), ranks, -1).transpose(1, 0, 2).ravel()


def batch_order(module: Module, batch: int) -> Ints:
    """Which sequence each place of the batch has in a pod that serves."""
    args = (a.tensor for f in module.functions for a in f.body.args if a.tensor.role in CACHED)
    type_ = next(args)
    d = next(d for d, dim in enumerate(type_.dims) if "B" in dim.size.symbols)
    return order_of(module, type_, d, batch)


def _rank(module: Module, at: Mapping[str, int]) -> int:
    """The number of a rank in its pod, row-major."""
    actual = 0
    for axis in module.mesh.axes if module.mesh else ():
        actual = actual * module.env[axis] + at[axis]
    return actual


def pods_of(
    path: str, parts: Sequence[str], **options: Any
) -> tuple[dict[str, Module], Mapping[str, Mapping[str, Sequence[Ints]]]]:
    """The planned modules of the pods of a job, and the ranks that each exchanges values with."""
    texts = tuple(part_text(text) for text in parts)
    sizes = {"B": 8, **options.pop("sizes", {})}
    return lowered_pods(JobOptions(path, sizes=sizes, part=texts, **options))


def lowered_pods(
    job: JobOptions,
) -> tuple[dict[str, Module], Mapping[str, Mapping[str, Sequence[Ints]]]]:
    plans = {name: Planned(print_module) for name in pod_names(job)}
    actual = Pods.of(job).lower({name: [plan] for name, plan in plans.items()})
    registry = next(iter(actual.modules.values())).registry
    texts_of = {name: Source(name, plans[name].needed("parts")) for name in actual.builders}
    return {
        name: parse_module(text, registry) for name, text in texts_of.items()
    }, actual.peers_in_other_pod


def assert_parts_train(path: str, parts: Sequence[str], **options: Any) -> None:
    """The pods of a step give the loss and the updated parameters of the whole step on one device,
    to 1e-9."""
    pods, far = pods_of(path, parts, **options)
    sizes = tuple(sorted(options.get("sizes", {}).items()))
    inputs, expected = whole_step(path, sizes, lora=options.get("lora", ""))
    results = run_pods(pods, far, inputs)
    assert len(results) == len(expected)
    for name, value in results.items():
        names = name, name.removesuffix("_sum"), name.removesuffix("_g")
        theirs = next(expected[n] for n in names if n in expected)
        np.testing.assert_allclose(value, theirs, rtol=1e-9, atol=1e-9, err_msg=name)


def part_text(text: str) -> PartText:
    head, _, flags = text.partition(":")
    name, _, value = head.partition("=")
    return PartText(name, value, flags.strip())


@cache
def whole_step(
    path: str, sizes: tuple[tuple[str, int], ...], passes: str = STEP, lora: str = ""
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs and results of the step on one device, with gradients long enough to be clipped."""
    builder = JobBuilder(JobOptions(path, sizes={"B": 8, **dict(sizes)}, lora=lora))
    module = run_passes(builder.module, passes)
    plain = inputs_of(module, 2)
    inputs = {n: a * SCALE if a.dtype.kind == "f" else a for n, a in plain.items()}
    return inputs, run_named(module, module.env, inputs)
