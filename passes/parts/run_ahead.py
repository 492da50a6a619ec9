"""run-ahead: lets a part for which others wait run forward of all microbatches first."""

from collections.abc import Iterable

from stagec.api import DiagnosticList, Module, Operation, Pass, Phase, Value, made_by, read_strategy
from stagec.ir.infer import infer_op
from stagec.ir.rewrite import drop_unused_bindings
from stagec.ir.traits import Accumulates
from stagec.ir_spec.ops.parts import Arrive, Depart
from stagec.ir_spec.ops.structure import joined_dim


class RunAhead(Pass):
    """Split the accumulation of a part that precedes others into two: forward of all microbatches,
    then backward of all. The gradients come back while it computes further microbatches.

    The values that backward takes from forward are joined over the microbatches: the stash of all
    of them is in memory at once. Nothing changes if forward itself waits for another part, or if
    backward takes a value without a batch dimension.

    Before:
        stg.func @f[part = encoder](%x: f32[B], %w: f32[B | param]) -> f32[B] {
          %g = stg.accumulate[count = 2, split = B] (%x_mb: f32[B/2] = %x) {
            %e = stg.gelu(%x_mb) : f32[B/2]
            stg.depart[e, trained, source = encoder, to = main](%e)
            %d = stg.arrive[d_e, source = main, to = encoder, sizes = B/2, dtype = f32,
              phase = backward] : f32[B/2]
            %y = stg.mul[phase = backward](%d, %e) : f32[B/2]
            stg.yield(%y)
          } : f32[B]
          stg.return(%g)
        }
    After:
        stg.func @f[part = encoder](%x: f32[B], %w: f32[B | param]) -> f32[B] {
          %e_all = stg.accumulate[count = 2, split = B] (%x_mb: f32[B/2] = %x) {
            %e = stg.gelu(%x_mb) : f32[B/2]
            stg.depart[e, trained, source = encoder, to = main](%e)
            stg.yield(%e)
          } : f32[B]
          %g = stg.accumulate[count = 2, split = B, phase = backward] (%e_mb: f32[B/2] = %e_all) {
            %d = stg.arrive[d_e, source = main, to = encoder, sizes = B/2, dtype = f32,
              phase = backward] : f32[B/2]
            %y = stg.mul[phase = backward](%d, %e_mb) : f32[B/2]
            stg.yield(%y)
          } : f32[B]
          stg.return(%g)
        }
    """

    needs = Phase.DIFFERENTIATED

    def applies(self, module: Module) -> bool:
        return "part" in module.main.attrs and read_strategy(module).pipeline is None

    def run(self, module: Module) -> None:
        for op in [op for op in module.main.body.ops if op.has(Accumulates)]:
            _run_ahead(module, op)


def _run_ahead(module: Module, op: Operation) -> None:
    """Split one accumulation into two, in place."""
    forward = [inner for inner in op.body.ops[:-1] if inner.phase == "forward"]
    kinds = [inner.definition for inner in forward]
    if not any(isinstance(k, Depart) for k in kinds) or any(isinstance(k, Arrive) for k in kinds):
        return
    made = {value for inner in forward for value in inner.results}
    later = [inner for inner in op.body.ops if inner not in forward]
    stash = list(dict.fromkeys(v for inner in later for v in inner.reads() if v in made))
    if lacking := [value for value in stash if joined_dim(op, value.tensor) is None]:
        module.diagnostics.remark(
            f"the part '{module.main.text('part')}' waits for the gradient of each microbatch: "
            f"backward takes %{lacking[0].name}, which has no dimension {op.text('split')}",
            op.loc,
        )
        return
    loc = made_by(RunAhead.name, op.loc)
    first = module.before(op, loc=loc).op("stg.accumulate", op.operands, dict(op.attrs), types=())
    region = first.make_region()
    for arg in op.body.args:
        _use(forward, arg, region.add_arg(arg.name, arg.type, arg.loc))
    for inner in forward:
        op.body.ops.remove(inner)
        region.append(inner)
    region.append(Operation(module.registry["stg.yield"], stash, loc=loc))
    for value in stash:
        first.add_result(f"{value.name}_all", None, value.loc)
    problems = DiagnosticList()
    infer_op(first, problems)
    problems.check()
    for value, joined in zip(stash, first.results, strict=True):
        op.add_operand(joined)
        _use(later, value, op.body.add_arg(f"{value.name}_mb", value.type, value.loc))
    op.attrs["phase"] = "backward"
    drop_unused_bindings(first)
    drop_unused_bindings(op)


def _use(ops: Iterable[Operation], old: Value, new: Value) -> None:
    """Let these operations, and those in their regions, use another value."""
    inside = {inner for op in ops for inner in op.walk()}
    for user, index in list(old.uses):
        if user in inside:
            user.set_operand(index, new)
