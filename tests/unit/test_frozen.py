"""Subclasses of `Frozen` are frozen dataclasses, with the decorator of dataclasses or without."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field, fields
from typing import Any, ClassVar

import pytest

from stagec.support.frozen import Frozen


class Plain(Frozen):
    """Without the decorator."""

    kind: ClassVar[str] = "plain"
    count: int = field(default=3, metadata={"help": "how many"})
    names: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Decorated(Frozen):
    """With it."""

    count: int = field(default=3, metadata={"help": "how many"})
    names: list[str] = field(default_factory=list[str])


@pytest.mark.parametrize("kind", [Plain, Decorated])
def test_fields_are_those_that_are_annotated(kind: type[Plain | Decorated]) -> None:
    made = kind(4)
    assert (made.count, made.names, kind().count) == (4, [], 3)
    assert [f.metadata.get("help") for f in fields(kind)] == ["how many", None]
    assert kind(4) == made != kind(5)
    assert repr(made).endswith("(count=4, names=[])")


class Stateful(Frozen):
    """With what is no field."""

    count: int

    def __init__(self, count: int) -> None:
        object.__setattr__(self, "count", count)
        self._seen = [count]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("kind", [Plain, Decorated, Stateful])
def test_fields_do_not_change(kind: type[Any]) -> None:
    made = kind(4)
    with pytest.raises(FrozenInstanceError):
        made.count = 5
    with pytest.raises(FrozenInstanceError):
        del made.count
    assert made.count == 4
