"""A base class whose subclasses are frozen dataclasses."""

from dataclasses import Field, FrozenInstanceError, dataclass, field
from typing import Any, dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Frozen:
    """Makes each subclass a frozen dataclass without a decorator: annotated names except
    `ClassVar`s are its fields. `@dataclass(frozen=True)` on a subclass is allowed, since each
    `field(...)` is restored. A subclass with an `__init__` of its own may have attributes that are
    not fields."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        written: dict[str, Any] = dict(vars(cls))
        dataclass(frozen=True)(cls)
        del cls.__setattr__, cls.__delattr__  # the methods below do the same
        for name, value in written.items():
            if type(value) is Field:
                setattr(cls, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        self._check(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._check(name)
        super().__delattr__(name)

    def _check(self, name: str) -> None:
        if name in vars(type(self))["__dataclass_fields__"]:
            raise FrozenInstanceError(f"cannot change field {name!r}")
