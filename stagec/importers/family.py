"""Families of models: the readers of each `model_type`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, TypeAlias

from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.importers.reading.config import Config
    from stagec.importers.writing.text import ModelText

Reader: TypeAlias = "Callable[[Config], ModelText]"


@dataclass(frozen=True)
class ModelFamily:
    """A group of models with one reader.

    `model_types` are the values of the key `model_type`; for files without it, `marks` are values
    of the key `_class_name`. `features` is a line for the table of docs/models.md. The reader reads
    every key of the configuration on which the computation depends. `read_images` is the reader of
    a text with images in the step.
    """

    name: str
    model_types: tuple[str, ...]
    read: Reader
    features: str = ""
    marks: tuple[str, ...] = ()
    read_images: Reader | None = None


#: The families that `reads` declared, by the module of the reader.
_DECLARED: defaultdict[str, list[ModelFamily]] = defaultdict(list)


def reads(
    name: str,
    *model_types: str,
    features: str,
    marks: tuple[str, ...] = (),
    read_images: Reader | None = None,
) -> Callable[[Reader], Reader]:
    """A decorator that declares the reader of a built-in family, with the fields of
    `ModelFamily`."""

    def declare(read: Reader) -> Reader:
        @wraps(read)
        def named(config: Config) -> ModelText:
            config.family = name  # also where another family reads its language model
            return read(config)

        family = ModelFamily(name, model_types, named, features, marks, read_images)
        _DECLARED[read.__module__].append(family)
        return named

    return declare


def declared_in(module: str) -> list[ModelFamily]:
    """The families whose readers a module declared, in the order of the module."""
    return _DECLARED[module]


def known_families(families: Iterable[ModelFamily]) -> dict[str, ModelFamily]:
    """The families by their model types and class names. Raises `DiagnosticError` for a name of two
    families."""
    known: dict[str, ModelFamily] = {}
    for family in families:
        for name in (*family.model_types, *family.marks):
            if name in known:
                raise error(
                    f"families '{known[name].name}' and '{family.name}' both read '{name}'",
                    remedy="remove it from one of them",
                )
            known[name] = family
    return known
