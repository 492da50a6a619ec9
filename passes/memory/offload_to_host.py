"""offload-to-host: what lives in host memory, and the copies that bring it to the device and back.

Activations that a repeat stashes go to the host as soon as they are there and come back where the
repeat that runs back uses them first. Optimizer state is copied in before each update and
out after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from stagec.api import (
    Builder,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    TensorType,
    Value,
    is_parameter,
    made_by,
    read_strategy,
)
from stagec.ir.builder import RawAttr
from stagec.ir.traits import Repeats, Terminates
from stagec.ir_spec.ops.comm import Collective
from stagec.ir_spec.ops.pipeline import ActionOp
from stagec.memory.buffers import LATER

PASS = "offload-to-host"
HOST, DEVICE = "host", "device"


@dataclass(frozen=True)
class OffloadToHost(Pass):
    """Move to host memory what `stg.offload` names: activations, optimizer state, or both.

    An activation that a repeat stashes is copied to the host when it is there, and back where the
    repeat that runs back uses it first. State is copied in before its update and out after it.
    With `nodes` each copy is a node of the trace. Without the statement nothing happens.

    Before:
        stg.strategy @s {
          stg.offload[optimizer]
        }
        stg.func @f(
            %w: f32[D | rep param], %g: f32[D | rep],
            %m: f32[D | rep state], %v: f32[D | rep state]) {
          %w_1, %m_1, %v_1 = stg.adamw[phase = optimizer](%w, %g, %m, %v) :
              (f32[D | rep], f32[D | rep], f32[D | rep])
          stg.return[phase = optimizer](%w_1, %m_1, %v_1)
        }
    After:
        stg.strategy @s {
          stg.offload[optimizer]
        }
        stg.func @f (
            %w: f32[D | rep param],
            %g: f32[D | rep],
            %m: f32[D | rep state mem(host)],
            %v: f32[D | rep state mem(host)]) {
          %m_2 = stg.copy[to = device, phase = optimizer](%m) : f32[D | rep]
          %v_2 = stg.copy[to = device, phase = optimizer](%v) : f32[D | rep]
          %w_1, %m_1, %v_1 = stg.adamw[phase = optimizer](%w, %g, %m_2, %v_2) :
              (f32[D | rep], f32[D | rep], f32[D | rep])
          %m_1_host = stg.copy[to = host, phase = optimizer](%m_1) : f32[D | rep mem(host)]
          %v_1_host = stg.copy[to = host, phase = optimizer](%v_1) : f32[D | rep mem(host)]
          stg.return[phase = optimizer](%w_1, %m_1_host, %v_1_host)
        }
    """

    name = PASS
    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        return bool(read_strategy(module).offload)

    def run(self, module: Module) -> None:
        strategy = read_strategy(module)
        what, copies = strategy.offload, _Copies(module, strategy.copy_nodes)
        for kind, move in (("activations", _activations), ("optimizer", _states)):
            if kind not in what:
                continue
            for func in module.functions:
                move(copies, func.body)
            if not copies.made:
                module.diagnostics.remark(
                    f"'stg.offload[{kind}]' changes nothing: {_NOTHING[kind]}", strategy.loc
                )
            copies.made.clear()


_NOTHING = {
    "activations": "no repeated layer keeps a value for backward",
    "optimizer": "there is no optimizer state",
}


@dataclass(frozen=True)
class _Copies:
    """Makes copies, which are nodes of the trace or not."""

    module: Module
    nodes: bool
    made: list[Value] = field(default_factory=list[Value])

    def __call__(self, b: Builder, value: Value, to: str, name: str) -> Value:
        attrs: dict[str, RawAttr] = {"to": to, **({"node": True} if self.nodes else {})}
        self.made.append(b.value("stg.copy", [value], attrs, hint=name))
        return self.made[-1]


def _moved(value: Value, memory: str) -> TensorType:
    return replace(value.tensor, memory=memory)


# -- activations -----------------------------------------------------------------------------------


def _activations(copies: _Copies, region: Region) -> None:
    for op in region.ops:
        if op.region is None:
            continue
        if not op.has(Repeats):
            _activations(copies, op.region)
        elif op.phase == "forward":
            for index in range(op.integer("carry", 1), len(op.results)):
                _stashed(copies, op, index)


def _stashed(copies: _Copies, repeat: Operation, index: int) -> None:
    """Move one stacked result of a repeat. Gathered parameters are no activations and stay."""
    stack, end = repeat.results[index], repeat.body.terminator
    value = end.operands[index]
    stacks = _handed_on(stack)
    uses = stacks[-1].uses
    users = [(u, i) for u, i in uses if u.has(Repeats) and u.phase in LATER]
    if len(users) != len(uses) or not users or _is_gathered_parameter(value):
        return
    b = _after(copies.module, value)
    copy = copies(b, value, HOST, f"{value.name}_host")
    end.set_operand(index, copy)
    for each in stacks:
        each.type = _moved(each, HOST)
    for user, slot in users:
        arg = user.body.args[slot]
        there = list(arg.uses)
        arg.type = _moved(arg, HOST)
        first = min((_in_region(op, user.body) for op, _ in there), key=lambda op: op.position())
        before = Builder.before(
            copies.module.registry, first, loc=made_by(PASS, arg.loc), phase=user.phase
        )
        back = copies(before, arg, DEVICE, arg.name)
        for op, i in there:
            op.set_operand(i, back)


def _handed_on(value: Value) -> list[Value]:
    """A value, and the results that stand for it outside of the action that makes it."""
    if len(value.uses) == 1:
        user, index = value.uses[0]
        owner = user.parent_op
        if user.has(Terminates) and owner is not None and isinstance(owner.definition, ActionOp):
            return [value, *_handed_on(owner.results[index])]
    return [value]


def _after(module: Module, value: Value) -> Builder:
    """A builder where a value has just been made."""
    loc = made_by(PASS, value.loc)
    if isinstance(value.owner, Region):
        return Builder(module.registry, value.owner, 0, loc=loc)
    return Builder.after(module.registry, value.owner, loc=loc)


def _in_region(op: Operation, region: Region) -> Operation:
    """The operation of the region itself that is or contains this one."""
    while op.parent is not region and op.parent is not None:
        op = op.parent.owner
    return op


def _is_gathered_parameter(value: Value) -> bool:
    op = value.producer
    return op is not None and isinstance(op.definition, Collective) and is_parameter(op.operands[0])


# -- optimizer state -------------------------------------------------------------------------------


def _states(copies: _Copies, body: Region) -> None:
    states = [a for a in body.args if a.tensor.role == "state"]
    for op in list(body.ops):
        mine = {i: v for i, v in enumerate(op.operands) if v in states}
        if not mine:
            continue
        before = Builder.before(copies.module.registry, op, loc=made_by(PASS, op.loc))
        for i, state in mine.items():
            state.type = _moved(state, HOST)
            op.set_operand(i, copies(before, state, DEVICE, state.name))
        after = Builder.after(copies.module.registry, op, loc=made_by(PASS, op.loc))
        for result in op.results:
            if op.definition.reuses(op, result.index) in mine:
                users = list(result.uses)
                new = copies(after, result, HOST, f"{result.name}_host")
                for user, i in users:
                    user.set_operand(i, new)
    body.returns = tuple(
        replace(t, memory=v.tensor.memory) if isinstance(t, TensorType) else t
        for t, v in zip(body.returns, body.terminator.operands, strict=False)
    )
