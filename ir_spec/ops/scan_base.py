"""The base of all scans over tokens: shapes, parts of a split sequence, numeric references.

A scan is one fused kernel `y = scan(inputs)`. Its gradient needs only the inputs: the kernels
compute the states again, so only the inputs are stashed. If the sequence is split over n ranks,
each works on its part, and states pass between ranks:

    %x_parts = stg.reshape["b(zs)rp->bzsrp", factors = z, sizes = cp](%x)      // z: the part
    %state, %keep = stg.ssd_state(%x_parts, ...)      // what a part adds to a state, and the
                                                      // factor of the state before it
    %states, %keeps = stg.all_gather[dim = 1, over = cp](%state, %keep)
    %starts = stg.carry_states["bzhkv,bzh->bzhkv"](%states, %keeps)      // before each part
    %start = stg.all_slice[dim = 1, over = cp](%starts)
    %y_parts = stg.ssd(%x_parts, ..., %start)

Backward repeats this, and does the same from the last part to the first with the gradients of the
states. An all_gather moves n states of B*H*K*V fp32 elements and n factors, whatever S is.

With `state` a scan starts from a given state, and returns the state after its last token in the
same buffer: this is how serving keeps the earlier tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from stagec.ir.builder import Builder, RawAttr
from stagec.ir.core import Operation, Value
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


#: The rules of `stg.carry_states`, forward and reverse, if a part multiplies a state by a matrix.
_MATRIX = ("bzhkv,bzhlk->bzhlv", "bzhlv,bzhlk->bzhkv")
THREE_TIMES = ", three times its FLOPs: the states again, and their gradients"


class ScanOp(OpDef):
    """Base of a scan and of the ops derived from it: the shapes of their operands and results."""

    def scan(self) -> Scan:
        """The scan itself, or the one that the op is derived from."""
        raise NotImplementedError

    def given(self, op: Operation) -> Mapping[str, Value]:
        """The operands by their names in the class; a last one with `*` may be missing."""
        names = [n.rstrip("*") for n in self.operands]
        return dict(zip(names, op.operands, strict=False))

    def result_names(self, op: Operation) -> tuple[str, ...]:
        """The names of its results in `shapes`, with the prefix `d_` for gradients."""
        return self.results

    def rule(self, op: Operation) -> Rule:
        given = self.given(op)
        texts = self.texts(op)
        left = ",".join(texts[_bare(name)] for name in given)
        right = ",".join(texts[_bare(name)] for name in self.result_names(op))
        factors = frozenset(left + right)
        whole = "kl" if self.scan().matrix else ""
        whole = "".join(f for f in whole if f in factors)
        like = {"l": _size_of("k", texts, given)} if "l" in right else None
        return make_rule(f"{left}->{right}", whole=whole, special="s", summed="s", sizes=like)

    def texts(self, op: Operation) -> Mapping[str, str]:
        """The shapes by name, with the letters of the batch filled in."""
        scan = self.scan()
        b = "bz" if max(v.tensor.rank for v in op.operands) > scan.rank else "b"
        return {n: t.format(b=b) for n, t in scan.shapes(op, self.given(op)).items()}

    def steps(self, op: Operation) -> tuple[str, str]:
        """The rules of `stg.carry_states`, forward and reverse."""
        if self.scan().matrix:
            return _MATRIX
        texts = self.texts(op)
        heads = (plain(texts[name]).replace("r", "h") for name in ("state", "keep"))
        state, keep = (f"bz{text.lstrip('bz')}" for text in heads)
        return f"{state},{keep}->{state}", f"{state},{keep}->{state}"

    def named(self, op: Operation, args: Sequence[Array]) -> dict[str, Array]:
        """The operands by name, batch and parts as one dimension, and the constants of the op."""
        texts = self.texts(op)
        arguments = dict(zip(self.given(op), args, strict=True))
        flat = {
            n: v.reshape(-1, *v.shape[2:]) if texts[_bare(n)].startswith("bz") else v
            for n, v in arguments.items()
        }
        return {**flat, **self.scan().constants(op)}


def _bare(name: str) -> str:
    """The name in `shapes` of an operand or result: a gradient has the shape of its value."""
    table = {"dy": "y", "start": "state", "d_end": "state", "end": "state"}
    return table.get(name, name.removeprefix("d_"))


class Scan(ScanOp):
    """Base of a scan, the op that computes y. Its last operand may be the state before the first
    token. With `state` the state after the last token is a result, in fp32, in the same buffer.

    Shapes are the letters of a rule, with `{b}` for the batch: `b`, or `bz` for parts. The sequence
    is `s`, heads are `(gr)` or `r`. Three ops are derived from each scan: its gradient, the effect
    of a part of the sequence on a state, and the gradient of that.
    """

    results = ("result", "end?")
    inputs: ClassVar[tuple[str, ...]] = ()
    carried: ClassVar[tuple[str, ...]] = ()  # the inputs that states depend on
    seen: ClassVar[tuple[str, ...]] = ()  # those that the gradient of the first state depends on
    rank: ClassVar[int] = 4  # the highest rank among the operands of each of its ops, without parts
    matrix: ClassVar[bool] = False  # a part multiplies the state before it by a matrix
    late: ClassVar[bool] = False  # a token reads the state before its own update
    #: For the examples of derived ops: the types of the inputs, and of a state and its factor.
    #: `notes` end the documentation of the gradient, of a part and of the gradient of a part.
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
        """The derived ops. Their examples use the values of the scan's own example."""
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
        how = call.removeprefix(self.name)
        given = {"of": self, "params": _without_state(type(self))}
        ops = list[OpDef]()
        for (base, suffix, outputs, inputs, types), doc in zip(rows, self._docs(), strict=True):
            results, operands = ", ".join(outputs), ", ".join(inputs)
            example = f"{results} = {self.name}_{suffix}{how}({operands}) : ({types})"
            ops.append(derive(base, self, suffix, doc, example, **given))
        return ops

    def _docs(self) -> list[str]:
        """The documentation of the derived ops."""
        before, after = "the factor of the state before it", "that of the gradient after the part"
        if self.matrix:
            before = "the matrix that multiplies the state before it"
            after = "the matrix whose transpose multiplies the gradient after the part"
        sequence = "a part of the sequence"
        docs = (
            f"Gradient of `{self.name}`",
            f"What {sequence} adds to the states of `{self.name}`, and {before}",
            f"The gradient of the states before {sequence} of `{self.name}`, and {after}",
        )
        return [f"{doc}{note}." for doc, note in zip(docs, self.notes, strict=True)]

    # -- what a scan states ------------------------------------------------------------------------

    def shapes(self, op: Operation, given: Mapping[str, Value]) -> Mapping[str, str]:
        """The shape of each input, of `y`, `state` and `keep`."""
        raise NotImplementedError

    def tokens(self, x: Named) -> Tokens:
        """The tokens of the recurrence from the inputs that are given; batch and parts are one
        dimension."""
        raise NotImplementedError

    def pull(self, x: Named, d: Tokens, dy: Array) -> Named:
        """The gradients of the inputs from those of the tokens and of y [N, S, H, V]."""
        raise NotImplementedError

    def skip(self, x: Named) -> Array:
        """A term that is added to y [N, S, H, V]; 0 by default."""
        return 0

    def constants(self, op: Operation) -> Named:
        """Values that the parameters of an operation state, by name; none by default."""
        return {}

    def gradient_flops(self, op: Operation, n: Sizes) -> Expr:
        """FLOPs of its gradient; by default three times its own."""
        return self.flops(op, n) * 3

    def part_flops(self, op: Operation, n: Sizes) -> Expr:
        """FLOPs of the effect of a part of the sequence on a state."""
        raise NotImplementedError

    def part_gradient_flops(self, op: Operation, n: Sizes) -> Expr:
        """FLOPs of the gradient of the effect of a part; by default those of the effect."""
        return self.part_flops(op, n)

    def one(self, n: Sizes) -> Expr | None:
        """FLOPs of one token from a given state; None if they are those of a chunk of one token."""
        return None

    # -- the op ------------------------------------------------------------------------------------

    def result_names(self, op: Operation) -> tuple[str, ...]:
        return ("y", "end") if op.flag("state") else ("y",)

    def rule(self, op: Operation) -> Rule:
        return replace(super().rule(op), summed=frozenset())

    def dtypes(self, op: Operation) -> Sequence[str]:
        return [op.operands[0].tensor.dtype, "f32"]

    def verify(self, op: Operation) -> Iterator[str]:
        if op.flag("state") and len(op.operands) == len(self.inputs):
            yield f"expects with 'state' the state before the first token, after {self.inputs[-1]}"

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """Keep the state after the earlier tokens, in fp32."""
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
        """FLOPs of the op: for one token from a given state those of the recurrence (`one`), else
        `chunks`, which already includes a state before every chunk, the first one too."""
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
        return [v.reshape(ctx.shape(r)) for v, r in both]


def _without_state(scan: type[Scan]) -> tuple[Param, ...]:
    return tuple(p for p in scan.params if p is not STATE)


class FromScan(ScanOp):
    """Base of the ops that are derived from a scan."""

    of: ClassVar[Scan]

    def scan(self) -> Scan:
        return self.of


class ScanGrad(FromScan):
    """Base of the op that computes the gradients of all inputs. Its last two operands may be the
    state before the first token and the gradient of the state after the last token."""

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
        named = zip(self.of.inputs, op.results, strict=True)
        return [pulled[n].reshape(ctx.shape(r)) for n, r in named]


class ScanPart(FromScan):
    """Base of the ops that compute the effect of a part of the sequence on a state, or on its
    gradient, as a term and a factor, both in fp32."""

    element_types = ("f32", "f32")

    def rule(self, op: Operation) -> Rule:
        """The rule of the base class; the sequence inside a part must not be split."""
        rule = super().rule(op)
        return replace(rule, whole=rule.whole | {"s"}, special=frozenset(), summed=frozenset())


class ScanState(ScanPart):
    """Base of the op that computes what a part of the sequence adds to a state, and the factor of
    the state before the part, in fp32."""

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
        return [v.reshape(ctx.shape(r)) for v, r in zip(both, op.results, strict=True)]


class ScanStateGrad(ScanPart):
    """Base of the op that computes the gradient of the state before a part of the sequence, from
    that of y alone, and the factor of the gradient of the state after the part, in fp32."""

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
        return [v.reshape(ctx.shape(r)) for v, r in zip(both, op.results, strict=True)]


def _starts(
    b: Builder,
    definition: ScanOp,
    op: Operation,
    parts: Mapping[str, Value],
    over: Sequence[str],
    first: Sequence[Value] = (),
) -> list[Value]:
    """The state before each part; given the state before the first part (`first`), also the state
    after the last one."""
    y = op.results[0].name
    operands = [parts[n] for n in definition.scan().carried]
    names = [f"{y}_state", f"{y}_keep"]
    own = b.op(f"{definition.scan().name}_state", operands, _attrs(op), names=names).results
    attrs: dict[str, RawAttr] = {"spec": definition.steps(op)[0]}
    end = [op.results[1].name] if first else []
    return carry(b, [*own, *first], attrs, over, [f"{y}_start", *end])


def _ends(
    b: Builder, definition: ScanOp, op: Operation, parts: Mapping[str, Value], over: Sequence[str]
) -> list[Value]:
    """The gradient of the state after each part."""
    y = op.results[0].name
    operands = [parts["dy"], *(parts[n] for n in definition.scan().seen)]
    names = [f"{y}_dstate", f"{y}_dkeep"]
    own = b.op(f"{definition.scan().name}_state_grad", operands, _attrs(op), names=names).results
    attrs: dict[str, RawAttr] = {"spec": definition.steps(op)[1], "reverse": True}
    return carry(b, own, attrs, over, [f"{y}_end"])


def _attrs(op: Operation) -> dict[str, RawAttr]:
    return {k: v for k, v in op.attrs.items() if k not in ("phase", "fused", "state")}


def _size_of(factor: str, texts: Mapping[str, str], given: Mapping[str, Value]) -> Expr:
    """The size of a factor that is the last dimension of an operand."""
    return next(v.tensor.shape[-1] for n, v in given.items() if texts[_bare(n)].endswith(factor))


def _full(state: Array, tokens: Tokens) -> Array:
    """A state as [N, H, K, V]."""
    n, _, h, k = tokens.k.shape
    return state.reshape(n, h, k, -1)


def count(n: Sizes, *factors: str) -> Expr:
    """The product of the sizes of these factors and of the batch; missing ones count as 1."""
    return product(n.get(f, ONE) for f in ("b", "z", *factors))
