"""Classes that are frozen dataclasses because of what they derive from."""

from __future__ import annotations

from dataclasses import Field, FrozenInstanceError, dataclass, field
from typing import Never, dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Frozen:
    """Base of classes whose subclasses are frozen dataclasses: the names that they annotate, but
    for `ClassVar`s, are their fields, without a decorator. `@dataclass(frozen=True)` may stand over
    them all the same: it finds each `field(...)` as it was written."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        written = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        dataclass(frozen=True)(cls)
        del cls.__setattr__, cls.__delattr__  # those below do the same
        for name, value in written.items():
            setattr(cls, name, value)

    def __setattr__(self, name: str, value: object) -> Never:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> Never:
        raise FrozenInstanceError(f"cannot delete field {name!r}")
