"""add-optimizer: gradient clipping and one AdamW update per parameter."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.api import Module, Pass, Phase
from stagec.transform.optimizer import add_optimizer


@dataclass(frozen=True)
class AddOptimizer(Pass):
    """Append the optimizer: the function then returns the loss, updated parameters and updated
    state.

    The strategy says which (`stg.optimizer`) and with which element types (`stg.dtypes`).
    """

    name = "add-optimizer"
    needs = Phase.DIFFERENTIATED

    def run(self, module: Module) -> None:
        add_optimizer(module)
