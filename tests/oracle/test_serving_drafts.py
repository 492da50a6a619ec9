"""A draft model in a pod of its own: what it drafts, and what the other pod makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from stagec.jobs.request.options import JobOptions
from tests.configurations import sizes_of, small
from tests.drafts import assert_drafts
from tests.support import EXHAUSTIVE, LLAMA, tiny_options

#: The options of the pod that verifies, and the flags of the one that drafts.
ROWS: Sequence[tuple[Mapping[str, Any], str]] = (
    ({"tp": 4}, "tp=2"),
    ({"dp": 2, "tp": 2}, "dp=4"),
    ({}, ""),
    ({"tp": 2}, "dp=2,tp=2"),
    ({"dp": 4}, "tp=4"),
    ({"tp": 2, "microbatches": 2}, "dp=2,microbatches=2"),
    ({"pp": 2, "tp": 2, "microbatches": 1}, "tp=2"),
    ({"cp": 2, "tp": 2}, "tp=2"),
)


def each_first(*cases: tuple[Any, ...]) -> Iterator[Any]:
    """The first of some cases by itself; the others are for `make test-all`."""
    for number, case in enumerate(cases):
        yield pytest.param(*case, marks=EXHAUSTIVE if number else ())


@pytest.mark.parametrize(("options", "flags"), [*each_first(*ROWS)])
def test_drafts_are_verified(options: Mapping[str, Any], flags: str) -> None:
    draft = tiny_options(LLAMA, sizes={"L": 1, "D": 4, "F": 8})
    assert_drafts(tiny_options(LLAMA), draft, options, flags)


#: Windows, latents, selected keys, experts, states, biases of distances, encoders.
FAMILIES = (
    "gemma3_text deepseek_v3 deepseek_v32 gpt_oss qwen3_next mamba2 rwkv7 recurrent_gemma lfm2 "
    "gpt2 bloom t5 whisper"
)


@pytest.mark.parametrize("flags", [*each_first(("tp=2",), ("",))])
@pytest.mark.parametrize("model_type", [*each_first(*((name,) for name in FAMILIES.split()))])
def test_families_draft(model_type: str, flags: str, tmp_path: Path) -> None:
    given = {**small(model_type), "vocab_size": 16}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    routed = any("experts" in key for key in given)
    flags = ",".join(filter(None, (flags, "capacity-factor=16" if routed else "")))
    draft = JobOptions(str(path), sizes=sizes_of(model_type, 8, 8))
    draft = draft.changed(capacity_factor=Fraction(16)) if routed else draft
    assert_drafts(
        tiny_options(LLAMA), draft, {}, flags, past=8 if model_type == "gemma3_text" else 4
    )
