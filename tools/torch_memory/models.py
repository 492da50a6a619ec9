"""Models as training code writes them, module by module: the texts of the library that runs may
name. A model is a function from a run to a module that maps tokens and labels to the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

from tools.torch_memory.experts import HuggingFaceExperts, TorchtitanMoe
from tools.torch_memory.liger import LigerNorm, liger_loss, liger_swiglu
from tools.torch_memory.run import TorchRun

#: A norm of vectors of this width.
Norm = Callable[[int], nn.Module]


class HuggingFaceNorm(nn.Module):
    """`LlamaRMSNorm`: cast, normalize, cast back, scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + 1e-5)).to(x.dtype)


class FusedNorm(nn.Module):
    """`nn.RMSNorm` as its kernel on GPUs: input and a number for each row are kept. On CPUs it runs
    operation by operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return _FusedNorm.apply(x, self.weight)
        weight = self.weight.to_local(grad_placements=[Partial()])
        y = _FusedNorm.apply(x.to_local(), weight)
        return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False)


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class Attention(nn.Module):
    """Grouped queries with rotated queries and keys, of transformers' and torchtitan's models; the
    latter repeat keys and values for the heads that share them. `eager`: `eager_attention_forward`
    of transformers."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        titan: bool,
        eager: bool = False,
        norm: Norm | None = None,
    ) -> None:
        super().__init__()
        d, self.k, self.titan, self.eager = sizes["D"], sizes["K"], titan, eager
        #: Attention over the parts of other ranks, where a rank has a part of each sequence.
        self.over_ranks: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        self.q_norm, self.k_norm = (norm(self.k) if norm else nn.Identity() for _ in range(2))
        self.wq = nn.Linear(d, sizes["H"] * self.k, bias=False)
        self.wk = nn.Linear(d, sizes["G"] * self.k, bias=False)
        self.wv = nn.Linear(d, sizes["G"] * self.k, bias=False)
        self.wo = nn.Linear(sizes["H"] * self.k, d, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, ...]) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.k)) for w in (self.wq, self.wk, self.wv))
        q, k = self.q_norm(q), self.k_norm(k)
        if len(rotation) == 1:
            q, k = _rotated_complex(q, *rotation), _rotated_complex(k, *rotation)
        if self.titan:
            times = q.shape[2] // k.shape[2]
            k, v = _repeated(k, times), _repeated(v, times)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if len(rotation) > 1:
            q, k = _rotated(q, *rotation), _rotated(k, *rotation)
        if self.eager:
            a = _eager_attention(q, k, v)
        elif self.over_ranks is not None:
            a = self.over_ranks(q, k, v)
        else:
            a = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=not self.titan
            )
        return self.wo(a.transpose(1, 2).flatten(-2))


def _eager_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`eager_attention_forward` of transformers' Llama, with a causal mask."""
    times, rows = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (
        x[:, :, None].expand(-1, -1, times, -1, -1).reshape(*q.shape) if times > 1 else x
        for x in (k, v)
    )
    mask = torch.full((rows, rows), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5 + mask
    shares = functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(shares, v)


def _repeated(x: Tensor, times: int) -> Tensor:
    """`repeat_kv` of torchtitan."""
    return x.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3) if times > 1 else x


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rotary_pos_emb` of transformers."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _rotated_complex(x: Tensor, rotations: Tensor) -> Tensor:
    """`apply_rotary_emb` of torchtitan."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations[:, None]).flatten(3).type_as(x)


class FeedForward(nn.Module):
    """SwiGLU, operation by operation."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes["D"], sizes["F"], bias=False)
        self.w2 = nn.Linear(sizes["F"], sizes["D"], bias=False)
        self.w3 = nn.Linear(sizes["D"], sizes["F"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside the residual."""

    def __init__(self, norm: Norm, width: int, attention: nn.Module, feed: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed
        self.attention_norm, self.ffn_norm = norm(width), norm(width)

    def forward(self, x: Tensor, *rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """The parts that layouts know: `tok_embeddings`, `layers`, `norm`, `output`."""

    def __init__(self, sizes: Mapping[str, int], norm: Norm, block: Callable[[], Block]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes["V"], sizes["D"])
        self.layers = nn.ModuleList(block() for _ in range(sizes["L"]))
        self.norm = norm(sizes["D"])
        self.output = nn.Linear(sizes["D"], sizes["V"], bias=False)

    def logits(self, tokens: Tensor, *rotation: Tensor) -> Tensor:
        """Those of tokens; a stage of a pipeline takes and returns what passes between blocks."""
        x = self.blocks(tokens, *rotation)
        return self.output(self.norm(x)) if self.output is not None else x

    def blocks(self, tokens: Tensor, *rotation: Tensor) -> Tensor:
        """What the last block returns."""
        x = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers:
            x = layer(x, *rotation)
        return x


class HuggingFaceDecoder(Decoder):
    """`LlamaForCausalLM` of transformers 5, and models like it: rotations by forward, the loss
    inside; `head_norm`: of queries and keys, as Qwen3's."""

    norm_of: Norm = HuggingFaceNorm

    def __init__(
        self,
        run: TorchRun,
        feed: Callable[[Mapping[str, int]], nn.Module],
        head_norm: Norm | None = None,
    ) -> None:
        sizes, eager = run.sizes, run.flag("attention", "flash-2") == "eager"

        def block() -> Block:
            attention = Attention(sizes, titan=False, eager=eager, norm=head_norm)
            return Block(self.norm_of, sizes["D"], attention, feed(sizes))

        super().__init__(sizes, self.norm_of, block)
        inverse = 1.0 / 5e5 ** (torch.arange(0, sizes["K"], 2, dtype=torch.float32) / sizes["K"])
        self.register_buffer("inv_freq", inverse, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], dtype=torch.float32)
        angles = torch.outer(places, self.inv_freq)
        both = torch.cat((angles, angles), dim=-1)
        kind = self.tok_embeddings.weight.dtype
        hidden = self.norm(self.blocks(tokens, both.cos().to(kind), both.sin().to(kind)))
        return self.loss(hidden, labels)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """`ForCausalLMLoss`."""
        logits = self.output(hidden)  # both are there until the loss is
        upcast = logits.float()
        shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return functional.cross_entropy(upcast.view(-1, upcast.shape[-1]), shifted.view(-1))


class LigerFeedForward(FeedForward):
    """`LigerSwiGLUMLP`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(liger_swiglu(self.w1(x), self.w3(x)))


class LigerDecoder(HuggingFaceDecoder):
    """The same with the kernels of Liger; `lce_forward` has the head in the loss."""

    norm_of = LigerNorm

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return liger_loss(hidden.flatten(0, 1), self.output.weight)


class TorchtitanDecoder(Decoder):
    """`Transformer` of torchtitan's llama3, and models like it: rotations as a complex buffer; the
    loss is outside of forward, see `outside_loss`."""

    head_norm: Norm | None = None

    def __init__(self, run: TorchRun, feed: Callable[[Mapping[str, int]], nn.Module]) -> None:
        sizes = run.sizes

        def block() -> Block:
            attention = Attention(sizes, titan=True, norm=self.head_norm)
            return Block(FusedNorm, sizes["D"], attention, feed(sizes))

        super().__init__(sizes, FusedNorm, block)
        inverse = 1.0 / 5e5 ** (torch.arange(0, sizes["K"], 2, dtype=torch.float32) / sizes["K"])
        angles = torch.outer(torch.arange(sizes["S"], dtype=torch.float32), inverse)
        self.register_buffer("freqs_cis", self.rotations(angles))

    def rotations(self, angles: Tensor) -> Tensor:
        """The table of rotations."""
        return torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(tokens, self.freqs_cis)


class TorchtitanQwen(TorchtitanDecoder):
    """`Qwen3Model` of torchtitan: norms of heads, and rotations of halves by a table in fp32."""

    head_norm = FusedNorm

    def __init__(self, run: TorchRun, feed: Callable[[Mapping[str, int]], nn.Module]) -> None:
        super().__init__(run, feed)
        if run.flag("rotation_tables", "cos-sin") != "cos-sin":
            raise ValueError(f"{run.title}: Qwen3 of torchtitan has rotation_tables = cos-sin")

    def rotations(self, angles: Tensor) -> Tensor:
        both = torch.cat((angles, angles), dim=-1)
        return torch.cat((both.cos(), both.sin()), dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.freqs_cis.to(torch.bfloat16).chunk(2, dim=-1)
        return self.logits(tokens, cos, sin)


def outside_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """`cross_entropy_loss` of torchtitan."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


#: Models by text of the library and stack.
MODELS: Mapping[tuple[str, str], Callable[[TorchRun], nn.Module]] = {
    ("llama.stg", "huggingface"): partial(HuggingFaceDecoder, feed=FeedForward),
    ("llama.stg", "huggingface-liger"): partial(LigerDecoder, feed=LigerFeedForward),
    ("llama.stg", "torchtitan"): partial(TorchtitanDecoder, feed=FeedForward),
    ("mixtral.stg", "huggingface"): partial(
        HuggingFaceDecoder, feed=partial(HuggingFaceExperts, wide=True)
    ),
    ("qwen3_moe.stg", "huggingface"): partial(
        HuggingFaceDecoder, feed=HuggingFaceExperts, head_norm=HuggingFaceNorm
    ),
    ("qwen3_moe.stg", "torchtitan"): partial(TorchtitanQwen, feed=TorchtitanMoe),
}


def model_of(run: TorchRun) -> nn.Module:
    """The model of a run, in fp32. Raises `ValueError` where none is written down here."""
    key = run.text, run.flag("stack", "huggingface")
    if key not in MODELS:
        raise ValueError(f"{run.title}: there is no model {key[0]} in the way of {key[1]}")
    return MODELS[key](run)
