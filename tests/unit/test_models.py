"""The model library: the catalog and the texts agree.

The tests go over all models, so that one that is added later is tested too.
"""

from __future__ import annotations

from importlib.resources import files

import pytest

from stagec.importers.library import model_source
from stagec.models import LibraryModel, library
from tests.support import DISTINCT, TINY, TINY_CLICKS, parse, run_passes

pytestmark = DISTINCT

BATCH = "B"  # given by a job, not by a model


def test_the_catalog_names_every_text_and_no_other() -> None:
    folder = files("stagec.models")
    texts = {f.name for f in folder.iterdir() if f.name.endswith(".stg")}
    configs = folder.joinpath("configs").iterdir()
    texts |= {f"configs/{f.name}" for f in configs if f.name.endswith(".json")}
    assert {model.text_name for model in library().values()} == texts


def test_every_text_runs_on_tiny_sizes() -> None:
    """`tests/oracle/test_model_gradients.py` goes over `TINY`; `tests/oracle/test_imported.py` over
    the families of configurations."""
    assert {library()[name].text_name for name in (*TINY, *TINY_CLICKS)} == {
        model.text_name for model in library().values() if not model.is_configuration
    }


@pytest.mark.long
@pytest.mark.parametrize("model", library().values(), ids=lambda m: m.name)
def test_sizes_are_those_of_the_text(model: LibraryModel) -> None:
    """The catalog sizes symbols that there are, and leaves none but the batch open."""
    source = model_source(model)
    module = parse(source.text, source.name)
    run_passes(module, "inline")
    assert model.values.keys() <= set(module.symbols) - {BATCH}
    assert set(module.symbols) - module.env.keys() - model.values.keys() == {BATCH}
    assert module.parameters(), "it is a model to train"
