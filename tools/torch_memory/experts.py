"""Mixtures of experts as training code writes them, under even load."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import DTensor
from torch.nn import functional

#: Rows that are added to those of each expert at most (`TOKEN_GROUP_ALIGN_SIZE_M`).
_ALIGNMENT = 8


class HuggingFaceExperts(nn.Module):
    """`Qwen3MoeSparseMoeBlock` of transformers 5, with `grouped_mm_experts_forward`; `wide` routers
    leave their weights in fp32, as `MixtralTopKRouter`."""

    def __init__(self, sizes: Mapping[str, int], *, wide: bool = False) -> None:
        super().__init__()
        self.wide = wide
        d, m, self.count, self.top = sizes["D"], sizes["M"], sizes["E"], sizes["T"]
        self.gate = nn.Linear(d, self.count, bias=False)
        self.gate_up = nn.Parameter(torch.empty(self.count, 2 * m, d))
        self.down = nn.Parameter(torch.empty(self.count, d, m))

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.view(-1, hidden.shape[-1])
        scores = functional.softmax(self.gate(x).float(), dim=-1)
        weights, chosen = torch.topk(scores, self.top, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights if self.wide else weights.to(x.dtype)
        return self._experts(x, chosen, weights).view_as(hidden)

    def _experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        experts, order = torch.sort(chosen.reshape(-1))
        weights = weights.reshape(-1)
        rows = x[order // self.top]
        weights = weights[order]
        loads = torch.histc(experts.float(), bins=self.count, min=0, max=self.count - 1)
        ends = torch.cumsum(loads, dim=0, dtype=torch.int32)
        made = torch._grouped_mm(rows, self.gate_up.transpose(-2, -1), offs=ends)
        made = self._gated(made)
        made = torch._grouped_mm(made, self.down.transpose(-2, -1), offs=ends)
        weighted = made * weights.unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        weighted = weighted[back]
        return weighted.view(len(x), self.top, -1).sum(dim=1).to(x.dtype)

    def _gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate) * up


class TorchtitanExperts(nn.Module):
    """`GroupedExperts` of torchtitan: three stacks of weights, grouped products."""

    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(count, inner, width))
        self.w2 = nn.Parameter(torch.empty(count, width, inner))
        self.w3 = nn.Parameter(torch.empty(count, inner, width))

    def forward(self, rows: Tensor, loads: Tensor) -> Tensor:
        w1, w2, w3 = (_local(w) for w in (self.w1, self.w2, self.w3))
        return self._products(rows, loads, w1, w2, w3)

    def _products(self, rows: Tensor, loads: Tensor, *weights: Tensor) -> Tensor:
        ends = torch.cumsum(loads, dim=0, dtype=torch.int32)
        x = rows.bfloat16()
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in weights)
        hidden = functional.silu(torch._grouped_mm(x, w1, offs=ends))
        hidden = hidden * torch._grouped_mm(x, w3, offs=ends)
        return torch._grouped_mm(hidden, w2, offs=ends).type_as(rows)


class TorchtitanMoe(nn.Module):
    """`MoE` of torchtitan with a softmax router whose weights count for the results of experts, as
    Qwen3's. `padded` and `exchanged` move rows around its experts."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        d, self.count, self.top = sizes["D"], sizes["E"], sizes["T"]
        self.gate = nn.Linear(d, self.count, bias=False)
        self.experts = TorchtitanExperts(d, sizes["M"], self.count)

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.view(-1, hidden.shape[-1])
        scores = functional.softmax(self.gate(x).to(torch.float32), dim=1)
        best, chosen = torch.topk(scores, self.top, dim=1)
        best = best / (best.sum(dim=-1, keepdim=True) + 1e-20)
        best = best * 1.0
        loads = torch.histc(chosen.view(-1).float(), bins=self.count, min=0, max=self.count)
        order = torch.argsort(chosen.view(-1), stable=True)
        best = best.view(-1)[order]
        tokens = (order // self.top).reshape(-1, 1).expand(-1, x.shape[-1])
        made = self.experts(torch.gather(x, dim=0, index=tokens), loads)
        out = torch.zeros_like(x)
        made = (made.to(torch.float32) * best.reshape(-1, 1)).to(x.dtype)
        return out.scatter_add(dim=0, index=tokens, src=made).view_as(hidden)


def padded(experts: nn.Module) -> None:
    """`_permute` and `_unpermute` of torchtitan 0.2.0: rows are permuted before the experts of a
    rank, each filled up by as many as `_ALIGNMENT`, and back."""

    def permuted(module: nn.Module, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rows, loads = inputs
        module.order = torch.zeros(len(rows) + len(loads) * _ALIGNMENT, dtype=torch.int32)
        rows = torch.vstack((rows, rows.new_zeros(rows.shape[-1])))
        module.shape = rows.shape
        return rows[module.order, :], loads

    def restored(module: nn.Module, inputs: object, made: Tensor) -> Tensor:
        rows = made.new_empty(module.shape)
        rows[module.order, :] = made
        return rows[:-1]

    experts.register_forward_pre_hook(permuted)
    experts.register_forward_hook(restored)


def exchanged(experts: nn.Module, group: dist.ProcessGroup) -> None:
    """`ExpertParallel`: rows go to the ranks of their experts, and results back; under even load
    each rank gets as many as it sends."""
    ranks = dist.get_world_size(group)

    def sent(module: nn.Module, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rows, loads = inputs
        splits = [len(rows) // ranks] * ranks
        module.splits = splits
        return all_to_all_single_autograd(rows, splits, splits, group), loads[: len(loads) // ranks]

    def returned(module: nn.Module, inputs: object, made: Tensor) -> Tensor:
        return all_to_all_single_autograd(made, module.splits, module.splits, group)

    experts.register_forward_pre_hook(sent)
    padded(experts)
    experts.register_forward_hook(returned)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
