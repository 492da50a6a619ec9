"""Lowered ops (`et.`): one SPMD graph whose nodes are what a trace holds, with symbolic sizes.

SSA edges are data dependencies. Computations run in program order on one stream, communication in
program order on another. `stg.free` and `stg.memory` are what plan-memory adds before lowering.
"""

from __future__ import annotations

from collections.abc import Sequence

from stagec.ir.core import Operation
from stagec.ir.opdef import OpDef, Param
from stagec.ir.types import NODE, Type
from stagec.ir_spec.ops.structure import REPLAY, Declaration, Terminator


class FreeOp(Declaration):
    """The end of the lifetime of buffers: their last user is above."""

    name = "stg.free"
    ends_lifetime = True
    operands = ("value",)
    variadic = True
    example = "stg.free(%n1)"


class MemoryOp(Declaration):
    """Bytes on one rank: static (parameters, gradients, optimizer), stash, transient and peak."""

    name = "stg.memory"
    params = tuple(
        Param(n, "size", f"bytes of {d}")
        for n, d in (
            ("parameters", "parameters"),
            ("gradients", "gradients"),
            ("optimizer", "optimizer state"),
            ("stash", "activations kept for backward"),
            ("transient", "what lives inside the step"),
            ("peak", "everything at the worst moment"),
            ("host", "what is offloaded to host memory, beside all of these"),
        )
    )
    example = "stg.memory[parameters = 2*P, peak = 18*P]"


class GraphOp(Declaration):
    """The program of every rank of a class; `ranks` of them run it."""

    name = "et.graph"
    has_region = True
    symbol = "required"
    params = (
        Param("ranks", "size", "how many ranks run it", required=True),
        Param("parameters", "size", "trainable parameters of the whole model"),
    )
    example = "et.graph @step[ranks = dp*tp] (%x: node) -> node {\n  et.return(%x)\n}"


class NodeOp(OpDef):
    """Base of what becomes a node."""

    operands = ("dep",)
    variadic = True
    pure = False

    def infer(self, op: Operation) -> list[Type]:
        return [NODE]


class CompOp(NodeOp):
    """A computation: FLOPs executed, matmul FLOPs as counted, bytes read and written, bytes of the
    results."""

    name = "et.comp"
    params = (
        Param("kind", "name", "the op", required=True, positional=True),
        Param("flops", "size", "FLOPs executed", required=True),
        Param("matmul", "size", "FLOPs of matrix products, masks ignored"),
        Param("bytes", "size", "bytes read and written"),
        Param("out", "size", "bytes of the results", required=True),
    )
    example = "%y = et.comp[einsum, flops = 2*B*D, out = 2*B](%x) : node"


class CollOp(NodeOp):
    """A collective: the group's axes, bytes of the full buffer (the larger side), element type.

    `bucket` cuts it into calls of that many bytes. `ahead = 1` lets it start one iteration early:
    it waits for the computations of the iteration before the previous one only (FSDP prefetch);
    with `ahead = 0` it is issued when its iteration begins. The first `kept` iterations of its
    repeat have the result already, so there it is no call. A `blocking` one runs in the order of
    the computations: it waits for the one before it, and the next waits for it.
    """

    name = "et.coll"
    params = (
        Param("kind", "name", "the collective", required=True, positional=True),
        Param("group", "names", "the mesh axes", required=True),
        Param("bytes", "size", "bytes of the full buffer", required=True),
        Param("dtype", "name", "element type"),
        Param("bucket", "int", "bytes of one call"),
        Param("parts", "sizes", "bytes of each operand, where a bucket cuts between them"),
        Param("ahead", "int", "iterations by which it may start early"),
        Param("kept", "int", "first iterations of the repeat that have the result already"),
        Param("blocking", "flag", "computations wait for it in the order of the text"),
    )
    example = "%y = et.coll[all_gather, group = tp, bytes = 2*B*D](%x) : node"


class EtRegionOp(OpDef):
    """Base of repeated regions of nodes."""

    operands = ("init",)
    variadic = True
    variadic_results = True
    has_region = True
    pure = False
    free = True

    def region_args(self, op: Operation) -> Sequence[Type]:
        """Nodes all of them."""
        return [NODE] * len(op.operands)

    def infer(self, op: Operation) -> list[Type]:
        return [NODE] * len(op.body.terminator.operands)


class EtRepeatOp(EtRegionOp):
    """As `stg.repeat`: a carried node is that of the iteration before, the others are one per
    iteration."""

    name = "et.repeat"
    carries = True
    params = (
        Param("count", "size", "iterations", required=True),
        Param("carry", "int", "carried values"),
        Param("reverse", "flag", "from the last to the first"),
        *REPLAY,
    )
    example = "%y = et.repeat[count = L, carry = 1] (%h: node = %x) {\n  et.yield(%h)\n} : node"


class EtAccumulateOp(EtRegionOp):
    """As `stg.accumulate`: the region once for each microbatch."""

    name = "et.accumulate"
    params = (Param("count", "size", "microbatches", required=True),)
    example = "%y = et.accumulate[count = 4] (%h: node = %x) {\n  et.yield(%h)\n} : node"


class EtRecallOp(NodeOp):
    """As `stg.recall`: the first node in iterations that recompute, else the second; no node
    itself."""

    name = "et.recall"
    free = True
    example = "%n = et.recall(%n_again, %n_stashed) : node"


class EtYieldOp(Terminator):
    """Ends a repeated region."""

    name = "et.yield"
    example = "et.yield(%x)"


class EtReturnOp(Terminator):
    """Ends a graph."""

    name = "et.return"
    example = "et.return(%x)"


OPS = (
    FreeOp(),
    MemoryOp(),
    GraphOp(),
    CompOp(),
    CollOp(),
    EtRepeatOp(),
    EtAccumulateOp(),
    EtRecallOp(),
    EtYieldOp(),
    EtReturnOp(),
)
