"""connect-parts: turns values that cross between parts of a model into messages between ranks."""

from dataclasses import field

from stagec.api import Module, Operation, Pass, Phase, evaluate
from stagec.ir.builder import RawAttr
from stagec.ir_spec.ops.parts import Arrive
from stagec.ir_spec.ops.pod_crossings import end_type, message_bytes
from stagec.pipeline.peers import peer_module
from stagec.program.parts import PartCrossing, PartEnd, PartWay, ends_of, part_crossings, pod_of
from stagec.support.diagnostics import NotAnIntegerError


class ConnectParts(Pass):
    """Insert the messages to and from one other part of the model.

    Each rank that has a part of a value receives each byte of it once, in the placement that the
    value has there. The other pod is a `peer` of the job, or the text `module`, in the phase
    `partitioned`. Sizes need values.
    """

    needs = Phase.PARTITIONED
    until = Phase.PARTITIONED
    meets = True

    peer: str = field(default="", metadata={"help": "the other pod, of the same job"})
    module: str = field(default="", metadata={"help": "the file of the other pod's module"})

    def run(self, module: Module) -> None:
        example = "connect-parts{module=main.stg}"
        connect_parts(module, peer_module(module, self.peer, self.module, example=example))


def connect_parts(module: Module, other: Module) -> None:
    """Replace the ends of values that cross to or from another pod by messages, in place.

    Raises `DiagnosticError` for ends that do not match, and sizes that have no value or do not
    divide.
    """
    if not any(True for _ in ends_of(module)):
        return
    crossings, pod = part_crossings(module, other), pod_of(module)
    for end in list(ends_of(module)):
        crossing = crossings.values.get(end.way)
        if crossing is None:  # to a third pod
            continue
        attrs: dict[str, RawAttr] = {
            "first": crossing.first[pod][end.chunk],
            "ways": crossing.ways[pod],
            "stream": crossing.stream,
            "streams": crossings.layers,
        }
        made = _message(module, end, attrs, crossing)
        _check(module, made, crossing, end.way)
        if end.op.results:
            end.op.result.replace_with(made.result)
        end.op.erase()


def _message(
    module: Module, end: PartEnd, attrs: dict[str, RawAttr], crossing: PartCrossing
) -> Operation:
    op, way = end.op, end.way
    b = module.before(op, by=ConnectParts.name)
    if isinstance(op.definition, Arrive):
        pieces = 1 if crossing.whole else len(crossing.way.of)
        given = {"source": way.source, "pieces": pieces, **attrs}
        types, names = [op.result.tensor], [op.result.name]
        return b.op("stg.take_over", (), given, types=types, names=names)
    pieces = 1 if crossing.whole else crossing.way.pieces
    return b.op("stg.hand_over", op.operands, {"to": way.to, "pieces": pieces, **attrs})


def _check(module: Module, op: Operation, crossing: PartCrossing, way: PartWay) -> None:
    """Raises `DiagnosticError` for a dimension that is not divisible by its number of parts, and
    for messages without a whole number of bytes."""
    if crossing.whole or not op.operands:
        return
    remedy = "choose a batch and degrees that divide each other"
    for d, (dim, cuts) in enumerate(zip(end_type(op).dims, crossing.way.cuts, strict=True)):
        try:
            size = evaluate(dim.local, module.env)
        except NotAnIntegerError as problem:  # parts of a batch that take turns
            raise op.error(f"{way} cannot cross: {problem}", remedy=remedy) from None
        if size % cuts:
            what = f"dimension {d} has {size} on a rank, and crosses in {cuts} parts"
            raise op.error(f"{way} cannot cross: {what}", remedy=remedy)
    try:
        evaluate(message_bytes(op), module.env)
    except NotAnIntegerError as problem:
        raise op.error(
            f"{way} is sent in {op.integer('pieces')} pieces of unequal size: {problem}",
            remedy=remedy,
        ) from None
