"""Op definitions: everything that the compiler knows about an op, in one class.

Owns `OpDef` and the `Registry`. Concrete ops live in `ir_spec/ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar, cast

from stagec.ir.core import PHASES, Operation, Value
from stagec.ir.expr import ZERO, Expr, product, total
from stagec.ir.factor_sizes import factor_loads, factor_routed, factor_sizes, result_dims
from stagec.ir.index_rule import IndexRule
from stagec.ir.kernel import KernelShape, matrix_product
from stagec.ir.numeric import NumericContext
from stagec.ir.own_gathers import own_gathers
from stagec.ir.param import STATICS, Arity, Param
from stagec.ir.routed import expert_weights
from stagec.ir.rule import Rule, Shape
from stagec.ir.traits import Declares, InPlace, OpenParams, Stays, Trait
from stagec.ir.types import TensorType, Type
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean

if TYPE_CHECKING:
    from stagec.ir.builder import Builder
    from stagec.ir.serving_step import ServingStep

#: Operands and results of numeric references: numpy arrays (untyped, since they are test oracles).
Array = Any
Sizes = Mapping[str, Expr]
#: Gradients of the results or of the operands of an op; None where there is none.
Grads: TypeAlias = Sequence[Value | None]
#: The axes over which special factors are split.
Splits: TypeAlias = Mapping[str, tuple[str, ...]]
#: Builds the unfused form of an op before it, and returns the values that replace its results.
EagerForm: TypeAlias = "Callable[[Builder, Operation, IsOneOnRank], Sequence[Value] | None]"
_T = TypeVar("_T", bound=Trait)
_K = TypeVar("_K")
_COMMON = (
    Param("phase", "name", "part of the training step that the op belongs to", choices=PHASES),
    Param("fused", "int", "computations of a region with the same number are one kernel"),
    Param("continues", "name", "a kernel beside does its work: always, or on a family of devices"),
    Param("cached", "flag", "serving caches this value, not what follows from it"),
    Param(STATICS, "name", "in a block: the stg.statics that it takes besides"),
)


class IsOneOnRank(Protocol):
    """Whether a size is 1 on each rank, or as a `whole`; False if it has no value."""

    def __call__(self, size: Expr, *, whole: bool = False) -> bool: ...


@dataclass(frozen=True, slots=True)
class LossForm:
    """How a loss of the next tokens is computed: the form of `stg.loss`, the number of chunks of
    tokens (0: the default of the form), and whether the vocabulary is split."""

    name: str
    chunks: int = 0
    split: bool = False


class OpDef:
    """Base of all op definitions; a subclass states what differs. The docstring is the
    documentation."""

    name: ClassVar[str] = ""  # as in a text: dialect.name
    operands: ClassVar[tuple[str, ...]] = ()  # names; a last one with * stands for any number
    results: ClassVar[tuple[str, ...]] = ("result",)  # the same; one with ? may be left out
    params: ClassVar[tuple[Param, ...]] = ()  # in brackets
    traits: ClassVar[tuple[Trait, ...]] = ()  # properties that algorithms query: stagec.ir.traits
    parents: ClassVar[tuple[str, ...] | None] = None  # only directly in these ops (None: in any)
    example: ClassVar[str] = ""  # a line of text with it, run as a test

    # -- data that replace `rule`, `dtypes` and `flops` for many ops -------------------------------

    index: ClassVar[IndexRule | None] = None  # the rule
    element_types: ClassVar[tuple[str, ...]] = ()  # of results, or operands that have the same
    flops_per_point: ClassVar[int] = 0  # FLOPs for each point of the index space of the rule
    integral: ClassVar[str] = ""  # factors that are quotients of dimensions and must be integers

    # -- derived from the class, computed once -----------------------------------------------------

    kinds: ClassVar[frozenset[type[Trait]]] = frozenset()  # of its traits, with their base classes
    declares: ClassVar[str] = ""  # `what` of its trait `Declares`
    takes: ClassVar[Arity] = Arity()  # the number of operands
    gives: ClassVar[Arity] = Arity()  # the number of results
    params_by_name: ClassVar[Mapping[str, Param]] = {}  # the declared ones and `_COMMON`

    def __init_subclass__(cls) -> None:
        # a base class that sets attributes of subclasses does so before it calls this
        traits = _all_of(Trait, cls.traits)
        cls.kinds = frozenset(k for t in traits for k in type(t).__mro__ if issubclass(k, Trait))
        cls.declares = next((t.what for t in traits if isinstance(t, Declares)), "")
        cls.takes = Arity.of(_all_of(str, cls.operands))
        cls.gives = Arity.of(_all_of(str, cls.results))
        cls.params_by_name = {p.name: p for p in (*_COMMON, *_all_of(Param, cls.params))}

    def has(self, trait: type[Trait]) -> bool:
        """Whether the op has the trait, or a subclass of it."""
        return trait in self.kinds

    def default(self, name: str) -> str:
        """The default of a parameter that is a name; empty without a default."""
        param = self.params_by_name.get(name)
        return param.default if param is not None else ""

    def trait(self, kind: type[_T]) -> _T | None:
        """The trait of this kind with its fields; None if the op does not have it."""
        return next((t for t in self.traits if isinstance(t, kind)), None)

    def derived(self) -> Sequence[OpDef]:
        """Ops derived from this one, such as its gradient. They are registered after it."""
        return ()

    # -- shape -------------------------------------------------------------------------------------

    def rule(self, op: Operation) -> Rule | None:
        """The index rule, by default `index`; None for ops that are not computations."""
        return self.index.of(op) if self.index is not None else None

    def dtypes(self, op: Operation) -> Sequence[str]:
        """The dtype of each result: by default `element_types` without those of absent operands,
        else that of operand 0. Those of absent results, at the end, are ignored."""
        if not self.element_types:
            return [op.operands[0].tensor.dtype] * len(self.rule_results(op))
        own = {n: v.tensor.dtype for n, v in zip(self.takes.names, op.operands, strict=False)}
        absent = {*self.takes.names[len(op.operands) :]}
        return [own.get(name, name) for name in self.element_types if name not in absent]

    def rule_results(self, op: Operation) -> tuple[Shape, ...]:
        """The results of the rule, () without one."""
        rule = self.rule(op)
        return rule.results if rule else ()

    def infer(self, op: Operation) -> list[Type]:
        """The result types from the operand types: shapes from the rule. Raises
        `DiagnosticError`."""
        rule = self.rule(op)
        if rule is None and op.results:
            raise op.error(
                f"'{op.name}' has no rule, so its results have no types",
                remedy="define 'rule' in its op definition, or 'infer'",
            )
        if rule is None:
            return []
        sizes = factor_sizes(op, rule)
        lost = [f for shape in rule.results for g in shape for f in g if f not in sizes]
        if lost:
            raise op.error(
                f"'{op.name}' cannot infer the size of factor '{lost[0]}' of its result",
                remedy="use letters of the operands only",
            )
        dtypes, loads, routed = self.dtypes(op), factor_loads(op, rule), factor_routed(op, rule)
        return [
            TensorType(dtype, result_dims(op, shape, sizes, loads, routed))
            for dtype, shape in zip(dtypes[: len(rule.results)], rule.results, strict=True)
        ]

    def region_args(self, op: Operation) -> Sequence[Type] | None:
        """The types of the arguments of its region, from the operands to which they are bound; None
        if they are not bound."""
        return None

    def verify(self, op: Operation) -> Iterator[str]:
        """Messages for errors of this op beyond its signature. The method may read the attributes,
        the region and the types of the op, but nothing outside of it (`stagec.ir.verified`)."""
        return iter(())

    def reuses(self, op: Operation, result: int) -> int | None:
        """The operand whose buffer a result takes (or a part of it); None for a new buffer."""
        place = self.trait(InPlace) if InPlace in self.kinds else None
        return place.operands[result] if place is not None else None

    # -- cost per rank: `n` maps each factor to its local size. Methods may read the attributes and
    # # the types of the op, and what `costs_read` states, but nothing else (`stagec.ir.memo`) ---

    def costs_read(self, op: Operation) -> Hashable:
        """What the costs read of other operations: None for most."""
        return None

    def flops(self, op: Operation, n: Sizes) -> Expr:
        """Floating-point operations (a multiply-add is two), 0 for data movement; by default
        `flops_per_point` for each point of the index space."""
        rule = self.rule(op) if self.flops_per_point else None
        return product(n[f] for f in rule.factors) * self.flops_per_point if rule else ZERO

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        """FLOPs of the matrix products that kernels compute, ignoring masks in them, as counted by
        FlopCounterMode of PyTorch."""
        return ZERO

    def bytes_touched(self, op: Operation) -> Expr:
        """Bytes that are read or written on one rank, each once. By default all operands and
        results; an operand that the op gathers itself counts as gathered, and weights of experts
        count if the experts get tokens (`stagec.ir.routed`)."""
        rule = self.rule(op)
        known: dict[int, Expr] = {}
        if rule is not None:
            known = {g.operand: g.whole(op) for g in own_gathers(op, rule)}
            if (weights := expert_weights(op, rule)) is not None:
                n = factor_sizes(op, rule, local=True)
                known |= {i: weights.read(op.operands[i].tensor, n) for i in weights.operands}
        read = [known.get(i, v.tensor.local_bytes) for i, v in enumerate(op.operands)]
        return total([*read, *(v.tensor.local_bytes for v in op.results)])

    def kernel(self, op: Operation, n: Sizes) -> KernelShape | None:
        """The matrix product or attention that its kernel computes; None for a kernel bound by
        memory. By default the matrix product of its rule, if it has matmul FLOPs; only experts that
        get tokens count."""
        rule = self.rule(op)
        if rule is None or self.matmul_flops(op, n) == ZERO:
            return None
        weights = expert_weights(op, rule)
        sizes = n if weights is None else weights.occupied(n)
        return matrix_product(rule, sizes, op.operands[0].tensor.dtype)

    def active(self, op: Operation) -> Expr | None:
        """In a repeat: the number of first iterations in which a rank runs the op, which may depend
        on the coordinates of the rank. None: all iterations."""
        return None

    # -- derivative --------------------------------------------------------------------------------

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        """Build the gradient of each operand from the gradients of the results, at least one of
        which is not None.

        Forward values that it uses are those that backward needs: they are stashed. None stands for
        no gradient. Raises `DiagnosticError` if the op has no gradient.
        """
        raise op.error(
            f"'{self.name}' has no gradient",
            remedy="define 'grad' in its op definition, or keep it off the path to the loss",
        )

    # -- operation by operation --------------------------------------------------------------------

    def eager_forms(self) -> Mapping[str, EagerForm]:
        """By the names that `stg.kernels` uses: forms of the op that are several operations in
        PyTorch without a compiler. A form builds these operations before the op and returns the
        values that replace its results, or None if it is a single operation in this place. Its last
        argument states whether a size is 1 on each rank, as the strategy splits it."""
        return {}

    # -- serving -----------------------------------------------------------------------------------

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """Build the form of the op in a step of serving, before it. Returns the values that replace
        its results, or `op.results` for an op that is changed in place. None: nothing changes, as
        for an op that treats each token separately.

        State of the op comes from `step`. Raises `DiagnosticError` if there is no such form.
        """
        if step.mixes(op):
            raise op.error(
                f"'{self.name}' combines several tokens of a sequence, but has no form for "
                "serving, which needs state of the tokens before",
                remedy="serve a causal model, or define 'serve' in its op definition",
            )
        return None

    def logits(self, op: Operation) -> Value | None:
        """The logits [B, S, V] of a loss of the next tokens, which a step of serving returns
        instead; None for other ops."""
        return None

    def expanded(self, b: Builder, op: Operation, form: LossForm) -> Value | None:
        """For a loss of the next tokens: build it in another form, before it. Returns the new loss,
        or `op.result` if the op is changed in place. None: it has no such form."""
        return None

    # -- numeric meaning ---------------------------------------------------------------------------

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        """The results as numpy arrays, from local operands on one rank. Raises `DiagnosticError` if
        the op has no reference."""
        raise op.error(
            f"'{self.name}' has no numeric reference",
            remedy="define 'reference' in its op definition",
        )

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        """The number of distinct indices in an integer operand (random test data is below it); None
        for other operands."""
        return None

    # -- placement ---------------------------------------------------------------------------------

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        """Rewrite the op for split special factors; returns the values that replace its results.
        Raises `DiagnosticError` if the op cannot be split."""
        raise op.error(
            f"'{self.name}' cannot be split over {sorted(special)}",
            remedy="leave that dimension whole, or define 'partition' in its op definition",
        )

    # -- rewriting ---------------------------------------------------------------------------------

    def fold(self, op: Operation) -> Value | None:
        """An existing value of the same type that replaces the only result, or None. The method may
        change the op."""
        return None


def _all_of(kind: type[_K], given: object) -> tuple[_K, ...]:
    """The items of this kind. Other items in a class of a plug-in are errors when the plug-in is
    loaded (`stagec.pipeline.plugins`), not when its class is created."""
    items = cast("tuple[object, ...]", given) if isinstance(given, tuple) else ()
    return tuple(item for item in items if isinstance(item, kind))


class UnregisteredOp(OpDef):
    """An op without a definition, which can only be parsed and printed."""

    operands = ("operand*",)
    results = ("result*",)
    traits = (OpenParams(), Stays())

    def infer(self, op: Operation) -> list[Type]:
        return []


def unregistered(name: str) -> OpDef:
    """A placeholder definition for an op of this name."""
    definition: OpDef = type("Unregistered", (UnregisteredOp,), {"name": name})()
    return definition


class Registry:
    """The ops that a compiler knows: the built-in ones and those of plug-ins.

    `extras` are contributions of plug-ins to upper layers, such as pipeline schedules.
    """

    def __init__(self, ops: Iterable[OpDef] = ()) -> None:
        self._ops: dict[str, OpDef] = {}
        self.extras: list[object] = []
        for op in ops:
            self.add(op)

    def copy(self) -> Registry:
        """A copy, to which more ops can be added."""
        registry = Registry()
        registry._ops, registry.extras = {**self._ops}, [*self.extras]
        return registry

    def add(self, op: OpDef) -> None:
        """Add a definition. Raises `DiagnosticError` if another one has its name."""
        known = self._ops.get(op.name)
        if known is not None and type(known) is not type(op):
            raise error(
                f"op '{op.name}' is defined twice", remedy="rename one of the two definitions"
            )
        self._ops[op.name] = op

    def get(self, name: str) -> OpDef | None:
        """The definition of this name, or None."""
        return self._ops.get(name)

    def __getitem__(self, name: str) -> OpDef:
        """The definition of this name. Raises `LookupError` with the nearest name."""
        if (definition := self._ops.get(name)) is None:
            raise LookupError(f"unknown op '{name}': {self.suggest(name)}")
        return definition

    def __iter__(self) -> Iterator[OpDef]:
        return iter(self._ops.values())

    def suggest(self, name: str) -> str:
        """A remedy for an unknown op."""
        return did_you_mean(name, self._ops) or "'stagec ops' lists the ops"
