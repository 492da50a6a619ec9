"""Attention over sequences of which each rank has a part: what `context_parallel` of PyTorch runs
in place of `scaled_dot_product_attention`, with the kernels of CPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental import _attention as rings
from torch.distributed.tensor.experimental._context_parallel import _attention as templates

_aten = torch.ops.aten
_forward = _aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
#: How keys and values go round, as `--ring-steps` and PyTorch call it.
ROTATIONS = {"gathered": "allgather", "passed": "alltoall"}


def _of_parts(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    return _forward(query, key, value, is_causal=kwargs["is_causal"])


def _of_gradients(**kwargs: Any) -> tuple[Tensor, ...]:
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    return _backward(*(kwargs[name] for name in names), 0.0, kwargs["is_causal"])


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = templates._templated_ring_attention(group, 2, _of_parts, q, k, v, is_causal=True)
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = templates._templated_ring_attention_backward(
            ctx.group, 2, _of_gradients, grad, "grad_out", q, k, v, out, lse, is_causal=True
        )
        return (None, *gradients[:3])


def ring_attention(group: dist.ProcessGroup, rotation: str, *qkv: Tensor) -> Tensor:
    """Causal attention of the queries of a rank over the keys of all; `rotation`: of keys."""
    rings.set_rotate_method(ROTATIONS[rotation])
    return _RingAttention.apply(group, *qkv)
