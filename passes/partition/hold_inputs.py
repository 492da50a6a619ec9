"""hold-inputs: tokens, tables of rotations and masks are in the program, so in its plan of
memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stagec.api import (
    Builder,
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
from stagec.ir.rewrite import enclosing
from stagec.ir.traits import Accumulates
from stagec.ir.types import FLOATS
from stagec.ir_spec.ops.pipeline import ActionOp
from stagec.ir_spec.ops.rope import RelativeBiasGrad, RotaryEmbedding
from stagec.ir_spec.ops.softmax import SinkSoftmax, Softmax
from stagec.ir_spec.strategy.inputs import BUFFER, COS_SIN, EACH, MADE, NONE, InputsRule
from stagec.ir_spec.strategy.kernels import MATH, KernelsRule


class HoldInputs(Pass):
    """Give a function buffers for tokens in 64 bits and for tables of rotations, or forward tables
    that stay until backward ends, as `stg.inputs` says. In stages of a pipeline no table is made.

    Where forward makes tables and attention runs operation by operation, but not as `math`, it
    makes masks too, in the type that blocks carry: one for causal attention and one for each window
    (`eager_mask` of transformers, masking_utils.py). They stay until the blocks end, those of
    checkpoints until their backward. The buckets of a bias by distance are made in 64 bits, and
    stay until its gradient has been made (`T5Attention.compute_bias`).

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
            %t: i32[B@dp, S], %q: bf16[B@dp, S, H, K], %wide_t: i32[2, B@dp, S | bucket]) ->
            bf16[B@dp, S, H, K] {
          %rotations = stg.workspace : bf16[2, S, K | rep]
          %r = stg.rope(%q) : bf16[B@dp, S, H, K]
          %d = stg.rope[inverse, phase = backward](%r) : bf16[B@dp, S, H, K]
          stg.discard[phase = backward](%rotations)
          stg.return(%d)
        }
    """

    name = "hold-inputs"
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
            elif rule.rotations == MADE and not staged:
                turned = (op for op in func.body.walk() if _is_rotation(op))
                ends = [op for op in turned if op.phase != "forward"]
                _make(module, func, "rotations", tables, ends)
                if read_strategy(module).one(KernelsRule).attention != MATH:
                    ends = [op for op in func.body.walk() if _is_masked(op)]
                    _make(module, func, "mask", list(_masks(ends)), ends)
                for op in [
                    o for o in func.body.walk() if isinstance(o.definition, RelativeBiasGrad)
                ]:
                    _make(module, func, "buckets", [_buckets(op)], [op])
            tables_kept += len(tables) if rule.rotations != MADE or not staged else 0
            if rule.tokens != NONE:
                _hold_tokens(func, [*ids.values()] if rule.tokens == EACH else _ids(func)[:1])
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
    """Whether an operation of unfused attention has a mask, in backward where it runs again."""
    masked = op.flag("causal") or "window" in op.attrs
    kinds = (Softmax, SinkSoftmax)
    return masked and isinstance(op.definition, kinds) and op.phase in ("forward", "recompute")


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
    """Buffers in fp32 of the dimensions from one on: of cosines and sines, or of complex numbers,
    which are half as many."""
    for table in tables:
        type_ = replace(table, dtype="f32", dims=table.dims[start:], role="bucket")
        func.body.add_arg("rotations", type_, func.loc)


def _parts(func: Operation) -> int:
    """How many parts of the model, each with its buffers, a rank of a pipeline has, else 1."""
    actions = [op for op in func.body.walk() if isinstance(op.definition, ActionOp)]
    turning = (op for op in actions if any(map(_is_rotation, op.body.walk())))
    return len({op.expr("chunk") for op in turning}) or 1


def _ids(func: Operation) -> list[Value]:
    """The tokens and labels that a function takes."""
    return [a for a in func.body.args if not a.tensor.role and a.tensor.dtype not in FLOATS]


def _hold_tokens(func: Operation, ids: Sequence[Value]) -> None:
    """Buffers of twice the size of tokens, and of labels where they have their own; all stages of a
    pipeline have both."""
    for arg in ids:
        dims = (Dim(const(2)), *arg.tensor.dims)
        type_ = replace(arg.tensor, dims=dims, role="bucket")
        func.body.add_arg(f"wide_{arg.name}", type_, arg.loc)


def _make(
    module: Module, func: Operation, name: str, types: Sequence[TensorType], users: list[Operation]
) -> None:
    """Make tensors where forward begins, and keep them until the backward of the blocks that use
    them ends, or the blocks, in place."""
    steps = next((op for op in func.body.ops if op.has(Accumulates)), None)
    region = func.body if steps is None else steps.body
    ends = [enclosing(op, region) for op in users]
    for type_ in types if ends else ():
        first = Builder.before(module.registry, region.ops[0], loc=func.loc, phase="forward")
        made = first.value("stg.workspace", type=type_, hint=name)
        last = max(ends, key=Operation.position)
        behind = Builder.after(module.registry, last, loc=func.loc, phase=last.phase)
        behind.op("stg.discard", [made], types=())
