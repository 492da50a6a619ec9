"""The model library: texts as package data, with the default values of their symbols; presets of
published runs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """A model of the library: the name of its text and the values of its symbols."""

    name: str
    title: str
    text_name: str
    values: Mapping[str, int]

    @property
    def text(self) -> str:
        """The STG text, with the text's own defaults."""
        return files("stagec.models").joinpath(self.text_name).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Preset:
    """A published run: a model of the library, sizes, and the text of a mesh and a strategy."""

    name: str
    title: str
    model: str
    strategy_name: str
    values: Mapping[str, int]

    @property
    def text(self) -> str:
        """The text of the mesh and the strategy."""
        folder = files("stagec.models").joinpath("presets")
        return folder.joinpath(self.strategy_name).read_text(encoding="utf-8")


@cache
def presets() -> Mapping[str, Preset]:
    """All presets, by name."""
    catalog = tomllib.loads(
        files("stagec.models").joinpath("presets.toml").read_text(encoding="utf-8")
    )
    return {
        n: Preset(n, e["title"], e["model"], e["strategy"], e["set"]) for n, e in catalog.items()
    }


@cache
def library() -> Mapping[str, LibraryModel]:
    """All models, by name."""
    catalog = tomllib.loads(
        files("stagec.models").joinpath("catalog.toml").read_text(encoding="utf-8")
    )
    return {n: LibraryModel(n, e["title"], e["text"], e["set"]) for n, e in catalog.items()}
