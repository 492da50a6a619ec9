"""The format of MLCommons Chakra, as ASTRA-sim and related tools read it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stagec.formats.base import Durations, Format, Layout, TraceJob
from stagec.formats.chakra.encode import Encoder, fixed_varint
from stagec.formats.chakra.limits import exceeded_limits
from stagec.formats.chakra.nodes import varint
from stagec.formats.chakra.tensors import tensors_of
from stagec.ir.kernel import ON_HOST
from stagec.program.groups import Groups
from stagec.program.nodes import Program
from stagec.support.diagnostics import error


@dataclass(frozen=True)
class ChakraFormat(Format):
    """Chakra execution traces: protobuf records, one file per rank, and a groups file.

    With `tensor_names`, each node of a program with memory events lists the tensors that it reads
    and writes, see `tensors_of`. With `io`, each node has the shapes and element types of its
    operands and results, its element type and its stream.
    """

    tensor_names: bool = False
    io: bool = False
    name: ClassVar[str] = "chakra"
    suffix: ClassVar[str] = "et"
    patched: ClassVar[bool] = True
    pods: ClassVar[bool] = True

    def encoder(self, program: Program, layout: Layout, durations: Durations | None) -> Encoder:
        tensors = tensors_of(program) if self.tensor_names else None
        operands = None
        if self.io:  # imported only if needed
            from stagec.formats.chakra.operands import Operands

            operands = Operands.of(program, layout)
        return Encoder(self, program, layout, durations, tensors, operands)

    def check(self, job: TraceJob) -> None:
        if self.io and not job.models:
            raise error(
                "archives and traces that were read contain no operands (io)",
                remedy="compile the job with --format 'chakra{io=yes}'",
            )

    def drops(self, program: Program, layout: Layout) -> Sequence[str]:
        losses: list[str] = []
        if any(kernel.form == ON_HOST for node in program.prototypes for kernel in node.kernels):
            losses.append("that updates run in host memory: they are computations of the device")
        if not self.tensor_names or program.events is None:
            return losses
        more = tensors_of(program).peak - program.events.peak
        if more:
            losses.append(
                f"memory that is held by one node only: tensors peak {more:,} bytes higher"
            )
        return losses

    def peer(self, rank: int, ranks: int) -> bytes:
        return fixed_varint(rank, len(varint(ranks - 1)))

    def warnings(self, path: Path, groups: Groups, nodes: int) -> Sequence[str]:
        notes = exceeded_limits(groups.ids, groups.ranks, nodes)
        if "empty" in str(path):
            notes.append("ASTRA-sim takes a path with the word 'empty' for no groups file at all")
        return notes


CHAKRA = ChakraFormat()
