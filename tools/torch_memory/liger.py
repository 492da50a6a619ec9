"""Kernels of Liger (`apply_liger_kernel_to_llama`): they allocate as those do, without values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: Multiprocessors of an H100, each with a partial sum of the gradient of a scale.
_UNITS = 132


class LigerNorm(nn.Module):
    """`LigerRMSNorm`: the gradient of the input overwrites that of the result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, self.weight)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = torch.empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        _, weight, _ = ctx.saved_tensors
        sums = torch.empty(_UNITS, *weight.shape, dtype=torch.float32)
        return dy, sums.sum(dim=0).to(weight.dtype)


def liger_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`LigerSiLUMulFunction`: the gradients of gate and up overwrite these."""
    return _Swiglu.apply(gate, up)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gate, up


def liger_loss(x: Tensor, weight: Tensor) -> Tensor:
    """`fused_linear_cross_entropy_forward`: logits of a chunk of tokens, and all gradients."""
    return _Loss.apply(x, weight)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        tokens, width = x.shape
        parts = -(-weight.shape[0] // width)
        chunk = 1 << (-(-tokens // parts) - 1).bit_length()
        ctx.save_for_backward(torch.zeros_like(x), torch.zeros_like(weight))
        losses = torch.zeros(tokens, dtype=torch.float32)
        torch.empty(min(chunk, tokens), weight.shape[0], dtype=x.dtype)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        dx, dweight = ctx.saved_tensors
        return dx, dweight
