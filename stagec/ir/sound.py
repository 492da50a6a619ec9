"""Remembers what was found in order, so that only what a pass has changed is verified again."""

from __future__ import annotations

from stagec.ir.core import Attr, Operation
from stagec.ir.facts import Relation
from stagec.ir.module import Module
from stagec.ir.types import TensorType, Type

_Key = tuple[object, ...]


class Sound:
    """Operations that passed their checks in earlier verifications of one module.

    Whether an operation without a region is in order by itself depends on its definition, its
    attributes, the types of its operands and results, and what its module declares: `OpDef.verify`
    and `OpDef.infer` may read nothing else. One that is the same in all of these is not asked
    again. What depends on its place (visibility, uses, order) is no part of this.
    """

    def __init__(self) -> None:
        self._declared: _Key = ()
        self._relations: set[Relation] = set()
        self._keys: dict[Operation, _Key | None] = {}
        self._numbers: dict[int, tuple[int, object]] = {}
        self._equal: dict[object, int] = {}
        self._known: set[_Key] = set()
        self._found: set[_Key] = set()

    def start(self, module: Module) -> None:
        """A verification begins. Under other declarations nothing is known; with more relations
        more is divisible, so a type is in order still, but an op may need other placements."""
        declared, relations = _declarations(module), {r for r, _ in module.relations}
        if declared != self._declared or not self._relations <= relations:
            self._known.clear()
        elif self._relations != relations:
            self._known = {key for key in self._known if isinstance(key[0], str)}
        self._declared, self._relations = declared, relations
        self._found.clear()
        self._keys.clear()

    def knows(self, op: Operation, check: object) -> bool:
        """Whether the like of this operation has passed the check; if not, it may do so now."""
        if op not in self._keys:
            self._keys[op] = self._key(op)
        key = self._keys[op]
        return key is not None and self._is_known((check, key))

    def knows_type(self, type_: TensorType) -> bool:
        """Whether an equal type has passed its checks; if not, it may do so now."""
        return self._is_known(("type", self._number(type_)))

    def _is_known(self, key: _Key) -> bool:
        if key in self._known:
            return True
        self._found.add(key)
        return False

    def _key(self, op: Operation) -> _Key | None:
        values = [v.type for v in (*op.operands, *op.results)]
        if op.region is not None or None in values:
            return None
        number = self._number
        attrs = [(name, number(value)) for name, value in op.attrs.items()]
        return (op.definition, op.symbol, len(op.operands), *attrs, *map(number, values))

    def _number(self, thing: Attr | Type | None) -> int:
        """The same number for what is equal; the hash of a type or an expression is a long way."""
        found = self._numbers.get(id(thing))
        if found is None:
            number = self._equal.setdefault(thing, len(self._equal))
            found = self._numbers[id(thing)] = number, thing  # while it is held, its id is its own
        return found[0]

    def keep(self) -> None:
        """The verification found nothing wrong."""
        self._known |= self._found


def _declarations(module: Module) -> _Key:
    """What the checks of an operation ask its module for."""
    mesh = module.mesh
    return (
        module.phase == "lowered",
        module.symbols,
        mesh.sizes if mesh else None,
        list(module.loads),
        module.zigzag,
    )
