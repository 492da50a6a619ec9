"""emit-chakra: writes one execution trace per rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from stagec.api import Module, Pass, Phase
from stagec.job.emit import emit_module
from stagec.job.writer import Emission


@dataclass(frozen=True)
class EmitChakra(Pass):
    """Write the traces of all ranks, the groups file and the manifest into a folder; the module
    stays as it is."""

    name = "emit-chakra"
    needs = Phase.LOWERED

    out: str = field(default="traces", metadata={"help": "the folder to write to"})
    force: bool = field(default=False, metadata={"help": "replace earlier output in that folder"})

    def run(self, module: Module) -> None:
        emit_module(module, module.name, Path(self.out), {}, how=Emission(force=self.force))
