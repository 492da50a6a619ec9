"""Mixed steps: how `to-serving` rewrites steps whose sequences are of several classes.

B is the number of groups of sequences that step together, S the number of new tokens of a group:
those of the first class, sequence by sequence, then those of the next. Ops that treat each token
separately run over all of them. Any other op runs once for each class, as a plain step of B*n
sequences with q new tokens each after c cached ones:

    %q                                            [B, S, H, K], all tokens
    %q_0, %q_1 = stg.cut(%q)                      [B, n*q, H, K], of each class
    stg.reshape["a(bc)de->(ab)cde"](%q_0)         [B*n, q, H, K], a plain step
    ...                                           the op, with a cache of this class
    stg.reshape["(ab)cde->a(bc)de"], stg.concat   [B, S, H, K], all tokens

Class i has the symbols `count<i>`, `new<i>` and `past<i>`. The count of the last class is derived
from S, so that the parts of S add up to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from stagec.api import (
    Builder,
    Dim,
    Expr,
    Module,
    OpDef,
    Operation,
    Region,
    TensorType,
    Value,
    const,
    factor_sizes,
    letters,
    symbol,
)
from stagec.ir.builder import RawAttr
from stagec.ir.core import substitute_attr
from stagec.ir.drafts import concatenated
from stagec.ir.expr import ONE, ZERO, substitute
from stagec.ir.module import BATCH
from stagec.ir.serving_step import PAST
from stagec.passes.serving.caches import CachingStep
from stagec.passes.serving.latent import is_cached
from stagec.serving.step import Step, parse_step


@dataclass(frozen=True, slots=True)
class _Class:
    """A class of a step: the sequences per group, new tokens and cached tokens per sequence, and
    new tokens per group (`tokens`). The last new token of a sequence is sampled, or all (`all_`),
    or no token (`none`)."""

    count: Expr
    new: Expr
    past: Expr
    tokens: Expr
    all_: bool
    none: bool


def _split_caches(module: Module, cached: Sequence[Expr]) -> None:
    """Let statements about the cached tokens of a step be about those of each class."""
    module.ops("stg.symbols")[0].attrs.pop(PAST, None)
    splits = [op for op in module.ops("stg.strategy") for op in op.body.ops]
    for op in (op for op in splits if PAST in op.names("dims")):
        others = [name for name in op.names("dims") if name != PAST]
        if dims := (*others, *(str(past) for past in cached)):
            op.attrs["dims"] = dims
        else:
            op.erase()


def parsed_classes(classes: Sequence[str]) -> Step:
    """The step that the option `classes` states. Raises `DiagnosticError` for invalid classes."""
    return parse_step(",".join(classes))


@dataclass(slots=True)
class Mixed:
    """Rewrites the ops of a mixed step. `step` is the step of all tokens. `parts` are the values of
    each class, by original value and region; `latent` are values computed from cached ones."""

    step: CachingStep
    classes: Sequence[_Class]
    parts: dict[tuple[Value, Region], Sequence[Value]] = field(
        default_factory=dict[tuple[Value, Region], Sequence[Value]]
    )
    latent: set[Value] = field(default_factory=set[Value])

    @classmethod
    def of(cls, module: Module, step: CachingStep, given: Step) -> Mixed:
        """Declare the sizes of the classes of a step as symbols of the module. Raises
        `DiagnosticError` for a symbol that exists."""
        declared, tokens = module.ops("stg.symbols")[0], step.new
        parts: list[_Class] = []
        for i, each in enumerate(given.classes):
            last = i + 1 == len(given.classes)
            sizes = {f"count{i}": each.count, f"new{i}": each.new, f"past{i}": each.cached}
            if taken := [name for name in sizes if name in module.symbols]:
                raise module.root.error(
                    f"the model declares the symbol '{taken[0]}', which a mixed step uses for one "
                    "of its sizes",
                    remedy="rename the symbol in the model",
                )
            if last:  # its number is what the others leave of the tokens
                del sizes[f"count{i}"]
            declared.attrs.update({name: const(v) for name, v in sizes.items() if v})
            new, past = symbol(f"new{i}"), symbol(f"past{i}") if each.cached else ZERO
            left = tokens - sum((c.tokens for c in parts), ZERO)
            count = left / new if last else symbol(f"count{i}")
            own = left if last else count * new
            parts.append(_Class(count, new, past, own, each.sampled == each.new, not each.sampled))
        _split_caches(module, [each.past for each in parts if each.past != ZERO])
        step.env = module.env
        begun = [each for each in parts if each.past == ZERO]
        if len(begun) == 1:
            _encode(module.main.body, tokens, begun[0].count)
        return cls(step, parts)

    @property
    def _encodes(self) -> bool:
        """Whether an encoder has the sequences of one class, or none of any."""
        return sum(each.past == ZERO for each in self.classes) < 2

    # -- ops ---------------------------------------------------------------------------------------

    def serve(self, op: Operation) -> Sequence[Value] | None:
        """Build the form of an op in a mixed step, see `OpDef.serve`."""
        region = self.step.b.region
        if not self._runs_alone(op):
            return op.definition.serve(self.step, op)
        made = [self._of_class(op, i) for i in range(len(self.classes))]
        results: list[Value] = []
        for result, values in zip(op.results, zip(*made, strict=True), strict=False):
            self.parts[result, region] = values
            results.append(self._joined(result, values) if self._has_tokens(result) else result)
            self.parts[results[-1], region] = values
        taken = [v for v in op.operands if any(map(self._in_tokens, v.tensor.shape))]
        follows = bool(taken) and all(v in self.latent or is_cached(v) for v in taken)
        if op.flag("cached") or follows:
            self.latent.update(results)  # not results of attention: these are of new tokens
        return results

    def _runs_alone(self, op: Operation) -> bool:
        """Whether the op runs once for each class: it has a form of its own for serving, or takes
        values that depend on positions, or values computed from a cached one."""
        known = any(self._is_parts(v) for v in op.operands)
        own = type(op.definition).serve is not OpDef.serve and not self._by_token(op)
        sizes = (size for v in (*op.operands, *op.results) for size in v.tensor.shape)
        latent = any(v in self.latent or is_cached(v) for v in op.operands)
        return known or latent or (own and any(self._in_tokens(size) for size in sizes))

    def _in_tokens(self, size: Expr) -> bool:
        return bool(size.symbols & self.step.new.symbols)

    def _by_token(self, op: Operation) -> bool:
        """Whether an op treats each token separately, at any position."""
        rule = op.definition.rule(op)
        if rule is None or "past" in op.definition.params_by_name:
            return False
        sizes = factor_sizes(op, rule)
        tokens = {f for f, size in sizes.items() if self.step.is_tokens(size)}
        taken = {f for shape in rule.operands for group in shape for f in group}
        return len(tokens) < 2 and tokens <= taken and not self.step.mixes(op)

    def _is_parts(self, value: Value) -> bool:
        """Whether a value exists only as one value per class."""
        return (value, value.region) in self.parts and not self._has_tokens(value)

    def _of_class(self, op: Operation, number: int) -> Sequence[Value]:
        """The results of the op for one class."""
        mine, b = self.classes[number], self.step.b
        operands = [self._part(op, v, number) for v in op.operands]
        values = {str(self.step.new): mine.new, BATCH: symbol(BATCH) * mine.count}
        attrs = {n: substitute_attr(v, values) for n, v in op.attrs.items() if n != "past"}
        names = [f"{r.name}_{number}" for r in op.results]
        types = [_resized(r.tensor, values) for r in op.results]
        made = b.op(op.name, operands, attrs, types=types, names=names)
        step = replace(
            self.step,
            mode="decode" if mine.all_ and mine.past != ZERO else "prefill",
            sequences=symbol(BATCH) * mine.count,
            ending=f"_{number}",
            new=mine.new,
            past=mine.past,
            b=Builder.before(b.registry, made, loc=made.loc),
            parts=ONE if mine.past == ZERO else self.step.parts,
        )
        served = made.definition.serve(step, made)
        if served is None or list(served) == made.results:
            made.infer()
            return made.results
        made.erase()
        return served

    # -- values ------------------------------------------------------------------------------------

    def _has_tokens(self, value: Value) -> bool:
        """Whether a value is [B, S, ...] and no other dimension depends on the tokens."""
        shape = value.tensor.shape
        if any(map(self._in_tokens, shape[2:])):
            return False
        return len(shape) > 1 and shape[0] == symbol(BATCH) and self.step.is_tokens(shape[1])

    def _part(self, op: Operation, value: Value, number: int) -> Value:
        """The value of one class. Raises `DiagnosticError` for a value without tokens per class."""
        b = self.step.b
        made = self.parts.get((value, value.region)) if self._is_parts(value) else None
        parts = made or self.parts.get((value, b.region))
        if parts is None and self._has_tokens(value):
            cut = zip(self._cut(value), self.classes, strict=True)
            parts = self.parts[value, b.region] = [self._split(part, c) for part, c in cut]
        if parts is not None:
            return parts[number]
        shape = value.tensor.shape
        encoded = bool(shape) and symbol(BATCH).symbols <= shape[0].symbols
        if any(map(self._in_tokens, shape[1:])) or (encoded and not self._encodes):
            raise op.error(
                f"'{op.name}' takes %{value.name}: {value.type}, which cannot be divided among "
                f"the classes of a mixed step: expected [B, {self.step.new}, ...]",
                remedy="let one class begin its sequences, or serve the model in steps of one "
                "class: --serve prefill or --serve decode",
            )
        return value

    def _cut(self, value: Value) -> Sequence[Value]:
        """The tokens of each class, [B, n*q, ...]."""
        names = [f"{value.name}_{i}" for i in range(len(self.classes))]
        sizes = tuple(c.tokens for c in self.classes)
        return self.step.b.op("stg.cut", [value], {"sizes": sizes, "dim": 1}, names=names).results

    def _split(self, part: Value, mine: _Class) -> Value:
        """[B, n*q, ...] as [B*n, q, ...]."""
        one, all_ = _specs(part)
        return self._reshaped(part, f"{one}->{all_}", "c", mine.new)

    def _whole(self, part: Value) -> Value:
        """[B*n, q, ...] as [B, n*q, ...]."""
        one, all_ = _specs(part)
        return self._by_group(part, f"{all_}->{one}")

    def _by_group(self, part: Value, spec: str) -> Value:
        return self._reshaped(part, spec, "a", symbol(BATCH))

    def _reshaped(self, part: Value, spec: str, factor: str, size: Expr) -> Value:
        attrs: dict[str, RawAttr] = {"spec": spec, "factors": (factor,), "sizes": (size,)}
        return self.step.b.value("stg.reshape", [part], attrs, hint=part.name)

    def _joined(self, result: Value, values: Sequence[Value]) -> Value:
        return concatenated(self.step.b, [self._whole(value) for value in values], result.name)

    def sampled(self, value: Value, b: Builder) -> Value:
        """The rows of [B, S, ...] that are sampled, [B, R, ...]."""
        self.step.b = b
        tokens: list[Value] = []
        for part, mine in zip(self._cut(value), self.classes, strict=True):
            if mine.all_:
                tokens.append(part)
            elif not mine.none:
                at, own = {"at": mine.new - 1}, self._split(part, mine)
                rows = b.value("stg.take", [own], at, hint=f"{part.name}_last")
                rest = letters(rows.tensor.rank + 1)[2:]
                tokens.append(self._by_group(rows, f"(ab){rest}->ab{rest}"))
        return concatenated(b, tokens, f"{value.name}_sampled")

    @property
    def samples(self) -> bool:
        """Whether any token is sampled."""
        return not all(c.none for c in self.classes)


def _encode(body: Region, tokens: Expr, count: Expr) -> None:
    """An encoder has the sequences of the class that begins, so many of each group: the others have
    what it made."""
    for arg in body.args:
        shape = arg.tensor.shape
        if shape and shape[0] == symbol(BATCH) and tokens not in shape:
            dims = (Dim(shape[0] * count), *arg.tensor.dims[1:])
            arg.type = replace(arg.tensor, dims=dims)


def _resized(type_: TensorType, values: Mapping[str, Expr]) -> TensorType:
    """A type with other sizes of dimensions."""
    dims = (replace(d, size=substitute(d.size, values)) for d in type_.unplaced().dims)
    return replace(type_.unplaced(), dims=tuple(dims))


def _specs(value: Value) -> tuple[str, str]:
    rest = letters(value.tensor.rank + 1)[3:]
    return f"a(bc){rest}", f"(ab)c{rest}"
