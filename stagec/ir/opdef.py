"""Op definitions: everything the compiler knows of an op, in one class.

Owns `OpDef` and the `Registry`. Concrete ops live in `ir_spec/ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar, cast

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

#: What the numeric reference of an op works on: numpy arrays (kept untyped, they are test oracles).
Array = Any
Sizes = Mapping[str, Expr]
#: Gradients of the results or of the operands of an op; None where none flows.
Grads: TypeAlias = Sequence[Value | None]
#: The axes over which special factors are split.
Splits: TypeAlias = Mapping[str, tuple[str, ...]]
#: The size of a dimension on one rank; None if it is open.
LocalSize: TypeAlias = Callable[[Expr], "int | None"]
#: Builds what an op is without a compiler, before it, and returns what replaces its results.
EagerForm: TypeAlias = "Callable[[Builder, Operation, LocalSize], Sequence[Value] | None]"
_T = TypeVar("_T", bound=Trait)
_K = TypeVar("_K")
_COMMON = (
    Param("phase", "name", "part of the training step that the op belongs to", choices=PHASES),
    Param("fused", "int", "computations of a region with the same number are one kernel"),
    Param("continues", "name", "a kernel beside does its work: always, or on a family of devices"),
    Param("cached", "flag", "serving caches this value, not what follows from it"),
    Param(STATICS, "name", "in a block: the stg.statics that it takes besides"),
)


@dataclass(frozen=True, slots=True)
class LossForm:
    """How a loss of the next tokens is to be computed: the form of `stg.loss`, the parts of the
    tokens (0: as the form has them), and whether the vocabulary is split."""

    name: str
    chunks: int = 0
    split: bool = False


class OpDef:
    """Base of all op definitions; a subclass states what differs. The docstring is the
    documentation."""

    name: ClassVar[str] = ""  # as it stands in a text: dialect.name
    operands: ClassVar[tuple[str, ...]] = ()  # names; a last one with * stands any number of times
    results: ClassVar[tuple[str, ...]] = ("result",)  # the same; one with ? may be left out
    params: ClassVar[tuple[Param, ...]] = ()  # what may stand in brackets
    traits: ClassVar[tuple[Trait, ...]] = ()  # what algorithms ask for: stagec.ir.traits
    parents: ClassVar[tuple[str, ...] | None] = None  # only directly in these ops (None: in any)
    example: ClassVar[str] = ""  # a line of text with it, run as a test

    # -- what many ops can state as data, in place of `rule`, `dtypes` and `flops` -----------------

    index: ClassVar[IndexRule | None] = None  # the rule
    element_types: ClassVar[tuple[str, ...]] = ()  # of results, or operands that have the same
    flops_per_point: ClassVar[int] = 0  # FLOPs for each point of the index space of the rule
    integral: ClassVar[str] = ""  # factors that are quotients of dimensions, and whole numbers

    # -- what follows from the class, computed once ------------------------------------------------

    kinds: ClassVar[frozenset[type[Trait]]] = frozenset()  # of its traits, with those they refine
    declares: ClassVar[str] = ""  # what its trait `Declares` says
    takes: ClassVar[Arity] = Arity()  # how many operands
    gives: ClassVar[Arity] = Arity()  # how many results
    params_by_name: ClassVar[Mapping[str, Param]] = {}  # the declared ones and `_COMMON`

    def __init_subclass__(cls) -> None:
        # a base that makes, say, params of its own does so before it calls this
        traits = _all_of(Trait, cls.traits)
        cls.kinds = frozenset(k for t in traits for k in type(t).__mro__ if issubclass(k, Trait))
        cls.declares = next((t.what for t in traits if isinstance(t, Declares)), "")
        cls.takes = Arity.of(_all_of(str, cls.operands))
        cls.gives = Arity.of(_all_of(str, cls.results))
        cls.params_by_name = {p.name: p for p in (*_COMMON, *_all_of(Param, cls.params))}

    def has(self, trait: type[Trait]) -> bool:
        """Whether the op has the trait, or one that refines it."""
        return trait in self.kinds

    def default(self, name: str) -> str:
        """The name that a parameter stands for where it is left out; empty without such a name."""
        param = self.params_by_name.get(name)
        return param.default if param is not None else ""

    def trait(self, kind: type[_T]) -> _T | None:
        """The op's trait of this kind, with what it says; None if it has none."""
        return next((t for t in self.traits if isinstance(t, kind)), None)

    def derived(self) -> Sequence[OpDef]:
        """Ops that follow from this one, such as its gradient. The built-in ones are listed behind
        it."""
        return ()

    # -- shape -------------------------------------------------------------------------------------

    def rule(self, op: Operation) -> Rule | None:
        """The index rule, None for ops that are not computations; by default `index`."""
        return self.index.of(op) if self.index is not None else None

    def dtypes(self, op: Operation) -> Sequence[str]:
        """The dtype of each result; by default `element_types`, or without it that of operand 0."""
        if not self.element_types:
            return [op.operands[0].tensor.dtype] * len(self.rule_results(op))
        own = {n: v.tensor.dtype for n, v in zip(self.takes.names, op.operands, strict=False)}
        return [own.get(name, name) for name in self.element_types]

    def rule_results(self, op: Operation) -> tuple[Shape, ...]:
        """The results of the rule, () without one."""
        rule = self.rule(op)
        return rule.results if rule else ()

    def infer(self, op: Operation) -> list[Type]:
        """The result types from the operand types: shapes from the rule. Raises
        `DiagnosticError`."""
        rule = self.rule(op)
        if rule is None and op.results:
            raise error(
                f"'{op.name}' has no rule, so its results have no types",
                op.loc,
                remedy="define 'rule' in its op definition, or 'infer'",
            )
        if rule is None:
            return []
        sizes = factor_sizes(op, rule)
        lost = [f for shape in rule.results for g in shape for f in g if f not in sizes]
        if lost:
            raise error(
                f"'{op.name}' cannot infer the size of factor '{lost[0]}' of its result",
                op.loc,
                remedy="use letters of the operands only",
            )
        dtypes, loads, routed = self.dtypes(op), factor_loads(op, rule), factor_routed(op, rule)
        return [
            TensorType(dtype, result_dims(op, shape, sizes, loads, routed))
            for dtype, shape in zip(dtypes, rule.results, strict=True)
        ]

    def region_args(self, op: Operation) -> Sequence[Type] | None:
        """The types of its region's arguments, from the operands that they are bound to; None if
        they are not bound."""
        return None

    def verify(self, op: Operation) -> Iterator[str]:
        """Messages for what is wrong with this op beyond its signature. It may read the attributes,
        the region and the types of the op, not what is around it (`stagec.ir.verified`)."""
        return iter(())

    def reuses(self, op: Operation, result: int) -> int | None:
        """The operand whose buffer a result takes (wholly, or a part of it); None for a new one."""
        place = self.trait(InPlace) if InPlace in self.kinds else None
        return place.operands[result] if place is not None else None

    # -- cost, per rank: `n` maps each factor to its local size. It may read the attributes and the
    #    types of the op, not what is around it (`stagec.ir.memo`) --------------------------------

    def flops(self, op: Operation, n: Sizes) -> Expr:
        """Floating-point operations executed (a multiply-add is two), 0 for pure data movement; by
        default `flops_per_point`."""
        rule = self.rule(op) if self.flops_per_point else None
        return product(n[f] for f in rule.factors) * self.flops_per_point if rule else ZERO

    def matmul_flops(self, op: Operation, n: Sizes) -> Expr:
        """FLOPs of the matrix products that kernels compute, with masks inside of them ignored, as
        PyTorch's FlopCounterMode counts them."""
        return ZERO

    def bytes_touched(self, op: Operation) -> Expr:
        """Bytes read and written once each on one rank; by default all operands and all results,
        an operand that the op gathers itself as it is then, and of weights of experts those that
        get tokens (`stagec.ir.routed`)."""
        rule, known = self.rule(op), dict[int, Expr]()
        if rule is not None:
            known = {g.operand: g.whole(op) for g in own_gathers(op, rule)}
            if (weights := expert_weights(op, rule)) is not None:
                n = factor_sizes(op, rule, local=True)
                known |= {i: weights.read(op.operands[i].tensor, n) for i in weights.operands}
        read = [known.get(i, v.tensor.local_bytes) for i, v in enumerate(op.operands)]
        return total([*read, *(v.tensor.local_bytes for v in op.results)])

    def kernel(self, op: Operation, n: Sizes) -> KernelShape | None:
        """The matrix product or attention that its kernel computes; None for a kernel that is
        bound by memory. By default a matrix product, if it has FLOPs of one and its rule is one; of
        experts those that get tokens."""
        rule = self.rule(op)
        if rule is None or self.matmul_flops(op, n) == ZERO:
            return None
        weights = expert_weights(op, rule)
        sizes = n if weights is None else weights.occupied(n)
        return matrix_product(rule, sizes, op.operands[0].tensor.dtype)

    def active(self, op: Operation) -> Expr | None:
        """In a repeat: the number of its first iterations in which a rank runs the op. None: in
        all. It may depend on the rank's coordinates."""
        return None

    # -- derivative --------------------------------------------------------------------------------

    def grad(self, b: Builder, op: Operation, grads: Grads) -> Grads:
        """Build the gradient of each operand from the gradients of the results, of which one at
        least is there.

        Whatever forward value it uses is what backward needs: it is stashed. None: no gradient
        flows.
        """
        raise error(
            f"'{self.name}' has no gradient",
            op.loc,
            remedy="define 'grad' in its op definition, or keep it off the path to the loss",
        )

    # -- operation by operation --------------------------------------------------------------------

    def eager_forms(self) -> Mapping[str, EagerForm]:
        """By the names that `stg.kernels` gives them, forms of the op that are several operations
        in PyTorch without a compiler. A form builds these operations before the op and returns the
        values that replace its results; None: in this place it is one operation there, too. It is
        given the size of a dimension on one rank, as the strategy splits it."""
        return {}

    # -- serving -----------------------------------------------------------------------------------

    def serve(self, step: ServingStep, op: Operation) -> Sequence[Value] | None:
        """Build what the op becomes in a step of serving, before it; returns the values that
        replace its results, `op.results` for an op that is changed and stays. None: nothing
        changes, as for an op that treats each token by itself.

        State that it keeps comes from `step`. Raises `DiagnosticError` if there is no such form.
        """
        if step.mixes(op):
            raise error(
                f"'{self.name}' combines several tokens of a sequence, but has no form for "
                "serving, which needs state of the tokens before",
                op.loc,
                remedy="serve a causal model, or define 'serve' in its op definition",
            )
        return None

    def logits(self, op: Operation) -> Value | None:
        """The logits that it judges, [B, S, V], if it is a loss of the next tokens: what a step of
        serving returns instead."""
        return None

    def expanded(self, b: Builder, op: Operation, form: LossForm) -> Value | None:
        """If it is a loss of the next tokens: build it in another form, before it; `op.result` if
        the op is changed and stays. None: it has no such form."""
        return None

    # -- numeric meaning ---------------------------------------------------------------------------

    def reference(self, op: Operation, ctx: NumericContext, *args: Array) -> Sequence[Array]:
        """The results as numpy arrays, from local operands on one rank."""
        raise error(
            f"'{self.name}' has no numeric reference",
            op.loc,
            remedy="define 'reference' in its op definition",
        )

    def index_bound(self, op: Operation, operand: int) -> Expr | None:
        """If an integer operand holds indices: how many there are (random test data stays
        below)."""
        return None

    # -- placement ---------------------------------------------------------------------------------

    def partition(self, b: Builder, op: Operation, special: Splits) -> Sequence[Value]:
        """Rewrite the op for split special factors; returns the values that replace its results."""
        raise error(
            f"'{self.name}' cannot be split over {sorted(special)}",
            op.loc,
            remedy="leave that dimension whole, or define 'partition' in its op definition",
        )

    # -- rewriting ---------------------------------------------------------------------------------

    def fold(self, op: Operation) -> Value | None:
        """An existing value of the same type that replaces the only result, or None. It may change
        the op."""
        return None


def _all_of(kind: type[_K], given: object) -> tuple[_K, ...]:
    """The items of this kind. What else a class of a plug-in has there is refused when the plug-in
    is loaded (`stagec.pipeline.plugin_checks`), not while its class is made."""
    items = cast("tuple[object, ...]", given) if isinstance(given, tuple) else ()
    return tuple(item for item in items if isinstance(item, kind))


class UnregisteredOp(OpDef):
    """An op that nothing is known of; it prints and parses, no more."""

    operands = ("operand*",)
    results = ("result*",)
    traits = (OpenParams(), Stays())

    def infer(self, op: Operation) -> list[Type]:
        return []


def unregistered(name: str) -> OpDef:
    """A definition that stands for an op of that name."""
    definition: OpDef = type("Unregistered", (UnregisteredOp,), {"name": name})()
    return definition


class Registry:
    """The ops that a compiler knows: the built-in ones and those of plug-ins.

    `extras` is what plug-ins bring for upper layers, such as pipeline schedules.
    """

    def __init__(self, ops: Iterable[OpDef] = ()) -> None:
        self._ops: dict[str, OpDef] = {}
        self.extras: list[object] = []
        for op in ops:
            self.add(op)

    def copy(self) -> Registry:
        """The same, to which more can be added."""
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
        """The definition of that name."""
        return self._ops.get(name)

    def __getitem__(self, name: str) -> OpDef:
        """The definition of that name. Raises `LookupError`, with the nearest name."""
        if (definition := self._ops.get(name)) is None:
            raise LookupError(f"unknown op '{name}': {self.suggest(name)}")
        return definition

    def __iter__(self) -> Iterator[OpDef]:
        return iter(self._ops.values())

    def suggest(self, name: str) -> str:
        """A remedy for an unknown op."""
        return did_you_mean(name, self._ops) or "'stagec ops' lists the ops"
