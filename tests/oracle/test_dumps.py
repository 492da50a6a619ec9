"""The text is the truth: compiling on from the dump of any pass gives the same end (names of values
aside), and the dump of a partitioned step computes what the module in memory computes.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.ir.module import Module
from stagec.jobs.builder import JobBuilder
from stagec.pipeline.instrument import DumpDir
from stagec.pipeline.manager import PassManager
from stagec.text.printer import print_module
from tests.support import (
    DEEPSEEK,
    EXHAUSTIVE,
    GPT,
    LLAMA,
    MIXTRAL,
    PLACE,
    STEP,
    assert_same_text,
    clone,
    inputs_of,
    loaded,
    parse,
    run_numeric,
    tiny_module,
    tiny_options,
)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-all": (LLAMA, {"dp": 2, "tp": 2, "sp": True, "zero": 3, "microbatches": 2}),
    "llama-open": (LLAMA, {"mesh": {"dp": None, "tp": None}, "zero": 1, "ddp_bucket": 64}),
    "gpt": (GPT, {"dp": 2, "tp": 2, "zero": 2, "no_vocab_parallel": True}),
    "mixtral": (MIXTRAL, {"dp": 4, "ep": 2, "tp": 2, "sp": True, "capacity_factor": Fraction(2)}),
    "deepseek-open": (DEEPSEEK, {"mesh": {"ep": None, "tp": None}, "sp": True, "etp": 1}),
    "gpt-stages": (GPT, {"pp": 2, "dp": 2, "zero": 1, "microbatches": 2, "schedule": "zbv"}),
    "llama-stages": (LLAMA, {"pp": 2, "tp": 2, "sp": True, "cp": 2, "microbatches": 2, "zero": 3}),
    "gpt-kept": (GPT, {"tp": 2, "sp": True, "tp_inputs": "save-gathered"}),
}


#: Like another one; those that stay in all runs hold an open mesh, stages, and each third of the
#: dumps.
MORE = ("deepseek-open", "gpt", "gpt-kept", "llama-stages", "mixtral")


def renamed(module: Module) -> str:
    """The text of a module whose values are numbered in the order in which they are made."""
    numbers = count()
    for op in module.walk():
        for value in (*(op.region.args if op.region is not None else ()), *op.results):
            value.name = f"v{next(numbers)}"
    return print_module(module)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=EXHAUSTIVE if n in MORE else ()) for n in CASES]
)
def test_compiling_on_from_any_dump_gives_the_same(name: str, tmp_path: Path) -> None:
    model, options = CASES[name]
    pipeline = loaded().pipeline("train")
    module = JobBuilder(tiny_options(model, **options)).module
    PassManager(pipeline, [DumpDir(tmp_path)]).run(module)
    end = renamed(module)
    dumps = sorted(tmp_path.iterdir())
    done = 0
    for number, dump in enumerate(dumps):
        while number and pipeline.passes[done - 1].name != dump.stem[3:]:
            done += 1  # a pass that changes nothing has no dump
        text = dump.read_text(encoding="utf-8")
        again = parse(text, dump.name)
        assert_same_text(print_module(again), text, dump.name)
        if number % 3 != list(CASES).index(name) % 3:
            continue  # it takes time: each case goes on from every third dump
        PassManager(pipeline.passes[done:]).run(again)
        assert_same_text(renamed(again), end, f"from {dump.name}")


@pytest.mark.parametrize("name", ["llama-all", "gpt", "mixtral"])
def test_a_dump_computes_the_same(name: str) -> None:
    model, options = CASES[name]
    module = tiny_module(model, f"{STEP},{PLACE}", **options)
    inputs = inputs_of(module)
    for x, y in zip(run_numeric(module, inputs), run_numeric(clone(module), inputs), strict=True):
        np.testing.assert_array_equal(x, y)
