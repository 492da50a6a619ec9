"""split-stages: one function for each kind of pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

from stagec.api import Module, Pass, Phase
from stagec.sharding.kept import gather_once
from stagec.sharding.strategy import read_strategy
from stagec.transform.split_stages import split_stages


@dataclass(frozen=True)
class SplitStages(Pass):
    """Cut the step into functions of pipeline stages, as `stg.pipeline` says.

    Stages that hold the same share a function. Its accumulation becomes a list of `stg.action`s,
    with `stg.send` and `stg.recv` where the model is cut; a schedule with split backward gets
    actions for the gradients of weights. Reductions between stages (the gradient norm, tied
    embeddings) are inserted. With `reshard = never` every parameter is gathered once, before the
    microbatches. Without that statement nothing happens.
    """

    name = "split-stages"
    needs = Phase.PARTITIONED

    def run(self, module: Module) -> None:
        split_stages(module)
        strategy = read_strategy(module)
        if strategy.pipeline is not None and strategy.reshard == "never":
            gather_once(module)
