"""What all scans over the tokens share: shapes, parts of a split sequence, numeric references.

A scan is one fused kernel `y = scan(inputs)`. Its gradient uses the inputs only: the kernels
compute the states again, so only the inputs are stashed. Where the sequence is split over n ranks,
each works on its part, and states pass between ranks:

    %x_parts = stg.reshape["b(zs)rp->bzsrp", factors = z, sizes = cp](%x)      // z: the part
    %state, %keep = stg.ssd_state(%x_parts, ...)      // what a part adds to a state, and what it
                                                      // leaves of the state before it
    %states, %keeps = stg.all_gather[dim = 1, over = cp](%state, %keep)
    %starts = stg.carry_states["bzhkv,bzh->bzhkv"](%states, %keeps)      // before each part
    %start = stg.all_slice[dim = 1, over = cp](%starts)
    %y_parts = stg.ssd(%x_parts, ..., %start)

Backward does this again, and the same from the last part to the first with the gradients of the
states. An all_gather moves n pairs of B*H*K*V fp32 elements (and what is kept of them), whatever S.

With `state` a scan goes on from a state that is given, and gives the one behind its last token, in
place of it: what serving keeps of the tokens before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Quoted, Value
from stagec.ir.expr import ONE, Expr, call, product
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes, Splits, factor_sizes
from stagec.ir.rule import Rule, make_rule, parse_rule
from stagec.ir.serving import ServingStep
from stagec.ir.types import Dim, TensorType
from stagec.ir_spec.ops.base import STATE, gradients, no_gradient
from stagec.ir_spec.ops.recurrence import (
    Tokens,
    back,
    delayed,
    into_start,
    on_time,
    run,
    transition,
)
from stagec.ir_spec.ops.sequence_parts import carry, from_parts, to_parts

Named = Mapping[str, Array]


class ScanKind(OpDef):
    """One kind of scan: names and shapes of its inputs, and what tokens they make.

    Shapes are the letters of a rule, with `{b}` for the batch, which is `b`, or `bz` for parts.
    The sequence is `s`, heads are `(gr)` or `r`.
    """

    inputs: ClassVar[tuple[str, ...]] = ()
    carried: ClassVar[tuple[str, ...]] = ()  # the inputs that states depend on
    seen: ClassVar[tuple[str, ...]] = ()  # those that the gradient of a first state depends on
    rank: ClassVar[int] = 4  # the highest one of the operands of each of its ops, without parts
    stem: ClassVar[str] = ""  # the name of the op that computes y
    whole: ClassVar[str] = ""  # factors that must not be split
    late: ClassVar[bool] = False  # a token reads the state before it

    def shapes(self, op: Operation, given: Mapping[str, Value]) -> Mapping[str, str]:
        """The shape of each input, of `y`, `state` and `keep`."""
        raise NotImplementedError

    def tokens(self, x: Named) -> Tokens:
        """The tokens that inputs make, as far as they are given. Batch and parts are one."""
        raise NotImplementedError

    def pull(self, x: Named, d: Tokens, dy: Array) -> Named:
        """The gradients of the inputs from those of the tokens and of y [N, S, H, V]."""
        raise NotImplementedError

    def skip(self, x: Named) -> Array:
        """What is added to y [N, S, H, V], 0 by default."""
        return 0

    def steps(self, op: Operation) -> tuple[str, str]:
        """One step of `stg.carry_states`, forward and back."""
        return "bzhkv,bzh->bzhkv", "bzhkv,bzh->bzhkv"

    def given(self, op: Operation) -> Mapping[str, Value]:
        """The operands by name: those of the class, a last one with `*` may be missing."""
        names = [n.rstrip("*") for n in self.operands]
        return dict(zip(names, op.operands, strict=False))

    def made(self, op: Operation) -> tuple[str, ...]:
        """The names of its results in `shapes`, `d_` in front for gradients."""
        raise NotImplementedError

    def rule(self, op: Operation) -> Rule:
        given = self.given(op)
        texts = self.texts(op)
        left = ",".join(texts[_bare(name)] for name in given)
        right = ",".join(texts[_bare(name)] for name in self.made(op))
        factors = frozenset(left + right)
        whole = "".join(f for f in self.whole if f in factors)
        like = {"l": _size_of("k", texts, given)} if "l" in right else None
        return make_rule(f"{left}->{right}", whole=whole, special="s", summed="s", sizes=like)

    def texts(self, op: Operation) -> Mapping[str, str]:
        """`shapes` with the batch filled in."""
        b = "bz" if max(v.tensor.rank for v in op.operands) > self.rank else "b"
        return {n: t.format(b=b) for n, t in self.shapes(op, self.given(op)).items()}

    def named(self, op: Operation, args: Sequence[Array]) -> dict[str, Array]:
        """The operands by name, batch and parts as one dimension."""
        texts = self.texts(op)
        found = dict(zip(self.given(op), args, strict=True))
        return {
            n: v.reshape(-1, *v.shape[2:]) if texts[_bare(n)].startswith("bz") else v
            for n, v in found.items()
        }


def _bare(name: str) -> str:
    """What a name is the shape of: a gradient has that of its value."""
    table = {"dy": "y", "start": "state", "d_end": "state", "end": "state"}
    return table.get(name, name.removeprefix("d_"))


class Scan(ScanKind):
    """Base of the op that computes y. Its last operand may be the state before the first token;
    with `state` the one behind the last token is a result, in fp32, in its place."""

    results = ("result", "end?")

    def __init_subclass__(cls) -> None:
        cls.operands = (*cls.inputs, "start*")
        cls.params = (*cls.params, STATE)
        super().__init_subclass__()

    def made(self, op: Operation) -> tuple[str, ...]:
        return ("y", "end") if op.flag("state") else ("y",)

    def rule(self, op: Operation) -> Rule:
        return replace(super().rule(op), summed=frozenset())

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.operands[0].tensor.dtype, "f32"][: len(self.made(op))]

    def verify(self, op: Operation) -> Iterator[str]:
        if op.flag("state") and len(op.operands) == len(self.inputs):
            yield f"expects with 'state' the one before the first token, behind {self.inputs[-1]}"

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """The state behind the tokens before is kept, in fp32."""
        if not step.is_tokens(op.operands[0].tensor.shape[1]):
            return None
        text = self.texts(op)["state"]
        (shape,), _ = parse_rule(f"{text}->{text}")
        sizes = factor_sizes(op, self.rule(op))
        dims = tuple(Dim(product(sizes[f] for f in group)) for group in shape)
        return step.carry(op, TensorType("f32", dims))

    def reuses(self, op: Operation, result: int) -> int | None:
        return len(op.operands) - 1 if result == 1 else None

    def one(self, n: Sizes) -> Expr | None:
        """FLOPs of one token from a state, where the recurrence has other ones than chunks."""
        return None

    def counted(self, op: Operation, n: Sizes, chunks: Expr) -> Expr:
        """FLOPs: those of chunks, whose states already go into each chunk, the first one included;
        those of the recurrence for one token from a state."""
        one = self.one(n) if op.flag("state") else None
        if one is None:
            return chunks
        alone = call("max", [ONE * 2 - n["s"], ONE * 0])  # 1 for one token, 0 for more
        return one * alone + chunks * (ONE - alone)

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        no_gradient(op)
        return gradients(b, op, [grads[0], *op.operands])

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        over, texts = special["s"], self.texts(op)
        given = dict(self.given(op))
        first = [given.pop("start")] if op.flag("state") else []
        parts = {n: to_parts(b, v, texts[_bare(n)], over) for n, v in given.items()}
        start, *end = _starts(b, self, op, parts, over, first)
        name = f"{op.results[0].name}_parts"
        y = b.value(op.name, [*parts.values(), start], _attrs(op), hint=name)
        return [from_parts(b, y, texts["y"], op.results[0].name), *end]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x = self.named(op, args)
        start = x.pop("start", None)
        tokens = delayed(self.tokens(x)) if self.late else self.tokens(x)
        y, states = run(tokens, None if start is None else _full(start, tokens))
        y = y[:, :-1] if self.late else y
        both = zip((y + self.skip(x), states[-1]), op.results, strict=False)
        return [v.reshape(_shape(ctx, r)) for v, r in both]


class ScanGrad(ScanKind):
    """Base of the op that computes the gradients of all inputs. Its last operands may be the state
    before the first token and the gradient of the one behind the last."""

    def __init_subclass__(cls) -> None:
        cls.operands = ("dy", *cls.inputs, "states*")
        cls.results = tuple(f"d_{n}" for n in cls.inputs)
        super().__init_subclass__()

    def given(self, op: Operation) -> Mapping[str, Value]:
        names = ("dy", *self.inputs, "start", "d_end")
        return dict(zip(names, op.operands, strict=False))

    def made(self, op: Operation) -> tuple[str, ...]:
        return self.results

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [v.tensor.dtype for v in op.operands[1 : 1 + len(self.inputs)]]

    def verify(self, op: Operation) -> Iterator[str]:
        if len(op.operands) not in (1 + len(self.inputs), 3 + len(self.inputs)):
            yield "expects both the state before the first token and the gradient of the last one"

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        over, texts = special["s"], self.texts(op)
        parts = {n: to_parts(b, v, texts[_bare(n)], over) for n, v in self.given(op).items()}
        (start,) = _starts(b, self, op, parts, over)
        (ends,) = _ends(b, self, op, parts, over)
        names = [f"{r.name}_parts" for r in op.results]
        found = b.op(op.name, [*parts.values(), start, ends], _attrs(op), names=names).results
        return [
            from_parts(b, v, texts[_bare(n)], r.name)
            for n, v, r in zip(self.results, found, op.results, strict=True)
        ]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x = self.named(op, args)
        dy, start, d_end = x.pop("dy"), x.pop("start", None), x.pop("d_end", None)
        tokens = self.tokens(x)
        flat = dy.reshape(tokens.v.shape)
        states = [None if v is None else _full(v, tokens) for v in (start, d_end)]
        if self.late:
            more = np.concatenate([flat, np.zeros_like(flat[:, :1])], 1)
            grads = on_time(back(delayed(tokens), more, *states))
        else:
            grads = back(tokens, flat, *states)
        found = self.pull(x, grads, flat)
        return [
            found[n].reshape(_shape(ctx, r)) for n, r in zip(self.inputs, op.results, strict=True)
        ]


class ScanPart(ScanKind):
    """Base of what a part of the sequence does to a state that passes it, and what it leaves of the
    state, in fp32."""

    def made(self, op: Operation) -> tuple[str, ...]:
        return ("state", "keep")

    def rule(self, op: Operation) -> Rule:
        """What is inside a part must not be split."""
        rule = super().rule(op)
        return replace(rule, whole=rule.whole | {"s"}, special=frozenset(), summed=frozenset())

    def dtypes(self, op: Operation) -> Sequence[str]:
        return ["f32", "f32"]


class ScanState(ScanPart):
    """Base of the op that computes what a part of the sequence adds to a state, and what it leaves
    of the state before it, in fp32."""

    results = ("state", "keep")

    def __init_subclass__(cls) -> None:
        cls.operands = cls.carried
        super().__init_subclass__()

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        tokens = self.tokens(self.named(op, args))
        _, states = run(tokens)
        both = (states[-1], transition(tokens))
        return [v.reshape(_shape(ctx, r)) for v, r in zip(both, op.results, strict=True)]


class ScanStateGrad(ScanPart):
    """Base of the op that computes the gradient of the state before a part of the sequence, from
    that of y alone, and what the part leaves of the gradient behind it, in fp32."""

    results = ("d_state", "keep")

    def __init_subclass__(cls) -> None:
        cls.operands = ("dy", *cls.seen)
        super().__init_subclass__()

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x = self.named(op, args)
        dy = x.pop("dy")
        tokens = self.tokens(x)
        flat = dy.reshape(*tokens.q.shape[:3], -1)
        both = (into_start(tokens, flat, late=self.late), transition(tokens))
        return [v.reshape(_shape(ctx, r)) for v, r in zip(both, op.results, strict=True)]


def _starts(
    b: Builder,
    kind: ScanKind,
    op: Operation,
    parts: Mapping[str, Value],
    over: Sequence[str],
    first: Sequence[Value] = (),
) -> list[Value]:
    """The state before each part; with that before the first one also that behind the last."""
    y = op.results[0].name
    operands = [parts[n] for n in kind.carried]
    names = [f"{y}_state", f"{y}_keep"]
    own = b.op(f"{kind.stem}_state", operands, _attrs(op), names=names).results
    how: dict[str, RawAttr] = {"spec": Quoted(kind.steps(op)[0])}
    end = [op.results[1].name] if first else []
    return carry(b, [*own, *first], how, over, [f"{y}_start", *end])


def _ends(
    b: Builder, kind: ScanKind, op: Operation, parts: Mapping[str, Value], over: Sequence[str]
) -> list[Value]:
    """The gradient of the state behind each part."""
    y = op.results[0].name
    operands = [parts["dy"], *(parts[n] for n in kind.seen)]
    names = [f"{y}_dstate", f"{y}_dkeep"]
    own = b.op(f"{kind.stem}_state_grad", operands, _attrs(op), names=names).results
    how: dict[str, RawAttr] = {"spec": Quoted(kind.steps(op)[1]), "reverse": True}
    return carry(b, own, how, over, [f"{y}_end"])


def _attrs(op: Operation) -> dict[str, RawAttr]:
    return {k: v for k, v in op.attrs.items() if k not in ("phase", "fused", "state")}


def _size_of(factor: str, texts: Mapping[str, str], given: Mapping[str, Value]) -> Expr:
    """The size of a factor that is the last dimension of an operand."""
    return next(v.tensor.shape[-1] for n, v in given.items() if texts[_bare(n)].endswith(factor))


def _full(state: Array, tokens: Tokens) -> Array:
    """A state as [N, H, K, V]."""
    n, _, h, k = tokens.k.shape
    return state.reshape(n, h, k, -1)


def _shape(ctx: NumericContext, value: Value) -> tuple[int, ...]:
    return tuple(ctx.size(d.local) for d in value.tensor.dims)


def count(n: Sizes, *factors: str) -> Expr:
    """The product of the sizes of these factors and of the batch; missing ones count as 1."""
    return product(n.get(f, ONE) for f in ("b", "z", *factors))
