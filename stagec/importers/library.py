"""Texts of the model library: stored ones, and those imported from configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stagec.models import LIBRARY, LibraryModel, library_text
from stagec.support.source import Source

if TYPE_CHECKING:
    from stagec.importers.writing.text import ModelText

_REPEAT = re.compile(r"^ *(?:%[^=\n]*= )?stg\.repeat[^\[\n]*\[count = (\w+)", re.MULTILINE)


def model_source(model: LibraryModel) -> Source:
    """The STG text of a model of the library, with the defaults of the text."""
    if model.is_configuration:
        return Source(f"{LIBRARY}{model.name}.stg", _imported(model).text())
    return Source(LIBRARY + model.text_name, library_text(model.text_name))


def model_sizes(model: LibraryModel) -> Mapping[str, int]:
    """The values of the symbols of a model of the library."""
    if not model.is_configuration:
        return model.values
    symbols = _imported(model).used_symbols.values()
    return {s.name: s.value for s in symbols if s.value is not None} | dict(model.values)


def model_layers(model: LibraryModel) -> int:
    """The number of layers of all kinds in a model of the library, by the repeats of its text; 0
    without repeats."""
    sizes = model_sizes(model)
    counts = _REPEAT.findall(model_source(model).text)
    return sum(int(count) if count.isdigit() else sizes[count] for count in counts)


def _imported(model: LibraryModel) -> ModelText:
    from stagec.importers.importing import import_model  # lazily: it imports forty modules
    from stagec.importers.registry import BUILT_IN

    source = Source(f"{model.name}.json", library_text(model.text_name))
    return import_model(source, BUILT_IN)
