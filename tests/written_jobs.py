"""Jobs that formats are compared with `stagec analyze` on: models, strategies and schedules, with
tiny sizes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.support import EXHAUSTIVE, TINY, stagec

STRATEGIES = (
    ("--tp", "2"),
    ("--dp", "4", "--zero", "3"),
    ("--tp", "2", "--sp", "--dp", "2", "--zero", "1"),
    ("--tp", "2", "--pp", "2", "--microbatches", "2", "--schedule", "1f1b"),
    ("--pp", "2", "--microbatches", "4", "--schedule", "zb-h1", "--dp", "2"),
    ("--pp", "2", "--microbatches", "4", "--schedule", "dualpipe"),
    ("--pp", "2", "--microbatches", "4", "--schedule", "gpipe", "--tp", "2", "--sp"),
    ("--dp", "2", "--recompute", "full"),
)
MODELS = ("llama3-8b", "gpt3-175b", "mixtral-8x7b", "palm-540b")
_QUICK = {("llama3-8b", STRATEGIES[3]), ("mixtral-8x7b", STRATEGIES[2])}
#: 32 jobs, as parameters `model` and `words`.
JOBS = pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param(m, s, marks=[] if (m, s) in _QUICK else [EXHAUSTIVE])
        for m, s in product(MODELS, STRATEGIES)
    ],
)
#: Calls and bytes of the full buffer, by kind and axes; of messages by `send` and `recv`.
Traffic = Mapping[tuple[str, str], tuple[int, int]]


def tiny(model: str, *words: str, **more: int) -> tuple[str, ...]:
    """The words of a tiny job."""
    sizes = ",".join(f"{k}={v}" for k, v in {**TINY[model], **more}.items())
    return model, "--set", sizes, *words


@cache
def _analyzed(words: Sequence[str]) -> dict[str, Any]:
    done = stagec("analyze", *words, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def classes(words: Sequence[str]) -> list[dict[str, Any]]:
    """What `stagec analyze` says of each class of a job."""
    found: list[dict[str, Any]] = _analyzed(tuple(words))["classes"]
    return found


def flops_of(each: Mapping[str, Any]) -> int:
    """FLOPs of a rank of a class."""
    return sum(each["flops"].values())


def traffic_of(each: Mapping[str, Any]) -> Traffic:
    """The traffic of a rank of a class."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for row in each["collectives"]:
        found.setdefault((row["op"], "+".join(row["over"])), Counter()).update(
            calls=row["count"], bytes=row["bytes"]
        )
    for row in each["p2p"]:
        found.setdefault((row["dir"], ""), Counter()).update(calls=row["count"], bytes=row["bytes"])
    return {key: (v["calls"], v["bytes"]) for key, v in found.items()}
