"""share-ranks: runs a draft model on the ranks of the model for which it drafts, before it."""

from collections.abc import Mapping
from dataclasses import field

from stagec.api import (
    Expr,
    Module,
    Operation,
    Pass,
    Phase,
    SymbolRef,
    Value,
    const,
    read_strategy,
    symbol,
)
from stagec.ir.bind import substitute_sizes
from stagec.ir.clone import Copier, sized
from stagec.ir.drafts import DRAFT
from stagec.ir.module import BATCH
from stagec.ir.serving_step import PAST
from stagec.ir_spec.ops.parts import Arrive, Depart
from stagec.ir_spec.strategy.fusion import FusionRule
from stagec.pipeline.peers import peer_module
from stagec.program.crossings import microbatches
from stagec.program.parts import Ends, PartWay, matching_ends, pod_of

_OWN = "leave on=model out: the draft model gets ranks of its own"


class ShareRanks(Pass):
    """Run the step of a draft model on the ranks of the model that verifies, before its step.

    Both become one function. Nothing is sent: the drafts are a value of the function, and the
    chosen tokens are not sent back. Symbols of the draft model other than the batch and the cached
    tokens get the prefix `draft_`, its values `draft/`. Its axes are axes of the mesh with the same
    sizes; along the other axes all ranks do the same. The draft model is a `peer` of the job, or
    the text `module`, in the phase `partitioned`.
    """

    needs = Phase.PARTITIONED
    meets = True

    peer: str = field(default="", metadata={"help": "the pod of the draft model, of the same job"})
    module: str = field(default="", metadata={"help": "the file of the draft model's module"})

    def run(self, module: Module) -> None:
        example = "share-ranks{module=draft.stg}"
        share_ranks(module, peer_module(module, self.peer, self.module, example=example))


def share_ranks(module: Module, draft: Module) -> None:
    """Put the step of a draft model before that of the module, in place.

    Raises `DiagnosticError` for ends that do not match, ranks that the module does not have,
    sequences that are split differently, and microbatches.
    """
    _check_ranks(module, draft)
    pods = {pod_of(each): each for each in (module, draft)}
    mine, theirs = matching_ends(pods).values()
    body, step = module.main.body, draft.main.body
    sizes = _sizes(draft, theirs)
    _declare(module, draft, sizes)
    substitute_sizes(module, _counts(module, mine))
    copier = Copier({}, sizes, lambda name: f"{DRAFT}/{name}", lambda loc: loc)
    for arg in step.args:
        copier.values[arg] = body.add_arg(copier.named(arg.name), sized(arg.type, sizes), arg.loc)
    b = module.before(body.ops[0], by=ShareRanks.name)
    for op in step.ops[:-1]:
        if not isinstance(op.definition, Arrive | Depart):
            _name_orders(b.insert(copier.copy(op)))
    for way, ((end, *_), (other, *_)) in ((way, (mine[way], theirs[way])) for way in mine):
        if end.op.results:
            _hand_on(way, copier.values[other.value], end.value)
        end.op.erase()
    kept = (copier.values[v] for v in step.terminator.operands if v in copier.values)
    body.terminator.set_operands([*body.terminator.operands, *kept])
    body.returns = tuple(v.tensor for v in body.terminator.operands)
    del module.main.attrs["part"]
    module.main.attrs["guest"] = DRAFT
    module.sources.update(draft.sources)


def _sizes(draft: Module, ends: Ends) -> Mapping[str, Expr]:
    """The replacements for the symbols of a draft model. Symbols that count crossing tokens get
    their values, because the other model has different symbols of the same names."""
    names = draft.symbols.keys() - {BATCH, PAST}
    return {name: symbol(f"{DRAFT}_{name}") for name in names} | _counts(draft, ends)


def _counts(module: Module, ends: Ends) -> dict[str, Expr]:
    """The values of the symbols in the number of crossing tokens."""
    shapes = (end.value.tensor.shape for each in ends.values() for end in each)
    names = {name for shape in shapes for name in shape[1].symbols}
    return {name: const(module.env[name]) for name in names}


def _declare(module: Module, draft: Module, sizes: Mapping[str, Expr]) -> None:
    """Declare the symbols, assumptions and orders of a draft model. Its other declarations, mesh
    and strategy, are no longer needed."""
    renamed = {e.symbol_name: draft.symbols[n] for n, e in sizes.items() if e.symbol_name}
    b = module.before(module.main, loc=draft.root.loc, by=ShareRanks.name)
    b.op("stg.symbols", (), {n: True if v is None else v for n, v in sorted(renamed.items())})
    copier = Copier({}, sizes, str, lambda loc: loc)
    for op in draft.declaring("relations", "layers"):
        copy = b.insert(copier.copy(op))
        copy.symbol = copy.symbol and f"{DRAFT}_{copy.symbol}"


def _name_orders(op: Operation) -> None:
    """Let repeats refer to the orders of the draft model."""
    for each in op.walk():
        if isinstance(name := each.attrs.get("order"), SymbolRef):
            each.attrs["order"] = SymbolRef(f"{DRAFT}_{name.name}")


def _hand_on(way: PartWay, made: Value, taken: Value) -> None:
    """Use a value of the draft model where it would arrive. Raises `DiagnosticError` if the
    placements differ."""
    if made.tensor.axes != taken.tensor.axes or made.tensor.shape != taken.tensor.shape:
        raise taken.error(
            f"{way} is {made.type} in the draft model and {taken.type} here, so a rank lacks the "
            "drafts of its sequences",
            remedy="split the sequences of both models in the same way, or " + _OWN,
        )
    taken.replace_with(made)


def _check_ranks(module: Module, draft: Module) -> None:
    """Raises `DiagnosticError` for ranks that both models cannot share."""
    here, there = _axes(module), _axes(draft)
    shown = " x ".join(f"{axis} {size}" for axis, size in here.items()) or "one device"
    lost = [f"{axis} = {size}" for axis, size in there.items() if here.get(axis) != size]
    if lost:
        text = f"has {', '.join(lost)}, and these are {shown}"
        remedy = "give it these axes, or tp=1"
    elif microbatches(module) > 1:
        text, remedy = "waits for all sequences of a step", "leave --microbatches out"
    elif draft.loads:
        text, remedy = "has loads of experts", "give --expert-load for its model alone"
    elif _kernels(module, there) != _kernels(draft, there):
        text, remedy = "has other kernels or blocking collectives", "give both the same flags"
    else:
        return
    raise draft.root.error(
        f"a draft model on the ranks of its model {text}", remedy=f"{remedy}, or {_OWN}"
    )


def _axes(module: Module) -> Mapping[str, int | None]:
    return module.mesh.sizes if module.mesh else {}


def _kernels(module: Module, axes: Mapping[str, int | None]) -> tuple[object, ...]:
    """The properties of a strategy that later passes read; they apply to both models."""
    strategy = read_strategy(module)
    fused = strategy.one(FusionRule)
    return fused.kind, fused.gradients, {*strategy.blocking} & axes.keys()
