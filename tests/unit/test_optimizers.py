"""State and temporaries of optimizers, in bytes of two layers of Llama 3.1 8B."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import stagec

#: Parameters: embedding and head, each layer's matrices, and vectors of 4,096.
TABLES, LAYER, VECTORS = 2 * 128_256 * 4096, 218_103_808, 5 * 4096
PARAMETERS = TABLES + 2 * LAYER + VECTORS
#: A small batch, so that the update is the worst moment.
SIZES = ("--set", "L=2,B=1,S=256")
FREE = ("--stack", "huggingface")


def memory(*flags: str) -> dict[str, Any]:
    """The class of the only rank."""
    said = json.loads(stagec("memory", "llama3-8b", *SIZES, *FREE, *flags, "--json").out)
    actual: dict[str, Any] = said["classes"][0]
    return actual


def optimizer(*flags: str) -> int:
    actual: int = memory(*flags)["moments"]["after_update"]["by"]["optimizer"]
    return actual


@pytest.mark.distinct
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("adamw",), 4 * PARAMETERS),
        (("sgd",), 0),
        (("sgd", "--sgd-momentum"), 2 * PARAMETERS),
        (("lion",), 2 * PARAMETERS),
        # one byte for each moment, one fp32 scale for each block of 256 of them
        (("adam8bit", "--table-moments", "blocks"), 2 * PARAMETERS + 2 * 4 * PARAMETERS // 256),
        # of the table of words two of fp32
        (("adam8bit",), 4 * TABLES + 2 * (PARAMETERS - TABLES // 2) * (1 + 4 / 256)),
        (("muon",), 2 * 2 * LAYER + 4 * (TABLES + VECTORS)),
    ],
    ids=str,
)
def test_bytes_of_state(flags: tuple[str, ...], expected: int) -> None:
    assert optimizer("--optimizer", *flags) == expected


def test_gradient_of_a_head_that_forward_makes() -> None:
    """It is an activation until backward, and a gradient until the step ends."""
    moments, stock = memory("--loss", "linear")["moments"], memory()["moments"]
    assert not moments["after_forward"]["by"].get("gradients")
    assert moments["after_update"]["by"]["gradients"] == stock["after_update"]["by"]["gradients"]


def test_adafactor_keeps_rows_and_columns() -> None:
    """Of q, k, v, o, gate, up and down of each layer, of embedding and head; vectors whole."""
    layer = (4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096) + 3 * (4096 + 14336)
    assert optimizer("--optimizer", "adafactor") == 4 * (2 * layer + 2 * (128_256 + 4096) + VECTORS)


def test_temporaries_of_forms() -> None:
    """foreach: one more tensor for each of the parameters; for-loop: two of the largest one;
    in-backward: of all gradients never more than those of a layer or of a table."""
    fused, foreach, loop, inside = (
        memory("--optimizer-form", form) for form in ("fused", "foreach", "for-loop", "in-backward")
    )
    after = fused["moments"]["after_update"]["total"]
    assert foreach["peak"] - after == 2 * PARAMETERS
    assert loop["peak"] - after - 4 == 2 * 2 * 128_256 * 4096  # the factor that clips
    assert inside["peak"] < fused["peak"] - 2 * (PARAMETERS - TABLES // 2 - LAYER)
    assert not inside["moments"]["after_update"]["by"].get("gradients")


def test_newton_schulz_has_the_products_of_five_iterations() -> None:
    """Of a matrix of n by m, n <= m: five times 4 n^2 m + 2 n^3."""
    n, squares, keys, wide = 4096, 2, (1024, 2), (14336, 3)
    each = squares * 6 * n**3
    each += keys[1] * (4 * keys[0] ** 2 * n + 2 * keys[0] ** 3)
    each += wide[1] * (4 * n**2 * wide[0] + 2 * n**3)
    said = json.loads(stagec("analyze", "llama3-8b", *SIZES, "--optimizer", "muon", "--json").out)
    actual = said["classes"][0]["flops"]["optimizer"]
    assert 0 <= actual - 2 * 5 * each < 30 * PARAMETERS
