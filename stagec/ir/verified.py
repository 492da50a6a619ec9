"""A cache of verification results, so that only what a pass has changed is verified again."""

from collections.abc import Iterable, Iterator

from stagec.ir.core import Attr, Operation, Value
from stagec.ir.facts import Facts, Relation
from stagec.ir.module import Module
from stagec.ir.queries import plain
from stagec.ir.types import TensorType, Type
from stagec.support.diagnostics import DiagnosticList

_Key = tuple[object, ...]
#: The state of an operation: a key without attributes, the attributes, and its number.
_State = tuple[_Key, dict[str, Attr], int | None]


class VerifiedCache:
    """Operations that passed their checks in earlier verifications of one module.

    Each verification first assigns a number to every operation. Operations with one number are
    equal, so a check that one of them has passed holds for all:

    | the operation                    | its number                                                |
    |----------------------------------|-----------------------------------------------------------|
    | without a region                 | is that of all with the same definition, attributes and   |
    |                                  | types: `OpDef.verify` and `OpDef.infer` read nothing else |
    | with a region, not changed in it | is that of the verification before                        |
    | with a region, changed in it     | is a new one: its definition may read all that is inside  |
    | with a value without a type      | is None: it is checked each time                          |

    So an operation with a region that has passed its checks is not entered. Checks that depend on
    the place of an operation (visible values, order) are not cached.
    """

    def __init__(self) -> None:
        self.facts = Facts()  # of the module in this verification
        self._declared: _Key = ()
        self._relations: set[Relation] = set()
        self._states: dict[Operation, _State] = {}
        self._before: dict[Operation, _State] = {}
        self._changed: set[Operation] = set()
        self._outer: dict[Operation, set[Value]] = {}
        self._ids: dict[int, int] = {}
        self._alive: list[object] = []  # keeps ids unique
        self._equal: dict[object, int] = {}
        self._known: set[_Key] = set()
        self._new: set[_Key] = set()

    def start(self, module: Module) -> None:
        """Begin a verification. Other declarations clear the cache. With more relations more sizes
        divide, so types stay valid, but an op may need other placements."""
        declared, relations = _declarations(module), {r for r, _ in module.relations}
        if declared != self._declared or not self._relations <= relations:
            self._known.clear()
        elif self._relations != relations:
            self._known = {key for key in self._known if isinstance(key[0], str)}
        if declared != self._declared or self._relations != relations:
            self.facts = module.facts
        self._declared, self._relations = declared, relations
        self._new.clear()
        self._changed.clear()
        self._before, self._states = self._states, {}
        self._look(module.root)
        self._outer = {op: values for op, values in self._outer.items() if op in self._states}

    def knows(self, op: Operation, check: object) -> bool:
        """Whether an equal operation has passed the check."""
        return self._is_known((check, self._states[op][2]))

    def passed(self, op: Operation, check: object) -> None:
        """Note that the operation, with those inside it, has passed the check."""
        number = self._states[op][2]
        if number is not None:
            self._new.add((check, number))

    def unknown(
        self, ops: Iterable[Operation], check: object, problems: DiagnosticList
    ) -> Iterator[Operation]:
        """The operations, outer before inner, that have not passed the check. Operations for which
        the caller appends no problem pass it."""
        for op in ops:
            if self.knows(op, check):
                continue
            before = len(problems.items)
            yield op
            if op.region is not None:
                yield from self.unknown(op.region.ops, check, problems)
            if len(problems.items) == before:
                self.passed(op, check)

    def knows_type(self, type_: TensorType) -> bool:
        """Whether an equal type has passed its checks."""
        return self._is_known(("type", self._number(type_)))

    def passed_type(self, type_: TensorType) -> None:
        """Note that the type has passed its checks."""
        self._new.add(("type", self._number(type_)))

    def uses(self, op: Operation) -> Iterable[Value]:
        """The values from outside that an operation and those in its region use."""
        return op.operands if op.region is None else self._outer[op]

    def keep(self) -> None:
        """End a verification without errors."""
        self._known |= self._new

    def _is_known(self, key: _Key) -> bool:
        return key in self._known or key in self._new

    # -- numbers -----------------------------------------------------------------------------------

    def _look(self, op: Operation) -> None:
        """Assign numbers to an operation and those inside it; most are unchanged."""
        operands, region = op.operands, op.region
        types = [v.type for v in operands]
        types += [v.type for v in op.results]
        inside: _Key = ()
        same = True
        if region is not None:
            for inner in region.ops:
                if inner not in self._states:  # equal actions share a region
                    self._look(inner)
            same = self._changed.isdisjoint(region.ops)
            types += [v.type for v in region.args]
            inside = (*region.ops, *region.args, *region.returns)
        like = (op.definition, op.symbol, len(operands), *operands, *op.results, *types, *inside)
        before = self._before.get(op)
        if before is not None and same and before[0] == like and before[1] == op.attrs:
            self._states[op] = before
            return
        self._changed.add(op)
        self._states[op] = like, dict(op.attrs), self._number_of(op, types)
        if region is not None:
            used = set(operands).union(*map(self.uses, region.ops))
            self._outer[op] = used.difference(region.args, *(o.results for o in region.ops))

    def _number_of(self, op: Operation, types: list[Type | None]) -> int | None:
        number = self._number
        if None in types:
            return None
        if op.region is not None:
            unknown = any(self._states[inner][2] is None for inner in op.region.ops)
            return None if unknown else number(object())
        values = map(number, op.attrs.values())
        key = (number(op.definition), op.symbol, len(op.operands), *op.attrs, *values)
        key += tuple(map(number, types))
        return self._equal.setdefault(key, len(self._equal))

    def _number(self, thing: object) -> int:
        """A number that equal objects share; cached by id, because hashing types and expressions is
        slow."""
        number = self._ids.get(id(thing))
        if number is None:
            number = self._ids[id(thing)] = self._equal.setdefault(thing, len(self._equal))
            self._alive.append(thing)
        return number


def _declarations(module: Module) -> _Key:
    """The declarations of a module that checks of operations read."""
    mesh = module.mesh
    sizes, loads = plain(mesh.sizes) if mesh else None, list(module.loads)
    return module.phase == "lowered", plain(module.symbols), sizes, loads, module.zigzag
