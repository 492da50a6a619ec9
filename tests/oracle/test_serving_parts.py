"""Parts of a step of serving in pods of their own: all pods together compute what the step computes
on one device, and a pod decodes with the caches of the one that prefills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.oracle.test_images import SMALL
from tests.oracle.test_parts import ENDS, path
from tests.served_parts import assert_parts_hand_over, assert_parts_serve
from tests.support import EXHAUSTIVE, LONG

#: Strategies of the parts and of main.
ROWS = (
    ("dp=4", {"dp": 2, "tp": 2, "microbatches": 2}),
    ("tp=2,dp=2", {"tp": 4, "sp": True}),
    ("tp=4,sp", {"dp": 2}),
    ("", {"tp": 2, "microbatches": 4}),
    ("pp=2,dp=2", {"pp": 2, "tp": 2, "microbatches": 2}),
)
#: Strategies of the parts, of the pod that prefills and of the one that decodes.
PODS = (
    ("dp=4,microbatches=2", "dp=2,microbatches=2", "tp=2"),
    ("tp=2", "tp=4", "dp=2,tp=2"),
    ("dp=2,microbatches=4", "pp=2,microbatches=4", "tp=2,pp=2,microbatches=2"),
)
NAMES = ("whisper", "qwen2_5_vl", "t5", "mllama")


def cases(rows: tuple[Any, ...]) -> list[Any]:
    """The first strategies of an encoder and of a tower; for `make test-all` all of all."""
    actual: list[Any] = []
    for name in NAMES:
        for number, row in enumerate(rows):
            if name == "t5" and "pp" in row[0]:
                continue  # stages of a pod share a thread, which waits for what its last one sends
            few = number == 0 and name in NAMES[:2]
            marks = () if few else EXHAUSTIVE
            actual.append(pytest.param(name, *row, id=f"{name}-{number}", marks=marks))
    return actual


def sizes_of(name: str) -> dict[str, int]:
    return dict(SMALL[name][1]) if name in SMALL else {}


@pytest.mark.parametrize(("name", "part", "options"), cases(ROWS))
def test_pods_prefill_what_one_device_prefills(
    name: str, part: str, options: Mapping[str, Any]
) -> None:
    parts = [f"{end}: {part}" for end in ENDS[name]]
    assert_parts_serve(path(name), parts, sizes_of(name), 8, **options)


@LONG
@pytest.mark.parametrize(("name", "part", "prefill", "decode"), cases(PODS))
def test_a_pod_decodes_behind_parts(name: str, part: str, prefill: str, decode: str) -> None:
    parts = [f"{end}: {part}" for end in ENDS[name]]
    assert_parts_hand_over(path(name), parts, sizes_of(name), (prefill, decode), (6, 2))
