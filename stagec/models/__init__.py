"""The model library: texts as package data, with the default values of their symbols; presets of
published runs; stacks."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from stagec.support.source import FileLoc, Loc
from stagec.support.texts import package_text

#: The prefix of the names of texts of the library.
LIBRARY = "<library>/"


def is_shipped(loc: Loc) -> bool:
    """Whether a place is in a text of the library, such as a default of a stack."""
    return isinstance(loc, FileLoc) and loc.file.startswith(LIBRARY)


def library_text(path: str) -> str:
    """A text of the library, by its path within it. Raises `OSError`."""
    return package_text(f"models/{path}")


def blocks() -> tuple[str, ...]:
    """The paths of all texts of blocks, in the form of imports."""
    entries = files("stagec.models").joinpath("blocks").iterdir()
    return tuple(sorted(f"blocks/{f.name}" for f in entries if f.name.endswith(".stg")))


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """A model of the library: the name of its text, or of a configuration that is imported
    (`stagec.importers.library`), the values of its symbols, and its positions, None if the text
    states them."""

    name: str
    title: str
    text_name: str
    values: Mapping[str, int]
    positions: int | None

    @property
    def is_configuration(self) -> bool:
        """Whether the text is imported from a configuration."""
        return self.text_name.endswith(".json")


@dataclass(frozen=True, slots=True)
class Preset:
    """A published run: a model of the library, sizes, and the text of a mesh and a strategy; for a
    server also the options of its step, by their names on the command line."""

    name: str
    title: str
    model: str
    strategy_name: str
    values: Mapping[str, int]
    step: Mapping[str, str | int]

    @property
    def text(self) -> str:
        """The text of the mesh and the strategy."""
        return library_text(f"presets/{self.strategy_name}")


@cache
def presets() -> Mapping[str, Preset]:
    """All presets, by name."""
    catalog = tomllib.loads(library_text("presets.toml"))
    return {
        n: Preset(n, e["title"], e["model"], e["strategy"], e.get("set", {}), e.get("step", {}))
        for n, e in catalog.items()
    }


@cache
def stacks() -> tuple[str, ...]:
    """The names of the included stacks, each with a text `stacks/NAME.stg`; NAME@VERSION is an
    earlier release of NAME."""
    entries = files("stagec.models").joinpath("stacks").iterdir()
    return tuple(sorted(f.name[:-4] for f in entries if f.name.endswith(".stg")))


def stack_release(name: str) -> str:
    """The name among `stacks` that NAME or NAME@VERSION stands for: that of an earlier release if
    there is one of this version, and NAME itself otherwise."""
    return name if name in stacks() else name.partition("@")[0]


@cache
def library() -> Mapping[str, LibraryModel]:
    """All models, by name."""
    catalog = tomllib.loads(library_text("catalog.toml"))
    return {
        n: LibraryModel(n, e["title"], e["text"], e.get("set", {}), e.get("positions"))
        for n, e in catalog.items()
    }
