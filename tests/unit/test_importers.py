"""Texts from configurations: their figures are those of the models, to the unit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagec.driver.configurations import import_configuration
from stagec.importers.registry import BUILT_IN
from tests.support import analyse

DATA = Path(__file__).parents[1] / "data"
FIGURES: dict[str, Any] = json.loads((DATA / "models.json").read_text())
CONFIGS = {path.stem: path for path in sorted((DATA / "configs").glob("*.json"))}
KNOWN = {name for family in BUILT_IN for name in (*family.model_types, *family.marks)}


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CONFIGS[name].read_text())
    return found


READ = [n for n in CONFIGS if (_read(n).get("model_type") or _read(n)["_class_name"]) in KNOWN]


@pytest.mark.parametrize("name", READ)
def test_figures_are_those_of_the_model(name: str) -> None:
    """Parameters, and forward FLOPs of products with masks ignored, as PyTorch counts them."""
    expected = FIGURES[name]
    length = expected["flops_fwd"].get("S", 4096)
    found = analyse(str(CONFIGS[name]), sizes={"B": 1, "S": length})
    (stage,) = found["classes"]
    assert found["parameters"] == expected["params"]
    assert stage["matmul_flops"]["forward"] == expected["flops_fwd"]["total_dense"]


@pytest.mark.parametrize("name", READ)
def test_a_second_import_of_a_file_is_the_same_text(name: str) -> None:
    assert (
        import_configuration(str(CONFIGS[name])).text
        == import_configuration(str(CONFIGS[name])).text
    )
