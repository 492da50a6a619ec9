"""Every model of the library serves, under six strategies each, in one pod and in two: prefill and
decode give the logits of the whole forward."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from stagec.jobs.request.options import JobOptions
from stagec.models import LibraryModel, library, library_text
from tests.configurations import sizes_of, small
from tests.oracle.test_serving_states import ENCODERS, HEARD
from tests.pods import assert_hands_over
from tests.served import assert_serves
from tests.support import EXHAUSTIVE, LONG, TINY, tiny_options

#: What makes no tokens.
OTHERS = {"bert", "vit", "clip", "dit", "flux", "dlrm", "dlrm_tables"}
#: In one pod, and in two.
STRATEGIES: Mapping[str, Mapping[str, Any] | tuple[str, str]] = {
    "tp": {"tp": 2},
    "dp-tp": {"dp": 2, "tp": 2},
    "pp": {"pp": 2, "microbatches": 2},
    "pp-dp": {"pp": 2, "dp": 2, "microbatches": 2},
    "dp4": {"dp": 4},
    "pods-tp": ("tp=2", "dp=2,tp=2"),
    "pods-pp": ("dp=2", "pp=2,microbatches=2"),
}
#: Whole, then token by token; in chunks, then with a draft.
STEPS = {
    "whole": (("prefill", 4), ("decode", 1), ("decode", 1), ("decode", 1), ("decode", 1)),
    "chunks": (("prefill", 3), ("prefill", 3), ("decode", 2)),
}
#: Layers of another number than two.
_LAYERS = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
QUICK = {("llama", "pods-tp"), ("qwen3_next", "pp")}


def kind_of(entry: LibraryModel) -> str:
    """What the text of a model is: its name, or the type of its configuration."""
    if not entry.is_configuration:
        return entry.text_name.removesuffix(".stg")
    config = json.loads(library_text(entry.text_name))
    return str(config.get("model_type") or entry.name.partition("-")[0].partition(".")[0])


KINDS = {kind_of(e): e.name for e in reversed([*library().values()]) if kind_of(e) not in OTHERS}


def job_of(kind: str, folder: Path) -> JobOptions:
    """A tiny job of a kind, whose buffers of experts have room for all tokens."""
    name = KINDS[kind]
    if name in ENCODERS:
        return JobOptions(name, sizes={**HEARD, "B": 8, **ENCODERS[name]})
    room = {"capacity_factor": Fraction(8)}
    first = next((e.name for e in library().values() if kind_of(e) == kind), name)
    if first in TINY:
        routed = "E" in TINY[first]
        return tiny_options(first, sizes={"B": 8}, **(room if routed else {}))
    model_type = _LAYERS.get(kind, kind)
    config = small(model_type)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    routed = any("experts" in key for key in config)
    return JobOptions(str(path), sizes=sizes_of(model_type, 8, 8)).changed(
        **(room if routed else {})
    )


@LONG
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        pytest.param(k, s, marks=[] if (k, s) in QUICK else [EXHAUSTIVE])
        for k in KINDS
        for s in STRATEGIES
    ],
)
def test_every_model_serves(kind: str, strategy: str, tmp_path: Path) -> None:
    job, how = job_of(kind, tmp_path), STRATEGIES[strategy]
    if isinstance(how, tuple):
        assert_hands_over(job, *how, prompt=6, new=2)
        return
    for steps in STEPS.values():
        assert_serves(job.changed(**how), steps)
