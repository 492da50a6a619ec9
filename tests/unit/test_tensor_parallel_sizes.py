"""Tensor parallelism splits the heads, widths and vocabularies of every family."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stagec.importers.importing import import_model
from stagec.importers.registry import BUILT_IN
from stagec.ir_spec.strategy.axes import known_key_heads, tensor_parallel
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


def _gemma(tmp_path: Path, *, heads: int, keys: int, of_global: int) -> Path:
    given: dict[str, Any] = {"num_key_value_heads": keys, "num_global_key_value_heads": of_global}
    given |= {"num_attention_heads": heads, "enable_moe_block": False, "num_hidden_layers": 2}
    given |= {"layer_types": ["sliding_attention", "full_attention"]}
    path = tmp_path / "g.json"
    path.write_text(json.dumps(small("gemma4_text", **given)))
    return path


def test_each_kind_of_layers_splits_its_own_key_heads(tmp_path: Path) -> None:
    """Of 16 ranks 2 split the heads of global layers, 8 those of the others."""
    path = _gemma(tmp_path, heads=16, keys=8, of_global=2)
    printed = stagec("compile", path, "--tp", "16", "--print-strategy")
    assert "some layers (G_global = 2, G = 8)" in printed.err
    for line in (
        "mesh @pod[tp = 2, tpk = 4, tpr = 2]",
        "assume[G_global == tp, G == tp*tpk]",
        "split[G_global, over = tp]",
        "split[G, over = (tp, tpk)]",
        "split[(H, F, V, V_own), over = (tp, tpk, tpr)]",
        "defer[over = (tpk, tpr)]",
    ):
        assert f"  stg.{line}\n" in printed.out


@pytest.mark.parametrize("step", ["", "--context 8", "--context 8 --dcp 4"])
def test_kinds_of_key_heads_compute_the_same(tmp_path: Path, step: str) -> None:
    words = ("--tp", "4", "--check-numerics", "--dry-run", *step.split())
    words += ("--serve", "decode", "--batch", "2") if step else ()
    ran = stagec("compile", _gemma(tmp_path, heads=4, keys=2, of_global=1), *words)
    assert ran.code == 0, ran.err
    assert "4 ranks (tpk 2 x tpr 2)" in ran.out


def test_numbers_of_key_heads() -> None:
    sizes = {"G": 16, "G_global": 4, "G_8": 8, "H": 1, "G_local": None}
    assert list(known_key_heads(sizes).items()) == [("G_global", 4), ("G_8", 8), ("G", 16)]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("gpt2 --pad-vocab 1", "no cached tokens can be split over tp: each of these ranks has"),
        ("mamba2-2.7b", "no cached tokens can be split over tp: there are none"),
    ],
)
@pytest.mark.parametrize("step", ["decode --context 8", "mixed --step decode=4x4,prefill=1x4+0"])
def test_models_without_common_keys_have_no_caches_to_split(
    flags: str, why: str, step: str
) -> None:
    ran = stagec("analyze", *flags.split(), "--tp", "2", "--dcp", "2", "--serve", *step.split())
    assert ran.code == 1
    assert why in ran.err
    assert "help: leave it out (--dcp)" in ran.err


def test_prefill_has_no_axis_for_cached_tokens() -> None:
    words = ("--serve", "prefill", "--tp", "4", "--dcp", "2", "--print-strategy")
    assert "stg.mesh @pod[tp = 4]" in stagec("compile", "deepseek-v2-lite", *words).out


def test_a_table_has_rows_for_tokens_behind_cached_ones() -> None:
    words = ("--serve", "decode", "--set", "L=1,D=8,F=8,V=8,H=2,K=4")
    ran = stagec("compile", "gpt2", *words, "--context", "4", "--check-numerics", "--dry-run")
    assert ran.code == 0, ran.err
