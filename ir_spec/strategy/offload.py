"""Values that are kept in host memory."""

import re
from collections.abc import Iterator
from fractions import Fraction

from stagec.ir.core import Operation
from stagec.ir_spec.strategy.flag_values import FlagValues, Problems
from stagec.ir_spec.strategy.freeze import matches
from stagec.ir_spec.strategy.statement import (
    Flag,
    Record,
    Section,
    Statement,
    flagged,
    parameter,
    patterns,
)

#: The name of the result of attention among names of checkpoints
#: (`jax.ad_checkpoint.checkpoint_name`).
ATTENTION = "attn_out"
#: The kinds of values; a kind is the outermost scope of the names of its values.
OFFLOAD = ("activations", "gradients", "optimizer", "parameters")
_SHARE = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}|/0*[1-9][0-9]{0,5})?")


class OffloadRule(Record):
    """The values in host memory, and whether their copies are nodes of the trace."""

    what: tuple[str, ...] = parameter(
        "patterns",
        "activations, gradients, optimizer, parameters, or names of values, as in "
        '"optimizer, layers/gqa/a:1/2"',
        required=True,
        positional=True,
        flag=Flag(
            "offload",
            "Keep these in host memory: the stash of the blocks (activations), gradients, "
            "optimizer, parameters, or values by name, scope or pattern. A number after a colon "
            "is the share, as in 'attn_out:0.5,optimizer'.",
            default="",
            metavar="NAME[:SHARE],...",
            choices=("activations", "optimizer"),
            spares=True,
        ),
    )
    nodes: bool = flagged(
        "memory_nodes",
        "Write the copies of --offload as nodes of the trace (MEM_STORE, MEM_LOAD).",
        doc="the copies are nodes of the trace",
        needs=("offload",),
        rare=True,
    )

    @property
    def items(self) -> tuple[tuple[str, Fraction], ...]:
        """Each pattern, and the share of its values that goes to the host, 0 to 1."""
        return tuple((pattern, share) for pattern, share in map(_item, self.what))

    def share(self, *paths: str) -> Fraction:
        """The share of a value with these names that goes to the host, by the last pattern that
        matches one of them."""
        said = [share for pattern, share in self.items if any(matches(p, pattern) for p in paths)]
        return said[-1] if said else Fraction(0)


def _item(text: str) -> tuple[str, Fraction]:
    pattern, colon, share = text.partition(":")
    return pattern.strip(), Fraction(share.strip()) if colon else Fraction(1)


class OffloadOp(Statement):
    """Values that are kept in host memory and copied to the device where they are used.

    `activations`: the stash of the blocks; `optimizer`: master copies and moments; `parameters`:
    copied to the device for each use, and back after their update; `gradients`: copied to the host
    when they are complete, and back for the update. Other names are those of values, of scopes
    around them, or patterns, as in `stg.freeze`; a kind is the outermost scope, as in
    "parameters/embed". `attn_out` in the scope of a block also names the stashed result of its
    `stg.attention`. A number after a colon is the share of each value that goes to the host, by
    default 1; the last pattern that matches a value counts. With `nodes`, the copies are nodes of
    the trace, which overlap with computations.
    """

    name, record = "stg.offload", OffloadRule
    section = Section.MEMORY
    training = "nothing waits for a backward"
    example = 'stg.offload["optimizer, layers/gqa/a:1/2"]'

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        yield from (message for message, _ in _mistakes(patterns(op, "what")))

    def problems(self, request: FlagValues) -> Problems:
        for message, remedy in _mistakes(_names(request)):
            yield f"--offload {request['offload']}: {message}", remedy


def _names(request: FlagValues) -> tuple[str, ...]:
    text: str = request["offload"]
    return tuple(n.strip() for n in text.split(",")) if text else ()


def _mistakes(names: tuple[str, ...]) -> Problems:
    """The problems of the names of values, each with a remedy."""
    for text in names:
        pattern, colon, share = (part.strip() for part in text.partition(":"))
        if not pattern or '"' in pattern:
            yield f"expects the name of a value, found '{text}'", f"choose {', '.join(OFFLOAD)}"
        elif colon and not (_SHARE.fullmatch(share) and Fraction(share) <= 1):
            message = f"expects a share of '{pattern}' from 0 to 1, found '{share}'"
            yield message, f"write {pattern}:0.5, or {pattern}:1/2"
