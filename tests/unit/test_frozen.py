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


@pytest.mark.parametrize("kind", [Plain, Decorated])
def test_instances_do_not_change(kind: type[Any]) -> None:
    made = kind()
    for name in ("count", "other"):
        with pytest.raises(FrozenInstanceError):
            setattr(made, name, 5)
    with pytest.raises(FrozenInstanceError):
        del made.count
