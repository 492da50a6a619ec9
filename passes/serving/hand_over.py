"""hand-over: transfers the caches of sequences from the pod that prefills to the pod that
decodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field

from stagec.api import (
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    Value,
    const,
    error,
    evaluate,
    read_strategy,
    symbol,
)
from stagec.ir.builder import RawAttr
from stagec.ir.serving_step import PAST
from stagec.ir_spec.ops.cache_rows import rows_of
from stagec.ir_spec.ops.pod_crossings import message_bytes
from stagec.pipeline.peers import peer_module
from stagec.program.crossings import Crossing, Crossings, caches_of, crossings, token_of, used
from stagec.schedule.attached import stages_of
from stagec.support.diagnostics import NotAnIntegerError


class HandOver(Pass):
    """Send the caches of a prefill step to the pod that decodes, or receive them from the pod that
    prefills.

    A cache is sent to the cache of the same name in the other pod, in the placement that it has
    there; each rank that has a part receives each byte of it once. It is sent after the step has
    updated it, layer by layer, and received before the step uses it. If one pod has two half
    batches, a cache of the other pod crosses in two halves. The other pod is one of the job, or the
    text `module`, in the phase `partitioned`. Sizes need values.

    Before:
        %k_rows = stg.append(%k_i, %k) : bf16[B, S, G@tp, K]
    After (hand-over{to=decode,module=decode.stg}, where G is split over twice as many ranks):
        %k_rows = stg.append(%k_i, %k) : bf16[B, S, G@tp, K]
        stg.hand_over[to = decode, first = 0, ways = 2, pieces = 2, ...](%k_rows)
    """

    needs = Phase.PARTITIONED
    meets = True

    to: str = field(default="", metadata={"help": "hand over to the pod of this name"})
    source: str = field(default="", metadata={"help": "take over from the pod of this name"})
    module: str = field(default="", metadata={"help": "the file of the other pod's module"})

    def run(self, module: Module) -> None:
        example = "hand-over{to=decode,module=decode.stg}"
        if bool(self.to) == bool(self.source):
            raise error("expected 'to' or 'source'", remedy=f"as in {example}")
        other = peer_module(module, self.to or self.source, self.module, example=example)
        hand_over(module, other, to=self.to, source=self.source)


def hand_over(module: Module, other: Module, *, to: str = "", source: str = "") -> None:
    """Send the caches of a module to another pod, or receive them from it, in place.

    Raises `DiagnosticError` for caches that the other pod does not have, sizes without values, and
    placements whose parts do not match.
    """
    pods = (module, other) if to else (other, module)
    ways = crossings(*pods)
    rows = {n: _rows(pods[1], v) for _, v, c, _ in caches_of(pods[1]) for n, _ in ways.of_cache(c)}
    places: dict[Region | None, Operation] = {}
    ends = list(_ends_of(module, sends=bool(to)))
    for half in range(2):
        for end, func, whole, chunk in ends:
            for name, crossing in ways.of_cache(whole)[half : half + 1]:
                attrs = _attrs(crossing, ways, func, chunk, sends=bool(to)) | rows.get(name, {})
                if to:
                    end.send({"to": to, **attrs}, crossing, places, first=not half)
                else:
                    end.receive({"source": source, **attrs}, crossing, places)


def _attrs(
    crossing: Crossing, crossings: Crossings, func: Operation, chunk: int, *, sends: bool
) -> dict[str, RawAttr]:
    """The attributes that an end states about its messages."""
    here, there = crossing.source, crossing.target
    if not sends:
        here, there = there, here
    layers = tuple(here.starts[stage, chunk] for stage in stages_of(func) or (0,))
    return {
        "first": here.first[chunk],
        "ways": here.ways,
        "stream": crossing.stream,
        "streams": crossings.layers,
        **({"layers": layers} if any(layers) else {}),
        **({"shares": here.shares} if len(here.shares) > 1 else {}),
        **({"turns": here.turns} if here.turns > 1 else {}),
        "splits": there.turns,
    }


def _rows(decode: Module, cache: Value) -> dict[str, RawAttr]:
    """The dimension of tokens, not counting those of layers, and its number of rows for tokens
    before the step; empty for state of fixed size. Raises `DiagnosticError` for sizes without
    values."""
    rows = rows_of(cache)
    if rows is None:
        return {}
    _, _, depth = used(cache)
    cached = rows.cached(symbol(PAST))
    if lacking := sorted(cached.symbols - decode.env.keys()):
        raise cache.error(
            f"no value for {', '.join(lacking)}, which the rows of %{cache.name} to be sent "
            "depend on",
            remedy=decode.how_to_set(lacking),
        )
    return {"dim": rows.dim - depth, "rows": const(evaluate(cached, decode.env))}


def _ends_of(module: Module, *, sends: bool) -> Iterator[tuple[_End, Operation, str, int]]:
    """The ends of crossing values, in the order in which the step makes or uses them, each with its
    function, name and chunk. Raises `DiagnosticError` for a cache that the step does not update."""
    ends: list[tuple[_End, Operation, str, int]] = []
    for func, arg, name, chunk in caches_of(module):
        op, index, depth = used(arg)
        made = _made(op, index) if sends else op.operands[index]
        ends.append((_End(module, op, made, depth), func, name, chunk))
    yield from sorted(ends, key=lambda end: end[0].op.position())
    for func, value, name, chunk in list(token_of(module)):
        more: dict[str, RawAttr] = {"last": True}
        if value.producer is not None:
            yield _End(module, value.producer, value, more=more), func, name, chunk
            continue
        if evaluate(value.tensor.shape[1], module.env) > 1:
            more |= {"dim": 1, "rows": const(1)}
        op, index, depth = used(value)
        yield _End(module, op, op.operands[index], depth, more), func, name, chunk


def _made(op: Operation, index: int) -> Value:
    """The updated cache of an operation. Raises `DiagnosticError` if there is none."""
    for result in op.results:
        if op.definition.reuses(op, result.index) == index:
            return result
    raise op.error(
        f"'{op.name}' does not update the cache %{op.operands[index].name}",
        remedy="transfer the caches that 'to-serving' adds",
    )


class _End:
    """The place of a crossing value in a step: in the function, in a microbatch, or in a repeat of
    layers. A value that crosses in halves does so layer by layer, the whole first half before the
    second, in the order in which a pod with two half batches computes them."""

    def __init__(
        self,
        module: Module,
        op: Operation,
        value: Value,
        depth: int = 0,
        more: Mapping[str, RawAttr] | None = None,
    ) -> None:
        self._module, self._depth, self._more = module, depth, dict(more or {})
        self.op, self.value = op, value

    def send(
        self,
        attrs: Mapping[str, RawAttr],
        crossing: Crossing,
        places: dict[Region | None, Operation],
        *,
        first: bool,
    ) -> None:
        """Send the value directly after it is made, or a second half after all that was sent before
        in its layer, which is in `places`."""
        place = self.op if first else places[self.op.parent]
        b = self._module.after(place, loc=self.op.loc, by=HandOver.name)
        pieces = crossing.way.pieces * crossing.source.parts
        sent = b.op("stg.hand_over", [self.value], {**attrs, "pieces": pieces, **self._more})
        places[self.op.parent] = sent
        self._check(sent)
        self._check_cuts(sent, crossing)

    def receive(
        self,
        attrs: Mapping[str, RawAttr],
        crossing: Crossing,
        places: dict[Region | None, Operation],
    ) -> None:
        """Receive the value before the step uses it; halves before the first use of a crossing
        value in their layer, which is in `places`."""
        halves = crossing.target.halves
        place = places.setdefault(self.op.parent, self.op) if halves > 1 else self.op
        b = self._module.before(place, loc=self.op.loc, by=HandOver.name)
        name, types = f"{self.value.name}_taken", [self.value.tensor]
        given = {**attrs, "pieces": crossing.target.ways * halves, **self._more}
        taken = b.op("stg.take_over", [self.value], given, types=types, names=[name])
        self._check(taken)
        self.value.replace_with(taken.result)
        self.value = taken.result

    def _check(self, op: Operation) -> None:
        """Raises `DiagnosticError` for messages without a whole number of bytes."""
        try:
            evaluate(message_bytes(op), self._module.env)
        except NotAnIntegerError as problem:
            raise op.error(
                f"%{self.value.name} is sent in {op.integer('pieces')} pieces of unequal size: "
                f"{problem}",
                remedy="choose a number of tokens that is a multiple of the degrees of both pods",
            ) from None

    def _check_cuts(self, op: Operation, crossing: Crossing) -> None:
        """Raises `DiagnosticError` for a dimension that is not divisible by its number of parts,
        except that of tokens, of which each rank gets an even share."""
        split = read_strategy(self._module).batch
        for d, dim in enumerate(self.value.tensor.dims):
            cuts = crossing.way.cuts[d + self._depth]
            turns = crossing.source.parts if split in dim.size.symbols else 1
            size = evaluate(dim.local, self._module.env)
            if op.attrs.get("dim") != const(d) and size % (cuts * turns):
                raise op.error(
                    f"dimension {d} of %{self.value.name} has {size} elements per rank, which do "
                    f"not divide into {cuts * turns} messages",
                    remedy="choose a batch and degrees that divide each other",
                )
