"""Layers of several kinds in one stack: in any order, under any strategy, the step computes what
they compute on one device, one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.interp.pipeline import run_named
from stagec.ir.opdef import Array
from tests.layer_kinds import (
    KINDS,
    ORDERS,
    SIZES,
    STRATEGIES,
    kinds_module,
    order_of,
    separate_text,
)
from tests.support import STEP, crossed, inputs_of, parse, run_passes

PLACED = f"{STEP},partition,stages,units,plan"
TOLERANCE = 1e-9


@cache
def _plain(order: str, folder: Path) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs and results of the program on one device."""
    module = kinds_module(folder / "plain.stg", order, STEP)
    inputs = inputs_of(module, 2)
    return inputs, run_named(module, module.env, inputs)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@pytest.mark.parametrize("order", [*ORDERS, "ffn, mix, attn", "mix, 2*(attn, 2*ffn)"])
def test_layers_run_in_the_order_that_is_stated(order: str, folder: Path) -> None:
    """Each layer as a repeat of its own: loss, updated parameters and states are the same."""
    inputs, actual = _plain(order, folder)
    separate = parse(separate_text(order))
    separate.set_values(SIZES)
    separate = run_passes(separate, STEP)
    numbered = list(enumerate(order_of(order).numbered))

    def split(values: Mapping[str, Array]) -> dict[str, Array]:
        """What the layers of a kind have, layer by layer, by the names of the separate ones."""
        parts: dict[str, Array] = {}
        for name, value in values.items():
            kind = next((k for k in KINDS if f"%{_base(name)}:" in KINDS[k][0]), None)
            base, rest = _base(name), name.removeprefix(_base(name))
            for place, (other, number) in numbered if kind else ():
                if other == kind:
                    parts[f"{base}_{place}{rest}"] = value[number : number + 1]
            if kind is None:
                parts[name] = value
        return parts

    expected = run_named(separate, separate.env, split(inputs))
    assert_all_close(split(actual), expected)


def _base(name: str) -> str:
    """The parameter that a state or an update is of."""
    return re.sub(r"(_new|_m|_v|_master)+$", "", name)


def assert_all_close(actual: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        np.testing.assert_allclose(value, expected[name], TOLERANCE, TOLERANCE, err_msg=name)


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
    actual = run_named(module, module.env, inputs)
    assert len(actual) == len(expected)
    (loss, *rest), (expected_loss, *_) = actual, expected
    np.testing.assert_allclose(actual[loss], expected[expected_loss], rtol=TOLERANCE)
    for name in rest:
        theirs = expected[name.removesuffix("_g")]  # gathered updates of ZeRO-1 and 2
        np.testing.assert_allclose(actual[name], theirs, TOLERANCE, TOLERANCE, err_msg=name)
