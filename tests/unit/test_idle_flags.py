"""A flag that changes nothing in the program is said to: every flag, on jobs of every kind."""

from __future__ import annotations

from typing import Any

import pytest

from stagec.ir_spec.strategy.axes import AXES
from stagec.jobs.builder import JobBuilder
from stagec.jobs.legal import idle
from stagec.jobs.request.flags import OF_ONE_MESH
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.support.diagnostics import DiagnosticError
from stagec.text.printer import print_module
from tests.support import EXHAUSTIVE, GPT, LLAMA, LONG, MIXTRAL, TINY

JOBS: dict[str, dict[str, Any]] = {
    "data": {"dp": 2},
    "sharded": {"dp": 2, "zero": 3},
    "tensor": {"tp": 2},
    "stages": {"pp": 2, "tp": 2, "microbatches": 4},
    "sequence": {"cp": 2, "dp": 2, "zero": 1},
}
#: Values that say what holds without them, or how large a call is of which there is one; what is
#: filled up where sizes do not divide, copied where calls go along other dimensions, and cast where
#: elements have few bits; one call where queries
#: and keys have norms over ranks.
SAME = {
    *(("microbatches", 1), ("chunks", 1), ("pad_vocab", 1), ("collective_order", "copied")),
    ("compute_dtype", "bf16"),
}
BY_SIZE = {
    *("ddp_bucket", "own_casts", "fuse_experts", "shard_padding", "grad_flat"),
    "all_reduce_statistics",
}
#: What software makes of the seconds and of the memory of a program, which stays as it is.
SECONDS = {
    *("host_graphs", "all_reduce", "saved_tensors", "first_saved", "prompt_steps", "moe_names"),
    *("step_tokens", "reserve_outputs", "scheduler_poll", "scheduler_gather", "host_scheduler"),
    *("scheduler_balance", "host_prompts", "host_product_bits", "host_waits", "expanding_kernel"),
}


def program(model: str, flags: dict[str, Any]) -> tuple[str, list[str]]:
    """The lowered text of a job without its strategy, and what was said."""
    session = Session()
    sizes = {**TINY[model], "V": 64}  # memory is at its peak in the loss
    options = JobOptions(model).changed(sizes=sizes, explicit=frozenset(flags), **flags)
    builder = JobBuilder(options, session)
    module = builder.lower(verify=False)
    for op in module.ops("stg.strategy"):
        module.root.body.ops.remove(op)
    return print_module(module), [d.message for d in session.diagnostics]


def silent(model: str, given: dict[str, Any]) -> list[str]:
    """The flags that change nothing in a job without a word."""
    text, said = program(model, given)
    actual: list[str] = []
    for flag in OF_ONE_MESH.values():
        for value in flag.others(flag.default):
            stated = flag.name in given or flag.name in AXES or flag.name in BY_SIZE | SECONDS
            if stated or (flag.name, value) in SAME:
                continue
            try:
                other, expected = program(model, given | {flag.name: value})
            except DiagnosticError:
                continue
            if other == text and not set(expected) - set(said):
                actual.append(f"{flag.option} {value}")
    return actual


#: GPT has no fused attention: a ring refuses it, and backward uses nothing that --cp-inputs keeps.
CASES = [(model, job) for model in (LLAMA, GPT, MIXTRAL) for job in JOBS]
SUMS = {"zero": 3, "microbatches": 4}
CASES.remove((GPT, "sequence"))
QUICK = [(LLAMA, "stages"), (MIXTRAL, "sequence")]


@LONG
@pytest.mark.parametrize(
    ("model", "job"),
    [*QUICK, *(pytest.param(*c, marks=EXHAUSTIVE) for c in CASES if c not in QUICK)],
)
def test_a_flag_that_changes_nothing_is_said_to(model: str, job: str) -> None:
    assert silent(model, JOBS[job]) == []


def test_ranks_that_blocks_stay_split_over_are_some_of_those_that_shard() -> None:
    job = JobOptions(LLAMA).changed(zero=3, reshard_ranks=2)
    assert {*idle(job, {}), *idle(job.changed(dp=2), {})} >= {
        "--reshard-ranks has no effect without --dp",
        "--reshard-ranks has no effect: these are all ranks that shard",
    }
    assert not idle(job.changed(dp=4), {})


@pytest.mark.parametrize(
    ("given", "without"),
    [
        ({"zero": 2, "ddp_bucket": 1 << 20}, {"zero": 1, "ddp_bucket": 1 << 20}),
        ({"fuse_caches": True}, {"fuse_caches": True, "serve": "decode"}),
        ({"fuse_caches": True}, {"fuse_products": True}),
        ({"pp": 2, "tp": 2, "sp": True, "scatter_gather": True}, {"pp": 2, "tp": 2, "sp": True}),
        (
            {"zero": 3, "grad_collective": "all-reduce"},
            {"zero": 1, "grad_collective": "all-reduce"},
        ),
        ({"zero": 1, "grad_reduction": "once"}, {"zero": 1, "grad_reduction": "each"}),
        ({"zero": 3, "grad_reduction": "once"}, SUMS | {"grad_reduction": "once"}),
        (SUMS | {"grad_reduction": "staged"}, SUMS | {"pp": 2, "grad_reduction": "staged"}),
    ],
)
def test_what_is_idle_is_known_without_a_compile(
    given: dict[str, Any], without: dict[str, Any]
) -> None:
    """So that a search does not try it."""
    job = JobOptions(LLAMA).changed(dp=2)
    assert idle(job.changed(**given), {})
    assert not idle(job.changed(**without), {})
