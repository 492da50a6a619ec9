"""Where gradients and optimizer state of a parameter live: with it, or sharded further (ZeRO)."""

from __future__ import annotations

from stagec.ir.core import Value
from stagec.ir.module import Module
from stagec.ir.types import TensorType
from stagec.sharding.strategy import Strategy
from stagec.transform.sharder import Sharder


class StatePlacement:
    """Placements that follow from a parameter's own and the ZeRO stage."""

    def __init__(self, module: Module, strategy: Strategy) -> None:
        self._sharder = Sharder(module, strategy)
        self._further = strategy.zero in (1, 2)

    def gradient(self, param: Value) -> TensorType:
        """Where the reduced gradient of a parameter lives (and its optimizer state)."""
        return self._sharder.shard(param) if self._further else param.tensor
