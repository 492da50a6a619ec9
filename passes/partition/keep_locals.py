"""keep-locals: keeps values to which local names of PyTorch code refer while forward runs."""

from dataclasses import replace

from stagec.api import Module, Operation, Pass, Phase, Region, Strategy, Value, read_strategy
from stagec.ir.module import uncast
from stagec.ir.rewrite import carried, repeats_in, replace_op, stacked_outside
from stagec.ir.traits import Recasts
from stagec.ir_spec.ops.contraction import Add, Einsum
from stagec.ir_spec.ops.loss_forms import LogProbability, LogSoftmax
from stagec.ir_spec.ops.pipeline import ActionOp
from stagec.ir_spec.strategy.autocast import AutocastRule
from stagec.ir_spec.strategy.loss import LossRule
from stagec.ir_spec.strategy.saved_tensors import SavedTensorsRule
from stagec.ir_spec.strategy.shard_units import ShardUnitsRule
from stagec.sharding.gathers import is_of_parameter
from stagec.sharding.stages import accumulation

#: Forms of a loss that is a Python function.
_FORMS = ("stock", "compiled")


class KeepLocals(Pass):
    """Keep logits, before and after their cast, until a loss of the form `stock` is computed,
    because they are arguments of functions (`ForCausalLMLoss` of transformers, `cross_entropy_loss`
    of torchtitan). Where the model computes the loss under autocast, which casts the input of its
    head, keep that as well (`hidden_states` of `LlamaForCausalLM.forward`). With a split vocabulary
    there is a further copy of the logits, shifted by their maximum, until their log-softmax is
    computed (`_log_softmax` of torch.distributed.tensor.parallel.loss). A `compiled` loss has
    logits as its argument, but no name for their cast.

    Under autocast, with the graph of PyTorch (`stg.saved_tensors[until = node]`), keep the inputs
    of blocks and of their sums while a block runs (`hidden_states`, `residual`, `input_tensor` of
    transformers), of which backward may have no more than casts, and the input of all blocks until
    these have run (`embedding_output`). With recomputed blocks, also keep the casts of parameters
    until forward ends: they are in the cache of autocast (`cached_cast` of ATen/autocast_mode.cpp).
    Without recomputed blocks backward uses these casts. In pipeline stages nothing of this is kept.

    Before:
        stg.strategy @s {
          stg.loss[form = stock]
        }
        stg.func @f(%z: bf16[B, V | rep], %y: i32[B | rep]) -> f32[| rep] {
          %l = stg.cast[f32](%z) : f32[B, V | rep]
          %p = stg.log_softmax(%l) : f32[B, V | rep]
          %n = stg.nll_loss[mean = B](%p, %y) : f32[| rep]
          stg.return(%n)
        }
    After:
        stg.strategy @s {
          stg.loss[form = stock]
        }
        stg.func @f(%z: bf16[B, V | rep], %y: i32[B | rep]) -> f32[| rep] {
          %l = stg.cast[f32](%z) : f32[B, V | rep]
          %p = stg.log_softmax(%l) : f32[B, V | rep]
          %n = stg.nll_loss[mean = B](%p, %y) : f32[| rep]
          stg.discard(%l, %z)
          stg.return(%n)
        }
    """

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        strategy = read_strategy(module)
        return strategy.one(LossRule).form in _FORMS or _casts_parameters(module)

    def run(self, module: Module) -> None:
        for func in module.functions:
            strategy, every = read_strategy(module), list(func.body.walk())
            inside = strategy.one(ShardUnitsRule).loss == "inside" and _is_cast(strategy)
            form = strategy.one(LossRule).form
            for op in every if form in _FORMS else ():
                if isinstance(op.definition, LogSoftmax | LogProbability):
                    _keep_logits(module, op, inside=inside, eager=form == "stock")
            staged = any(isinstance(op.definition, ActionOp) for op in every)
            if not staged and _casts_parameters(module):
                steps = accumulation(func)
                region = func.body if steps is None else steps.body
                _keep_inputs(module, region)
                if any(op.phase == "recompute" for op in every):
                    _keep_casts(module, region)


def _casts_parameters(module: Module) -> bool:
    """Whether the graph of PyTorch saves tensors and autocast casts parameters."""
    strategy = read_strategy(module)
    graph = strategy.one(SavedTensorsRule).until == "node"
    return graph and _is_cast(strategy)


def _is_cast(strategy: Strategy) -> bool:
    """Whether autocast casts: other casts are inside of modules, which name them no more."""
    return any(rule.on for rule in strategy.all(AutocastRule))


def _keep_logits(module: Module, op: Operation, *, inside: bool, eager: bool) -> None:
    """Keep the logits that a log-softmax takes until the loss is computed, in place. With `inside`
    (the model computes the loss) also keep the input of the head before its cast; with `eager` also
    the cast of the logits."""
    logits, region = op.operands[0], op.parent
    if op.phase != "forward" or region is None:
        return
    kept, behind = [logits] if eager else [], op
    if isinstance(op.definition, LogProbability):
        if eager:
            _have_shifted(module, op)
        behind = max((u for v in op.operands[1:] for u, _ in v.uses), key=Operation.position)
    else:
        behind = next((u for u, _ in op.result.uses if u.phase == "forward"), op)
    if (cast := logits.producer) is not None and cast.has(Recasts):
        if (source := cast.operands[0]).tensor.dtype == logits.tensor.dtype:
            kept = []
            replace_op(cast, [source])  # `Tensor.float` gives the tensor itself
        kept.append(source)
    if inside:
        kept += _cast_for_head(kept[-1] if kept else logits)
    if behind.parent is region and kept:
        module.after(behind, loc=op.loc, phase="forward").op("stg.discard", kept, types=())


def _cast_for_head(logits: Value) -> list[Value]:
    """The activations before their cast for the product that makes logits."""
    head = logits.producer
    while head is not None and head.operands and not isinstance(head.definition, Einsum):
        head = head.operands[0].producer
    casts = [v.producer for v in head.operands if not is_of_parameter(v)] if head else []
    return [op.operands[0] for op in casts if op is not None and op.has(Recasts)]


def _have_shifted(module: Module, op: Operation) -> None:
    """Add a buffer for shifted logits beside a log-softmax of a split vocabulary, in place."""
    x = op.operands[0]
    before = module.before(op, phase="forward")
    shifted = before.value("stg.workspace", type=replace(x.tensor, dtype="f32"), hint="shifted")
    module.after(op, phase="forward").op("stg.discard", [shifted], types=())


def _keep_inputs(module: Module, region: Region) -> None:
    """Keep the input of a block, that beside each of its sums, and what its last sum adds, before a
    cast, until the block ends, and the input of all blocks until these have ended, in place."""
    for op in (repeats := repeats_in(region, "forward")):
        block = op.body
        sums = [each.operands for each in block.ops if isinstance(each.definition, Add)]
        sums = [each for each in sums if len({v.type for v in each}) == 1]  # no bias
        sums = [each for each in sums if not _is_low_rank(each[-1])]  # `result = result + ...`
        added = [uncast(each[-1]) for each in sums[-1:]]
        kept = dict.fromkeys([*block.args[: carried(op)], *(each[0] for each in sums), *added])
        module.before(block.terminator, loc=op.loc).op("stg.discard", [*kept], types=())
    if repeats and (first := [v for v in repeats[0].operands[: carried(repeats[0])] if v.producer]):
        after = module.after(repeats[-1], loc=repeats[-1].loc, phase="forward")
        after.op("stg.discard", first, types=())


def _is_low_rank(value: Value) -> bool:
    """Whether a value is what the second matrix of an adapter makes."""
    op = uncast(value).producer
    made = op.operands[0].producer if op is not None and op.operands else None
    products = [each for each in (op, made) if each and isinstance(each.definition, Einsum)]
    return len(products) == 2 and all(any(map(is_of_parameter, p.operands)) for p in products)


def _keep_casts(module: Module, region: Region) -> None:
    """Keep the casts of parameters in forward of a region, and in its repeats, in place."""
    bodies = region, *(op.body for op in repeats_in(region, "forward"))
    casts = [v for body in bodies for v in _casts(body)]
    end = next((op for op in region.ops if op.phase != "forward"), region.terminator)
    if kept := stacked_outside(casts):
        module.before(end, loc=kept[0].loc, phase="forward").op("stg.discard", kept, types=())


def _casts(region: Region) -> list[Value]:
    """The results of casts of trained fp32 parameters in forward of a region."""
    forward = [op for op in region.ops if op.has(Recasts) and op.phase == "forward"]
    return [
        op.result
        for op in forward
        if is_of_parameter(w := op.operands[0]) and w.tensor.dtype == "f32" and _is_trained(w)
    ]


def _is_trained(value: Value) -> bool:
    """Whether a value is derived from a parameter with a gradient; the cache has casts of no
    others."""
    if (op := value.producer) is not None:
        return _is_trained(op.operands[0])
    outer = value.region.owner.operands
    return value.tensor.role == "param" or (
        value.index < len(outer) and _is_trained(outer[value.index])
    )
