"""Models with scans, convolutions, shifts, latents and indexers serve: prefill, then decode, give
the logits of the whole forward."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.configurations import SCANS, small
from tests.served import assert_serves
from tests.support import DEEPSEEK, DEEPSEEK_V2, crossed

#: Whole, then token by token; in chunks that lie across those of the scans, then with drafts.
STEPS = {
    "tokens": (("prefill", 3), ("decode", 1), ("decode", 1), ("decode", 1)),
    "chunks": (("prefill", 2), ("prefill", 3), ("decode", 2), ("decode", 1)),
}
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa")
STRATEGIES: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 2},
    {"dp": 2},
    {"dp": 2, "tp": 2},
    {"tp": 4},
    {"dp": 4},
    {"dp": 4, "tp": 2},
)
#: One row for each expert and sequence, also of a single token.
EXPERTS = {"E": 2, "T": 2}


@cache
def path_of(family: str) -> str:
    path = Path(mkdtemp(prefix="stagec-")) / "config.json"
    path.write_text(json.dumps(small(family)))
    return str(path)


def sizes_of(family: str) -> dict[str, int]:
    config = small(family)
    sparse = any("experts" in key for key in config)
    return {"B": 4, **(EXPERTS if sparse else {})}


def named(options: dict[str, Any]) -> str:
    return "-".join(f"{n}{v}" for n, v in options.items()) or "alone"


@crossed(family=[*SCANS, *LATENT], steps=list(STEPS), strategy=list(range(len(STRATEGIES))))
def test_a_family_serves(family: str, steps: str, strategy: int) -> None:
    options = STRATEGIES[strategy]
    assert_serves(path_of(family), STEPS[steps], sizes=sizes_of(family), **options)


@pytest.mark.parametrize("model", [DEEPSEEK, DEEPSEEK_V2])
def test_deepseek_serves(model: str) -> None:
    assert_serves(model, STEPS["tokens"], sizes=EXPERTS)
