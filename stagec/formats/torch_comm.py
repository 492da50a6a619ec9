"""Communication in the form that PyTorch records: names of collectives, element types, numbers of
input and output elements."""

from collections.abc import Mapping
from typing import NamedTuple

from stagec.program.nodes import Node
from stagec.time.measured.torch_ops import SIZES

#: The names of collectives and messages in PyTorch and in NCCL's kernels.
NCCL: Mapping[str, tuple[str, str]] = {
    "all_reduce": ("allreduce", "AllReduce"),
    "all_gather": ("_allgather_base", "AllGather"),
    "reduce_scatter": ("_reduce_scatter_base", "ReduceScatter"),
    "all_to_all": ("all_to_allv", "SendRecv"),
    "broadcast": ("broadcast", "Broadcast"),
    "reduce": ("reduce", "Reduce"),
    "send": ("send", "SendRecv"),
    "recv": ("recv", "SendRecv"),
}
#: PyTorch's names of element types: c10/core/ScalarType.h.
TYPES: Mapping[str, str] = {
    "bf16": "BFloat16",
    "f16": "Half",
    "f32": "Float",
    "f64": "Double",
    "f8e4m3": "Float8_e4m3fn",
    "f8e5m2": "Float8_e5m2",
    "i8": "Char",
    "i16": "Short",
    "i32": "Int",
    "i64": "Long",
    "bool": "Bool",
}
#: The types of tensors, by the element types of PyTorch.
TENSORS: Mapping[str, str] = {
    "BFloat16": "c10::BFloat16",
    "Half": "c10::Half",
    "Float": "float",
    "Double": "double",
    "Float8_e4m3fn": "c10::Float8_e4m3fn",
    "Float8_e5m2": "c10::Float8_e5m2",
    "Char": "signed char",
    "Byte": "unsigned char",
    "Short": "short int",
    "Int": "int",
    "Long": "long int",
    "Bool": "bool",
}
#: Element types that `comm_replay` does not know.
EIGHT_BITS = frozenset(("Float8_e4m3fn", "Float8_e5m2"))


class Elements(NamedTuple):
    """The element type of a collective, and its numbers of input and output elements."""

    dtype: str
    into: int
    out: int


def elements_of(node: Node, mesh: Mapping[str, int]) -> Elements:
    """The elements of a collective or message. If its type is not known, or its size is not a whole
    number of elements, elements are bytes."""
    dtype = TYPES.get(node.op.text("dtype") if node.op is not None else "", "Byte")
    ranks = node.group.size(mesh) if node.is_collective else 1
    if node.size % (SIZES[dtype] * ranks):
        dtype = "Byte"
    full = node.size // SIZES[dtype]
    sides = {"all_gather": (full // ranks, full), "reduce_scatter": (full, full // ranks)}
    return Elements(dtype, *sides.get(node.kind, (full, full)))
