"""A module: the root operation, and its symbols, mesh, facts and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from stagec.ir.builder import Builder
from stagec.ir.core import Attr, Operation, Region, Value
from stagec.ir.expr import Expr, const, total
from stagec.ir.facts import Facts, Relation
from stagec.ir.opdef import Registry
from stagec.ir.queries import Queries, TrackedValues, UnitAxes, ask, plain
from stagec.ir.traits import CopiesMemory, KeepsPart, Recasts
from stagec.ir.types import PARAMETERS, WEIGHTS, Load, TensorType
from stagec.support.diagnostics import DiagnosticError, DiagnosticList, error
from stagec.support.source import Loc, Source, made_by

Size = TypeVar("Size")
#: The symbol of the number of sequences of a step, over all ranks.
BATCH = "B"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes, slowest first; a size may have no value (None). Ranks are numbered row-major,
    last axis fastest."""

    name: str
    sizes: Mapping[str, int | None]

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(self.sizes)

    @property
    def unit_axes(self) -> frozenset[str]:
        """The axes of one rank."""
        return ask(UnitAxes(self.axes), self.sizes)


@dataclass(slots=True, weakref_slot=True)
class Module:
    """The unit of compilation."""

    root: Operation
    registry: Registry
    sources: dict[str, Source] = field(default_factory=dict[str, Source])
    diagnostics: DiagnosticList = field(default_factory=DiagnosticList)
    decisions: Queries | None = None  # notes the reads of values, if set
    peers: Mapping[str, Module] = field(default_factory=dict[str, "Module"])  # of the other pods
    #: Results of a pass for its observers, which remove them.
    notes: dict[object, object] = field(default_factory=dict[object, object])

    #: Renders a module for notebooks; set by `stagec.text`, which the IR does not import.
    as_html: ClassVar[Callable[[Module], str] | None] = None

    def _repr_html_(self) -> str | None:
        return None if Module.as_html is None else Module.as_html(self)

    @property
    def name(self) -> str:
        """The module's @name."""
        return self.root.symbol or "module"

    @property
    def phase(self) -> str:
        """The phase that the module states."""
        return self.root.text("phase", "parsed")

    @phase.setter
    def phase(self, value: str) -> None:
        self.root.attrs["phase"] = value

    @property
    def positions(self) -> int | None:
        """The positions for which the model was trained, None if the text does not state them."""
        return self.root.integer("positions") if "positions" in self.root.attrs else None

    @property
    def serving(self) -> str:
        """The mode of a step of serving; empty for a training step."""
        return self.root.text("serving")

    @serving.setter
    def serving(self, mode: str) -> None:
        self.root.attrs["serving"] = mode

    @property
    def sequences(self) -> tuple[str, ...]:
        """The dimensions of tokens that the module names, the main one first; S if it names none
        and declares S."""
        return self.root.names("sequences") or (("S",) if "S" in self.symbols else ())

    def declaring(self, *what: str) -> list[Operation]:
        """The operations directly in the module that declare one of these (`Declares.what`)."""
        return [op for op in self.root.body.ops if op.definition.declares in what]

    def ops(self, name: str) -> list[Operation]:
        """The operations of that name directly in the module (declarations, functions,
        strategies)."""
        return [op for op in self.root.body.ops if op.name == name]

    def walk(self) -> Iterator[Operation]:
        """All operations of the module."""
        return self.root.body.walk()

    def before(
        self, op: Operation, *, loc: Loc | None = None, by: str = "", phase: str | None = None
    ) -> Builder:
        """A builder that inserts directly before `op`, by default at its location and in its phase;
        `by` is the name of the pass that inserts. Raises ValueError if the op is in no region."""
        return Builder.before(self.registry, op, loc=_loc(loc or op.loc, by), phase=phase)

    def after(
        self, op: Operation, *, loc: Loc | None = None, by: str = "", phase: str | None = None
    ) -> Builder:
        """As `before`, for the place directly after `op`."""
        return Builder.after(self.registry, op, loc=_loc(loc or op.loc, by), phase=phase)

    @property
    def functions(self) -> list[Operation]:
        """All functions."""
        return self.declaring("function")

    @property
    def graphs(self) -> list[Operation]:
        """All programs of rank classes, which a lowered module has instead of functions."""
        return self.declaring("graph")

    @property
    def main(self) -> Operation:
        """The function that is compiled: the only one that is not private. Raises `DiagnosticError`
        if there is not exactly one."""
        public = [func for func in self.functions if not func.flag("private")]
        if len(public) != 1:
            which = " that are not private" if len(public) < len(self.functions) else ""
            raise self.root.error(
                f"module @{self.name} has {len(public)} functions{which}, expected one",
                remedy="state the forward computation in one stg.func",
            )
        return public[0]

    @property
    def symbols(self) -> Mapping[str, int | None]:
        """Every declared symbol with its default value."""
        return self._tracked(self._symbols())

    def _symbols(self) -> dict[str, int | None]:
        symbols: dict[str, int | None] = {}
        for op in self.declaring("symbols"):
            for name, value in op.attrs.items():
                symbols[name] = value.value if isinstance(value, Expr) else None
        return symbols

    @property
    def mesh(self) -> Mesh | None:
        """The mesh, or None."""
        for op in self.declaring("axes"):
            sizes = {n: v.value if isinstance(v, Expr) else None for n, v in op.attrs.items()}
            return Mesh(op.symbol or "mesh", self._tracked(sizes))
        return None

    @property
    def axis_sizes(self) -> Mapping[str, int]:
        """The ranks along each axis, 1 if the size has no value; empty without a mesh."""
        mesh = self.mesh
        return {axis: size or 1 for axis, size in mesh.sizes.items()} if mesh else {}

    @property
    def zigzag(self) -> dict[str, tuple[str, ...]]:
        """The dimensions whose positions are in zigzag order on ranks, each with its axes."""
        stated = [(op.names("dims"), op.names("over")) for op in self.declaring("order")]
        return {name: over for names, over in stated for name in names}

    @property
    def loads(self) -> dict[Load, Operation]:
        """The loads on which local sizes depend, each with the operation that declares it."""
        return {Load(op.text("of"), op.integer("first", 0)): op for op in self.declaring("loads")}

    @property
    def env(self) -> Mapping[str, int]:
        """All known values: symbols with defaults, axes with sizes, and even loads."""
        mesh = self.mesh
        sizes = {**self._symbols(), **(plain(mesh.sizes) if mesh else {})}
        even = {name: 1 for load in self.loads for name in load.names}
        return self._tracked({n: v for n, v in sizes.items() if v is not None} | even)

    def _tracked(self, values: dict[str, Size]) -> Mapping[str, Size]:
        return values if self.decisions is None else TrackedValues(values, self.decisions)

    def set_values(self, values: Mapping[str, int]) -> None:
        """Give declared symbols and axes these values, in the declarations only; other names are
        ignored. The change is noted if the module notes decisions."""
        if self.decisions is not None:
            self.decisions.change(values)
        for op in self.declaring("symbols", "axes"):
            op.attrs |= {name: const(values[name]) for name in op.attrs if name in values}

    def how_to_set(self, names: Iterable[str]) -> str:
        """A remedy for sizes without values: the options that give them."""
        mesh = self.mesh
        axes = [f"{n}=2" for n in names if mesh and n in mesh.sizes]
        sizes = [f"{n}=4096" for n in names if not mesh or n not in mesh.sizes]
        given = [("--mesh", axes), ("--set", sizes)]
        return "give " + " ".join(f"{flag} {','.join(v)}" for flag, v in given if v)

    def no_value(self, names: Sequence[str], loc: Loc, *, more: str = "") -> DiagnosticError:
        """The error for sizes without values, with `more` after its remedy. Its location is the
        mesh if all of them are axes, else `loc`."""
        sized = next((op for op in self.declaring("axes") if op.attrs.keys() >= {*names}), None)
        return error(
            f"no value for {', '.join(names)}",
            sized.loc if sized is not None else loc,
            remedy=self.how_to_set(names) + more,
        )

    @property
    def relations(self) -> list[tuple[Relation, Operation]]:
        """All assumptions, each with the operation that states it."""
        relations: list[tuple[Relation, Operation]] = []
        for op in self.declaring("relations"):
            values = op.attrs.get("relations", ())
            if isinstance(values, tuple):
                relations += [(v, op) for v in values if isinstance(v, Relation)]
        return relations

    def assume(self, relation: Relation, loc: Loc) -> None:
        """State an assumption before the main function, unless it is stated already."""
        if relation not in {known for known, _ in self.relations}:
            attrs: dict[str, Attr] = {"relations": (relation,)}
            op = Operation(self.registry["stg.assume"], (), attrs, loc=loc)
            self.root.body.insert(self.main.position(), op)

    def limits_length(self, relation: Relation) -> bool:
        """Whether a relation bounds the tokens of a sequence, as learned positions do. It does not
        apply to the tokens of a mixed step, which belong to many sequences."""
        return relation.modulus is None and not relation.symbols.isdisjoint(self.sequences)

    @property
    def facts(self) -> Facts:
        """The facts that follow from the relations and from known values."""
        return Facts((relation for relation, _ in self.relations), self.env)

    def parameters(self) -> list[Value]:
        """The parameters, including frozen ones."""
        return [a for a in self.main.body.args if a.tensor.role in PARAMETERS]

    def trainable(self) -> list[Value]:
        """The trained parameters: arguments of the function with the role `param`."""
        return [a for a in self.main.body.args if a.tensor.role == "param"]

    def parameter_counts(self) -> dict[str, Expr]:
        """The number of elements of all parameters, and, if some are frozen, of those that are
        trained. Functions and graphs state these counts after parameters were padded, cut or
        lowered."""
        names = ("parameters", "trainable")
        if stated := {n: self.main.expr(n) for n in names if n in self.main.attrs}:
            return stated
        every, trained = self.parameters(), self.trainable()
        counts = {"parameters": total(p.tensor.elements for p in every)}
        if len(trained) < len(every):
            counts["trainable"] = total(p.tensor.elements for p in trained)
        return counts


def uncast(value: Value) -> Value:
    """The operand of a cast; any other value itself."""
    op = value.producer
    return op.operands[0] if op is not None and op.has(Recasts) else value


def is_parameter(value: Value) -> bool:
    """Whether the value is a parameter, a slice of one in a repeat, a copy of these from the host,
    or a kept part of a gathered one."""
    owner = value.owner
    if not isinstance(owner, Region):
        if owner.region is not None:
            owner = owner.region.terminator.operands[value.index].producer or owner
        if owner.has(KeepsPart):
            return True
        return owner.has(CopiesMemory) and is_parameter(owner.operands[0])
    if isinstance(value.type, TensorType) and value.type.role in WEIGHTS:
        return True
    outer = owner.owner
    return value.index < len(outer.operands) and is_parameter(outer.operands[value.index])


def _loc(loc: Loc, by: str) -> Loc:
    return made_by(by, loc) if by else loc
