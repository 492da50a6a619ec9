"""separate-attention: puts attention of all layers on one pipeline stage, and feed-forward on the
other."""

from stagec.api import (
    Loc,
    Module,
    Operation,
    Pass,
    Phase,
    Quoted,
    SymbolRef,
    const,
    error,
    evaluate,
    made_by,
    read_strategy,
)
from stagec.ir.core import renumber
from stagec.ir.expr import UnboundError
from stagec.ir.layers import LayerStack, declaration_of, stack_of
from stagec.ir.order import compact
from stagec.ir.rewrite import drop_unused_bindings, repeats_in
from stagec.ir.types import CACHED
from stagec.ir_spec.ops.half_layers import behind_attention
from stagec.ir_spec.strategy.pipeline import PipelineOp, PipelineRule

PASS = "separate-attention"
#: The schedule in which half layers follow each other from stage to stage.
SCHEDULE = "interleaved"


class SeparateAttention(Pass):
    """Split each layer after its attention, so that one of two pipeline stages has the attention of
    all layers, with its caches, and the other one has the rest, as `stg.pipeline[afd]` states
    (MegaScale-Infer, arXiv 2504.02263; Step-3, arXiv 2507.19427).

    A repeat becomes two, whose layers alternate. The stages have one chunk per layer and the
    `interleaved` schedule: with two microbatches each stage works on one of them, and the value
    between layers is sent in both directions once per layer. The cut is at the first place after
    attention with a single live value: the sum of the input of the layer and attention.

    Before:
        stg.symbols[B, S, P, H, K, L = 2]
        stg.mesh @pod[pp = 2]
        stg.strategy @s[mesh = @pod] {
          stg.pipeline[over = pp, afd]
        }
        stg.func @f(%x: bf16[B, S, H, K], %w: bf16[L, K, K | frozen],
            %c: bf16[L, B, P, H, K | cache]) -> bf16[B, S, H, K] {
          %y = stg.repeat @layers[count = L, carry = 1](%h: bf16[B, S, H, K] = %x,
              %w_i: bf16[K, K] = %w, %c_i: bf16[B, P, H, K] = %c) {
            %a = stg.attention(%h, %c_i, %c_i) : bf16[B, S, H, K]
            %r = stg.add(%h, %a) : bf16[B, S, H, K]
            %f = stg.einsum["bshk,kc->bshc"](%r, %w_i) : bf16[B, S, H, K]
            %s = stg.add(%r, %f) : bf16[B, S, H, K]
            stg.yield(%s)
          } : bf16[B, S, H, K]
          stg.return(%y)
        }
    After:
        stg.symbols[B, S, P, H, K, L = 2]
        stg.mesh @pod[pp = 2]
        stg.strategy @s[mesh = @pod] {
          stg.pipeline[over = pp, schedule = "interleaved", chunks = 2]
        }
        stg.order @layers_halves[(layers, layers_rest)*2]
        stg.func @f(%x: bf16[B, S, H, K], %w: bf16[L, K, K | frozen],
            %c: bf16[L, B, P, H, K | cache]) -> bf16[B, S, H, K] {
          %y_attended = stg.repeat @layers[count = L, carry = 1, order = @layers_halves](
              %h: bf16[B, S, H, K] = %x, %c_i: bf16[B, P, H, K] = %c) {
            %a = stg.attention(%h, %c_i, %c_i) : bf16[B, S, H, K]
            %r = stg.add(%h, %a) : bf16[B, S, H, K]
            stg.yield(%r)
          } : bf16[B, S, H, K]
          %y = stg.repeat @layers_rest[count = L, carry = 1, order = @layers_halves](
              %r: bf16[B, S, H, K] = %y_attended, %w_i: bf16[K, K] = %w) {
            %f = stg.einsum["bshk,kc->bshc"](%r, %w_i) : bf16[B, S, H, K]
            %s = stg.add(%r, %f) : bf16[B, S, H, K]
            stg.yield(%s)
          } : bf16[B, S, H, K]
          stg.return(%y)
        }
    """

    needs = Phase.SHAPED

    def applies(self, module: Module) -> bool:
        rule = read_strategy(module).pipeline
        return rule is not None and rule.afd

    def run(self, module: Module) -> None:
        rule = read_strategy(module).pipeline
        assert rule is not None
        separate_attention(module, rule)


def separate_attention(module: Module, rule: PipelineRule) -> None:
    """Cut the layers of the main function, in place, and state the schedule of the stages.

    Raises `DiagnosticError` for a number of stages other than two, for a step of training, and for
    layers that cannot be cut after their attention.
    """
    if module.env.get(rule.over) != 2:
        raise rule.error(
            f"attention and feed-forward are on two stages, but {rule.over} has "
            f"{module.env.get(rule.over, 'no size')}",
            remedy=f"give --{rule.over} 2: each stage has as many ranks",
        )
    if not any(arg.tensor.role in CACHED for arg in module.main.body.args):
        raise rule.error(
            "attention and feed-forward apart need a step of serving",
            remedy="add --serve decode, or leave stg.pipeline[afd] out (--afd)",
        )
    repeats = repeats_in(module.main.body)
    layers = sum(_number(module, op, rule.loc) for op in repeats)
    for number, first in enumerate(dict.fromkeys(map(_first_of, repeats))):
        _separate(module, stack_of(first), f"_{number}" if number else "", rule.loc)
    for strategy in module.ops("stg.strategy"):
        for op in strategy.body.ops:
            if isinstance(op.definition, PipelineOp):
                del op.attrs["afd"]
                op.attrs |= {"schedule": Quoted(SCHEDULE), "chunks": const(layers)}


def _first_of(repeat: Operation) -> Operation:
    """The first repeat of its stack."""
    return stack_of(repeat).members[0]


def _number(module: Module, repeat: Operation, loc: Loc) -> int:
    """The number of layers of a repeat. Raises `DiagnosticError` if it has no value."""
    try:
        return evaluate(repeat.expr("count"), module.env)
    except UnboundError as unbound:
        raise error(
            "layers are cut into attention and feed-forward by number, but a count is open",
            loc,
            remedy=module.how_to_set(unbound.names),
        ) from None


def _separate(module: Module, stack: LayerStack, suffix: str, loc: Loc) -> None:
    """Cut the layers of a stack, and declare their order; new names end with `suffix`."""
    names = {op: op.symbol or f"layers{suffix}" for op in stack.members}
    first = stack.members[0]
    kinds = [names[stack.members[t.member]] for t in stack.turns(_number(module, first, loc))]
    order = compact([half for kind in kinds for half in (kind, f"{kind}_rest")])
    name = f"{names[first]}_halves"
    given = first.attrs.get("order")
    old = declaration_of(first, given) if isinstance(given, SymbolRef) else None
    for op in stack.members:
        _cut(op, names[op], name, loc)
    module.before(module.main).op("stg.order", (), {"layers": order}, symbol=name)
    if old is not None:
        old.erase()


def _cut(op: Operation, kind: str, order: str, loc: Loc) -> None:
    """Move the operations of a layer after attention to a second repeat, after this one. Raises
    `DiagnosticError` for a layer without a place to cut."""
    place, handed = behind_attention(op, loc, "leave stg.pipeline[afd] out (--afd)")
    body, end = op.body, op.body.terminator
    tail, yields, users = body.ops[place:-1], end.operands, list(op.results[0].uses)
    made = {v for each in tail for v in each.results}
    attrs = {**op.attrs, "order": SymbolRef(order)}
    rest = Operation(op.definition, (), attrs, symbol=f"{kind}_rest", loc=made_by(PASS, op.loc))
    region = rest.make_region()
    moved = {handed: region.add_arg(handed.name, handed.type, handed.loc)}
    operands = [op.results[0]]
    inside = [inner for each in tail for inner in each.walk()]
    for arg in body.args[1:]:
        if any(user in inside for user, _ in arg.uses):
            operands.append(op.operands[arg.index])
            moved[arg] = region.add_arg(arg.name, arg.type, arg.loc)
    for inner in inside:
        for number, value in enumerate(inner.operands):
            if value in moved:
                inner.set_operand(number, moved[value])
    for each in tail:
        body.ops.remove(each)
        region.append(each)
    rest.set_operands(operands)
    leaving = [0, *(n for n, v in enumerate(yields) if n and v in made)]
    staying = [n for n in range(1, len(yields)) if n not in leaving]
    last = [moved.get(yields[n], yields[n]) for n in leaving]
    region.append(Operation(end.definition, last, end.attrs, loc=end.loc))
    end.set_operands([handed, *(yields[n] for n in staying)])
    results = [rest.add_result(r.name, r.type, r.loc) for r in (op.results[n] for n in leaving)]
    op.results[0].replace_with(results[0], users)
    for number, result in zip(leaving[1:], results[1:], strict=True):
        op.results[number].replace_with(result)
    op.results = [op.results[0], *(op.results[n] for n in staying)]
    renumber(op.results)
    op.results[0].name += "_attended"
    op.symbol = kind
    op.attrs["order"] = SymbolRef(order)
    drop_unused_bindings(op)
    assert op.parent is not None
    op.parent.insert(op.position() + 1, rest)
