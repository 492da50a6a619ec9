"""offload-to-host: moves values to host memory and adds the copies between host and device.

Activations that a repeat stashes are copied to the host when they are computed, and back before
their first use in the backward repeat. Parameters and optimizer state are copied in before each
update and out after it; gradients are copied out when they are complete and in before each use.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from stagec.api import (
    Builder,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    Strategy,
    TensorType,
    Value,
    const,
    made_by,
    read_strategy,
)
from stagec.ir.builder import RawAttr
from stagec.ir.rewrite import carried
from stagec.ir.traits import Accumulates, CopiesMemory, Recalls, Repeats, Terminates
from stagec.ir.types import DEVICE, WEIGHTS, WHOLE
from stagec.ir_spec.ops.attention_base import AttentionWork
from stagec.ir_spec.ops.pipeline import ActionOp
from stagec.ir_spec.strategy.freeze import matches
from stagec.ir_spec.strategy.offload import ATTENTION, OFFLOAD, OffloadRule
from stagec.memory.buffers import LATER
from stagec.memory.liveness import is_gathered, updated
from stagec.support.suggest import did_you_mean

HOST, OPTIMIZER = "host", "optimizer"


class OffloadToHost(Pass):
    """Move the values that `stg.offload` names, or a share of each, to host memory.

    An activation that a repeat stashes is copied to the host when it is computed, and back before
    its first use in the backward repeat. State and parameters are copied in before their update and
    out after it. Parameters are also copied in for each use, slice by slice. A gradient is copied
    out when it is complete, and in for the update. With `nodes` each copy is a node of the trace.
    Without the statement nothing happens.

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

    needs = Phase.PARTITIONED

    def applies(self, module: Module) -> bool:
        return bool(read_strategy(module).offload.what)

    def run(self, module: Module) -> None:
        offload_to_host(module, read_strategy(module))


_NOTHING = {
    "activations": "no repeated layer keeps a value for backward",
    "gradients": "no gradient is complete before the update, or sums over microbatches keep them",
    "optimizer": "the step has no optimizer state",
    "parameters": "the step has no parameters",
}


def offload_to_host(module: Module, strategy: Strategy) -> None:
    """Move the values that the strategy names to the host and add the copies, in place.

    Raises `DiagnosticError` for a name that matches no value, and for parameters and gradients
    whose update is part of backward.
    """
    rule, copies = strategy.offload, _Copies(module, strategy.offload)
    for func in module.functions:
        _activations(copies, func.body)
        _gradients(copies, func.body)
        _arguments(copies, func.body)
    for pattern, _ in rule.items:
        if any(matches(path, pattern) for path in copies.made):
            continue
        if pattern not in OFFLOAD:
            known = {part for path in copies.paths for part in (path, *path.split("/"))}
            raise rule.error(
                f"no value that can be offloaded matches '{pattern}'",
                remedy=did_you_mean(pattern, known)
                or f"choose {', '.join(OFFLOAD)}, or names of values; 'stagec memory' lists them",
            )
        if rule.share(pattern):
            module.diagnostics.remark(
                f"'stg.offload[{pattern}]' changes nothing: {_NOTHING[pattern]}", rule.loc
            )
    in_backward = strategy.optimizer.form == "in_backward"
    if in_backward and any(p.startswith(("gradients", "parameters")) for p in copies.made):
        raise rule.error(
            "updates in backward need parameters and gradients on the device",
            remedy="choose --offload optimizer or activations, or another --optimizer-form",
        )


@dataclass(frozen=True)
class _Copies:
    """Makes the copies of values that the strategy names. `paths` are all values that it could
    name, `made` those that it does."""

    module: Module
    rule: OffloadRule
    paths: set[str] = field(default_factory=set[str])
    made: set[str] = field(default_factory=set[str])

    def share(self, kind: str, value: Value, alias: str = "") -> Fraction:
        """The share of a value that goes to the host; `alias` is a second name of its kind."""
        paths = [f"{kind}/{value.name}"]
        if alias:
            paths.append(f"{paths[0].rpartition('/')[0]}/{alias}")
        self.paths.update(paths)
        items = self.rule.items
        self.made.update(p for p in paths if any(matches(p, pattern) for pattern, _ in items))
        return self.rule.share(*paths)

    def updates_there(self, arg: Value) -> bool:
        """Whether the host updates an argument where it is, so that its copies take no time."""
        return read_strategy(self.module).optimizer.offloaded == HOST and arg.tensor.role == "state"

    def store(self, b: Builder, value: Value, share: Fraction, *, stays: bool = False) -> Value:
        """Copy a value, or a share of it, to the host; without a node if it stays there."""
        attrs: dict[str, RawAttr] = {"to": HOST}
        if share != WHOLE:
            attrs["share"] = const(share.numerator) / share.denominator
        return self._copy(b, value, attrs, f"{value.name}_host", stays)

    def load(self, b: Builder, value: Value, *, stays: bool = False) -> Value:
        """Copy a value to the device; without a node if it stays on the host."""
        return self._copy(b, value, {"to": DEVICE}, value.name, stays)

    def _copy(
        self, b: Builder, value: Value, attrs: dict[str, RawAttr], name: str, stays: bool
    ) -> Value:
        nodes: dict[str, RawAttr] = {"node": True} if self.rule.nodes and not stays else {}
        return b.value("stg.copy", [value], {**attrs, **nodes}, hint=name)

    def before(self, op: Operation) -> Builder:
        """A builder before an operation, in its phase."""
        return self.module.before(op, by=OffloadToHost.name)

    def behind(self, value: Value) -> Builder:
        """A builder directly after a value is made."""
        return Builder.behind(self.module.registry, value, made_by(OffloadToHost.name, value.loc))


def _moved(value: Value, share: Fraction) -> TensorType:
    return replace(value.tensor, memory=HOST, share=share)


# -- activations -----------------------------------------------------------------------------------


def _activations(copies: _Copies, region: Region) -> None:
    for op in region.ops:
        if op.region is None:
            continue
        if not op.has(Repeats):
            _activations(copies, op.region)
        elif op.phase == "forward":
            for index in range(carried(op), len(op.results)):
                _stashed(copies, op, index)


def _stashed(copies: _Copies, repeat: Operation, index: int) -> None:
    """Move one stacked result of a repeat. Gathered parameters are not activations and stay."""
    value = repeat.body.terminator.operands[index]
    stacks = _handed_on(repeat.results[index])
    uses = stacks[-1].uses
    users = [(u, i) for u, i in uses if u.has(Repeats) and u.phase in LATER]
    if len(users) != len(uses) or not users or is_gathered(value):
        return
    is_attention = any(_is_attention(user.body.args[slot]) for user, slot in users)
    share = copies.share("activations", value, ATTENTION if is_attention else "")
    if not share:
        return
    for user, slot in users:
        if any(u.has(Recalls) for u, _ in user.body.args[slot].uses):
            what = read_strategy(copies.module).recompute
            raise what.error(
                f"%{value.name}, which only some layers stash, cannot be offloaded",
                remedy="recompute in all layers or in none, or name other values in stg.offload",
            )
    _store_slices(copies, repeat, index, stacks, share)
    for user, slot in users:
        _load_slices(copies, user, slot, share)


def _is_attention(arg: Value) -> bool:
    """Whether gradients of attention use a value as the result of attention."""
    kernels = [(op.definition, i) for op, i in arg.uses if isinstance(op.definition, AttentionWork)]
    inside = (op.body.args[i] for op, i in arg.uses if op.region is not None)
    read = any(kernel.operands[i : i + 1] == ("y",) for kernel, i in kernels)
    return read or any(map(_is_attention, inside))


def _store_slices(
    copies: _Copies, repeat: Operation, index: int, stacks: list[Value], share: Fraction
) -> None:
    """Copy each slice that a repeat stacks to the host when it is made; `stacks` are the
    results."""
    end = repeat.body.terminator
    value = end.operands[index]
    end.set_operand(index, copies.store(copies.behind(value), value, share))
    for each in stacks:
        each.type = _moved(each, share)


def _load_slices(copies: _Copies, user: Operation, slot: int, share: Fraction) -> None:
    """Copy each slice of a stack on the host to the device before its first use in a repeat."""
    arg = user.body.args[slot]
    arg.type = _moved(arg, share)
    _load(copies, arg, user.body)


def _load(copies: _Copies, value: Value, region: Region) -> None:
    """Copy a value on the host to the device before its first use of each phase in a region.
    Repeats inside it use that copy, unless they take slices from the host."""
    uses = [(op, i) for op, i in value.uses if not op.has(CopiesMemory) and not op.has(Terminates)]
    uses = [(op, i) for op, i in uses if not _takes_from_host(op, i)]
    inside = [(at, op, i) for op, i in uses if (at := _in_region(op, region)) is not None]
    for phase in dict.fromkeys(at.phase for at, _, _ in inside):
        mine = [(at, op, i) for at, op, i in inside if at.phase == phase]
        first = min((at for at, _, _ in mine), key=lambda op: op.position())
        back = copies.load(copies.before(first), value)
        for _, op, i in mine:
            op.set_operand(i, back)


def _takes_from_host(op: Operation, index: int) -> bool:
    """Whether the region of an operation takes an operand from the host itself."""
    return op.region is not None and op.region.args[index].tensor.memory == HOST


def _handed_on(value: Value) -> list[Value]:
    """A value, and the results that represent it outside of the actions that make it."""
    if len(value.uses) == 1:
        user, index = value.uses[0]
        owner = user.parent_op
        if user.has(Terminates) and owner is not None and isinstance(owner.definition, ActionOp):
            return [value, *_handed_on(owner.results[index])]
    return [value]


def _in_region(op: Operation, region: Region) -> Operation | None:
    """The operation of the region that is this one or a repeat around it, or None."""
    while op.parent is not region:
        owner = op.parent_op
        if owner is None or not owner.has(Repeats):
            return None
        op = owner
    return op


# -- gradients -------------------------------------------------------------------------------------


def _gradients(copies: _Copies, body: Region) -> None:
    """Move the gradients that updates take. Each operation of an update copies them back."""
    for op in list(body.ops):
        if op.phase == OPTIMIZER or op.has(Accumulates):
            continue
        for value in list(op.results):
            if not any(u.phase == OPTIMIZER for u, _ in value.uses) or not value.tensor.rank:
                continue
            share = copies.share("gradients", value)
            stacked = op.has(Repeats) and value.index >= carried(op)
            users = list(value.uses)
            if not share or (op.region is not None and not stacked):
                continue
            if stacked:
                _store_slices(copies, op, value.index, [value], share)
                there = value
            else:
                there = copies.store(copies.behind(value), value, share)
            for user, i in users:
                user.set_operand(i, copies.load(copies.before(user), there))


# -- parameters and optimizer state ----------------------------------------------------------------


def _arguments(copies: _Copies, body: Region) -> None:
    """Move arguments. An update copies them to the device and back; each phase of a region that
    uses a parameter copies it to the device, in a repeat slice by slice."""
    kinds = {"state": "optimizer", **dict.fromkeys(WEIGHTS, "parameters")}
    kept = [arg for arg in body.args if arg.tensor.role in kinds]
    shares = {a: share for a in kept if (share := copies.share(kinds[a.tensor.role], a))}
    for arg, share in shares.items():
        arg.type = _moved(arg, share)
    versions = {arg: arg for arg in shares}  # arguments and their updates on the device
    for op in [op for op in body.ops if op.phase == OPTIMIZER and not op.has(Terminates)]:
        _update(copies, op, versions, shares)
    for arg, share in shares.items():
        _bring(copies, arg, share)
    body.returns = tuple(
        replace(t, memory=v.tensor.memory, share=v.tensor.share) if isinstance(t, TensorType) else t
        for t, v in zip(body.returns, body.terminator.operands, strict=False)
    )


def _update(
    copies: _Copies, op: Operation, versions: dict[Value, Value], shares: Mapping[Value, Fraction]
) -> None:
    """Copy the offloaded operands of an operation of an update to the device, and their final
    versions to the host."""
    after = copies.module.after(op, by=OffloadToHost.name)
    for result in op.results:
        slot = op.definition.reuses(op, result.index)
        old = updated(result) if op.region is not None else None
        old = op.operands[slot] if slot is not None else old
        if old is not None and old in versions:
            arg = versions[result] = versions[old]
            ends = [(user, i) for user, i in result.uses if user.has(Terminates)]
            if ends:
                stays = copies.updates_there(arg)
                new = copies.store(after, result, shares[arg], stays=stays)
                result.replace_with(new, ends)
    for i, value in enumerate(op.operands):
        if value in shares:
            stays = copies.updates_there(value)
            op.set_operand(i, copies.load(copies.before(op), value, stays=stays))


def _bring(copies: _Copies, value: Value, share: Fraction) -> None:
    """Copy a parameter on the host to the device in each region that uses it, slice by slice in
    repeats."""
    for op, i in list(value.uses):
        if op.region is not None:
            arg = op.body.args[i]
            arg.type = _moved(arg, share)
            _bring(copies, arg, share)
    regions = {op.parent: None for op, _ in value.uses if op.region is None and op.parent}
    for region in regions:
        _load(copies, value, _outside_of_repeats(region, value))


def _outside_of_repeats(region: Region, value: Value) -> Region:
    """The region outside of all repeats around `region` whose layers share the value."""
    while region is not value.region and region.owner.has(Repeats) and region.owner.parent:
        region = region.owner.parent
    return region
