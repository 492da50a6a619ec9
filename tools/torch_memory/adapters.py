"""Which parameters are trained: low-rank adapters as peft adds them, frozen weights, and weights of
4 bits as bitsandbytes has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stagec.ir_spec.strategy.freeze import FreezeRule
from tools.torch_memory.run import TorchRun

#: Modules by the names of parameters in the texts of models; the one packs two modules.
MODULES = {"w_gate": "w1", "w_up": "w3", "w_gate_up": "w1,w3", "w_down": "w2"}
_PATHS = {"tok_embeddings": "embed", "output": "head", "norm": "final_norm"}
#: Elements of 4 bits that have a scale in common, and scales that have one.
_BLOCK, _SCALES = 64, 256


class Adapter(nn.Module):
    """`peft.tuners.lora.layer.Linear` without dropout. Inputs are cast to the type of the adapter,
    the sum is cast to that of the module's result."""

    def __init__(self, base: nn.Module, rank: int, scaling: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.scaling = base, scaling
        self.lora_a = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        decodes = isinstance(self.base, Linear4bit)  # peft/tuners/lora/bnb.py: requires_conversion
        if not (decodes and torch.is_autocast_enabled("cpu")):
            x = x.to(self.lora_a.weight.dtype)
        return (y + self.lora_b(self.lora_a(x)) * self.scaling).to(y.dtype)


class Linear4bit(nn.Module):
    """`bitsandbytes.nn.Linear4bit` with NF4 and scales of 8 bits: decoded before each product in
    bf16 (`bnb_4bit_compute_dtype`), of which only the weight in 4 bits is kept."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        size = base.weight.numel()
        blocks = size // _BLOCK
        self.weight = _stored(size // 2, torch.uint8)
        self.scales = _stored(blocks, torch.uint8)
        self.scales_of_scales = _stored(-(-blocks // _SCALES), torch.float32)

    def decoded(self) -> Tensor:
        """`dequantize_4bit`: the scales in fp32, then the weight."""
        scales = self.scales.to(torch.float32)
        scales += 1.0
        return torch.empty(self.out_features, self.in_features, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return _MatMul4Bit.apply(x.to(torch.bfloat16), self).to(x.dtype)


def _stored(size: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)


class _MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Linear4bit) -> Tensor:
        ctx.module = module
        return functional.linear(x, module.decoded())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return torch.matmul(dy, ctx.module.decoded()), None


def train_parts(model: nn.Module, run: TorchRun) -> nn.Module:
    """Freeze, quantize and adapt a model in place, as the flags of a run say."""
    targets = [m for n in _names(run.flag("lora", "")) for m in MODULES.get(n, n).split(",")]
    rank, alpha = run.flag("lora_rank", 16), run.flag("lora_alpha", 0)
    wide = run.flag("lora_dtype", "f32") == "f32"
    if targets:
        model.requires_grad_(False)
    if run.flag("weight_dtype", "") == "nf4":
        for parent, name, linear in _linears(model.layers):
            setattr(parent, name, Linear4bit(linear))
    for parent, name, linear in list(_linears(model)):
        if name in targets:
            dtype = torch.float32 if wide else linear.weight.dtype
            setattr(parent, name, Adapter(linear, rank, (alpha or rank) / rank, dtype))
    rule = FreezeRule(run.flag("freeze", ""))
    for name, parameter in model.named_parameters():
        if (frozen := rule.freezes(_path(name))) is not None:
            parameter.requires_grad_(not frozen)
    return model


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear | Linear4bit):
                yield module, name, child


def _path(name: str) -> str:
    """The path of a parameter in the text of its model."""
    first, *rest = name.split(".")
    return "/".join([_PATHS.get(first, first), *rest[:-1]])
