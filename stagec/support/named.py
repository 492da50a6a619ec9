"""Objects that users choose by name: schedules, formats, batching policies, built in or from
plug-ins."""

from collections.abc import Container, Iterable, Mapping
from typing import ClassVar, Protocol, TypeVar

from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean


class HasName(Protocol):
    """A class with the name that users write."""

    name: ClassVar[str]


N = TypeVar("N", bound=HasName)
T = TypeVar("T")


def by_name(kinds: str, *groups: Iterable[N], taken: Container[str] = ()) -> dict[str, N]:
    """All objects of some kind by their names, in order; `kinds` is the plural of the kind for
    messages. Raises `DiagnosticError` for a name that is used twice or `taken`."""
    named: dict[str, N] = {}
    for group in groups:
        for each in group:
            if each.name in named or each.name in taken:
                raise error(
                    f"two {kinds} have the name '{each.name}'",
                    remedy="give the new one another name",
                )
            named[each.name] = each
    return named


def find(kind: str, name: str, known: Mapping[str, T], more: str = "") -> T:
    """The object with this name. Raises `DiagnosticError` with the nearest name if there is none,
    or with all names followed by `more`."""
    if name not in known:
        raise error(
            f"no {kind} '{name}'",
            remedy=did_you_mean(name, known) or f"choose among {', '.join(known)}{more}",
        )
    return known[name]
