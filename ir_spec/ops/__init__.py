"""The built-in ops: each class with a `name` defines one. `OPS` lists them."""

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from stagec.ir.opdef import OpDef

#: Modules of ops, in the order in which these are listed.
_MODULES = """
    structure functions quantized served_adapters parts
    contraction convolution extremes
    scan causal_conv sequence_parts state_space linear_attention rwkv rg_lru
    selection merge cache_rows
    activation gated norm softmax
    attention ring ring_edge rope distance indexer compressed streams
    route moe vocabulary loss_forms losses recommend
    layout comm optimizer adam8bit adafactor muon pipeline pod_crossings trace
"""


def ops_of(room: ModuleType) -> Iterator[OpDef]:
    """An op for each class with a name that a module defines, in the order of the text, each
    followed by the ops that are derived from it."""
    for item in vars(room).values():
        own = isinstance(item, type) and item.__module__ == room.__name__ and "name" in vars(item)
        if own and issubclass(item, OpDef):
            op = item()
            yield from (op, *op.derived())


OPS: tuple[OpDef, ...] = tuple(
    op for name in _MODULES.split() for op in ops_of(import_module(f"{__name__}.{name}"))
)
