"""Statements of a strategy about how it runs: what is kept, computed again, rounded and reduced."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, const
from stagec.ir.traits import Declares
from stagec.ir_spec.ops.axes import EXPERTS, REDUCED, REPLICAS
from stagec.ir_spec.ops.statement import (
    Axes,
    Flag,
    FlagValues,
    Record,
    Section,
    Statement,
    parameter,
)

RECOMPUTE = ("none", "selective", "full", "full_replay")
OFFLOAD = ("activations", "optimizer")
DTYPES = ("f32", "bf16", "f16")
FP8 = ("hybrid", "e4m3", "block")
SCALING = ("delayed", "current")
#: Bytes of a call that reduces gradients, as in PyTorch's DDP (`bucket_cap_mb`).
BUCKET = 25 << 20
_NAME = re.compile(r"[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class TpInputsRule(Record):
    """Whether backward gathers the inputs of split matmuls again."""

    policy: str = parameter(
        "name",
        "regather or save_gathered",
        default="regather",
        required=True,
        positional=True,
        choices=("regather", "save_gathered"),
        flag=Flag(
            "tp_inputs",
            "Gather inputs of split matmuls again in backward, or keep them.",
            needs=("tp", "sp"),
            tries=("save-gathered", "regather"),
        ),
    )


class TpInputsOp(Statement):
    """Whether backward gathers the inputs of split matmuls again (regather) or keeps them
    (save-gathered)."""

    name, record = "stg.tp_inputs", TpInputsRule
    example = "stg.tp_inputs[regather]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if "tp" in request.axes:
            yield {"policy": "regather", **self.flag_values(request)}


@dataclass(frozen=True)
class BlockingRule(Record):
    """Collectives of activations over these axes block."""

    over: Axes = parameter(
        "axes",
        "mesh axes",
        required=True,
        flag=Flag(
            "async_tp",
            "Let computations overlap collectives of tensor parallelism, but for data, or not.",
            "switch",
            True,
            needs=("tp",),
        ),
    )


class BlockingOp(Statement):
    """Collectives of activations over these axes block: they run in the stream of computations.

    A computation that is issued after one waits for it, whether it uses the result or not, and it
    waits for the computation before it. Without the statement only data dependencies hold between
    the two streams (asynchronous tensor parallelism).
    """

    name, record, repeats = "stg.blocking", BlockingRule, True
    example = "stg.blocking[over = tp]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if "tp" in request.axes and not request["async_tp"]:
            yield {"over": request.over("tp", REPLICAS)}


@dataclass(frozen=True)
class FusionRule(Record):
    """Which neighbouring computations run as one kernel."""

    kind: str = parameter(
        "name",
        "pointwise; elementwise: norms as well; epilogue: those behind matrix products as well",
        default="none",
        positional=True,
        choices=("none", "pointwise", "elementwise", "epilogue"),
        flag=Flag(
            "fusion",
            "Element-wise computations that follow each other run as one kernel: without norms and "
            "softmax (pointwise), with them (elementwise), also behind a matrix product "
            "(epilogue), or each by itself.",
        ),
    )
    gradients: bool = parameter(
        "flag",
        "matrix products add weight gradients to the sum over microbatches themselves",
        default=False,
        flag=Flag(
            "fuse_gradients",
            "Matrix products add weight gradients to the sum over microbatches themselves.",
        ),
    )


class FusionOp(Statement):
    """Neighbouring computations run as one kernel, as a compiler would do it.

    `pointwise` joins computations of single elements that follow each other, as TorchScript does;
    `elementwise` joins them with normalisations over rows; `epilogue` joins element-wise ones to
    the matrix product before them as well. With `gradients` the products of weight gradients add to
    the sum over microbatches, as those of Megatron-LM do (`gradient_accumulation_fusion`); else it
    is a kernel of its own (`stg.accumulate_grad`), as in PyTorch's DDP. Without the statement every
    computation is a kernel of its own, as PyTorch runs without a compiler.
    """

    name, record = "stg.fusion", FusionRule
    section = Section.KERNELS
    example = "stg.fusion[elementwise]"


@dataclass(frozen=True)
class CapacityRule(Record):
    """The capacity factor of expert buffers, if one is given."""

    factor: Expr | None = parameter(
        "ratio",
        "rows of expert buffers over those of balanced load",
        required=True,
        least=1,
        flag=Flag(
            "capacity_factor",
            "Rows of the expert buffers over those of balanced load, such as 5/4.",
            default=Fraction(1),
            needs=(EXPERTS,),
        ),
    )


class CapacityOp(Statement):
    """The capacity factor of expert buffers: rows beyond balanced load, padded with zeros."""

    name, record = "stg.capacity", CapacityRule
    example = "stg.capacity[factor = 5/4]"


@dataclass(frozen=True)
class ExpertLoadRule(Record):
    """Relative loads of the experts, in one layer with experts or in all others."""

    loads: tuple[int, ...] = parameter(
        "ints",
        "one for each expert, 0 or more",
        required=True,
        flag=Flag(
            "expert_load",
            "How many tokens the experts take: JSON, a list, or a list for each layer; or such a "
            "list itself.",
            "loads",
            needs=(EXPERTS,),
        ),
    )
    layer: int | None = parameter("int", "the layer (default: all others)", default=None, least=0)


class ExpertLoadOp(Statement):
    """How many tokens the experts take, relative to each other: one number for each.

    With `layer` it is about one layer, counted from 0 among those with experts; without, about all
    that no other statement is about. Ranks take whole rows, shared out by largest remainders.
    """

    name, record, repeats = "stg.expert_load", ExpertLoadRule, True
    traits = (Declares("expert_loads"),)
    example = "stg.expert_load[loads = (5, 1, 1, 1), layer = 0]"

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        loads = op.integers("loads")
        if any(n < 0 for n in loads) or not any(loads):
            yield "expects loads of 0 or more, and not only 0"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        loads = request["expert_load"]
        if loads and not isinstance(loads[0], tuple):
            yield {"loads": loads}
            return
        for layer, row in enumerate(loads):
            yield {"loads": row, "layer": layer}


def _dtype(name: str, default: str, help: str) -> Any:
    flag = Flag(f"{name}_dtype", help, tries=("f32", "bf16"), numerics=True)
    return parameter("name", f"element type: {name}", default=default, choices=DTYPES, flag=flag)


@dataclass(frozen=True)
class DtypesRule(Record):
    """Element types of parameters and activations, gradients, reductions on the wire and the master
    copy; `fp8` is the recipe of 8-bit products, if there are any."""

    param: str = _dtype("param", "bf16", "Parameters and activations.")
    grad: str = _dtype("grad", "f32", "Gradients.")
    reduce: str = _dtype("reduce", "f32", "Gradients on the wire.")
    master: str = _dtype("master", "f32", "The optimizer's copy of the parameters.")
    fp8: str = parameter(
        "name",
        "recipe of 8-bit products",
        choices=FP8,
        flag=Flag(
            "fp8",
            "8-bit products of the blocks: e4m3 forward, gradients in e5m2 (hybrid) or e4m3; with "
            "block, e4m3 with a scale for each 128 elements.",
            default="none",
            tries=("none", "hybrid"),
            numerics=True,
        ),
    )
    scaling: str = parameter(
        "name",
        "where the scales of 8-bit operands come from",
        default="delayed",
        choices=SCALING,
        flag=Flag(
            "fp8_scaling",
            "Scales of --fp8 are known before (delayed: casts run in the kernels around them) or "
            "come from the operand itself (current: casts are kernels).",
            needs=("fp8",),
            numerics=True,
        ),
    )


class DtypesOp(Statement):
    """Element types: of parameters and activations, gradients, reductions on the wire, the master
    copy.

    With `fp8` both operands of the blocks' products with parameters are 8-bit floats: f8e4m3 in
    forward, in backward f8e5m2 (`hybrid`) or the same (`e4m3`) for what comes in. With `block`
    activations and gradients are f8e4m3s, which has an f32 scale for each 128 elements, as in
    DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) and block scaling of Transformer Engine. Results,
    and parameters at rest, keep their type. With `scaling = current` each scale is that of the
    tensor which is cast, so that the cast waits for all of it and is a kernel: `stg.quantize`.
    """

    name, record = "stg.dtypes", DtypesRule
    section = Section.KERNELS
    example = "stg.dtypes[param = bf16, grad = f32, reduce = f32, master = f32]"

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        if op.attrs.get("fp8") == "block" and op.attrs.get("scaling") == "current":
            yield "with blocks scales what is cast where it is cast: leave out 'scaling'"
        if "scaling" in op.attrs and "fp8" not in op.attrs:
            yield "'scaling' is about products of 8 bits, expects 'fp8' beside it"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        types = {n: request[f"{n}_dtype"] for n in ("param", "grad", "reduce", "master")}
        found = {**types, **self.flag_values(request)}
        if "fp8" not in found:
            found.pop("scaling", None)  # it has no effect
        yield found


@dataclass(frozen=True)
class BucketRule(Record):
    """Bytes of one call that reduces gradients; 0: one call after backward."""

    bytes: int = parameter(
        "int",
        "bytes with which a call is full",
        required=True,
        least=1,
        flag=Flag(
            "ddp_bucket",
            "ZeRO 0 and 1: reduce gradients in calls of this size, as soon as they are there "
            "(default 25 MiB; 0: in one call after backward).",
            default=BUCKET,
            least=0,
            metavar="BYTES",
            needs=(REDUCED,),
        ),
    )


class BucketOp(Statement):
    """Gradients are reduced while backward goes on, under ZeRO 0 and 1: those that are complete go
    together until a call has this many bytes. Without it there is one call after backward.

    The rule is that of PyTorch's DDP and of Megatron-LM (`overlap_grad_reduce`): no gradient is
    cut, and the one with which a call reaches its size closes it. Each chunk of a pipeline stage
    has calls of its own. PyTorch's first call, of 1 MiB, is not modelled.
    """

    name, record = "stg.bucket", BucketRule
    section = Section.DATA
    training = "there are no gradients to reduce"
    example = "stg.bucket[bytes = 26214400]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if request["ddp_bucket"] and request["zero"] < 2 and request.over(*REDUCED):
            yield {"bytes": request["ddp_bucket"]}


def _some_blocks(name: str, doc: str, help: str) -> Any:
    flag = Flag(f"recompute_{name}", help, metavar="N", needs=("recompute",))
    return parameter("int", doc, least=1, flag=flag)


@dataclass(frozen=True)
class RecomputeRule(Record):
    """What backward computes again: by policy, or the results of these ops; in all blocks, in the
    first `layers`, or in every `every`-th."""

    policy: str = parameter(
        "name",
        "none, selective, full or full_replay",
        default="none",
        positional=True,
        choices=RECOMPUTE,
        flag=Flag(
            "recompute",
            "Activations that backward computes again: by policy, or the results of these ops.",
            "text",
            metavar="none|selective|full|full-replay|OP,...",
            tries=("none", "selective", "full"),
        ),
    )
    ops: tuple[str, ...] = parameter(
        "names", "ops whose results are computed again, as in (attention, swiglu)"
    )
    layers: int = _some_blocks(
        "layers",
        "only in this many first blocks",
        "Recompute in the first N layers of each stage only (0: in all).",
    )
    every: int = _some_blocks(
        "every", "only in every n-th block", "Recompute in every N-th layer only (0: in all)."
    )


class RecomputeOp(Statement):
    """Which activations of a block backward computes again instead of taking them from the stash.

    `selective`: what grows with the square of a dimension, as attention scores do. `full`: all but
    the inputs of the blocks; what nothing in backward needs is not computed. `full_replay`: all of
    the block, as the published formulas count. `ops` instead names the ops whose results are not
    stashed. `layers` recomputes in the first blocks of each stage only (Megatron-LM's method
    `block`), `every` in every n-th block (as torchtitan does); the others stash all.
    """

    name, record = "stg.recompute", RecomputeRule
    section = Section.MEMORY
    training = "there is no backward to compute again for"
    example = "stg.recompute[full, layers = 4]"

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        if ("policy" in op.attrs) == ("ops" in op.attrs):
            yield "expects a policy or a list of ops, and not both"
        if "layers" in op.attrs and "every" in op.attrs:
            yield "'layers' and 'every' both say in which blocks"
        for name in ("layers", "every"):
            if name in op.attrs and op.text("policy") == "none":
                yield f"nothing is computed again, so '{name}' says nothing"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if request["recompute"] != "none":
            names = _names(request)
            is_policy = names[0] in RECOMPUTE
            what = {"policy": names[0]} if is_policy else {"ops": names}
            yield {**what, **self.flag_values(request)}

    def problems(self, request: FlagValues) -> Iterator[tuple[str, str]]:
        unnamed = [n for n in _names(request) if not _NAME.fullmatch(n)]
        if unnamed:
            message = (
                f"--recompute {request['recompute']}: '{unnamed[0]}' is neither a policy nor the "
                "name of an op"
            )
            policies = ", ".join(RECOMPUTE)
            yield message, f"choose {policies}, or ops of the model, such as silu,multiply"


def _names(request: FlagValues) -> tuple[str, ...]:
    """A policy of recompute, or names of ops."""
    given: str = request["recompute"]
    policy = given.replace("-", "_")
    return (policy,) if policy in RECOMPUTE else tuple(n.strip() for n in given.split(","))


@dataclass(frozen=True)
class OffloadRule(Record):
    """What lives in host memory, and whether its copies are nodes of the trace."""

    what: tuple[str, ...] = parameter(
        "names",
        "activations, optimizer or both",
        required=True,
        positional=True,
        choices=OFFLOAD,
        flag=Flag(
            "offload",
            "Keep what the blocks stash, or the optimizer's state, in host memory.",
            default="",
            metavar="activations,optimizer",
        ),
    )
    nodes: bool = parameter(
        "flag",
        "the copies are nodes of the trace",
        flag=Flag(
            "memory_nodes",
            "Write the copies of --offload as nodes of the trace (MEM_STORE, MEM_LOAD).",
            needs=("offload",),
        ),
    )


class OffloadOp(Statement):
    """What lives in host memory and is copied to the device where it is used.

    `activations`: what the blocks stash; `optimizer`: master copies and moments. With `nodes` the
    copies are nodes of the trace, which run beside computations.
    """

    name, record = "stg.offload", OffloadRule
    section = Section.MEMORY
    training = "nothing waits for a backward"
    example = "stg.offload[optimizer]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if request["offload"]:
            yield self.flag_values(request)


@dataclass(frozen=True)
class OptimizerRule(Record):
    """The optimizer, and the largest norm of the gradients."""

    kind: str = parameter(
        "name",
        "adamw or none",
        default="adamw",
        required=True,
        positional=True,
        choices=("adamw", "none"),
    )
    clip: Expr = parameter("ratio", "the largest gradient norm", default=const(1), least=0)


class OptimizerOp(Statement):
    """The optimizer: AdamW with clipping of the gradient norm to `clip` (0: no clipping)."""

    name, record = "stg.optimizer", OptimizerRule
    training = "there is no optimizer"
    example = "stg.optimizer[adamw, clip = 1]"

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        yield {"kind": "adamw", "clip": 1}


OPS = (
    TpInputsOp(),
    BlockingOp(),
    FusionOp(),
    CapacityOp(),
    ExpertLoadOp(),
    DtypesOp(),
    BucketOp(),
    RecomputeOp(),
    OffloadOp(),
    OptimizerOp(),
)
