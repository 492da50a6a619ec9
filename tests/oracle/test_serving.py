"""A step of serving gives the logits of the whole forward: prefill, then decode, token by token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.served import assert_serves
from tests.support import LLAMA

ONE_BY_ONE = (("prefill", 4), ("decode", 1), ("decode", 1), ("decode", 2))
CHUNKED = (("prefill", 2), ("prefill", 2), ("decode", 1))


@pytest.mark.parametrize("steps", [ONE_BY_ONE, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize(
    "options",
    [{}, {"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 8}],
    ids=lambda o: "-".join(f"{n}{v}" for n, v in o.items()) or "alone",
)
def test_llama_serves(steps: Any, options: dict[str, Any]) -> None:
    assert_serves(LLAMA, steps, **options)
