"""Training steps of small Llamas and of a small mixture of experts in plain PyTorch, with the
computation that `stagec` compiles: bf16 parameters and gradients, fp32 master copies and AdamW
states, gradient clipping, fused attention, eager kernels, one rank.

Parameters have the shapes of stagec/models/llama.stg and mixtral.stg.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: The largest finite values of float8_e4m3fn and float8_e5m2 (arXiv 2209.05433, table 1).
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_THETA = 500000.0


@dataclass(frozen=True)
class Step:
    """One training step: a model of stagec's library, its sizes (`--set`) and flags."""

    model: str
    sizes: Mapping[str, int]
    recompute: bool = False
    fp8: bool = False

    @property
    def flags(self) -> str:
        """The strategy as flags of stagec."""
        words = ["--grad-dtype bf16", "--fusion none"]
        words += ["--recompute full"] * self.recompute + ["--fp8 hybrid"] * self.fp8
        return " ".join(words)

    @property
    def size_text(self) -> str:
        """The sizes as a value of `--set`."""
        return ",".join(f"{name}={value}" for name, value in self.sizes.items())


def steps(*, quick: bool, fp8: bool) -> list[Step]:
    """The steps to time: a tiny one of each kind, or those that fit on a device of 80 GB."""
    if quick:
        llama = _sizes("L=2,D=128,H=4,G=2,K=32,F=256,V=512,S=64,B=2")
        mixture = _sizes("L=2,D=64,H=2,G=1,K=32,M=128,E=4,T=2,V=512,S=64,B=2")
        llamas, mixtures = [llama], [mixture]
    else:
        base = _sizes("L=4,D=4096,H=32,G=8,K=128,F=14336,V=128256,S=8192,B=1")
        small = _sizes("L=16,D=2048,H=32,G=8,K=64,F=8192,V=128256,S=4096,B=2")
        llamas = [base, {**base, "S": 4096, "B": 4}, small, {**small, "B": 4}]
        llamas.append({**small, "S": 1024, "B": 1})
        mixtures = [_sizes("L=2,D=4096,H=32,G=8,K=128,M=3584,E=8,T=2,V=32000,S=4096,B=2")]
    made = [Step("llama3-8b", s, again) for s in llamas for again in (False, True)]
    made += [Step("llama3-8b", s, fp8=True) for s in llamas if fp8]
    return made + [Step("mixtral-8x7b", s, again) for s in mixtures for again in (False, True)]


def _sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, _, size in (item.partition("=") for item in text.split(","))}


class Trainer:
    """The state of a step, and its execution. `parameters` is their number."""

    def __init__(self, step: Step, device: str) -> None:
        self._torch = torch = importlib.import_module("torch")
        self._step, self._device = step, device
        torch.manual_seed(0)
        shapes = _shapes(step)
        self._weights = {name: self._parameter(name, shape) for name, shape in shapes.items()}
        self.parameters = sum(w.numel() for w in self._weights.values())
        self._states = [
            (w, w.detach().float(), *(torch.zeros_like(w, dtype=torch.float32) for _ in range(2)))
            for w in self._weights.values()
        ]
        self._count = torch.zeros((), dtype=torch.float32, device=device)
        n = step.sizes
        shape = (n["B"], n["S"])
        self._tokens, self._labels = (
            torch.randint(0, n["V"], shape, device=device) for _ in range(2)
        )
        self._rotation = self._angles()
        self._fp8 = fp8_product(torch) if step.fp8 else None

    def run(self) -> Any:
        """Run forward, backward and the update, and return the loss."""
        loss = self._loss()
        loss.backward()
        self._update()
        return loss.detach()

    def _parameter(self, name: str, shape: tuple[int, ...]) -> Any:
        torch = self._torch
        if "norm" in name:
            made = torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        else:
            made = torch.randn(shape, dtype=torch.bfloat16, device=self._device).mul_(0.02)
        return made.requires_grad_(True)

    def _angles(self) -> tuple[Any, Any]:
        torch, n = self._torch, self._step.sizes
        exponents = torch.arange(0, n["K"], 2, device=self._device, dtype=torch.float32) / n["K"]
        places = torch.arange(n["S"], device=self._device, dtype=torch.float32)
        angles = torch.outer(places, _THETA**-exponents)[:, None, :]
        return angles.cos().bfloat16(), angles.sin().bfloat16()

    def _loss(self) -> Any:
        torch, n = self._torch, self._step.sizes
        functional = torch.nn.functional
        x = functional.embedding(self._tokens, self._weights["embed"])
        checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
        for layer in range(n["L"]):
            weights = {w: self._weights[f"{w}.{layer}"] for w in _layer_shapes(self._step)}
            if self._step.recompute:
                x = checkpoint(self._layer, x, weights, use_reentrant=False)
            else:
                x = self._layer(x, weights)
        x = functional.rms_norm(x, (n["D"],), self._weights["norm"])
        logits = functional.linear(x, self._weights["head"])
        return functional.cross_entropy(logits.float().view(-1, n["V"]), self._labels.view(-1))

    def _layer(self, x: Any, w: Mapping[str, Any]) -> Any:
        n, functional = self._step.sizes, self._torch.nn.functional
        normed = functional.rms_norm(x, (n["D"],), w["attn_norm"])
        q, k, v = (self._linear(normed, w[name]) for name in ("wq", "wk", "wv"))
        q, k = self._rotated(q, n["H"]), self._rotated(k, n["G"])
        v = v.view(n["B"], n["S"], n["G"], n["K"]).transpose(1, 2)
        grouped = {"enable_gqa": True} if n["G"] != n["H"] else {}
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        flat = attended.transpose(1, 2).reshape(n["B"], n["S"], n["H"] * n["K"])
        x = x + self._linear(flat, w["wo"])
        normed = functional.rms_norm(x, (n["D"],), w["ffn_norm"])
        if "router" in w:
            return x + self._experts(normed, w)
        gate, up = self._linear(normed, w["w_gate_up"]).chunk(2, dim=-1)
        return x + self._linear(functional.silu(gate) * up, w["w_down"])

    def _rotated(self, x: Any, heads: int) -> Any:
        n, (cos, sin) = self._step.sizes, self._rotation
        x = x.view(n["B"], n["S"], heads, n["K"])
        left, right = x.chunk(2, dim=-1)
        turned = (left * cos - right * sin, left * sin + right * cos)
        return self._torch.cat(turned, dim=-1).transpose(1, 2)

    def _linear(self, x: Any, weight: Any) -> Any:
        if self._fp8 is None:
            return self._torch.nn.functional.linear(x, weight)
        return self._fp8.apply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)

    def _experts(self, x: Any, w: Mapping[str, Any]) -> Any:
        """Rows in the order of their experts, cut into equal parts: the load is balanced."""
        torch, n = self._torch, self._step.sizes
        rows = x.reshape(-1, n["D"])
        weights, chosen = torch.topk(torch.nn.functional.linear(rows, w["router"]), n["T"])
        weights = torch.softmax(weights, dim=-1)
        order = torch.argsort(chosen.flatten(), stable=True)
        tokens = order // n["T"]
        buffers = rows[tokens].view(n["E"], -1, n["D"])
        gate, up = torch.bmm(buffers, w["w_gate_up"]).chunk(2, dim=-1)
        made = torch.bmm(torch.nn.functional.silu(gate) * up, w["w_down"])
        scaled = made.view(-1, n["D"]) * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, tokens, scaled).view_as(x)

    def _update(self) -> None:
        """Update the master copies one by one, so that one gradient at a time is in fp32."""
        torch = self._torch
        torch.nn.utils.clip_grad_norm_(self._weights.values(), 1.0)
        with torch.no_grad():
            self._count += 1
            for weight, master, mean, square in self._states:
                torch._fused_adamw_(
                    *([master], [weight.grad.float()], [mean], [square], [], [self._count]),
                    lr=1e-4,
                    beta1=0.9,
                    beta2=0.95,
                    weight_decay=0.1,
                    eps=1e-8,
                    amsgrad=False,
                    maximize=False,
                )
                weight.copy_(master)
                weight.grad = None


def _layer_shapes(step: Step) -> dict[str, tuple[int, ...]]:
    """The parameters of a layer; those of products as [out, in], of experts as [E, in, out]."""
    n = step.sizes
    heads, shared = n["H"] * n["K"], n["G"] * n["K"]
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (n["D"],),
        "wq": (heads, n["D"]),
        "wk": (shared, n["D"]),
        "wv": (shared, n["D"]),
        "wo": (n["D"], heads),
        "ffn_norm": (n["D"],),
    }
    if "E" not in n:
        return {**shapes, "w_gate_up": (2 * n["F"], n["D"]), "w_down": (n["D"], n["F"])}
    experts = {"w_gate_up": (n["E"], n["D"], 2 * n["M"]), "w_down": (n["E"], n["M"], n["D"])}
    return {**shapes, "router": (n["E"], n["D"]), **experts}


def _shapes(step: Step) -> dict[str, tuple[int, ...]]:
    n, of_layer = step.sizes, _layer_shapes(step)
    layers = {f"{w}.{i}": shape for i in range(n["L"]) for w, shape in of_layer.items()}
    ends = {"norm": (n["D"],), "head": (n["V"], n["D"])}
    return {"embed": (n["V"], n["D"]), **layers, **ends}


def parameters(step: Step) -> int:
    """The number of parameters of the model of a step."""
    return sum(math.prod(shape) for shape in _shapes(step).values())


def fp8_product(torch: Any) -> Any:
    """x w^T with 8-bit operands, scaled by their largest elements: e4m3 forward, gradients in e5m2.
    Both operands of the products of backward are transposed in memory, since they must be
    contiguous along the summed dimension."""

    def small(x: Any, name: str) -> tuple[Any, Any]:
        scale = x.abs().amax().float().clamp(min=1e-12) / _LARGEST[name]
        return (x / scale).to(getattr(torch, name)), scale

    def product(a: tuple[Any, Any], b: tuple[Any, Any]) -> Any:
        """[m, k] by [n, k] transposed."""
        return torch._scaled_mm(
            *(a[0], b[0].t()), scale_a=a[1], scale_b=b[1], out_dtype=torch.bfloat16
        )

    def turned(x: tuple[Any, Any]) -> tuple[Any, Any]:
        return x[0].t().contiguous(), x[1]

    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        rows, columns = small(x, "float8_e4m3fn"), small(weight, "float8_e4m3fn")
        ctx.save_for_backward(*rows, *columns)
        return product(rows, columns)

    def backward(ctx: Any, dy: Any) -> tuple[Any, Any]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        gradient = small(dy, "float8_e5m2")
        dx = product(gradient, turned((weight, weight_scale)))
        return dx, product(turned(gradient), turned((x, x_scale)))

    made: Callable[..., Any] = type
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return made("Fp8Product", (torch.autograd.Function,), methods)
