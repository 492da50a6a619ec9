"""What a compile held comes back without a look for garbage."""

import gc
import weakref
from typing import Any

import pytest

from stagec.analysis.family import Compiled
from stagec.ir.core import Operation
from stagec.ir.module import Module
from stagec.jobs.builder import JobBuilder
from stagec.jobs.figures import CompiledJob, compiled_of
from stagec.jobs.request.options import JobOptions
from stagec.machines import load_machine

JOBS: dict[str, dict[str, Any]] = {
    "pipeline": {"model": "llama3-8b", "pp": 4, "schedule": "interleaved", "chunks": 2, "zero": 2},
    "recompute": {"model": "llama3-8b", "tp": 2, "sp": True, "recompute": "full", "zero": 3},
    "experts": {"model": "mixtral-8x7b", "dp": 4, "ep": 4, "optimizer": "muon"},
    "decode": {"model": "llama3-8b", "serve": "decode", "batch": 8, "context": 1024},
}


@pytest.mark.parametrize(("name", "figures"), [*((n, True) for n in JOBS), ("pipeline", False)])
def test_what_a_compile_held_comes_back(name: str, figures: bool) -> None:
    _timed(name)  # the texts of the library stay
    gc.collect()
    gc.disable()
    try:
        before = _counted()
        job = _timed(name, figures)
        module = weakref.ref(vars(job.compiled)["_module"])
        kept = _counted() - before
        del job
        assert module() is None
        assert _counted() - before < kept / 10
    finally:
        gc.enable()


def test_who_holds_programs_holds_what_they_are_unrolled_from() -> None:
    job = _timed("pipeline")
    issued = job.compiled.issued(job.values)
    counts = [len(program) for program in issued.programs]
    issued.forget()
    del job
    gc.collect()
    assert [len(program) for program in issued.programs] == counts


def _timed(name: str, figures: bool = True) -> CompiledJob:
    sizes = {} if "serve" in JOBS[name] else {"B": 16}
    builder = JobBuilder(JobOptions(**JOBS[name], sizes=sizes))
    values = dict(builder.module.env)
    if builder.serving is not None:
        values |= builder.serving.values
    compiled: Compiled = compiled_of(builder)
    job = CompiledJob("job", compiled, values, lambda: _timed(name))
    if figures:
        job.figures()
    job.time(load_machine("h100-sxm"))
    return job


def _counted() -> int:
    return sum(isinstance(each, Operation | Module) for each in gc.get_objects())
