"""The model library: texts as package data, with the default values of their symbols."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
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


def library() -> dict[str, LibraryModel]:
    """All models, by name."""
    catalog = tomllib.loads(
        files("stagec.models").joinpath("catalog.toml").read_text(encoding="utf-8")
    )
    return {n: LibraryModel(n, e["title"], e["text"], e["set"]) for n, e in catalog.items()}
