"""The cut of layers into attention, which stays with the rest of the model, and feed-forward, which
is a part of its own."""

from stagec.api import Builder, Loc, Module, Operation, Value, const, error, made_by, read_strategy
from stagec.ir.builder import RawAttr
from stagec.ir.core import renumber
from stagec.ir.rewrite import drop_unused_bindings, repeats_in
from stagec.ir.types import CACHED, PARAMETERS
from stagec.ir_spec.ops.half_layers import behind_attention
from stagec.ir_spec.ops.parts import arrive, depart
from stagec.ir_spec.strategy.lora import LoraRule
from stagec.ir_spec.strategy.microbatches import MicrobatchesRule
from stagec.ir_spec.strategy.moe import MoeRule
from stagec.ir_spec.strategy.part import PartRule

PASS = "cut-part"
_REMEDY = "leave the part with feed-forward out"


def cut_layers(module: Module, rule: PartRule, keep: str, rest: str) -> None:
    """Keep the feed-forward of all layers in the main function, or what is left of it, in place. In
    each layer a value departs to the other pod behind attention, and another one comes back at the
    end.

    Raises `DiagnosticError` for a step of training, for layers without a place to cut, and for
    parameters that both halves use.
    """
    body = module.main.body
    if not any(arg.tensor.role in CACHED for arg in body.args):
        raise rule.error(
            f"the part '{rule.name}' has the feed-forward of a step of training, expected one of "
            "serving",
            remedy="add --serve decode, or leave stg.part[feed_forward] out",
        )
    _check_turns(module, rule)
    repeats = repeats_in(body)
    places = {op: behind_attention(op, rule.loc, _REMEDY) for op in repeats}
    _check_owners(module, rule, {op: place for op, (place, _) in places.items()})
    ends: dict[Operation, _Ends] = {}
    for op, (place, value) in places.items():
        taken = sum(each.crosses.is_called(value.name) for each in ends.values())
        ends[op] = _Ends(module, op, place, value, rule, rest, f"_{taken + 1}" if taken else "")
    if keep == rest:
        for each in ends.values():
            each.keep_attention()
        return
    body.terminator.set_operands(())
    body.returns = ()
    for op in reversed(body.ops[:-1]):
        if op in ends:
            ends[op].keep_feed_forward()
        elif not any(result.uses for result in op.results):
            op.erase()


def _check_turns(module: Module, rule: PartRule) -> None:
    """Raise `DiagnosticError` for statements that divide the batch in another way."""
    strategy = read_strategy(module)
    halves, microbatches = strategy.one(MoeRule), strategy.one(MicrobatchesRule)
    if adapters := next(iter(strategy.all(LoraRule)), None):
        raise error(
            f"adapters cannot be used with the part '{rule.name}', which would need some of them",
            adapters.loc,
            remedy="leave --lora out, or the part: --pp 2 --afd has two stages",
        )
    given = (
        (halves.two_batches, "two half batches", "--two-batch-overlap", halves.loc),
        (microbatches.count > 1, "microbatches", "--microbatches", microbatches.loc),
    )
    for divides, what, option, loc in given:
        if divides:
            raise error(
                f"{what} cannot be used with the part '{rule.name}', with which parts of a batch "
                "already take turns",
                loc,
                remedy=f"leave {option} out; --part-batches is the number of parts",
            )


def _check_owners(module: Module, rule: PartRule, places: dict[Operation, int]) -> None:
    """Raise `DiagnosticError` for a parameter that feed-forward and something else use."""
    for arg in module.main.body.args:
        users: set[bool] = set()
        for op, index in arg.uses if arg.tensor.role in PARAMETERS else ():
            if op not in places:
                users.add(False)
                continue
            tail = {inner for each in op.body.ops[places[op] : -1] for inner in each.walk()}
            users |= {user in tail for user, _ in op.body.args[index].uses}
        if len(users) > 1:
            raise arg.error(
                f"the parameter %{arg.name} is used by the part '{rule.name}' and by the rest",
                remedy=_REMEDY,
            )


class _Ends:
    """A layer of a repeat that is cut before operation `place`, where `crosses` is the only live
    value."""

    def __init__(
        self,
        module: Module,
        op: Operation,
        place: int,
        crosses: Value,
        rule: PartRule,
        rest: str,
        suffix: str,
    ) -> None:
        self._module, self._op, self._rule = module, op, rule
        self._rest, self._suffix, self.crosses = rest, suffix, crosses
        self._head, self._tail = op.body.ops[:place], op.body.ops[place:-1]

    def keep_attention(self) -> None:
        """Keep what is before the cut; what feed-forward makes of it arrives."""
        end, rule = self._op.body.terminator, self._rule
        out, *others = end.operands
        made = {v for op in self._tail for v in op.results}
        if lost := [v for v in others if v in made]:
            raise rule.error(
                f"the layers of %{self._op.results[0].name} also return %{lost[0].name}, which the "
                f"part '{rule.name}' computes",
                remedy=_REMEDY,
            )
        b = self._module.before(self._tail[0], loc=self._loc)
        depart(b, self.crosses, self.crosses.tensor, self._way(self.crosses, self._rest, rule.name))
        way = self._way(out, rule.name, self._rest)
        end.set_operand(0, arrive(b, out.tensor, way, out.name))
        for op in reversed(self._tail):
            op.erase()
        drop_unused_bindings(self._op)

    def keep_feed_forward(self) -> None:
        """Keep what is behind the cut, which begins with what arrives. Nothing passes from layer to
        layer."""
        op, end, rule = self._op, self._op.body.terminator, self._rule
        out, registry = end.operands[0], self._module.registry
        b = Builder.before(registry, self._tail[0], loc=self._loc)
        way = self._way(self.crosses, self._rest, rule.name)
        there = arrive(b, self.crosses.tensor, way, self.crosses.name)
        self.crosses.replace_with(there, list(self.crosses.uses))
        end.set_operands(())
        b = Builder.before(registry, end, loc=self._loc)
        depart(b, out, out.tensor, self._way(out, rule.name, self._rest))
        for each in reversed(self._head):
            each.erase()
        op.results = []
        op.attrs["carry"] = const(0)
        used = [arg.index for arg in op.body.args if arg.uses]
        op.set_operands([op.operands[index] for index in used])
        op.body.args[:] = [op.body.args[index] for index in used]
        renumber(op.body.args)

    @property
    def _loc(self) -> Loc:
        return made_by(PASS, self._rule.loc)

    def _way(self, value: Value, source: str, to: str) -> dict[str, RawAttr]:
        name = value.name.replace("/", "_") + self._suffix
        return {"value": name, "source": source, "to": to}
