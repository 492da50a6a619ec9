"""emit: writes one execution trace per rank."""

from dataclasses import field
from pathlib import Path

from stagec.api import Module, Pass, Phase
from stagec.formats.registry import find_format, formats_of


class Emit(Pass):
    """Write the traces of all ranks, the groups file and the manifest into a folder. The module is
    not changed."""

    needs = Phase.LOWERED

    out: str = field(default="traces", metadata={"help": "the folder to write to"})
    force: bool = field(default=False, metadata={"help": "replace earlier output in that folder"})
    format: str = field(default="chakra", metadata={"help": "the format of the files"})

    def run(self, module: Module) -> None:
        # imported here: they load protobuf, and every command loads every pass
        from stagec.traces.emit import make_job
        from stagec.traces.writer import Emission, write_source

        format_ = find_format(self.format, formats_of(module.registry))
        job = make_job(module, module.name, format_=format_)
        write_source(job, Path(self.out), {}, Emission(force=self.force))
