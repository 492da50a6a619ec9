"""Relations between sizes that a strategy needs: declared in the module, and checked for known
sizes."""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, const, evaluate, fraction, numerator_and_denominator, symbol
from stagec.ir.facts import Facts, Relation, divisible
from stagec.ir.module import Module
from stagec.ir_spec.strategy.axes import (
    DATA_AXES,
    EXPERT_WIDTH,
    EXPERTS,
    SHARED_WIDTH,
    TENSOR_AXES,
    VOCABULARY,
    WIDTHS,
)
from stagec.support.diagnostics import DiagnosticList, error
from stagec.support.source import Loc, made_by


class Assumptions:
    """Relations that a pass adds to a module, in one `stg.assume` of its own. Relations between
    known sizes are checked.

    Sizes that do not divide are collected, so that `check` can report all of them.
    """

    def __init__(self, module: Module, by: str, loc: Loc) -> None:
        """`by` is the name of the pass, `loc` the location that needs the relations."""
        self._module, self._by, self._loc = module, by, loc
        self._wanted = _known_sizes(module)
        self._failed: list[tuple[Expr, Expr, Loc, Expr]] = []
        self._declared: Operation | None = None
        self._assumed = {r for r, _ in module.relations}
        self.facts = Facts(r for r, _ in module.relations)  # without current values

    def divides(self, size: Expr, divisor: Expr, loc: Loc) -> None:
        """Assume that `divisor` divides `size`; `check` reports known sizes that do not."""
        env = self._module.env
        above, below = numerator_and_denominator(size)
        relation = divisible(above, below * divisor)
        known = relation.symbols <= env.keys()
        sizes = self._wanted.setdefault(below * divisor, [])
        if known and above not in sizes:
            sizes.append(above)
            if not relation.holds(env):
                self._failed.append((above, below * divisor, loc, below))
        if not self.facts.divides(divisor, size):
            self.facts.add(relation)
            self._declare(relation)

    def holds(self, relation: Relation, loc: Loc, remedy: str) -> None:
        """Assume any relation. Raises `DiagnosticError` with `remedy` if it is false for known
        sizes."""
        env = self._module.env
        if relation.symbols <= env.keys() and not relation.holds(env):
            raise error(f"this needs {relation}", loc, remedy=remedy)
        if relation.symbols and relation not in self._assumed:
            self._assumed.add(relation)
            self._declare(relation)

    def check(self) -> None:
        """Raise `DiagnosticError` for all sizes that do not divide, one error per divisor."""
        problems = DiagnosticList()
        groups: dict[tuple[Expr, Expr, Expr | None], list[tuple[Expr, Loc]]] = {}
        for size, divisor, loc, below in self._failed:
            alone = size if below.symbols else None  # the remedy names this size
            groups.setdefault((divisor, below, alone), []).append((size, loc))
        for (divisor, below, _), failed in groups.items():
            sizes, (_, loc) = [size for size, _ in failed], failed[0]
            remedy = self._remedy(sizes, divisor, below)
            problems.error(self._refusal(sizes, divisor), loc, remedy=remedy)
        problems.check()

    def _refusal(self, sizes: Sequence[Expr], divisor: Expr) -> str:
        """`H = 32 and G = 8 do not divide over tp = 3`."""
        env, several = self._module.env, len(sizes) > 1
        tried = evaluate(divisor, env)
        how = f"{'do' if several else 'does'} not divide over {divisor} = {tried}"
        if not divisor.symbols:
            how = f"{'are not multiples' if several else 'is not a multiple'} of {tried}"
        return f"{_listed([f'{size} = {evaluate(size, env)}' for size in sizes])} {how}"

    def _remedy(self, sizes: Sequence[Expr], divisor: Expr, below: Expr) -> str:
        env = self._module.env
        tried = evaluate(divisor, env)
        if not below.symbols:
            common = gcd(*(evaluate(s, env) for s in self._wanted[divisor]))
            remedy = _choices(sizes, divisor, common, tried)
            padded = any(size.symbol_name in WIDTHS for size in sizes) and below != const(1)
            whole = self._whole_experts(sizes, tried // evaluate(below, env)) if padded else ""
            shared = all(size.symbol_name == SHARED_WIDTH for size in sizes)
            whole += ", or --whole-shared-experts" if shared else ""
            if all(size.symbol_name == VOCABULARY for size in sizes):
                return f"{remedy}, or --pad-vocab 1 to pad the vocabulary"
            return f"{remedy}{whole}, or --pad-widths {below}" if padded else remedy
        remedy = f"choose {sizes[0]} as a multiple of {tried}"
        if (capacity := self._capacity()) is not None:
            have = evaluate(sizes[0], env)
            more = Fraction(-(-have // tried) * tried, have) * capacity
            remedy += f", or --capacity-factor {more}"
        return remedy

    def _whole_experts(self, sizes: Sequence[Expr], ranks: int) -> str:
        """The remedy to distribute whole experts over `ranks` instead of splitting each, as engines
        require if blocks of low-bit weights do not divide (vLLM: --enable-expert-parallel, else
        Fp8MoEMethod of layers/quantization/fp8.py raises). Empty if other sizes than the width of
        experts are split, if experts do not divide, or with data parallelism."""
        axes, experts = self._module.axis_sizes, self._module.env.get(EXPERTS, 0)
        data = any(axes.get(axis, 1) > 1 for axis in DATA_AXES)
        alone = all(size.symbol_name == EXPERT_WIDTH for size in sizes)
        fits = alone and not data and experts and experts % ranks == 0
        return f", or --ep {ranks} for whole experts" if fits else ""

    def _capacity(self) -> Fraction | None:
        """The capacity factor of experts; None if there are no experts."""
        routing = [op for op in self._module.walk() if "capacity" in op.definition.params_by_name]
        given = (op.expr("capacity") for op in routing if "capacity" in op.attrs)
        return fraction(next(given, const(1))) if routing else None

    def _declare(self, relation: Relation) -> None:
        """Append to the `stg.assume` of these relations, which comes after the declarations."""
        if self._declared is None:
            root, definition = self._module.root.body, self._module.registry["stg.assume"]
            declarations = ("stg.symbols", "stg.assume", "stg.mesh")
            places = [i for i, o in enumerate(root.ops) if o.name in declarations]
            self._declared = Operation(definition, loc=made_by(self._by, self._loc))
            root.insert(1 + max(places, default=-1), self._declared)
        before = self._declared.attrs.get("relations", ())
        given = before if isinstance(before, tuple) else ()
        self._declared.attrs["relations"] = (*given, relation)


def _known_sizes(module: Module) -> dict[Expr, list[Expr]]:
    """Maps divisors to known sizes that are assumed to be divisible already."""
    sizes: dict[Expr, list[Expr]] = {}
    for relation, _ in module.relations:
        size, divisor = relation.left, relation.modulus
        known = relation.symbols <= module.env.keys()
        if known and divisor is not None and relation == divisible(size, divisor):
            sizes.setdefault(divisor, []).append(size)
    return sizes


def _choices(sizes: Sequence[Expr], divisor: Expr, common: int, tried: int) -> str:
    """The remedy with the common divisors of all sizes that are nearest to the current one."""
    names = _listed([str(size) for size in sizes])
    candidates = [n for n in range(1, min(common, 4 * tried) + 1) if common % n == 0]
    if len(divisor.symbols) == 1:  # 2*cp: choices of cp
        alone = symbol(*divisor.symbols)
        each = divisor / alone
        if not each.symbols and (fitting := [n for n in candidates if n % evaluate(each, {}) == 0]):
            divisor, tried = alone, tried // evaluate(each, {})
            candidates = [n // evaluate(each, {}) for n in fitting]
    best = sorted(candidates, key=lambda n: abs(n - tried))[:3]
    if divisor.symbol_name is None and (common >= tried or len(divisor.symbols) < 2):
        return f"choose {names} as {'multiples' if sizes[1:] else 'a multiple'} of {tried}"
    other = f"other values of {names}" if sizes[1:] else f"another {names}"
    of_flag = " (--tp)" if len(divisor.symbols) > 1 and divisor.symbols <= {*TENSOR_AXES} else ""
    return f"choose {divisor}{of_flag} among {', '.join(map(str, sorted(best)))}, or {other}"


def _listed(texts: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
