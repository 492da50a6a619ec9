"""DLRM with tables that are split by table, by row and by column: the step computes what one device
computes, and what is sent is what the split asks for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stagec.interp.pipeline import run_named
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from tests.support import STEP, TINY_CLICKS, analyse, inputs_of, operations, run_passes, tiny_module

BATCH = "stg.split[B, over = dp]"
#: All ranks look all rows up that they have; what they found is summed up.
ROWS = "stg.split[R, over = dp]\n    stg.gather[B, of = rows]"
#: The model, statements before the split of the batch, and what moves bags in forward.
SPLITS = {
    "by table": ("dlrm-tables", "stg.split[N, over = dp, of = (tables, rows)]", "all_to_all"),
    "by row": ("dlrm", ROWS, "reduce_scatter"),
    "by column": ("dlrm", "stg.split[D, over = dp, of = tables]", "all_to_all"),
    "rows of tables": ("dlrm-tables", ROWS, "reduce_scatter"),
    "replicated": ("dlrm", "", ""),
}


@pytest.mark.parametrize("kind", SPLITS)
def test_a_step_with_split_tables(kind: str, tmp_path: Path) -> None:
    model, statement, moves = SPLITS[kind]
    text = "stg.module @s {\n  stg.mesh @pod[dp = 2]\n  stg.strategy @s[mesh = @pod] {\n"
    file = tmp_path / "strategy.stg"
    file.write_text(f"{text}    {statement}\n    {BATCH}\n  }}\n}}\n")
    plain = tiny_module(model, STEP)
    inputs = inputs_of(plain, 2)
    expected = run_named(plain, plain.env, inputs)
    options = JobOptions(model, strategy=str(file), sizes=TINY_CLICKS[model])
    actual = run_passes(JobBuilder(options).module, f"{STEP},partition,units")
    results = run_named(actual, actual.env, inputs)
    for (name, mine), theirs in zip(results.items(), expected.values(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9, err_msg=name)
    forward = [
        op for op in actual.walk() if op.phase == "forward" and op.results and "over" in op.attrs
    ]
    kinds = {op.name.removeprefix("stg.") for op in forward if op.operands[0].tensor.rank > 1}
    assert moves in kinds or not moves
    (table,) = (p for p in actual.parameters() if p.name == "tables")
    assert any(d.split for d in table.tensor.dims) == bool(statement)
    assert not [op for op in operations(actual, "stg.all_gather") if op.operands[0] is table]


def test_the_published_model() -> None:
    """Parameters and FLOPs of MLPerf's DLRM: 187,767,399 rows of 128; 4,916,992 FLOPs a sample."""
    actual = analyse("dlrm", sizes={"B": 1})
    assert actual["parameters"] == 24_036_595_969
    assert actual["classes"][0]["matmul_flops"]["forward"] == 4_916_992
