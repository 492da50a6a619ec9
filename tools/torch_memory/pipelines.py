"""Pipeline stages of a rank, as torchtitan cuts and runs them (`torch.distributed.pipelining`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules

from tools.torch_memory.run import TorchRun

#: Classes of PyTorch by what a schedule is called here.
SCHEDULES: Mapping[str, Callable[..., Any]] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "interleaved-zb": schedules.ScheduleInterleavedZeroBubble,
    "looped-bfs": schedules.ScheduleLoopedBFS,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}
#: Those whose second parts stand in the other order of ranks.
_FOLDED = ("zbv", "dualpipev")


def stages_of(run: TorchRun) -> list[int]:
    """The parts of the model on the rank of a run, first to last; without a pipeline it has all."""
    ranks, chunks = run.flag("pp", 1), _chunks(run)
    if run.flag("schedule", "1f1b") in _FOLDED:
        return [run.stage, 2 * ranks - 1 - run.stage]
    return [chunk * ranks + run.stage for chunk in range(chunks)]


def _chunks(run: TorchRun) -> int:
    schedule = run.flag("schedule", "1f1b")
    default = 2 if schedule.startswith(("interleaved", "looped")) or schedule in _FOLDED else 1
    return run.flag("chunks", default)


def cut(model: Any, run: TorchRun, part: int) -> nn.Module:
    """What a part of the model has of it (`pipeline_module_split`), in place."""
    parts = run.flag("pp", 1) * _chunks(run)
    layers = len(model.layers) // parts
    if layers * parts != len(model.layers):
        raise ValueError(f"{run.title}: {parts} parts do not divide {len(model.layers)} layers")
    model.layers = model.layers[part * layers : (part + 1) * layers]
    if part:
        model.tok_embeddings = None
    if part + 1 < parts:
        model.norm = model.output = None
    return model


class Pipeline:
    """The schedule of one rank; its messages are not sent. `moment` is called where the forward of
    the last microbatch has ended."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        run: TorchRun,
        mesh: DeviceMesh,
        loss: Callable[[Tensor, Tensor], Tensor],
        moment: Callable[[], None],
        mark: Callable[[Tensor, str], None],
    ) -> None:
        count = run.flag("microbatches", 1)
        last = run.flag("pp", 1) * _chunks(run)
        tokens = run.sizes["B"] // count, run.sizes["S"]
        narrow = run.flag("zero", 0) == 3 and run.flag("compute_dtype", "bf16") == "bf16"
        dtype = torch.bfloat16 if narrow else next(parts[0].parameters()).dtype
        between = torch.empty(*tokens, run.sizes["D"], dtype=dtype, requires_grad=True)
        logits = torch.empty(*tokens, run.sizes["V"], dtype=dtype, requires_grad=True)
        ids = torch.zeros(*tokens, dtype=torch.int64)
        self.stages = [
            PipelineStage(
                part,
                number,
                last,
                torch.device("cpu"),
                input_args=between if number else ids,
                output_args=logits if number == last - 1 else between,
                group=mesh.get_group("pp"),
            )
            for number, part in zip(stages_of(run), parts, strict=True)
        ]
        self._left, self._count, self._moment, self._mark = 0, count, moment, mark
        for stage in self.stages:
            self._watch(stage)
        made = SCHEDULES[run.flag("schedule", "1f1b")]
        single = issubclass(made, schedules.PipelineScheduleSingle)
        self._run = made(
            self.stages[0] if single else self.stages,
            n_microbatches=count,
            loss_fn=lambda y, labels: loss(y, labels) / count,
            scale_grads=False,
        )
        self._returns = run.flag("stage_results", "step") == "step"

    def _watch(self, stage: PipelineStage) -> None:
        forward, back = stage.forward_one_chunk, stage.backward_one_chunk
        weights = stage.backward_weight_one_chunk

        def forward_one(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            return forward(*args, **kwargs)

        def backward_one(*args: Any, **kwargs: Any) -> Any:
            if not self._left:
                self._left = -1
                self._moment()
            return back(*args, **kwargs)

        def weights_one(*args: Any, **kwargs: Any) -> Any:
            made = weights(*args, **kwargs)
            for each in stage.submod.parameters():  # sets them itself
                if each.grad is not None:
                    self._mark(each.grad, "gradients")
            return made

        stage.forward_one_chunk, stage.backward_one_chunk = forward_one, backward_one
        stage.backward_weight_one_chunk = weights_one

    def received(self) -> list[Tensor]:
        """The buffers into which the stages receive."""
        every = [
            each
            for stage in self.stages
            for infos in (stage.args_recv_info, stage.grad_recv_info)
            for row in infos.values()
            for each in row
        ]
        return [each.buffer for each in every if each.buffer is not None]

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        """Forward and backward of all microbatches."""
        self._left = self._count * len(self.stages)
        losses: list[Tensor] = []
        first, last = (any(getattr(s, n) for s in self.stages) for n in ("is_first", "is_last"))
        send, schedules._batch_p2p = schedules._batch_p2p, lambda ops, desc=None: []
        try:
            self._run.step(
                *([tokens] if first else []),
                target=labels if last else None,
                losses=losses if last else None,
                return_outputs=self._returns,
            )
        finally:
            schedules._batch_p2p = send
