"""How a server schedules requests into steps."""

from __future__ import annotations

from collections.abc import Iterator

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, fraction
from stagec.ir_spec.strategy.flag_values import SERVE
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

#: What a step takes by default: vLLM v1's budget of tokens on cards of 70 GiB and more
#: (vllm/engine/arg_utils.py).
BUDGET = 8192
ANY, BESIDE, ALONE = "any", "beside", "alone"


class SchedulerRule(Record):
    """How a server schedules requests into steps."""

    prompts: str = flagged(
        "prompt_steps",
        "With --serve: prompts share steps with decoding sequences (beside), or have steps of "
        "their own, for which these wait (alone).",
        doc=(
            "beside: prompts share steps with sequences that decode; alone: steps have prompts "
            "only, while these wait; any: beside in requests over time, alone in steady batches"
        ),
        choices=(ANY, BESIDE, ALONE),
    )
    tokens: int = flagged(
        "step_tokens",
        "With --serve: the most tokens of a step of a group of ranks, including chunks of prompts.",
        "int",
        default=BUDGET,
        least=1,
    )
    memory: Expr | None = flagged(
        "server_memory",
        "With --serve: the share of a device's memory for weights, activations and caches, such as "
        "9/10 (default: all).",
        "ratio",
        least=0,
    )
    reserve: bool = flagged(
        "reserve_outputs",
        "With --serve: admit a request only if the cache has room for all its tokens, so that none "
        "is preempted.",
    )
    poll: int = flagged(
        "scheduler_poll",
        "With --serve: look for new requests before each N-th decode step.",
        "int",
        default=1,
        least=1,
    )
    gather: int = flagged(
        "scheduler_gather",
        "With --serve: the most decode steps for which prompts wait for others, until they fill "
        "9/10 of the tokens of a step.",
        "int",
        least=0,
    )
    balance: int = flagged(
        "scheduler_balance",
        "With --serve: the most decode steps for which prompts wait until each group of ranks with "
        "sequences of its own has one.",
        "int",
        least=0,
    )

    def room(self, bytes_: int) -> int:
        """What a server takes of so many bytes."""
        return bytes_ if self.memory is None else int(bytes_ * fraction(self.memory))


class SchedulerOp(Statement):
    """How a server schedules requests into steps.

    With prompts `beside`, as under vLLM v1 and TensorRT-LLM, a step has the next token of each
    sequence that decodes and chunks of prompts, `tokens` in all: weights are read once for both.
    With prompts `alone`, SGLang's default, sequences that decode wait while prompts have steps of
    their own.

    `memory` is vLLM's `gpu_memory_utilization` and SGLang's `mem_fraction_static`. With `reserve`
    a request is let in when the cache has room for its prompt and all that it may generate
    (TensorRT-LLM, GUARANTEED_NO_EVICT); else it is let in with its first chunk, and preempted where
    blocks run out. `poll` is SGLang's `scheduler_recv_interval`: new requests are looked for every
    so many steps that decode, and behind each step with prompts. `gather` is TensorRT-LLM's
    `batch_wait_timeout_iters`: while others decode, prompts wait for so many steps unless they and
    these have 9/10 of `tokens` (`batch_wait_max_tokens_ratio`). With attention data parallelism and
    `enable_balance` a prompt of one rank makes all of them wait, so prompts wait first until each
    rank has one, `balance` steps at most (`timeout_iters`, 50), and only if each has one, for
    `gather` steps more (`batching_wait_iters`, 10; _torch/pyexecutor/py_executor.py,
    `_balance_adp_requests`).

    It says when things happen, not what: the program of a step is the same.
    """

    name, record = "stg.scheduler", SchedulerRule
    section = Section.SERVING
    rare, software, needs = True, True, (SERVE,)
    example = "stg.scheduler[prompts = beside, tokens = 8192, memory = 9/10]"

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        share = op.expr("memory") if "memory" in op.attrs else None
        if share is not None and (share.symbols or not 0 < fraction(share) <= 1):
            yield f"expects 'memory' to be more than 0 and at most 1, found {share}"
