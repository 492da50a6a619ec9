"""A value of this process that another process builds again."""

from collections.abc import Callable
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Rebuilt(Generic[T]):
    """A value and the function that builds it. A pickle has the function alone, and the process
    that reads it builds the value when it is first asked for."""

    def __init__(self, build: Callable[[], T], *built: T) -> None:
        self._build, self._built = build, built

    def __call__(self) -> T:
        """The value. Raises what the function raises."""
        if not self._built:
            self._built = (self._build(),)
        return self._built[0]

    def __reduce__(self) -> tuple[type[Self], tuple[Callable[[], T]]]:
        return type(self), (self._build,)
