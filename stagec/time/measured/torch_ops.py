"""Turns ops of PyTorch that the profiler recorded into rows of a table of measured kernels.

The name of an op, its recorded dimensions, types and arguments determine the kernel. The order of
arguments is that of `native_functions.yaml` of pytorch/pytorch, and of `flash_attn_interface.py`
for the package flash-attn (Dao-AILab/flash-attention).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from stagec.support.json_values import is_list
from stagec.time.measured.kernel_tables import Key

#: Element types as the profiler calls them: stagec's name, and bytes.
TYPES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "c10::BFloat16": ("bf16", 2),
        "c10::Half": ("f16", 2),
        "float": ("f32", 4),
        "double": ("f64", 8),
        "c10::Float8_e4m3fn": ("f8e4m3", 1),
        "c10::Float8_e5m2": ("f8e5m2", 1),
        "signed char": ("i8", 1),
        "unsigned char": ("u8", 1),
        "bool": ("bool", 1),
        "short": ("i16", 2),
        "int": ("i32", 4),
        "long int": ("i64", 8),
        "long": ("i64", 8),
    }
)
#: Bytes of the element types of collectives (c10/core/ScalarType.h).
SIZES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
        **dict.fromkeys(("Float8_e4m3fnuz", "Float8_e5m2fnuz"), 1),
        **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
        **dict.fromkeys(("Float", "Int"), 4),
        **dict.fromkeys(("Double", "Long"), 8),
    }
)
#: Why an op is not a row.
NO_SHAPES = "its shapes are not recorded"


@dataclass(frozen=True, slots=True)
class Recorded:
    """An op as the profiler recorded it: for each argument its dimensions, its strides, its type
    and, if it is not a tensor, its value as text."""

    name: str
    dims: Any
    strides: Any
    types: Any
    values: Any

    def value(self, i: int) -> str:
        """The text of an argument that is not a tensor; '' if it is not recorded."""
        item = _item(self.values, i)
        return item if isinstance(item, str) else ""

    def tensor(self, i: int) -> Tensor:
        """An argument. Raises `ValueError` if it is not a tensor with a recorded shape."""
        shape, width = _item(self.dims, i), TYPES.get(str(_item(self.types, i)))
        if is_list(shape) and any(map(is_list, shape)):
            raise ValueError("the types of lists of tensors are not recorded")
        if not is_list(shape) or width is None or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(NO_SHAPES)
        strides = _item(self.strides, i)
        return Tensor(tuple(shape), *width, strides if is_list(strides) else [])

    def has(self, i: int) -> bool:
        """Whether an argument is a tensor."""
        try:
            self.tensor(i)
        except ValueError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Tensor:
    """The shape of an argument, its element type and the bytes of an element."""

    shape: tuple[int, ...]
    dtype: str
    width: int
    strides: Sequence[int]

    @property
    def size(self) -> int:
        """The bytes in memory; broadcast elements count once."""
        strides = self.strides if len(self.strides) == len(self.shape) else [1] * len(self.shape)
        return math.prod(n for n, s in zip(self.shape, strides, strict=True) if s) * self.width


def _item(values: Any, i: int) -> Any:
    """Element i of a list, or None."""
    return values[i] if is_list(values) and i < len(values) else None


def row_of(op: Recorded) -> Key | str | None:
    """The row of an op, or the reason why it has none; None if the op is not known."""
    find = _OPS.get(op.name)
    if find is None:
        return _triton(op)
    try:
        row = find(op)
    except ValueError as problem:
        return str(problem)
    return row if all(n > 0 for n in row.extents) else "it has no elements"


def row_of_collective(name: str, nelems: tuple[Any, Any], dtype: Any, ranks: Any) -> Key | str:
    """The row of a collective, given its name, the numbers of its input and output elements, type
    and group size; or the reason why it has none. Its bytes are those of the larger side."""
    plain = name.lower().replace("_", "")
    kind = next((k for start, k in _COLLECTIVES.items() if plain.startswith(start)), None)
    if kind is None or "sparse" in plain:
        return "recv waits for its sender" if plain == "recv" else "no collective of the table"
    width = SIZES.get(dtype) if isinstance(dtype, str) else None
    if width is None or not all(type(n) is int for n in (*nelems, ranks)):
        return "its sizes are not recorded"
    size = max(nelems) * width
    ranks = 2 if kind == "message" else ranks
    if ranks < 2 or size <= 0:
        return "it moves nothing"
    return Key(kind, "", (ranks, size))


_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "send": "message",
}


def _product(op: Recorded, first: int) -> Key:
    """Operands [.., m, k] and [.., k, n] at `first` and after it."""
    left, right = op.tensor(first), op.tensor(first + 1)
    if len(left.shape) != len(right.shape) or left.shape[-1:] != right.shape[-2:-1]:
        raise ValueError("its operands are not matrices that can be multiplied")
    *batch, m, k = left.shape
    if left.dtype != right.dtype:
        raise ValueError(f"a product of {left.dtype} by {right.dtype}")
    return Key("matmul", left.dtype, (math.prod(batch), m, right.shape[-1], k))


@dataclass(frozen=True, slots=True)
class _Attention:
    """The places of the arguments of fused attention: the query (key and value follow it), whether
    the mask is causal, the bias and the left window. With `heads` the dimensions are batch, heads,
    rows, width, else batch, rows, heads, width."""

    kind: str
    query: int
    causal: int
    bias: int | None = None
    window: int | None = None
    heads: bool = True

    def __call__(self, op: Recorded) -> Key:
        q, k, v = (op.tensor(self.query + i) for i in range(3))
        if not all(len(t.shape) == 4 for t in (q, k, v)):
            raise ValueError("sequences of different lengths")
        if self.bias is not None and op.has(self.bias):
            raise ValueError("attention with a bias")
        if self.window is not None and not op.value(self.window).startswith("-"):
            raise ValueError("attention with a window")
        causal = op.value(self.causal)
        if causal not in ("True", "False"):
            raise ValueError("whether it is causal is not recorded")
        rows, heads = (2, 1) if self.heads else (1, 2)
        extents = (q.shape[0], q.shape[heads], k.shape[heads], q.shape[rows], k.shape[rows])
        return Key(self.kind, q.dtype, (*extents, q.shape[3], v.shape[3]), causal == "True")


def _memory(size: int, op: str = "") -> Key:
    return Key("memory", "", (size,), False, op)


def _normalized(op: Recorded, name: str, *parameters: int, backward: bool = False) -> Key:
    """A normalization, which reads x and its parameters, the scale first, and writes y; or its
    backward, which reads dy, x and the scale and writes dx and the gradients of the parameters."""
    x = op.tensor(int(backward))
    sizes = [op.tensor(i).size for i in parameters if op.has(i)]
    if backward:
        return _memory(op.tensor(0).size + 2 * x.size + sum(sizes[:1] + sizes), f"{name}_grad")
    return _memory(2 * x.size + sum(sizes), name)


def _softmax(op: Recorded) -> Key:
    x = op.tensor(0)
    wide = op.value(2) == "True"  # half_to_float
    return _memory(x.size + x.size // x.width * (4 if wide else x.width), "softmax")


def _embedding(op: Recorded) -> Key:
    """An embedding, which reads an index and a row for each token and writes the row."""
    table, tokens = op.tensor(0), op.tensor(1)
    if len(table.shape) != 2:
        raise ValueError("its table is not a matrix")
    row = table.shape[1] * table.width
    return _memory(math.prod(tokens.shape) * (2 * row + tokens.width), "embedding")


def _elementwise(op: Recorded, operands: int) -> Key:
    """An element-wise op, which reads its operands and writes their common shape in the widest of
    their types, or in place the first operand. Arguments after the operands are those of `out=`."""
    tensors = [op.tensor(i) for i in range(operands) if i == 0 or op.has(i)]
    if op.name.endswith("_"):
        return _memory(sum(t.size for t in tensors) + tensors[0].size)
    rank = max(len(t.shape) for t in tensors)
    shapes = [(1,) * (rank - len(t.shape)) + t.shape for t in tensors]
    shape = [max(sizes) for sizes in zip(*shapes, strict=True)]
    width = max((t.width for t in tensors if t.shape or not rank), default=1)
    return _memory(sum(t.size for t in tensors) + math.prod(shape) * width)


def _dropout(op: Recorded) -> Key:
    """Dropout, which also writes a mask of one byte an element."""
    x = op.tensor(0)
    return _memory(2 * x.size + x.size // x.width, "dropout")


def _copy(op: Recorded) -> Key:
    """A copy of the second argument to the first."""
    return _memory(math.prod(op.tensor(0).shape) * op.tensor(0).width + op.tensor(1).size)


def _triton(op: Recorded) -> Key | str | None:
    """A fused kernel of torch.compile, which reads or writes each of its arguments once."""
    if not op.name.startswith(("triton_poi_", "triton_red_", "triton_per_")):
        return None
    tensors = [op.tensor(i) for i in range(len(op.dims or [])) if op.has(i)]
    return _memory(sum(t.size for t in tensors)) if tensors else NO_SHAPES


_UNARY = """neg abs exp exp2 log sqrt rsqrt reciprocal sin cos tanh sigmoid silu gelu relu pow clamp
    clamp_min square softplus _log_softmax"""
_BINARY = """add sub rsub mul div maximum minimum silu_backward gelu_backward sigmoid_backward
    tanh_backward threshold_backward native_dropout_backward masked_fill"""
_TERNARY = "where addcmul addcdiv lerp"

_BATCHED = ("aten::baddbmm", "aten::baddbmm_")

_OPS: Mapping[str, Callable[[Recorded], Key]] = MappingProxyType(
    {
        **{
            f"aten::{name}{place}": partial(_elementwise, operands=n)
            for n, names in ((1, _UNARY), (2, _BINARY), (3, _TERNARY))
            for name in names.split()
            for place in ("", "_")
        },
        "aten::copy_": _copy,
        "aten::native_dropout": _dropout,
        "aten::fill_": lambda op: _memory(op.tensor(0).size),
        "aten::zero_": lambda op: _memory(op.tensor(0).size),
        "aten::sum": lambda op: _memory(op.tensor(0).size),
        "aten::mean": lambda op: _memory(op.tensor(0).size),
        "aten::linalg_vector_norm": lambda op: _memory(op.tensor(0).size),
        "aten::native_layer_norm": lambda op: _normalized(op, "layernorm", 2, 3),
        "aten::native_layer_norm_backward": lambda op: _normalized(
            op, "layernorm", 5, 6, backward=True
        ),
        "aten::_fused_rms_norm": lambda op: _normalized(op, "rmsnorm", 2),
        "aten::_fused_rms_norm_backward": lambda op: _normalized(op, "rmsnorm", 4, backward=True),
        "aten::_softmax": _softmax,
        "aten::_softmax_backward_data": lambda op: _memory(3 * op.tensor(0).size, "softmax_grad"),
        "aten::embedding": _embedding,
        **dict.fromkeys(
            ("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::_int_mm"),
            lambda op: _product(op, 0),
        ),
        **dict.fromkeys(
            ("aten::addmm", "aten::addmm_", "aten::_addmm_activation", *_BATCHED),
            lambda op: _product(op, 1),
        ),
        "aten::_scaled_dot_product_flash_attention": _Attention("attention", 0, 4),
        "aten::_scaled_dot_product_flash_attention_backward": _Attention(
            "attention_backward", 1, 11
        ),
        "aten::_scaled_dot_product_efficient_attention": _Attention("attention", 0, 6, 3),
        "aten::_scaled_dot_product_efficient_attention_backward": _Attention(
            "attention_backward", 1, 11, 4
        ),
        "aten::_scaled_dot_product_cudnn_attention": _Attention("attention", 0, 6, 3),
        "aten::_scaled_dot_product_cudnn_attention_backward": _Attention(
            "attention_backward", 1, 14, 8
        ),
        "flash_attn::_flash_attn_forward": _Attention("attention", 0, 5, window=6, heads=False),
        "flash_attn::_flash_attn_backward": _Attention(
            "attention_backward", 1, 11, window=12, heads=False
        ),
    }
)
