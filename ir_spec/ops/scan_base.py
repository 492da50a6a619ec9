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
from stagec.ir.factor_sizes import factor_sizes
from stagec.ir.numeric import NumericContext
from stagec.ir.opdef import Array, Grads, OpDef, Sizes, Splits
from stagec.ir.param import Param
from stagec.ir.rule import Rule, make_rule, parse_rule
from stagec.ir.serving_step import ServingStep
from stagec.ir.types import Dim, TensorType
from stagec.ir_spec.ops.base import STATE, derive, gradients, no_gradient
from stagec.ir_spec.ops.recurrence import (
    Tokens,
    back,
    delayed,
    into_start,
    on_time,
    run,
    transition,
)
from stagec.ir_spec.ops.sequence_parts import carry, from_parts, plain, to_parts

Named = Mapping[str, Array]


#: A step of `stg.carry_states`, forward and back, where a part leaves a matrix of a state.
_MATRIX = ("bzhkv,bzhlk->bzhlv", "bzhlv,bzhlk->bzhkv")
THREE_TIMES = ", three times its FLOPs: the states again, and their gradients"


class ScanOp(OpDef):
    """Base of a scan and of the ops that follow from it: how what they take and give is shaped."""

    def scan(self) -> Scan:
        """The scan that it is, or follows from."""
        raise NotImplementedError

    def given(self, op: Operation) -> Mapping[str, Value]:
        """The operands by name: those of the class, a last one with `*` may be missing."""
        names = [n.rstrip("*") for n in self.operands]
        return dict(zip(names, op.operands, strict=False))

    def made(self, op: Operation) -> tuple[str, ...]:
        """The names of its results in `shapes`, `d_` in front for gradients."""
        return self.results

    def rule(self, op: Operation) -> Rule:
        given = self.given(op)
        texts = self.texts(op)
        left = ",".join(texts[_bare(name)] for name in given)
        right = ",".join(texts[_bare(name)] for name in self.made(op))
        factors = frozenset(left + right)
        whole = "kl" if self.scan().matrix else ""
        whole = "".join(f for f in whole if f in factors)
        like = {"l": _size_of("k", texts, given)} if "l" in right else None
        return make_rule(f"{left}->{right}", whole=whole, special="s", summed="s", sizes=like)

    def texts(self, op: Operation) -> Mapping[str, str]:
        """The shapes with the batch filled in."""
        scan = self.scan()
        b = "bz" if max(v.tensor.rank for v in op.operands) > scan.rank else "b"
        return {n: t.format(b=b) for n, t in scan.shapes(op, self.given(op)).items()}

    def steps(self, op: Operation) -> tuple[str, str]:
        """One step of `stg.carry_states`, forward and back."""
        if self.scan().matrix:
            return _MATRIX
        texts = self.texts(op)
        heads = (plain(texts[name]).replace("r", "h") for name in ("state", "keep"))
        state, keep = (f"bz{text.lstrip('bz')}" for text in heads)
        return f"{state},{keep}->{state}", f"{state},{keep}->{state}"

    def named(self, op: Operation, args: Sequence[Array]) -> dict[str, Array]:
        """The operands by name, batch and parts as one dimension, and constants."""
        texts = self.texts(op)
        arguments = dict(zip(self.given(op), args, strict=True))
        flat = {
            n: v.reshape(-1, *v.shape[2:]) if texts[_bare(n)].startswith("bz") else v
            for n, v in arguments.items()
        }
        return {**flat, **self.scan().constants(op)}


def _bare(name: str) -> str:
    """What a name is the shape of: a gradient has that of its value."""
    table = {"dy": "y", "start": "state", "d_end": "state", "end": "state"}
    return table.get(name, name.removeprefix("d_"))


class Scan(ScanOp):
    """Base of a scan, the op that computes y. Its last operand may be the state before the first
    token; with `state` the one behind the last token is a result, in fp32, in its place.

    Shapes are the letters of a rule, with `{b}` for the batch, which is `b`, or `bz` for parts.
    The sequence is `s`, heads are `(gr)` or `r`. From a scan follow its gradient, what a part of a
    sequence does to a state, and the gradient of that.
    """

    results = ("result", "end?")
    inputs: ClassVar[tuple[str, ...]] = ()
    carried: ClassVar[tuple[str, ...]] = ()  # the inputs that states depend on
    seen: ClassVar[tuple[str, ...]] = ()  # those that the gradient of a first state depends on
    rank: ClassVar[int] = 4  # the highest one of the operands of each of its ops, without parts
    matrix: ClassVar[bool] = False  # a part multiplies the state before it with a matrix
    late: ClassVar[bool] = False  # a token reads the state before it
    #: Of the examples of ops that follow: the types of the inputs, of a state and what is left of
    #: it. What their documentation adds: of the gradient, of a part and of the gradient of a part.
    input_types: ClassVar[str]
    part_types: ClassVar[str]
    notes: ClassVar[tuple[str, str, str]] = (THREE_TIMES, "", "")

    def __init_subclass__(cls) -> None:
        cls.operands = (*cls.inputs, "start*")
        cls.params = (*_without_state(cls), STATE)
        super().__init_subclass__()

    def scan(self) -> Scan:
        return self

    def derived(self) -> Sequence[OpDef]:
        """With examples of the values that the example of the scan has."""
        y, _, rest = self.example.partition(" = ")
        call, _, rest = rest.partition("(")
        values = dict(zip(self.inputs, rest.partition(")")[0].split(", "), strict=True))
        dy, every = f"%d{y[1:]}", [*values.values()]
        carried, seen = ([values[n] for n in names] for names in (self.carried, self.seen))
        rows = (
            (ScanGrad, "grad", [f"%d{v[1:]}" for v in every], [dy, *every], self.input_types),
            (ScanState, "state", ["%h", "%keep"], carried, self.part_types),
            (ScanStateGrad, "state_grad", ["%dh", "%keep"], [dy, *seen], self.part_types),
        )
        how, given = (
            call.removeprefix(self.name),
            {"of": self, "params": _without_state(type(self))},
        )
        ops = list[OpDef]()
        for (base, suffix, made, taken, types), doc in zip(rows, self._docs(), strict=True):
            results, operands = ", ".join(made), ", ".join(taken)
            example = f"{results} = {self.name}_{suffix}{how}({operands}) : ({types})"
            ops.append(derive(base, self, suffix, doc, example, **given))
        return ops

    def _docs(self) -> list[str]:
        """The documentation of what follows from it."""
        adds, leaves = "what it leaves of them", "what the part leaves of the gradient behind it"
        if self.matrix:
            adds = "the matrix that multiplies the state before it"
            leaves = "the matrix by which the part multiplies, transposed, the gradient behind it"
        sequence = "a part of the sequence"
        docs = (
            f"Gradient of `{self.name}`",
            f"What {sequence} adds to the states of `{self.name}`, and {adds}",
            f"The gradient of the states before {sequence} of `{self.name}`, and {leaves}",
        )
        return [f"{doc}{note}." for doc, note in zip(docs, self.notes, strict=True)]

    # -- what a scan states ------------------------------------------------------------------------

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

    def constants(self, op: Operation) -> Named:
        """What an operation states beside its inputs."""
        return {}

    def gradient_flops(self, op: Operation, n: Sizes) -> Expr:
        """FLOPs of its gradient; by default three times its own."""
        return self.flops(op, n) * 3

    def part_flops(self, op: Operation, n: Sizes) -> Expr:
        """FLOPs of what a part of the sequence does to a state."""
        raise NotImplementedError

    def part_gradient_flops(self, op: Operation, n: Sizes) -> Expr:
        """FLOPs of the gradient of that; by default as many."""
        return self.part_flops(op, n)

    def one(self, n: Sizes) -> Expr | None:
        """FLOPs of one token from a state, where the recurrence has other ones than chunks."""
        return None

    # -- the op ------------------------------------------------------------------------------------

    def made(self, op: Operation) -> tuple[str, ...]:
        return ("y", "end") if op.flag("state") else ("y",)

    def rule(self, op: Operation) -> Rule:
        return replace(super().rule(op), summed=frozenset())

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.operands[0].tensor.dtype, "f32"][: len(self.made(op))]

    def verify(self, op: Operation) -> Iterator[str]:
        if op.flag("state") and len(op.operands) == len(self.inputs):
            yield f"expects with 'state' the state before the first token, after {self.inputs[-1]}"

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


def _without_state(scan: type[Scan]) -> tuple[Param, ...]:
    return tuple(p for p in scan.params if p is not STATE)


class FromScan(ScanOp):
    """Base of ops that follow from a scan."""

    of: ClassVar[Scan]

    def scan(self) -> Scan:
        return self.of


class ScanGrad(FromScan):
    """Base of the op that computes the gradients of all inputs. Its last operands may be the state
    before the first token and the gradient of the one behind the last."""

    def __init_subclass__(cls) -> None:
        cls.operands = ("dy", *cls.of.inputs, "states*")
        cls.results = tuple(f"d_{n}" for n in cls.of.inputs)
        cls.element_types = cls.of.inputs
        super().__init_subclass__()

    def given(self, op: Operation) -> Mapping[str, Value]:
        names = ("dy", *self.of.inputs, "start", "d_end")
        return dict(zip(names, op.operands, strict=False))

    def verify(self, op: Operation) -> Iterator[str]:
        if len(op.operands) not in (1 + len(self.of.inputs), 3 + len(self.of.inputs)):
            yield "expects both the state before the first token and the gradient of the last one"

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return self.of.gradient_flops(op, n)

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        over, texts = special["s"], self.texts(op)
        parts = {n: to_parts(b, v, texts[_bare(n)], over) for n, v in self.given(op).items()}
        (start,) = _starts(b, self, op, parts, over)
        (ends,) = _ends(b, self, op, parts, over)
        names = [f"{r.name}_parts" for r in op.results]
        results = b.op(op.name, [*parts.values(), start, ends], _attrs(op), names=names).results
        return [
            from_parts(b, v, texts[_bare(n)], r.name)
            for n, v, r in zip(self.results, results, op.results, strict=True)
        ]

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x = self.named(op, args)
        dy, start, d_end = x.pop("dy"), x.pop("start", None), x.pop("d_end", None)
        tokens = self.of.tokens(x)
        flat = dy.reshape(tokens.v.shape)
        states = [None if v is None else _full(v, tokens) for v in (start, d_end)]
        if self.of.late:
            more = np.concatenate([flat, np.zeros_like(flat[:, :1])], 1)
            grads = on_time(back(delayed(tokens), more, *states))
        else:
            grads = back(tokens, flat, *states)
        pulled = self.of.pull(x, grads, flat)
        return [
            pulled[n].reshape(_shape(ctx, r))
            for n, r in zip(self.of.inputs, op.results, strict=True)
        ]


class ScanPart(FromScan):
    """Base of what a part of the sequence does to a state that passes it, and what it leaves of the
    state, in fp32."""

    element_types = ("f32", "f32")

    def rule(self, op: Operation) -> Rule:
        """What is inside a part must not be split."""
        rule = super().rule(op)
        return replace(rule, whole=rule.whole | {"s"}, special=frozenset(), summed=frozenset())


class ScanState(ScanPart):
    """Base of the op that computes what a part of the sequence adds to a state, and what it leaves
    of the state before it, in fp32."""

    results = ("state", "keep")

    def __init_subclass__(cls) -> None:
        cls.operands = cls.of.carried
        super().__init_subclass__()

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return self.of.part_flops(op, n)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        tokens = self.of.tokens(self.named(op, args))
        _, states = run(tokens)
        both = (states[-1], transition(tokens))
        return [v.reshape(_shape(ctx, r)) for v, r in zip(both, op.results, strict=True)]


class ScanStateGrad(ScanPart):
    """Base of the op that computes the gradient of the state before a part of the sequence, from
    that of y alone, and what the part leaves of the gradient behind it, in fp32."""

    results = ("d_state", "keep")

    def __init_subclass__(cls) -> None:
        cls.operands = ("dy", *cls.of.seen)
        super().__init_subclass__()

    def flops(self, op: Operation, n: Sizes) -> Expr:
        return self.of.part_gradient_flops(op, n)

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        x = self.named(op, args)
        dy = x.pop("dy")
        tokens = self.of.tokens(x)
        flat = dy.reshape(*tokens.q.shape[:3], -1)
        both = (into_start(tokens, flat, late=self.of.late), transition(tokens))
        return [v.reshape(_shape(ctx, r)) for v, r in zip(both, op.results, strict=True)]


def _starts(
    b: Builder,
    made: ScanOp,
    op: Operation,
    parts: Mapping[str, Value],
    over: Sequence[str],
    first: Sequence[Value] = (),
) -> list[Value]:
    """The state before each part; with that before the first one also that behind the last."""
    y = op.results[0].name
    operands = [parts[n] for n in made.scan().carried]
    names = [f"{y}_state", f"{y}_keep"]
    own = b.op(f"{made.scan().name}_state", operands, _attrs(op), names=names).results
    how: dict[str, RawAttr] = {"spec": Quoted(made.steps(op)[0])}
    end = [op.results[1].name] if first else []
    return carry(b, [*own, *first], how, over, [f"{y}_start", *end])


def _ends(
    b: Builder, made: ScanOp, op: Operation, parts: Mapping[str, Value], over: Sequence[str]
) -> list[Value]:
    """The gradient of the state behind each part."""
    y = op.results[0].name
    operands = [parts["dy"], *(parts[n] for n in made.scan().seen)]
    names = [f"{y}_dstate", f"{y}_dkeep"]
    own = b.op(f"{made.scan().name}_state_grad", operands, _attrs(op), names=names).results
    how: dict[str, RawAttr] = {"spec": Quoted(made.steps(op)[1]), "reverse": True}
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
