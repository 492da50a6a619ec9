"""hold-inputs: adds the batch, rotation tables and masks to the program and its memory plan."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stagec.api import (
    Dim,
    Expr,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    TensorType,
    Value,
    const,
    read_strategy,
)
from stagec.ir.rewrite import bind, enclosing, stacked_outside
from stagec.ir.traits import Repeats
from stagec.ir.types import FLOATS
from stagec.ir_spec.ops.attention import FlashAttention
from stagec.ir_spec.ops.pipeline import ActionOp
from stagec.ir_spec.ops.rope import RelativeBiasGrad, RotaryEmbedding
from stagec.ir_spec.ops.softmax import SinkSoftmax, Softmax
from stagec.ir_spec.strategy.dtypes import computed_in
from stagec.ir_spec.strategy.inputs import BUFFER, COS_SIN, EACH, MADE, NONE, InputsRule
from stagec.ir_spec.strategy.kernels import MATH, KernelsRule
from stagec.ir_spec.strategy.shard_units import ShardUnitsRule
from stagec.sharding.stages import accumulation


class HoldInputs(Pass):
    """Give a function buffers for the batch, with tokens in 64 bits, and for rotation tables, as
    `stg.inputs` states. Tables that forward computes instead stay until backward ends. In pipeline
    stages no table is computed.

    Where forward computes tables and attention is unfused, except as `math`, it also makes masks in
    the type of the carried activations: one for causal attention and one for each window
    (`eager_mask` of transformers, masking_utils.py). Kernels that take a mask have one of a byte
    for each window and pair (`sdpa_mask`). They stay until the blocks end, with
    checkpoints until their backward ends. The buckets of a bias by distance are made in 64 bits,
    and stay until its gradient has been made (`T5Attention.compute_bias`). With checkpoints the
    first block makes them again, when all others are gone.

    If FSDP2 gathers parameters in another type than they have, it casts what a block is given, so
    also cosines and sines in fp32 (`FSDPState._pre_forward`, `cast_forward_inputs`): a copy for
    each block stays until its backward ends. Complex numbers are not cast.

    Before:
        stg.symbols[B, S, H, K]
        stg.mesh @pod[dp]
        stg.assume[B % dp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.inputs[tokens = shared, rotations = made]
        }
        stg.func @f(%t: i32[B@dp, S], %q: bf16[B@dp, S, H, K]) -> bf16[B@dp, S, H, K] {
          %r = stg.rope(%q) : bf16[B@dp, S, H, K]
          %d = stg.rope[inverse, phase = backward](%r) : bf16[B@dp, S, H, K]
          stg.return(%d)
        }
    After:
        stg.symbols[B, S, H, K]
        stg.mesh @pod[dp]
        stg.assume[B % dp == 0]
        stg.strategy @s[mesh = @pod] {
          stg.inputs[tokens = shared, rotations = made]
        }
        stg.func @f (
            %t: i32[B@dp, S], %q: bf16[B@dp, S, H, K], %batch_q: bf16[B@dp, S, H, K | bucket],
            %wide_t: i32[2, B@dp, S | bucket]) -> bf16[B@dp, S, H, K] {
          %rotations = stg.workspace : bf16[2, S, K | rep]
          %r = stg.rope(%q) : bf16[B@dp, S, H, K]
          %d = stg.rope[inverse, phase = backward](%r) : bf16[B@dp, S, H, K]
          stg.discard[phase = backward](%rotations)
          stg.return(%d)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        return bool(read_strategy(module).all(InputsRule))

    def run(self, module: Module) -> None:
        rule, tables_kept = read_strategy(module).one(InputsRule), 0
        ids = {arg.name: arg for func in module.functions for arg in _ids(func)}
        for func in module.functions:
            tables = list(_tables(func.body))
            staged = any(isinstance(op.definition, ActionOp) for op in func.body.walk())
            if rule.rotations in (BUFFER, COS_SIN):
                _hold_tables(func, tables * _parts(func), 0 if rule.rotations == COS_SIN else 1)
                if rule.rotations == COS_SIN and _casts_inputs(module):
                    _cast_tables(module, func)
            elif rule.rotations == MADE and not staged:
                turned = (op for op in func.body.walk() if _is_rotation(op))
                ends = [op for op in turned if op.phase != "forward"]
                _make(module, func, "rotations", tables, ends)
                if read_strategy(module).one(KernelsRule).attention != MATH:
                    ends = [op for op in func.body.walk() if _is_masked(op)]
                    _make(module, func, "mask", list(_masks(ends)), ends)
                ends = [op for op in func.body.walk() if _takes_mask(op)]
                _make(module, func, "mask", list(_boolean_masks(ends)), ends)
                again = any(op.phase == "recompute" for op in func.body.walk())
                for op in [] if again else list(func.body.walk()):
                    if isinstance(op.definition, RelativeBiasGrad):
                        _make(module, func, "buckets", [_buckets(op)], [op])
            tables_kept += len(tables) if rule.rotations != MADE or not staged else 0
            if rule.tokens != NONE:
                _hold_batch(func, [*ids.values()] if rule.tokens == EACH else _ids(func)[:1])
        if rule.rotations != NONE and not tables_kept:
            why = "no layer rotates, or all are in stages of a pipeline, which make no tables"
            said = f"'rotations = {rule.rotations}' of 'stg.inputs' changes nothing: {why}"
            module.diagnostics.remark(said, rule.loc)


def _tables(body: Region) -> Iterator[TensorType]:
    """The cosines and sines of each kind of rotation in forward: `[2, positions, elements]`."""
    known: set[tuple[Expr, Expr, str]] = set()
    for op in body.walk():
        if not _is_rotation(op) or op.phase != "forward":
            continue
        x = op.operands[0].tensor
        part = next((op.expr(n) for n in ("first", "last") if n in op.attrs), x.dims[-1].size)
        key = x.dims[1].size, part, str(op.attrs.get("base"))
        if key not in known:
            known.add(key)
            yield TensorType(x.dtype, (Dim(const(2)), x.dims[1], Dim(part)), placed=x.placed)


def _is_rotation(op: Operation) -> bool:
    return isinstance(op.definition, RotaryEmbedding)


def _is_masked(op: Operation) -> bool:
    """Whether an operation is a masked softmax of unfused attention, in forward or recomputed."""
    masked = op.flag("causal") or "window" in op.attrs
    kinds = (Softmax, SinkSoftmax)
    return masked and isinstance(op.definition, kinds) and op.phase in ("forward", "recompute")


def _takes_mask(op: Operation) -> bool:
    """Whether an operation is a kernel with a mask, which runs in forward or again."""
    return isinstance(op.definition, FlashAttention) and op.flag("mask")


def _boolean_masks(kernels: Sequence[Operation]) -> Iterator[TensorType]:
    """The masks of forward that all sequences share, `[rows, columns]`, a byte for each pair."""
    known: set[str] = set()
    for op in kernels:
        spans = str([op.attrs.get(name) for name in ("window", "chunk", "prefix")])
        if op.phase == "forward" and spans not in known:
            known.add(spans)
            mask = op.operands[-1].tensor
            yield replace(mask, dtype="u8", dims=mask.dims[1:])


def _masks(softmaxes: Sequence[Operation]) -> Iterator[TensorType]:
    """The masks of forward, `[batch, rows, columns]`."""
    known: set[str] = set()
    for op in softmaxes:
        batch, *_, rows, columns = op.result.tensor.dims
        carried = op.parent_op.operands[:1] if op.parent_op is not None else ()
        if op.phase == "forward" and (key := str(op.attrs.get("window"))) not in known:
            known.add(key)
            dtype = carried[0].tensor.dtype if carried else op.result.tensor.dtype
            yield replace(op.result.tensor, dtype=dtype, dims=(batch, rows, columns))


def _buckets(op: Operation) -> TensorType:
    """The buckets of all pairs of a query and a key, in 64 bits: `[2, queries, keys]`."""
    bias = op.operands[0].tensor
    return TensorType("i32", (Dim(const(2)), *bias.dims[1:]), placed=True)


def _hold_tables(func: Operation, tables: Sequence[TensorType], start: int) -> None:
    """Add fp32 buffers with the dimensions of the tables from `start` on: 0 for cosines and sines,
    1 for complex numbers, which need half the bytes."""
    for table in tables:
        type_ = replace(table, dtype="f32", dims=table.dims[start:], role="bucket")
        func.body.add_arg("rotations", type_, func.loc)


def _casts_inputs(module: Module) -> bool:
    """Whether gathers of parameters cast, and units with them."""
    strategy = read_strategy(module)
    casts = computed_in(strategy.dtypes, strategy.zero, strategy.dtypes.param)
    return bool(strategy.all(ShardUnitsRule)) and casts != strategy.dtypes.param


def _cast_tables(module: Module, func: Operation) -> None:
    """Keep tables in the type of what blocks rotate from their forward to their backward, in
    place."""
    repeats = [op for op in func.body.walk() if op.has(Repeats)]
    for block in (op for op in repeats if op.phase == "forward"):
        for back in (op for op in repeats if {*op.operands} & {*block.results}):
            first = module.before(block.body.ops[0], loc=block.loc, phase="forward")
            for type_ in _tables(block.body) if back.phase == "backward" else ():
                made = first.value("stg.workspace", type=type_, hint="rotations")
                (stack,) = stacked_outside([made])
                kept = bind(back, stack, made)
                end = module.before(back.body.terminator, loc=back.loc, phase="backward")
                end.op("stg.discard", [kept], types=())


def _parts(func: Operation) -> int:
    """The number of model chunks of a pipeline rank, each with its own buffers; 1 without a
    pipeline."""
    actions = [op for op in func.body.walk() if isinstance(op.definition, ActionOp)]
    turning = (op for op in actions if any(map(_is_rotation, op.body.walk())))
    return len({op.expr("chunk") for op in turning}) or 1


def _ids(func: Operation) -> list[Value]:
    """The tokens and labels that a function takes."""
    return [a for a in func.body.args if not a.tensor.role and a.tensor.dtype not in FLOATS]


def _hold_batch(func: Operation, ids: Sequence[Value]) -> None:
    """Add a buffer of twice the size for tokens, and for labels if they have their own, which all
    pipeline stages have, and one for each other argument, such as pixels."""
    others = [a for a in func.body.args if not a.tensor.role and a.tensor.dtype in FLOATS]
    for arg in others:
        func.body.add_arg(f"batch_{arg.name}", replace(arg.tensor, role="bucket"), arg.loc)
    for arg in ids:
        dims = (Dim(const(2)), *arg.tensor.dims)
        type_ = replace(arg.tensor, dims=dims, role="bucket")
        func.body.add_arg(f"wide_{arg.name}", type_, arg.loc)


def _make(
    module: Module, func: Operation, name: str, types: Sequence[TensorType], users: list[Operation]
) -> None:
    """Add tensors at the start of forward and keep them until the last of their users (for ops in
    blocks, the block) has run, in place."""
    steps = accumulation(func)
    region = func.body if steps is None else steps.body
    ends = [enclosing(op, region) for op in users]
    for type_ in types if ends else ():
        first = module.before(region.ops[0], loc=func.loc, phase="forward")
        made = first.value("stg.workspace", type=type_, hint=name)
        last = max(ends, key=Operation.position)
        module.after(last, loc=func.loc).op("stg.discard", [made], types=())
