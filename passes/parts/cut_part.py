"""cut-part: keeps one part of the model in a pod, and the ends of values that cross to other
parts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stagec.api import Loc, Module, Operation, Pass, Phase, Region, Value, note, read_strategy
from stagec.ir.builder import RawAttr
from stagec.ir.core import renumber
from stagec.ir.traits import Repeats
from stagec.ir.types import CACHED, FLOATS, PARAMETERS
from stagec.ir_spec.ops.parts import Arrive, Depart, arrive, depart
from stagec.ir_spec.strategy.part import MAIN, PartRule
from stagec.ir_spec.strategy.pipeline import PipelineRule
from stagec.passes.parts.cut_layers import cut_layers
from stagec.support.diagnostics import Located
from stagec.support.suggest import did_you_mean

#: The schedule of pipeline stages that run ahead of another part.
AHEAD = "gpipe"


class CutPart(Pass):
    """Keep one part of the model as `stg.part` states: its operations, its parameters, and one end
    of each value that enters or leaves it.

    The part consists of the operations on which its result depends. Values that depend on no
    parameter, such as a mask, are computed in every part. A parameter that the rest of the model
    uses too, such as a tied embedding, belongs to `main`, and so do its users; their results cross
    to the part. The loss belongs to `main`.

    With `stg.part[feed_forward]` the part is what each layer does after its attention: in each
    layer a value departs there, and another one comes back (MegaScale-Infer, arXiv 2504.02263).

    Before:
        stg.strategy @s {
          stg.part[encoder, of = e]
        }
        stg.func @f(%x: f32[B], %w: f32[B | param]) -> f32[] {
          %e = stg.mul(%x, %w) : f32[B]
          %l = stg.sum["b->"](%e) : f32[]
          stg.return(%l)
        }
    After:
        stg.strategy @s {
          stg.part[encoder, of = e]
        }
        stg.func @f[part = main]() -> f32[] {
          %e = stg.arrive[
            e, trained, source = encoder, to = main, sizes = B, dtype = f32] : f32[B]
          %l = stg.sum["b->"](%e) : f32[]
          stg.return(%l)
        }
    """

    needs = Phase.SHAPED

    keep: str = field(default=MAIN, metadata={"help": "the part that the pod has"})
    rest: str = field(default=MAIN, metadata={"help": "what the rest of the model is called"})

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        rules, pipeline = strategy.all(PartRule), strategy.pipeline
        if pipeline is not None and any(rule.feed_forward for rule in rules):
            raise pipeline.error(  # a value crosses in each layer, between pods without stages
                "a part with feed-forward cannot be used with pipeline stages",
                remedy="leave --pp out",
            )
        cut_part(module, rules, self.keep, self.rest)
        if pipeline is not None:
            _check_stages(module, pipeline)


def _check_stages(module: Module, pipeline: PipelineRule) -> None:
    """Raise `DiagnosticError` for pipeline stages that would deadlock with another part: they start
    several microbatches before the gradient of the first one arrives. This concerns a part that
    both sends values to another part and receives some, and a part that does not run ahead."""
    part = module.main.text("part")
    ends = [op for op in module.main.body.ops if isinstance(op.definition, Arrive | Depart)]
    gone = [op for op in ends if isinstance(op.definition, Depart)]
    if not any(op.flag("trained") for op in ends):
        return
    if gone and len(gone) < len(ends):
        (other, *_) = (op.text("to") for op in gone)
        raise pipeline.error(
            f"'{part}' and '{other}' need values of each other in forward, so their pipeline "
            "stages would wait for each other",
            remedy="leave --pp out, or give both parts parameters of their own",
        )
    if gone and pipeline.schedule != AHEAD:
        raise pipeline.error(
            f"the part '{part}' has the schedule {pipeline.schedule}, expected {AHEAD}, which "
            "runs forward of all microbatches before backward",
            remedy=f"add schedule={AHEAD} to its flags, or leave out pp",
        )


def cut_part(module: Module, rules: Sequence[PartRule], keep: str, rest: str = MAIN) -> None:
    """Keep one part of the main function, in place; `rest` is the name of the part that no rule
    names.

    Raises `DiagnosticError` for unknown or repeated names, values that are not results of the
    function itself, nested parts, parameters that two parts use, and layers that cannot be cut.
    """
    known = [rest, *(rule.name for rule in rules)]
    if keep not in known or len(known) == 1:
        raise module.main.error(
            f"no part '{keep}'",
            remedy=did_you_mean(keep, known) or f"its parts are: {', '.join(known)}",
        )
    func = module.main
    if layers := next((rule for rule in rules if rule.feed_forward), None):
        if len(rules) > 1:
            raise layers.error(
                f"the part '{layers.name}' with feed-forward cannot be used with other parts",
                remedy="leave the others out",
            )
        cut_layers(module, layers, keep, rest)
        trained: list[str] = []
    else:
        parts = _Parts(func.body, rest)
        for rule in rules:
            parts.add(rule)
        parts.check()
        trained = [p for p in known if any(v.tensor.role == "param" for v in parts.args(p))]
        _cut(module, parts, keep)
    _drop_unused(module)
    func.attrs["part"] = keep
    if peers := tuple(part for part in trained if part != keep and keep in trained):
        func.attrs["peers"] = peers


@dataclass(frozen=True, slots=True)
class _Crossing(Located):
    """A value of one part that another part uses."""

    value: Value
    source: str
    to: str
    loc: Loc


class _Parts:
    """The values that cross between the parts of a function, which define the parts."""

    def __init__(self, body: Region, rest: str) -> None:
        self.body, self.rest = body, rest
        self.crossings: list[_Crossing] = []

    def add(self, rule: PartRule) -> None:
        """Add a part, given by the value that it computes. Raises `DiagnosticError`."""
        if rule.name == self.rest or any(rule.name == c.source for c in self.crossings):
            what = "is the rest of the model" if rule.name == self.rest else "stands twice"
            raise rule.error(f"the part '{rule.name}' {what}", remedy="choose another name")
        self.crossings.append(_Crossing(_named(self.body, rule), rule.name, self.rest, rule.loc))
        self._share(rule)

    def _share(self, rule: PartRule) -> None:
        """Leave ops to the rest that use a parameter of the rest and nothing of the part."""
        mine, theirs = self.args(rule.name), self.args(self.rest)
        users = (op for v in _parameters(mine) if v in theirs for op, _ in v.uses)
        part = self.ops(rule.name)
        for op in dict.fromkeys(op for op in users if op in part and op.region is None):
            if all(v in theirs for v in _parameters(self._takes(op.operands, ())[1])):
                self.crossings.append(_Crossing(op.results[0], self.rest, rule.name, rule.loc))

    def ops(self, part: str) -> set[Operation]:
        """The operations of the function that belong to a part."""
        return self._takes(self._ends(part), self._stops(part))[0]

    def args(self, part: str) -> set[Value]:
        """The arguments of the function that a part uses."""
        return self._takes(self._ends(part), self._stops(part))[1]

    def trains(self, crossing: _Crossing) -> bool:
        """Whether a crossing value depends on a trained parameter."""
        _, args = self._takes([crossing.value], ())
        return any(v.tensor.role == "param" for v in args)

    def _ends(self, part: str) -> list[Value]:
        ends = [c.value for c in self.crossings if c.source == part]
        return [*ends, *(self.body.terminator.operands if part == self.rest else ())]

    def _stops(self, part: str) -> list[Value]:
        return [c.value for c in self.crossings if c.to == part]

    def _takes(
        self, ends: Iterable[Value], stops: Iterable[Value]
    ) -> tuple[set[Operation], set[Value]]:
        """The operations and arguments on which the values `ends` depend, up to the values
        `stops`."""
        ops, args = set[Operation](), set[Value]()
        pending, seen = list(ends), set(stops)
        while pending:
            value = pending.pop()
            op = value.producer
            if value in seen:
                continue
            seen.add(value)
            if op is None and value.region is self.body:
                args.add(value)
            elif op is not None and op.parent is self.body:
                ops.add(op)
                pending += op.reads()
        return ops, args

    def check(self) -> None:
        """Raise `DiagnosticError` for nested parts, and for parameters that two parts use."""
        users: dict[Value, str] = {}
        for part in dict.fromkeys([self.rest, *(c.source for c in self.crossings)]):
            ops = self.ops(part)
            for other in self.crossings:
                if part not in (other.source, other.to) and other.value.producer in ops:
                    raise other.error(
                        f"the part '{part}' takes %{other.value.name} of '{other.source}'",
                        remedy="let one part compute both",
                    )
            for value in _parameters(self.args(part)):
                if (other_part := users.setdefault(value, part)) != part:
                    raise value.error(
                        f"the parameter %{value.name} is used by the parts '{other_part}' and "
                        f"'{part}'",
                        remedy="use a parameter of its own in each part, or choose a value that "
                        "does not use it",
                    )


def _parameters(values: Iterable[Value]) -> list[Value]:
    return [v for v in values if v.tensor.role in PARAMETERS]


def _named(body: Region, rule: PartRule) -> Value:
    """The value that ends a part. Raises `DiagnosticError`."""
    if len(rule.of) != 1:
        number = "several values" if rule.of else "no value"
        raise rule.error(f"the part '{rule.name}' has {number}, expected one", remedy="name one")
    name = rule.of[0]
    named = [v for v in body.values() if v.is_called(name)]
    own = [v for v in named if v.producer is not None and v.region is body and v.uses]
    if not named:
        known = {v.name.rpartition("/")[2] for v in body.values() if v.producer is not None}
        remedy = did_you_mean(name, known) or "'stagec models NAME' prints the model's text"
        if any(arg.tensor.role in CACHED for arg in body.args):
            what = f"the step of serving does not compute a value '%{name}'"
            remedy = did_you_mean(name, known) or "an encoder runs in the first step of prefill"
            raise rule.error(what, remedy=remedy)
        raise rule.error(f"the model has no value '%{name}'", remedy=remedy)
    if len(own) != 1 or own[0].tensor.dtype not in FLOATS:
        what = "is an argument, made inside of layers, or used by nothing"
        if own:
            what = f"is of {own[0].tensor.dtype}"
        if len(own) > 1:
            what = f"may be {', '.join(f'%{v.name}' for v in own)}"
        raise rule.error(
            f"%{name}, which ends the part '{rule.name}', {what}",
            remedy="name one value that the function itself computes, outside of repeats",
            notes=[note(f"%{v.name} is here", v.loc) for v in (own or named)[:3]],
        )
    return own[0]


# -- the cut ---------------------------------------------------------------------------------------


def _cut(module: Module, parts: _Parts, keep: str) -> None:
    """Replace crossing values by the ends of a part, and erase the ops of other parts."""
    body, mine = parts.body, parts.ops(keep)
    trained = {c: parts.trains(c) for c in parts.crossings}
    theirs = [op for op in body.ops[:-1] if op not in mine]
    for crossing in parts.crossings:
        if keep in (crossing.source, crossing.to):
            _end(module, crossing, trained=trained[crossing], arrives=crossing.to == keep)
    if keep != parts.rest:
        body.terminator.set_operands(())
        body.returns = ()
    for op in reversed(theirs):
        op.erase()


def _drop_unused(module: Module) -> None:
    """Drop the arguments and the orders of layers of other parts."""
    body = module.main.body
    body.args[:] = [arg for arg in body.args if arg.uses]
    renumber(body.args)
    used = {op.attrs.get("order") for op in body.walk() if op.has(Repeats)}
    names = {str(order).lstrip("@") for order in used}
    for op in module.ops("stg.order"):
        if op.symbol not in names:
            op.erase()


def _end(module: Module, crossing: _Crossing, *, trained: bool, arrives: bool) -> None:
    """Add the end of a crossing value: it departs where it is made, or arrives there instead."""
    value, op = crossing.value, crossing.value.producer
    if op is None:
        return
    b = module.after(op, loc=crossing.loc, by=CutPart.name)
    attrs: dict[str, RawAttr] = {
        "value": value.name.replace("/", "_"),
        "source": crossing.source,
        "to": crossing.to,
        **({"trained": True} if trained else {}),
    }
    if not arrives:
        depart(b, value, value.tensor.inner, attrs)
        return
    users = [(user, i) for user, i in value.uses if not isinstance(user.definition, Depart)]
    value.replace_with(arrive(b, value.tensor.inner, attrs, value.name), users)
