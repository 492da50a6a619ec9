"""Layers of several kinds in one stack: in any order, under any strategy, the step computes what
they compute on one device, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.interp.pipeline import run_named
from stagec.ir.opdef import Array
from tests.layer_kinds import kinds_module
from tests.support import STEP, crossed, inputs_of

PLACED = f"{STEP},partition,stages,units,plan"
TOLERANCE = 1e-9
#: Regular, irregular, the last kind of the text first, one kind alone.
ORDERS: Sequence[str] = (
    "(2*attn, ffn, mix)*2",
    "mix, 2*attn, ffn, mix, attn, 2*ffn",
    "4*ffn, attn, 3*ffn",
    "8*attn",
)
STRATEGIES: Mapping[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sp": True},
    "ring": {"cp": 2, "cp_mode": "ring"},
    "zero-1": {"dp": 2, "zero": 1, "ddp_bucket": 300},
    "zero-3": {"dp": 2, "zero": 3},
    "zero-3-never": {"dp": 2, "zero": 3, "reshard_after_forward": "never"},
    "zero-3-last": {"dp": 2, "zero": 3, "reshard_after_forward": "last", "fsdp_prefetch": 2},
    "full": {"recompute": "full"},
    "every": {"recompute": "selective", "recompute_every": 2, "microbatches": 2},
    "first": {"recompute": "full", "recompute_layers": 3, "tp": 2},
    "pp": {"pp": 2, "microbatches": 4, "dp": 2, "zero": 1},
    "pp-uneven": {"pp": 4, "microbatches": 4, "stage_layers": (1, 3, 0, 4), "tp": 2, "sp": True},
    "pp-never": {"pp": 2, "microbatches": 4, "dp": 2, "zero": 3, "reshard_after_forward": "never"},
    "interleaved": {"pp": 2, "chunks": 2, "microbatches": 4, "schedule": "interleaved"},
    "looped": {"pp": 2, "chunks": 4, "microbatches": 4, "schedule": "looped-bfs"},
    "zb-h1": {"pp": 3, "microbatches": 4, "schedule": "zb-h1", "recompute": "full"},
    "zbv": {"pp": 2, "microbatches": 4, "schedule": "zbv"},
    "dualpipe": {"pp": 2, "microbatches": 4, "schedule": "dualpipe"},
    "dualpipev": {"pp": 2, "microbatches": 4, "schedule": "dualpipev", "dp": 2, "zero": 3},
}


@cache
def _plain(order: str, folder: Path) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs and results of the program on one device."""
    module = kinds_module(folder / "plain.stg", order, STEP)
    inputs = inputs_of(module, 2)
    return inputs, run_named(module, module.env, inputs)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@crossed(order=ORDERS, strategy=STRATEGIES)
def test_any_strategy_computes_the_same(order: str, strategy: str, folder: Path) -> None:
    assert_same(order, folder, STRATEGIES[strategy])


@pytest.mark.parametrize("strategy", ["zero-3", "zero-3-never", "zero-3-last", "pp", "pp-never"])
def test_layers_of_a_kind_may_share_parameters(strategy: str, folder: Path) -> None:
    assert_same("tied, 2*ffn, attn, tied, ffn, 2*tied", folder, STRATEGIES[strategy])


def assert_same(order: str, folder: Path, options: dict[str, Any]) -> None:
    """A sharded step and the plain one give the same loss, updates and states."""
    inputs, expected = _plain(order, folder)
    module = kinds_module(folder / "sharded.stg", order, PLACED, **options)
    found = run_named(module, module.env, inputs)
    assert len(found) == len(expected)
    (loss, *rest), (expected_loss, *_) = found, expected
    np.testing.assert_allclose(found[loss], expected[expected_loss], rtol=TOLERANCE)
    for name in rest:
        theirs = expected[name.removesuffix("_g")]  # gathered updates of ZeRO-1 and 2
        np.testing.assert_allclose(found[name], theirs, TOLERANCE, TOLERANCE, err_msg=name)
