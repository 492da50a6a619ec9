"""A draft model in a pod of its own, or on the ranks of its model: what it drafts, and what the
model makes of it."""

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
from tests.support import EXHAUSTIVE, LLAMA, LONG, tiny_options

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


#: On the same ranks: the axes of the model, whole copies, and axes of experts beside none.
SHARED: Sequence[tuple[Mapping[str, Any], str]] = (
    ({"dp": 2, "tp": 2}, ""),
    ({"tp": 4}, "tp=1"),
    ({"dp": 2, "tp": 2}, "tp=1"),
    ({"cp": 2, "tp": 2}, ""),
    ({"mesh": {"tp": 2, "dp": 2}}, "tp=1"),
)


@LONG
@pytest.mark.parametrize(("options", "flags"), [*each_first(*SHARED)])
def test_drafts_are_verified_on_the_same_ranks(options: Mapping[str, Any], flags: str) -> None:
    """They are those of pods of their own, as the same words judge both."""
    draft = tiny_options(LLAMA, sizes={"L": 1, "D": 4, "F": 8})
    assert_drafts(tiny_options(LLAMA), draft, options, flags, on_model=True)


#: Windows, latents, selected keys, experts, states, biases of distances, encoders.
FAMILIES = (
    "gemma3_text deepseek_v3 deepseek_v32 gpt_oss qwen3_next mamba2 rwkv7 recurrent_gemma lfm2 "
    "gpt2 bloom t5 whisper"
)


@LONG
@pytest.mark.parametrize(
    ("options", "flags", "on_model"),
    [*each_first(({}, "tp=2", False), ({}, "", False), ({"tp": 2}, "", True))],
)
@pytest.mark.parametrize("model_type", [*each_first(*((name,) for name in FAMILIES.split()))])
def test_families_draft(
    model_type: str, options: Mapping[str, Any], flags: str, on_model: bool, tmp_path: Path
) -> None:
    given = {**small(model_type), "vocab_size": 16}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    routed = any("experts" in key for key in given)
    flags = ",".join(filter(None, (flags, "capacity-factor=16" if routed else "")))
    draft = JobOptions(str(path), sizes=sizes_of(model_type, 8, 8))
    draft = draft.changed(capacity_factor=Fraction(16)) if routed else draft
    past = 8 if model_type == "gemma3_text" else 4
    assert_drafts(tiny_options(LLAMA), draft, options, flags, past=past, on_model=on_model)
