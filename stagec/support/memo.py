"""Methods with cached results."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

Self = TypeVar("Self")
Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def memo_method(
    method: Callable[Concatenate[Self, Given], Answer],
) -> Callable[Concatenate[Self, Given], Answer]:
    """Cache the results of a method in its object. `functools.cache` on a bound method would make
    the object refer to itself, so that only the garbage collector could free it."""
    where = f"_{method.__name__}_answers"

    @wraps(method)
    def answer(self: Self, /, *given: Given.args, **named: Given.kwargs) -> Answer:
        known: dict[Any, Answer] = vars(self).setdefault(where, {})
        key = given, *named.items()
        if key not in known:
            known[key] = method(self, *given, **named)
        return known[key]

    return answer
