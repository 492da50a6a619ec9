"""narrow-collectives: moves a value in the smaller of the two element types of its cast.

| written                             | done         |                                          |
|-------------------------------------|--------------|------------------------------------------|
| gather, cast to fewer bytes         | cast, gather | half of what is sent                     |
| cast to more bytes, gather          | gather, cast | half of what is sent                     |
| cast of a parameter, gather         | gather, cast | parameters are prefetched and kept whole |
| casts to 16 and to 8 bits, gather   | cast, gather, | the same, in `stg.dtypes[compute]`      |
|                                     | cast         |                                          |
| cast, all_reduce                    | as written   | the type is that of the reduction        |
| dispatch, cast to fewer bytes,      | cast,        | engines quantize a token once, not for   |
| in a step of serving                | dispatch     | each of its experts                      |

Gathers, exchanges and copies for experts only copy elements, so results are the same.
"""

from dataclasses import replace

from stagec.api import Module, Operation, Pass, Phase, Value, is_parameter, read_strategy
from stagec.ir.traits import Recasts
from stagec.ir.types import DTYPE_BYTES
from stagec.ir_spec.ops.comm import AllGather, AllToAll
from stagec.ir_spec.ops.moe import Dispatch
from stagec.ir_spec.strategy.moe import MoeRule

_MOVES = (AllGather, AllToAll)


class NarrowCollectives(Pass):
    """Swap a gather or an exchange with a cast if this moves fewer bytes; in a step of serving also
    the op that copies tokens for experts. With `stg.moe[payload = tokens]` rows of experts are
    exchanged without a swap.

    A parameter is gathered before it is cast, because the gathered parameter is kept. A cast to the
    type of `stg.dtypes[compute]` becomes part of the gather: each rank casts its part.

    Before:
        stg.func @f(%x: f32[B, D@tp]) {
          %x_g = stg.all_gather[dim = 1, over = tp](%x) : f32[B, D | rep]
          %y = stg.cast[bf16](%x_g) : bf16[B, D | rep]
          stg.return(%y)
        }
    After:
        stg.func @f(%x: f32[B, D@tp]) {
          %y = stg.cast[bf16](%x) : bf16[B, D@tp]
          %x_g = stg.all_gather[dim = 1, over = tp](%y) : bf16[B, D | rep]
          stg.return(%x_g)
        }
    """

    needs = Phase.PARTITIONED

    def run(self, module: Module) -> None:
        narrow_collectives(module)


def narrow_collectives(module: Module) -> None:
    """Swap moves and casts if this moves fewer bytes, or if a parameter moves, in place."""
    compute = read_strategy(module).dtypes.compute
    kinds = (*_MOVES, Dispatch) if module.serving else _MOVES
    every = (op for op in module.main.body.walk() if isinstance(op.definition, kinds))
    moves = [op for op in every if len(op.results) == 1]
    if read_strategy(module).one(MoeRule).payload == "tokens":
        moves = [op for op in moves if not _sends_tokens(op)]
    for op in moves:
        while (before := op.operands[0].producer) is not None:
            if before.text("to") == compute and _is_cast_weight(before, op):
                _cast_within(before, op)
            elif _moves_first(before):
                _cast_after(module, before, op)
            else:
                break
    for op in reversed(moves):
        after = _only_user(op.result)
        if after is not None and _narrows(after) and not _is_weight(op.operands[0]):
            _cast_before(module, op, after)


def _sends_tokens(op: Operation) -> bool:
    """Whether an op sends rows to experts or back."""
    dims = op.result.tensor.dims
    sends = isinstance(op.definition, AllToAll | Dispatch)
    return sends and any(d.routed or d.load for d in dims)


def _narrows(op: Operation) -> bool:
    if not op.has(Recasts):
        return False
    return DTYPE_BYTES[op.result.tensor.dtype] < DTYPE_BYTES[op.operands[0].tensor.dtype]


def _moves_first(cast: Operation) -> bool:
    """Whether a move is swapped with the cast before it: the cast widens, or casts a parameter."""
    if not cast.has(Recasts):
        return False
    types = (cast.operands[0].tensor.dtype, cast.result.tensor.dtype)
    return DTYPE_BYTES[types[0]] < DTYPE_BYTES[types[1]] or (
        _narrows(cast) and _is_weight(cast.operands[0])
    )


def _is_cast_weight(cast: Operation, move: Operation) -> bool:
    """Whether an op gathers a parameter after its cast."""
    gathers = isinstance(move.definition, AllGather)
    return gathers and cast.has(Recasts) and is_parameter(cast.operands[0])


def _only_user(value: Value) -> Operation | None:
    """The only user of a value, if it is in the same region; else None."""
    user = value.uses[0][0] if len(value.uses) == 1 else None
    return user if user is not None and user.parent is value.region else None


def _is_weight(value: Value) -> bool:
    """Whether a value is a parameter, possibly cast or moved."""
    op = value.producer
    if op is not None and (op.has(Recasts) or isinstance(op.definition, _MOVES)):
        return _is_weight(op.operands[0])
    return is_parameter(value)


def _cast_before(module: Module, move: Operation, cast: Operation) -> None:
    source, moved, dtype = move.operands[0], move.result, cast.result.tensor.dtype
    b = module.before(move, loc=cast.loc, phase=cast.phase)
    type_, name = replace(source.tensor, dtype=dtype), cast.result.name
    move.set_operand(0, b.value(cast.name, [source], cast.attrs, type=type_, hint=name))
    moved.type = replace(moved.tensor, dtype=dtype)
    cast.result.replace_with(moved)
    cast.erase()


def _cast_within(cast: Operation, move: Operation) -> None:
    """Make the cast before the gather of a parameter part of the gather."""
    move.set_operand(0, cast.operands[0])
    move.attrs["to"] = cast.text("to")
    if not cast.result.uses:
        cast.erase()


def _cast_after(module: Module, cast: Operation, move: Operation) -> None:
    source, moved = cast.operands[0], move.result
    b = module.after(move, loc=cast.loc)
    to = moved.tensor
    move.set_operand(0, source)
    moved.type = replace(to, dtype=source.tensor.dtype)
    moved.replace_with(b.value(cast.name, [moved], cast.attrs, type=to, hint=cast.result.name))
    if not cast.result.uses:
        cast.erase()
