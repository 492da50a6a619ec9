"""Operands and results of nodes, as Chakra's converter of PyTorch traces writes them.

    inputs.shapes   [[4096, 512], [512, 1792]]
    inputs.types    ['Tensor(c10::BFloat16)', 'Tensor(c10::BFloat16)']

Shapes are those of one rank: each dimension is divided by the axes that split it. A kernel of
several ops has the operands that it reads and the results that others use; a call of a reduction in
buckets has its elements in a single row. Nodes whose sizes differ between ranks of a class, and
merged nodes, have no shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from stagec.formats.base import Layout
from stagec.formats.chakra.nodes import AttrValue, NodeOperands
from stagec.formats.torch_comm import TENSORS, TYPES, elements_of
from stagec.ir.core import Operation, Value
from stagec.ir.expr import UnboundError, evaluate
from stagec.ir.types import TensorType
from stagec.program.nodes import Node, Program
from stagec.support.diagnostics import NotAnIntegerError
from stagec.support.memo import memo_method
from stagec.time.streams import COMPUTE, Stream, streams_of

_NONE = NodeOperands("[]", "[]", "[]")


@dataclass(frozen=True)
class Operands:
    """The operands, results and streams of the nodes of a class."""

    layout: Layout
    streams: Mapping[Stream, int]

    @classmethod
    def of(cls, program: Program, layout: Layout) -> Operands:
        """The operands of a program. Computations are on stream 0; other streams are numbered in
        the order of use."""
        used = (streams_of(node)[-1] for node in program.prototypes)
        return cls(layout, {s: i for i, s in enumerate(dict.fromkeys((COMPUTE, *used)))})

    def attributes(self, node: Node) -> dict[str, AttrValue]:
        """The attributes for the stream of a node, and for its element type if it has one."""
        dtype = self._dtype(node)
        stream = {"stream": self.streams[streams_of(node)[-1]]}
        return {**stream, **({"dtype": dtype} if dtype else {})}

    def _dtype(self, node: Node) -> str:
        if node.op is not None and (dtype := node.op.text("dtype")):
            return dtype
        if node.kernel is not None and node.kernel.dtype:
            return node.kernel.dtype
        origin = None if node.op is None else node.op.origin
        types = [v.type for v in origin.results] if origin is not None else []
        return next((t.dtype for t in types if isinstance(t, TensorType)), "")

    @memo_method
    def sides(self, node: Node) -> tuple[NodeOperands, NodeOperands]:
        """The operands and the results of a prototype."""
        if node.bucket:
            dtype, into, out = elements_of(node, self.layout.mesh)
            return _written([([into], dtype)]), _written([([out], dtype)])
        origin = None if node.op is None else node.op.origin
        if origin is None or node.parts:
            return _NONE, _NONE
        kernel = _kernel(origin)
        inside = {result for op in kernel for result in op.results}
        given = dict.fromkeys(v for op in kernel for v in op.operands if v not in inside)
        made = [v for v in inside if any(user not in kernel for user, _ in v.uses)]
        order = [v for op in kernel for v in op.results if v in set(made)]
        return self._values(given), self._values(order or origin.results)

    def _values(self, values: Iterable[Value]) -> NodeOperands:
        tensors = [v.tensor for v in values if isinstance(v.type, TensorType)]
        shapes = [self._shape(t) for t in tensors]
        if any(shape is None for shape in shapes):
            return _NONE
        return _written([(s or [], t.dtype) for s, t in zip(shapes, tensors, strict=True)])

    def _shape(self, tensor: TensorType) -> list[int] | None:
        """The extents of a rank's part, None if they are not known."""
        sizes, mesh = self.layout.sizes, self.layout.mesh
        try:
            whole = [(evaluate(d.size, sizes), prod(mesh[a] for a in d.axes)) for d in tensor.dims]
        except (NotAnIntegerError, UnboundError):
            return None
        return [-(-size // parts) for size, parts in whole]


def _kernel(op: Operation) -> Sequence[Operation]:
    """The ops that run in the same launch as this one, including itself."""
    number, region = op.integer("fused", 0), op.parent
    if not number or region is None:
        return [op]
    return [each for each in region.ops if each.integer("fused", 0) == number]


def _written(tensors: Sequence[tuple[Sequence[int], str]]) -> NodeOperands:
    types = [f"Tensor({TENSORS.get(TYPES.get(d, d), d)})" for _, d in tensors]
    return NodeOperands("[]", repr([list(shape) for shape, _ in tensors]), repr(types))
