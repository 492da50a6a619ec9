"""How a server schedules requests into steps."""

from collections.abc import Iterator

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, fraction
from stagec.ir_spec.strategy.flag_values import SERVE
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

#: The default number of tokens of a step: that of vLLM v1 on cards of 70 GiB and more
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

    batch: int = flagged(
        "scheduler_batch",
        "With --serve and --pp: the most sequences of each of the batches in flight, of which "
        "there are as many as pipeline stages (default: an equal share).",
        "int",
        least=0,
    )

    def room(self, bytes_: int) -> int:
        """The bytes that a server uses, of `bytes_` bytes."""
        return bytes_ if self.memory is None else int(bytes_ * fraction(self.memory))


class SchedulerOp(Statement):
    """How a server schedules requests into steps.

    With prompts `beside`, as in vLLM v1 and TensorRT-LLM, a step contains the next token of each
    decoding sequence and chunks of prompts, at most `tokens` together: weights are read once for
    both. With prompts `alone`, SGLang's default, decoding sequences wait while prompts have
    separate steps.

    `memory` is vLLM's `gpu_memory_utilization` and SGLang's `mem_fraction_static`. With `reserve`,
    a request is admitted when the cache has room for its prompt and all tokens that it may generate
    (TensorRT-LLM, GUARANTEED_NO_EVICT); otherwise it is admitted with its first chunk, and
    preempted if blocks run out. `poll` is SGLang's `scheduler_recv_interval`: the scheduler looks
    for new requests after this number of decode steps, and after each step with prompts. `gather`
    is TensorRT-LLM's `batch_wait_timeout_iters`: while other sequences decode, prompts wait for at
    most this number of steps, unless all together have 9/10 of `tokens`
    (`batch_wait_max_tokens_ratio`). With attention data parallelism and `enable_balance`, a prompt
    on one rank makes all ranks wait, so prompts first wait until each rank has one, for at most
    `balance` steps (`timeout_iters`, 50), and, if each has one, for at most `gather` further steps
    (`batching_wait_iters`, 10; _torch/pyexecutor/py_executor.py, `_balance_adp_requests`).

    On pipeline stages as many batches are in flight as there are stages. `batch` bounds the
    sequences of each (SGLang's `pp_max_micro_batch_size`); by default it is an equal share of those
    that may run. vLLM has no such bound: one batch may have all of them.

    The statement changes when steps run, not the program of a step.
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
