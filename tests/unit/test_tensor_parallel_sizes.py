"""Tensor parallelism splits the heads, widths and vocabularies of every family."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stagec.importers.importing import import_model
from stagec.importers.registry import BUILT_IN
from stagec.ir_spec.strategy.axes import fewest_key_heads, tensor_parallel
from stagec.support.source import Source
from tests.configurations import small
from tests.support import stagec

#: Heads and widths that all ranks have: of indexers, of encoders of sounds and poolings that are
#: declared only, of one group of results; tokens of a compressed row; heads whose groups are split.
WHOLE = {*("H_i", "F_a", "G_a", "H_a", "E_a", "G_v", "H_o", "M_sparse", "M_heavy", "H_l")}
NAMES = [name for family in BUILT_IN for name in family.model_types]


@pytest.mark.parametrize("model_type", NAMES)
def test_no_size_of_a_family_stays_whole(model_type: str) -> None:
    names = import_model(Source("c.json", json.dumps(small(model_type))), BUILT_IN).symbols
    sizes = {name for name in names if re.match(r"[HGFMV](_|$)", name)}
    assert sizes - WHOLE == {*tensor_parallel(sizes - WHOLE)}


def test_kinds_of_layers_with_few_key_heads_have_copies(tmp_path: Path) -> None:
    """Of 4 ranks all split 4 heads, and two each have one of 2."""
    path = tmp_path / "c.json"
    keys = {"num_key_value_heads": 4, "num_global_key_value_heads": 2}
    path.write_text(json.dumps(small("gemma4_text", **keys)))
    printed = stagec("compile", path, "--tp", "4", "--print-strategy")
    assert printed.code == 0, printed.err
    assert "stg.mesh @pod[tp = 2, tpr = 2]" in printed.out
    assert "stg.split[G_global, over = tp]" in printed.out
    assert re.search(r"stg.split\[\(H, G, .*\), over = \(tp, tpr\)\]", printed.out)


def test_the_fewest_key_heads() -> None:
    sizes = {"G": 16, "G_global": 4, "G_8": 8, "H": 1, "G_local": None}
    assert fewest_key_heads(sizes) == ("G_global", 4)
    assert fewest_key_heads({"H": 2}) == ("", None)
