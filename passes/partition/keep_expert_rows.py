"""keep-expert-rows: keeps rows of experts, and the graphs of their checkpoints, as long as code has
names for them."""

from stagec.api import Builder, Module, Operation, Pass, Phase, Value, made_by, read_strategy
from stagec.ir.rewrite import carried
from stagec.ir.traits import Repeats
from stagec.ir_spec.ops.comm import AllReduce, AllToAll, ReduceScatter
from stagec.ir_spec.ops.layout import Discard
from stagec.ir_spec.ops.moe import Combine, Dispatch, SortRows
from stagec.ir_spec.strategy.moe import MoeRule
from stagec.models import is_shipped


class KeepExpertRows(Pass):
    """Keep rows before and after their exchanges until results are added up, in forward and where
    backward computes it again, and what the graph of a checkpoint has (`stg.discard[graph]`) until
    the backward of the microbatch ends, as `stg.moe[names = layer]` states.

    Before:
        stg.symbols[B, S, D, E, T]
        stg.mesh @pod[ep]
        stg.assume[E % ep == 0, B % ep == 0]
        stg.strategy @s[mesh = @pod] {
          stg.moe[names = layer]
        }
        stg.func @f(%x: bf16[B@ep, S, D], %e: i32[B@ep, S, T]) {
          %xs = stg.dispatch[count = E](%x, %e) : bf16[E, B@ep, S*T/E, D | routed(E=2, T)]
          %in = stg.all_to_all[from = 1, dim = 0, over = ep](%xs) :
              bf16[E@ep, B, S*T/E, D | routed(E=2, T)]
          %m = stg.gelu(%in) : bf16[E@ep, B, S*T/E, D | routed(E=2, T)]
          %ys = stg.all_to_all[from = 0, dim = 1, over = ep](%m) :
              bf16[E, B@ep, S*T/E, D | routed(E=2, T)]
          %y = stg.combine(%ys, %e) : bf16[B@ep, S, D]
          stg.return(%y)
        }
    After:
        stg.symbols[B, S, D, E, T]
        stg.mesh @pod[ep]
        stg.assume[E % ep == 0, B % ep == 0]
        stg.strategy @s[mesh = @pod] {
          stg.moe[names = layer]
        }
        stg.func @f(%x: bf16[B@ep, S, D], %e: i32[B@ep, S, T]) {
          %xs = stg.dispatch[count = E](%x, %e) : bf16[E, B@ep, S*T/E, D | routed(E=2, T)]
          %in = stg.all_to_all[from = 1, dim = 0, over = ep](%xs) :
              bf16[E@ep, B, S*T/E, D | routed(E=2, T)]
          %m = stg.gelu(%in) : bf16[E@ep, B, S*T/E, D | routed(E=2, T)]
          %ys = stg.all_to_all[from = 0, dim = 1, over = ep](%m) :
              bf16[E, B@ep, S*T/E, D | routed(E=2, T)]
          %y = stg.combine(%ys, %e) : bf16[B@ep, S, D]
          stg.discard(%xs, %in, %m)
          stg.return(%y)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        return read_strategy(module).one(MoeRule).names == "layer"

    def run(self, module: Module) -> None:
        keeps = False
        for func in module.functions:
            every = list(func.body.walk())
            for op in every:
                if isinstance(op.definition, Combine) and op.phase in ("forward", "recompute"):
                    keeps |= _keep_rows(module, op)
            for op in every:
                if op.has(Repeats):
                    keeps |= _keep_graphs(module, op)
        rule = read_strategy(module).one(MoeRule)
        if not keeps and not is_shipped(rule.loc):
            said = "'names = layer' of 'stg.moe' changes nothing: no rows of experts stay longer"
            module.diagnostics.remark(said, rule.loc)


def _keep_rows(module: Module, combine: Operation) -> bool:
    """Keep the rows of a layer until its results are added up: those that are sent and received,
    and the results that are sent back. Returns whether there are any."""
    rows, chosen = combine.operands[:2]
    sent = [u for u, _ in chosen.uses if _sends(u, combine)]
    kept = [v for op in sent for v in (op.results[0], _exchanged(op.results[0]))]
    back = rows.producer
    if back is not None and isinstance(back.definition, AllToAll):
        kept.append(rows := back.operands[rows.index])
        _keep_results(module, rows)
    if kept := list(dict.fromkeys(kept)):
        module.after(combine, by=KeepExpertRows.name).op("stg.discard", kept, types=())
    return bool(kept)


def _keep_results(module: Module, rows: Value) -> None:
    """Keep the results of experts, which are sorted and reduced over ranks before they are sent,
    until that is done."""
    last, made = rows.producer, rows
    while (op := made.producer) and isinstance(op.definition, SortRows | ReduceScatter):
        made = op.operands[made.index]
    if last is not None and made is not rows:
        b = module.after(last, by=KeepExpertRows.name)
        b.op("stg.discard", [made], types=())


def _sends(op: Operation, combine: Operation) -> bool:
    same = op.parent is combine.parent and op.phase == combine.phase
    return same and isinstance(op.definition, Dispatch) and op.position() < combine.position()


def _exchanged(rows: Value) -> Value:
    """What a rank receives of rows: they are the same where nothing is exchanged."""
    moves = (u for u, _ in rows.uses if isinstance(u.definition, AllToAll))
    return next((u.results[u.operands.index(rows)] for u in moves), rows)


def _keep_graphs(module: Module, repeat: Operation) -> bool:
    """Keep what the graphs of the checkpoints of all layers have until the end of the region around
    them. Returns whether there are any."""
    stacks = list[Value]()
    for op in [op for op in repeat.body.ops if isinstance(op.definition, Discard)]:
        if op.flag("graph"):
            values = list(map(_reduced, op.operands))
            op.erase()
            stacks += [_stack(repeat, value) for value in values]
    if stacks:
        end = repeat.home.terminator
        b = Builder.before(module.registry, end, loc=made_by(KeepExpertRows.name, repeat.loc))
        b.phase = "backward"
        b.op("stg.discard", list(dict.fromkeys(stacks)), types=())
    return bool(stacks)


def _reduced(value: Value) -> Value:
    """A gradient, or the sum over ranks of it."""
    sums = (u for u, _ in value.uses if isinstance(u.definition, AllReduce | ReduceScatter))
    return next((u.results[u.operands.index(value)] for u in sums), value)


def _stack(repeat: Operation, value: Value) -> Value:
    """The values of all iterations: the operand of which one is a slice, or a new result."""
    body = repeat.body
    if value.owner is body and value.index >= carried(repeat):
        return repeat.operands[value.index]
    body.terminator.add_operand(value)
    name = f"{value.name}_kept"
    return repeat.add_result(name, value.tensor.stacked(repeat.expr("count")), value.loc)
