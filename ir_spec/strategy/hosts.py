"""How the program that launches kernels keeps up with its device."""

from collections.abc import Iterator
from typing import Any

from stagec.ir.core import Operation
from stagec.ir_spec.strategy.flag_values import SERVE, FlagValues, Problems
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

#: When the scheduler of an engine works: between two steps, or concurrently with devices.
BETWEEN, BESIDE = "between", "beside"
#: Where hosts wait for devices: nowhere, at both ends of each forward and backward, or after each
#: kernel.
NEVER, PHASES, KERNELS = "never", "phases", "kernels"
#: How hosts launch steps with prompts: as a graph, or kernel by kernel.
CAPTURED, ISSUED = "captured", "issued"


def _time(flag: str, doc: str, help: str, needs: tuple[str, ...] = (), **more: Any) -> Any:
    doc = f'{doc}, such as "2 us"'
    return flagged(flag, help, "str", doc=doc, metavar="TIME", needs=needs, **more)


class HostsRule(Record):
    """The times of the program that launches kernels, as text with units; '' if not stated."""

    issue: str = _time(
        "host_issue",
        "from one computation to the next (default: that of the machine)",
        "Time of a host from one computation to the next, such as '9 us', for which devices may "
        "wait (default: that of the machine).",
    )
    issue_backward: str = _time(
        "host_issue_backward",
        "of a computation of backward, in place of `issue`",
        "Time of a host for a computation of backward, which the engine of gradients launches "
        "(default: --host-issue).",
    )
    waits: str = flagged(
        "host_waits",
        "Hosts run ahead of devices (never), or wait for them at both ends of forward and backward "
        "of each microbatch (phases), or behind each kernel (kernels).",
        choices=(NEVER, PHASES, KERNELS),
    )
    microbatch: str = _time(
        "host_microbatch",
        "before forward of a microbatch, for hosts that wait",
        "With --host-waits: time of a host before forward of a microbatch, such as '2 ms' "
        "(default: none).",
        beside=("host_waits",),
    )
    between: str = _time(
        "host_between",
        "between two steps of training, while devices wait",
        "Time of a host between two steps of training, for which devices wait, such as '40 ms' "
        "(default: none).",
    )
    graphs: bool = flagged(
        "host_graphs",
        "Capture training steps as graphs, which hosts launch as a whole, as in serving.",
    )
    prompts: str = flagged(
        "host_prompts",
        "With --serve: hosts launch steps with prompts as a graph (captured), or issue them kernel "
        "by kernel (issued), each in --host-issue.",
        choices=(CAPTURED, ISSUED),
        needs=(SERVE,),
    )
    product: str = _time(
        "host_product",
        "of a product in `product_bits` or less on Blackwell, in place of `issue`",
        "Time of a host for a product in --host-product-bits or less on Blackwell, such as '200 "
        "us', if it chooses the kernel at each call (default: --host-issue).",
        (SERVE,),
    )
    product_bits: int = flagged(
        "host_product_bits",
        "With --host-product: the most bits of its operands.",
        "int",
        least=4,
        default=8,
        needs=("host_product",),
    )
    graph_gap: str = _time(
        "graph_gap",
        "between two kernels of a graph",
        "With --serve decode: the gap between two kernels of a captured graph, such as '0.5 us' "
        "(default: the launch gap of the machine).",
        (SERVE,),
    )
    step: str = _time(
        "host_step",
        "of the scheduler for a step of serving",
        "With --serve: time of the scheduler per step, such as '1 ms' (default: none).",
        (SERVE,),
    )
    scheduler: str = flagged(
        "host_scheduler",
        "With --serve: the scheduler prepares a step after the step before (between), or while it "
        "runs (beside).",
        choices=(BETWEEN, BESIDE),
        needs=(SERVE,),
    )
    request: str = _time(
        "host_request",
        "of a request outside of its steps",
        "With --serve: time of a request before its first step and after its last, such as '10 "
        "ms' (default: none).",
        (SERVE,),
    )

    @property
    def issue_seconds(self) -> float | None:
        """The seconds from one computation to the next; None for the default of the machine."""
        return _seconds(self.issue) if self.issue else None

    @property
    def issue_backward_seconds(self) -> float | None:
        """The seconds for a computation of backward; None if they are as for others."""
        return _seconds(self.issue_backward) if self.issue_backward else None

    @property
    def product_seconds(self) -> float | None:
        """The seconds for a product in `product_bits` or less on Blackwell; None if they are as for
        others."""
        return _seconds(self.product) if self.product else None

    @property
    def microbatch_seconds(self) -> float:
        """The seconds before forward of a microbatch."""
        return _seconds(self.microbatch)

    @property
    def between_seconds(self) -> float:
        """The seconds between two steps of training."""
        return _seconds(self.between)

    @property
    def graph_gap_seconds(self) -> float | None:
        """The seconds between two kernels of a captured graph; None for the launch gap of the
        machine."""
        return _seconds(self.graph_gap) if self.graph_gap else None

    @property
    def step_seconds(self) -> float:
        """The seconds of the scheduler for a serving step."""
        return _seconds(self.step)

    @property
    def request_seconds(self) -> float:
        """The seconds of a request before its first step, and between that and its first token."""
        return _seconds(self.request)


class HostsOp(Statement):
    """How the program that launches kernels keeps up with its device.

    A host needs the time `issue` from one computation to the next, for the code of a framework
    between two launches; `issue_backward` for computations of backward, which the autograd engine
    launches without calls of modules. If that is longer than the computations, devices wait for the
    host. Hosts run ahead of their devices, from one microbatch into the next, unless they wait.
    With `waits = phases`, they wait at both ends of forward and backward of each microbatch, as
    timers that synchronize do (Megatron-LM v2.5, megatron/schedules.py,
    `timers("forward-compute")`, global_vars.py, `_Timer.start`). Then each of these takes the
    longer time of host and device, and before each forward the device is idle for the time
    `microbatch`, in which data are fetched, broadcast and masked (pretrain_gpt.py, `get_batch`).
    Trainers that read the loss and the norm of gradients, log and fetch data behind each step let
    devices wait for the time `between` (nanotron, trainer.py: `train_step_logs`).
    With `waits = kernels`, a launch returns when its kernel has ended (CUDA_LAUNCH_BLOCKING=1, with
    which BLOOM was trained: bigscience-workshop/bigscience, tr11-176B-ml.slurm), so `issue` is
    added to each computation. With `graphs`, a step is captured once and launched as a whole, so no
    device waits. Serving steps are captured without it, except those with prompts under `prompts =
    issued`, as in vLLM: its graphs are for steps that only decode
    (`CUDAGraphMode.FULL_DECODE_ONLY`), or have no more tokens than the largest captured size, 512
    (docs/design/cuda_graphs.md). For a product in `product_bits` or less on Blackwell, a host needs
    the time `product`, if it chooses the kernel at each call (FlashInfer, from vLLM's
    `flashinfer_scaled_fp4_mm` and, for fp8 weights with one scale per tensor,
    `flashinfer_scaled_fp8_mm`; fp8 in blocks has kernels of DeepGEMM).

    A captured graph of decode launches its kernels with `graph_gap` between them, instead of the
    launch gap of the machine. For a serving step, the scheduler of an engine needs the time `step`:
    it chooses requests, prepares their inputs and processes the tokens. Devices wait for it
    `between` two steps; a scheduler that works `beside` them prepares a step before the tokens of
    the previous one exist (vLLM, v1/core/sched/async_scheduler.py), and the step takes the longer
    time of both. `request` is the time of a request outside of its steps: to receive, tokenize and
    queue it, and to send its first token; it is part of the time to the first token.
    """

    name, record = "stg.hosts", HostsRule
    section = Section.KERNELS
    rare, software = True, True
    example = 'stg.hosts[issue = "9 us", graph_gap = "0.5 us", step = "1 ms"]'

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        for name in (f.param.name for f in self._fields if f.param.form == "str"):
            for problem in _misfits(op.text(name)):
                yield f"'{name}' {problem}"

    def problems(self, request: FlagValues) -> Problems:
        for flag in (f for f in self.flags if f.kind == "text"):
            for problem in _misfits(request[flag.name] or ""):
                yield f"{flag.option} {problem}", "give a time with its unit, such as '2 us'"


def _seconds(text: str) -> float:
    if not text:
        return 0.0
    from stagec.machines.figures import quantity  # a compile without machines loads none

    return float(quantity("time", text))


def _misfits(text: str) -> Iterator[str]:
    try:
        _seconds(text)
    except ValueError as problem:
        yield str(problem)
