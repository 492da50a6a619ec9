"""Lowered ops (`et.`): an SPMD graph whose ops become the nodes of a trace, with symbolic sizes.

SSA edges are data dependencies. Computations run in program order on one stream, communication in
program order on another. plan-memory adds `stg.free` and `stg.memory` before lowering.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from stagec.ir.core import Operation
from stagec.ir.kernel import EXTENTS, MEMORY
from stagec.ir.opdef import OpDef
from stagec.ir.param import Param
from stagec.ir.traits import (
    Declares,
    EndsLifetime,
    HasRegion,
    Holds,
    Lowered,
    Named,
    Recalls,
    Repeats,
    Runs,
    Stays,
    Terminates,
    Trait,
)
from stagec.ir.types import NODE, Type
from stagec.ir_spec.ops.pipeline import ACTIONS, ActionOp
from stagec.ir_spec.ops.pod_crossings import BY_LAYER
from stagec.ir_spec.ops.structure import FIRST, ORDER, REPLAY, Declaration, Terminator


class FreeOp(Declaration):
    """The end of the lifetime of buffers, after their last user. A later use is an error."""

    name = "stg.free"
    traits = (Declares(), EndsLifetime())
    operands = ("value*",)
    example = "stg.free(%n1)"


class MemoryOp(Declaration):
    """Bytes on one rank: static (parameters, gradients, optimizer, caches), stash, transient and
    peak."""

    name = "stg.memory"
    params = (
        Param("parameters", "size", "bytes of parameters"),
        Param("gradients", "size", "bytes of gradients"),
        Param("optimizer", "size", "bytes of optimizer state"),
        Param("buckets", "size", "bytes of flat buffers in which gradients are reduced"),
        Param("caches", "size", "bytes of what steps of serving keep of sequences"),
        Param("stash", "size", "bytes of activations kept for backward"),
        Param("transient", "size", "bytes of what lives inside the step"),
        Param("peak", "size", "bytes of everything at the worst moment (outside of actions)"),
        Param("host", "size", "bytes of what is offloaded to host memory, beside all of these"),
        Param("stages", "ints", "the pipeline stages that this is about"),
        Param(
            "around", "size", "of a stage: bytes beside static ones that last as long as actions"
        ),
    )
    example = "stg.memory[parameters = 2*P, peak = 18*P]"


class WorkingOp(Declaration):
    """The memory of an action for its microbatch, in bytes on one rank.

    `runs` are the kinds of actions of a chunk that run one after the other. Before them, forward,
    backward and the gradients of weights of some chunks have run for the same microbatch. If sums
    of gradients are freed between steps, the `first` microbatch that runs an action allocates them.
    """

    name = "stg.working"
    params = (
        Param("runs", "names", "kinds of the actions", required=True, choices=ACTIONS),
        Param("chunk", "int", "their chunk of the model", required=True),
        Param("forward", "ints", "the chunks whose forward has run before"),
        Param("backward", "ints", "the chunks whose backward has run before"),
        Param("weights", "ints", "the chunks whose gradients of weights have run before"),
        Param("first", "names", "those that no microbatch has run before", choices=ACTIONS),
        Param("sums", "sizes", "bytes of the sums of gradients that each of these makes"),
        Param("peak", "size", "bytes at its worst moment, on top of those at its start"),
        Param("left", "size", "bytes after it less those before"),
        Param("host", "size", "the same in host memory"),
        Param("stages", "ints", "the pipeline stages that run it"),
    )
    example = "stg.working[runs = backward, chunk = 0, forward = 0, peak = 3*B, left = -2*B]"


class BufferOp(Declaration):
    """A buffer of a step: its lifetime, counted in starts and ends of buffers, and its position in
    the enclosing arena, in bytes."""

    name = "stg.buffer"
    parents = ("stg.arena",)
    params = (
        Param("of", "str", "the value that it holds", required=True),
        Param("first", "int", "its start", required=True),
        Param("last", "int", "its end", required=True),
        Param("offset", "int", "bytes from the start of the arena", required=True),
        Param("bytes", "int", "its size in the arena", required=True),
    )
    example = 'stg.buffer[of = "n1", first = 1, last = 4, offset = 0, bytes = 512]'


class ArenaOp(Declaration):
    """The positions of all buffers of a step in one memory; buffers with overlapping lifetimes do
    not overlap."""

    name = "stg.arena"
    traits = (Declares(), Holds("each stg.buffer", only=True))
    params = (
        Param("space", "name", "device or host", required=True, choices=("device", "host")),
        Param("model", "str", "the allocator", required=True),
        Param("bound", "int", "the most bytes that live at once"),
        Param("allocated", "int", "the most bytes that are given out at once"),
        Param("reserved", "int", "the size of the arena"),
    )
    example = 'stg.arena @f_device[space = device, model = "best-fit"] {\n}'

    def verify(self, op: Operation) -> Iterator[str]:
        """Check that buffers with overlapping lifetimes do not overlap, and all are inside the
        arena."""
        starts = sorted((b for b in op.body.ops), key=lambda b: b.integer("first"))
        end = op.integer("reserved", 2**63 - 1)
        live: list[Operation] = []
        for buffer in starts:
            low, high = _span(buffer)
            if high > end or buffer.integer("last") < buffer.integer("first"):
                yield f"buffer '{buffer.text('of')}' ends before it starts, or beyond the arena"
            live = [b for b in live if b.integer("last") > buffer.integer("first")]
            for other in live:
                if low < _span(other)[1] and _span(other)[0] < high:
                    names = f"'{buffer.text('of')}' and '{other.text('of')}'"
                    yield f"buffers {names} overlap while both are allocated"
            live.append(buffer)


def _span(buffer: Operation) -> tuple[int, int]:
    return buffer.integer("offset"), buffer.integer("offset") + buffer.integer("bytes")


class GraphOp(Declaration):
    """The program of every rank of a class; `ranks` is the number of ranks that run it.

    With `stages`, it is the program of the ranks at these coordinates along the axis `over`. Sizes
    may contain the coordinate of a rank along an axis a, as the symbol `a_index`.
    """

    name = "et.graph"
    traits = (Declares("graph"), HasRegion(), Named(), Lowered())
    parents = ("stg.module",)
    params = (
        Param("ranks", "size", "how many ranks run it", required=True),
        Param("parameters", "size", "parameters of the whole model"),
        Param("trainable", "size", "those that are trained, if others are frozen"),
        Param("over", "axis", "the axis of pipeline stages"),
        Param("stages", "ints", "the stages that run it"),
        Param("caches", "ints", "of serving: arguments that are the last results after the step"),
        Param("inputs", "ints", "of serving: arguments by which tokens come in"),
    )
    example = "et.graph @step[ranks = dp*tp] (%x: node) -> node {\n  et.return(%x)\n}"


class NodeOp(OpDef):
    """Base class of ops that become nodes."""

    operands = ("dep*",)
    traits: ClassVar[tuple[Trait, ...]] = (Stays(), Lowered())

    def infer(self, op: Operation) -> list[Type]:
        return [NODE]


_SHARED = Param("shared", "flag", "of a mixed step: for the tokens of several groups of ranks")


_EXTENTS = {
    "batch": "of a kernel: products, or sequences of attention",
    "m": "of a matrix product: rows of the left operand and the result",
    "n": "of a matrix product: columns of the right operand and the result",
    "k": "of a matrix product: what is summed over",
    "heads": "of attention: heads of the queries",
    "kv_heads": "of attention: heads of the keys and values",
    "queries": "of attention: queries of a sequence",
    "keys": "of attention: keys of a sequence that are computed with",
    "qk": "of attention: head size of queries and keys",
    "v": "of attention: head size of values",
}


class CompOp(NodeOp):
    """A computation: FLOPs executed, FLOPs of matrix products as other tools count them, bytes read
    and written, bytes of the results.

    `kernel` is the kind of the kernel, which determines its time. A matrix product has the extents
    `batch`, `m`, `n` and `k`: its FLOPs are `2*batch*m*n*k`. Attention has `batch`, `heads`,
    `kv_heads`, `queries`, `keys` and the head sizes `qk` and `v`: its FLOPs are
    `2*batch*heads*queries*keys` times `qk + v`, in backward times `3*qk + 2*v`; half of that if it
    is `causal`. Other kernels are limited by memory. Extents are those of one rank, in elements. A
    fused kernel lists its ops with `fuses`; `kind` is the first of them.
    """

    name = "et.comp"
    params = (
        Param("kind", "name", "the op", required=True, positional=True),
        Param("flops", "size", "FLOPs executed", required=True),
        Param("matmul", "size", "FLOPs of the matrix products in kernels, masks ignored"),
        Param("bytes", "size", "bytes read and written"),
        Param("out", "size", "bytes of the results", required=True),
        Param(
            "kernel",
            "name",
            "matmul, attention, attention_backward or memory (default)",
            choices=tuple(EXTENTS),
            default=MEMORY,
        ),
        Param("causal", "flag", "of attention: a mask leaves half of the queries and keys"),
        Param("windowed", "flag", "of attention: keys are those of a window, on average"),
        Param("transposed", "flag", "of products: rows are summed up, m and n are contiguous"),
        Param(
            "form",
            "name",
            "of attention: its kernel of a library (stg.kernels), indexer or selects; of experts: "
            "experts",
        ),
        Param("dtype", "name", "element type of the operands of products"),
        Param("fuses", "names", "the ops that run as one kernel"),
        _SHARED,
        *(Param(name, "size", doc) for name, doc in _EXTENTS.items()),
    )
    example = (
        "%y = et.comp[einsum, flops = 2*B*D, out = 2*B, kernel = matmul, dtype = bf16, "
        "batch = 1, m = B, n = 1, k = D](%x) : node"
    )

    def verify(self, op: Operation) -> Iterator[str]:
        """Check that a kernel has exactly the extents of its kind."""
        wanted = EXTENTS[op.text("kernel", MEMORY)]
        given = [n for n in _EXTENTS if n in op.attrs]
        if sorted(given) != sorted(wanted):
            yield (
                f"a kernel of kind {op.text('kernel', MEMORY)} has the extents "
                f"{', '.join(wanted) or 'none'}, found {', '.join(given) or 'none'}"
            )


class CollOp(NodeOp):
    """A collective: the group's axes, bytes of the full buffer (the larger side), element type.

    With `bucket` it is several calls: operands, or a layer's part of each, are collected in the
    order in which they are complete, until a call has that many bytes. With `ahead = 1`, it may
    start one iteration early: it waits only for the computations of the iteration before the
    previous one (FSDP prefetch); with `ahead = 0` it is issued when its iteration begins. The first
    `kept` iterations of its repeat have the result already and do not call it. A `blocking`
    collective runs in the order of computations: it waits for the previous one, and the next one
    waits for it. A collective over pipeline stages is issued after the schedule, unless each stage
    has two copies.
    """

    name = "et.coll"
    params = (
        Param("kind", "name", "the collective", required=True, positional=True),
        Param("group", "axes", "the mesh axes", required=True),
        Param("bytes", "size", "bytes of the full buffer", required=True),
        Param("dtype", "name", "element type"),
        Param("bucket", "int", "bytes with which a call is full"),
        Param("parts", "sizes", "with `bucket`: bytes of each operand"),
        Param("ahead", "int", "iterations by which it may start early"),
        Param("pairs", "name", "mirrored: coordinates i and n-1-i only", choices=("mirrored",)),
        Param("kept", "int", "first iterations of the repeat that have the result already"),
        Param("blocking", "flag", "computations wait for it in the order of the text"),
        Param("copies", "size", "of an all_to_all: experts of a token, which goes once to a node"),
        Param("groups", "size", "with `copies`: at most so many groups of experts of a token"),
        _SHARED,
    )
    example = "%y = et.coll[all_gather, group = tp, bytes = 2*B*D](%x) : node"

    def verify(self, op: Operation) -> Iterator[str]:
        """Check that a reduction in buckets has the size of each operand."""
        if "bucket" not in op.attrs:
            return
        if op.integer("bucket") < 1:
            yield f"expects 'bucket' of at least one byte, found {op.integer('bucket')}"
        if len(op.exprs("parts")) != len(op.operands):
            sizes = len(op.exprs("parts"))
            yield f"expects {len(op.operands)} sizes in 'parts', one per operand, found {sizes}"


class MessageOp(NodeOp):
    """Base class of the two ends of a message, between neighbours along an axis or between two
    pods.

    The receiver's coordinate along `over` is that of the sender plus `by`, modulo the size of the
    axis. With `pod`, the other end is a rank of that pod: number `by` of those that the rank
    exchanges values with (`stagec.program.crossings`), plus `ways` for each further one of the
    `shares` that its layer is in. The messages of one channel arrive in the order in which they are
    sent; those between pods are identified by layer and part of the batch. With `overlapped`, the
    message is posted when the last matrix product before it starts, and overlaps with that product;
    otherwise when its operands are complete.
    """

    params = (
        Param("over", "axis", "the mesh axis"),
        Param("pod", "name", "the pod at the other end"),
        Param("by", "size", "coordinate of the receiver minus that of the sender", required=True),
        Param("bytes", "size", "bytes sent by one rank", required=True),
        Param("dtype", "name", "element type"),
        Param("channel", "int", "which of several streams of messages (default 0)"),
        Param("streams", "int", "with `pod`: the layers of all values that cross"),
        Param("ways", "int", "with `pod`: messages to each share"),
        Param("turn", "int", "with `pod`: which of the `turns` of a microbatch it is (default 0)"),
        *BY_LAYER,
        Param("overlapped", "flag", "not before the last matrix product above it starts"),
    )

    def verify(self, op: Operation) -> Iterator[str]:
        """Check that the message has either an axis or a pod."""
        if ("over" in op.attrs) == ("pod" in op.attrs):
            yield "expects 'over', an axis, or 'pod'"


class SendNode(MessageOp):
    """Sends the values of its operands to a neighbour; it does not wait for the receiver."""

    name = "et.send"
    example = "%s = et.send[over = pp, by = 1, bytes = 2*B*D](%y) : node"


class RecvNode(MessageOp):
    """Receives from a neighbour; it is posted when its operands are complete."""

    name = "et.recv"
    example = "%h = et.recv[over = pp, by = 1, bytes = 2*B*D]() : node"


class CopyOp(NodeOp):
    """A copy of a value to host memory, or back to the device.

    It overlaps with computations and collectives: it starts when the value and the previous
    computation are complete, and only users of its result wait for it. Copies in one direction run
    one after the other.
    """

    name = "et.copy"
    params = (
        Param("to", "name", "where it goes", required=True, choices=("host", "device")),
        Param("bytes", "size", "bytes that move", required=True),
        Param("ahead", "int", "iterations by which it may start early"),
    )
    example = "%h = et.copy[to = host, bytes = 2*B*D](%x) : node"


class EtRegionOp(OpDef):
    """Base class of repeated regions of nodes."""

    operands = ("init*",)
    results = ("yielded*",)
    traits: ClassVar[tuple[Trait, ...]] = (Runs(), Lowered())

    def region_args(self, op: Operation) -> Sequence[Type]:
        """All arguments are nodes."""
        return [NODE] * len(op.operands)

    def infer(self, op: Operation) -> list[Type]:
        return [NODE] * len(op.body.terminator.operands)

    def verify(self, op: Operation) -> Iterator[str]:
        yielded = len(op.body.terminator.operands)
        if yielded != len(op.results):
            yield f"has {len(op.results)} results, but its region yields {yielded} values"


class EtRepeatOp(EtRegionOp):
    """As `stg.repeat`: a carried node is that of the previous iteration; there is one of the others
    per iteration."""

    name = "et.repeat"
    traits = (Repeats(), Lowered())
    params = (
        Param("count", "size", "iterations", required=True),
        Param("carry", "int", "carried values"),
        Param("reverse", "flag", "from the last to the first"),
        ORDER,
        FIRST,
        *REPLAY,
    )
    example = "%y = et.repeat[count = L, carry = 1] (%h: node = %x) {\n  et.yield(%h)\n} : node"


class EtAccumulateOp(EtRegionOp):
    """As `stg.accumulate`: the region once for each microbatch, or its actions as scheduled."""

    name = "et.accumulate"
    params = (
        Param("count", "size", "microbatches", required=True),
        Param("schedule", "str", "the pipeline schedule that orders its actions"),
        Param("chunks", "int", "chunks of the model per rank under that schedule"),
    )
    example = "%y = et.accumulate[count = 4] (%h: node = %x) {\n  et.yield(%h)\n} : node"


class EtActionOp(EtRegionOp):
    """As `stg.action`: the work of a rank for one microbatch at one time."""

    name = "et.action"
    params = ActionOp.params
    example = "%y = et.action[forward, chunk = 0] () {\n  et.yield(%x)\n} : node"


class EtRecallOp(NodeOp):
    """As `stg.recall`: the first node in iterations that recompute, otherwise the second; it is not
    a node itself."""

    name = "et.recall"
    traits = (Recalls(), Stays(), Lowered())
    example = "%n = et.recall(%n_again, %n_stashed) : node"


class EtYieldOp(Terminator):
    """Ends a repeated region."""

    name = "et.yield"
    traits = (Terminates(), Lowered())
    example = "et.yield(%x)"


class EtReturnOp(Terminator):
    """Ends a graph."""

    name = "et.return"
    traits = (Terminates(), Lowered())
    example = "et.return(%x)"
