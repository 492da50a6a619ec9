"""Work that ranks of an axis repeat: against the FLOPs of one device, and where it is normal."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from stagec.analysis.repeated import NOTABLE, RepeatedWork
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from tests.support import LONG, analyse
from tests.towers import tower

PHASES = ("forward", "backward")
SPLIT = """stg.module @strategy {
  stg.mesh @pod[cp = 4]
  stg.strategy @s[mesh = @pod] {
    stg.split[S, over = cp]
    stg.gather[S]
  }
}
"""


def flops(entry: dict[str, Any]) -> int:
    (only,) = entry["classes"]
    return sum(only["flops"][phase] for phase in PHASES)


@pytest.fixture
def wan(tmp_path: Path) -> str:
    path = tmp_path / "wan.json"
    path.write_text(json.dumps(tower("WanTransformer3DModel")))
    return str(path)


SIZES = {"B": 2, "S": 256, "X": 512}


@LONG
def test_the_share_is_what_ranks_have_beside_their_parts(wan: str, tmp_path: Path) -> None:
    """Of n ranks each has 1/n of what is split and all of what is not: F = (n f - r (n - 1))."""
    strategy = tmp_path / "text_alone.stg"
    strategy.write_text(SPLIT)
    whole, mine = (flops(analyse(wan, sizes=SIZES, **o)) for o in ({}, {"strategy": str(strategy)}))
    repeated = Fraction(4 * mine - whole, 3)
    builder = JobBuilder(JobOptions(wan, strategy=str(strategy), sizes=SIZES))
    builder.lower()
    shares = {each.axis: each.share for each in builder.repeated.entries}
    assert shares["cp"] == repeated / mine
    assert builder.repeated.shares["cp"] == round(float(shares["cp"]), 6)
    (remark,) = builder.repeated.remarks()
    assert "ranks of cp repeat " in remark.message
    assert "[B, X, " in remark.message


@pytest.mark.distinct
@pytest.mark.parametrize("mode", ["ulysses", "all-gather"])
def test_flags_split_all_sequences(wan: str, mode: str) -> None:
    """Only the embedding of the time, a row for each video, is computed by all ranks."""
    mine, whole = (flops(analyse(wan, sizes=SIZES, **o)) for o in ({"cp": 4, "cp_mode": mode}, {}))
    assert whole / 4 <= mine < whole / 4 * 1.002


NORMAL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama3-8b", {"tp": 8}),
    ("llama3-8b", {"dp": 2, "cp": 2, "tp": 2, "pp": 2, "microbatches": 4}),
    ("qwen3-30b-a3b", {"tp": 8, "dp": 2}),
    ("deepseek-v3", {"tp": 8, "serve": "prefill"}),
    ("deepseek-v3", {"tp": 4, "serve": "decode", "context": 1024, "batch": 16}),
)


@pytest.mark.parametrize(("model", "options"), NORMAL)
def test_normal_jobs_get_no_remark(model: str, options: dict[str, Any]) -> None:
    builder = JobBuilder(JobOptions(model, **options))
    builder.lower("insert-collectives", verify=False)
    assert not list(builder.repeated.remarks())
    assert all(share < NOTABLE for share in builder.repeated.shares.values())


def test_open_sizes_have_no_share() -> None:
    builder = JobBuilder(JobOptions("llama3-8b", tp=8), symbolic=True)
    watched = RepeatedWork()
    builder.lower("insert-collectives", [watched], verify=False)
    assert not watched.shares
    assert not builder.repeated.shares
