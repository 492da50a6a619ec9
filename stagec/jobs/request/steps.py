"""The options of a job of several steps of serving: `--steps`, `--requests` and related ones."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from stagec.ir.serving_step import MIXED
from stagec.ir_spec.strategy.scheduler import BUDGET
from stagec.jobs.request.option import AnyText, CommandOption, Kind, Whole, rare_option
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.jobs.request.options import JobOptions

#: The default of the sequences that a server runs at once (vllm/engine/arg_utils.py).
SEQUENCES = 256
#: Tokens of a block of its cache (vLLM's default on GPUs).
BLOCK = 16
#: The default time of a step in nanoseconds.
TICK = 10**7
#: The most steps of a job.
MAX_STEPS = 1_000_000
_COUNT = Whole(1)


class Blocks(Kind[int]):
    """A number of blocks, or `all`, which is 0: as many as are needed."""

    name = "N|all"
    annotated = "int | str"

    def read(self, text: str) -> int:
        """The number."""
        return 0 if text == "all" else _COUNT.read(text)

    def text(self, value: Any) -> str:
        return str(value) if value else "all"


class Milliseconds(Kind[int]):
    """A time in milliseconds, as integer nanoseconds."""

    name = "MS"
    annotated = "float"

    def read(self, text: str) -> int:
        """The nanoseconds."""
        try:
            milliseconds = Decimal(text) if len(text) <= 20 else Decimal(0)
        except InvalidOperation:
            milliseconds = Decimal(0)
        if not milliseconds.is_finite() or not Decimal("1e-6") <= milliseconds <= Decimal(10**9):
            raise ValueError(f"'{text:.40}' is not a time in milliseconds, such as 10")
        return round(milliseconds * 10**6)

    def text(self, value: Any) -> str:
        return f"{Decimal(value) / 10**6:f}"


#: The options of several steps.
STEPS = (
    CommandOption(
        "steps",
        Whole(1, MAX_STEPS),
        "With --serve: the number of steps, one after the other (with --requests: at most).",
    ),
    CommandOption(
        "requests",
        AnyText(),
        "With --serve mixed: the requests of a server, as a CSV or JSONL file of arrivals, "
        "prompts and outputs, or as poisson:rate=4,count=100,prompt=512,output=64..256,seed=7. "
        "Groups of ranks with requests of their own get them round robin.",
        metavar="FILE|poisson:...",
    ),
    rare_option(
        "policy",
        AnyText(),
        "Which requests are in a step: fcfs (default), or one of a plug-in. --chunk N bounds "
        f"the tokens of a step (default: --step-tokens, {BUDGET}), --batch N its sequences "
        f"(default {SEQUENCES}).",
        "fcfs",
        metavar="NAME",
    ),
    rare_option(
        "cache_blocks",
        Blocks(),
        f"Blocks of {BLOCK} tokens, or of a --page, that the cache of a group has, or all "
        "that are needed (default: as many as the --machine has room for, else all).",
        metavar="N|all",
    ),
    rare_option(
        "bucket",
        _COUNT,
        "Round the cached tokens of sequences up to a multiple of N, so that more steps and "
        "classes are equal: an approximation (default 1: exact).",
        1,
    ),
    rare_option(
        "tick",
        Milliseconds(),
        "With --requests: the time that a step takes, in milliseconds (default: as long as it "
        f"takes on the --machine, else {TICK // 10**6}).",
        metavar="MS",
    ),
)


def has_steps(options: JobOptions, given: Mapping[str, Any]) -> bool:
    """Whether options ask for a job of several steps. Raises `DiagnosticError` if these are not
    steps of serving."""
    if given["steps"] is None and given["requests"] is None:
        return False
    what = "--steps" if given["requests"] is None else "--requests"
    if options.serve is None:
        raise error(f"{what} needs a step of serving", remedy="add --serve mixed")
    if given["requests"] is not None and options.serve != MIXED:
        raise error(
            "--requests needs --serve mixed: its steps have prompts and decoding sequences",
            remedy="give --serve mixed",
        )
    return True
