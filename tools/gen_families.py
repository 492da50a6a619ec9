"""docs/reference/families.md: the families whose configurations are read, from their readers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from stagec.importers.importing import NOT_MODELED
from stagec.importers.reading.keys import BEGINNINGS, ENDINGS, NO_EFFECT, OFF
from stagec.importers.registry import BUILT_IN
from tools.markup import page

_INTRO = (
    "The families whose configurations `stagec import` reads: the values of `model_type`, and what "
    "distinguishes a family from Llama. The name of a family leads to its reader, which asks for "
    "the keys of the family; a key that it does not ask for is an error that names it. "
    "[models.md](../models.md) says how an import works."
)


def families_page() -> str:
    """The page."""
    return page("Families", _INTRO, _body())


def _body() -> Iterator[str]:
    yield "| family | `model_type` | features |"
    yield "|---|---|---|"
    for family in sorted(BUILT_IN, key=lambda f: f.name.lower()):
        names = _listed((*family.model_types, *family.marks))
        file = f"../../{family.read.__module__.replace('.', '/')}.py"
        yield f"| [{family.name}]({file}) | {names} | {family.features} |"
    yield from ("", "## Not modeled", "")
    yield "These model types are refused, with what of them has no operation:"
    yield from ("", "| `model_type` | what is not modeled |", "|---|---|")
    yield from (f"| `{name}` | {reason} |" for name, reason in sorted(NOT_MODELED.items()))
    yield from ("", "## Keys without effect", "")
    yield "Any family may have these; they do not change what a training step computes:"
    yield from ("", _listed(sorted(NO_EFFECT)) + ".", "")
    begin = " or ".join(f"`{each}`" for each in BEGINNINGS)
    yield f"So have keys that begin with {begin}, and those that end in one of these:"
    yield from ("", _listed(ENDINGS) + ".", "")
    yield from ("## Features that are off", "")
    yield "Families that do not ask for one of these keys accept these values, and null:"
    yield from ("", "| key | values |", "|---|---|")
    for key, values in OFF.items():
        yield f"| `{key}` | {_listed(json.dumps(v) for v in values) or '`null`'} |"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
