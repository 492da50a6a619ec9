"""The format of ASTRA-sim: a folder that one command simulates."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from stagec.formats.astra_sim import system_files
from stagec.formats.astra_sim.topology import Dimension, dimensions, network_text, pod_dimensions
from stagec.formats.base import Durations, Layout, Need, TraceJob
from stagec.formats.chakra.encode import Encoder
from stagec.formats.chakra.format import ChakraFormat
from stagec.formats.chakra.limits import LARGEST_GROUP_ID
from stagec.machines import Machine
from stagec.program.groups import GroupAxes
from stagec.program.nodes import Program
from stagec.support.diagnostics import error

#: The collectives for which ASTRA-sim has algorithms: workload/Workload.cc.
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class AstraSimFormat(ChakraFormat):
    """Chakra traces, and the files that describe the machine to ASTRA-sim: system.json,
    network.yml, memory.json, logical_topology.json, and run.sh, which runs it.

    The time of a computation is the roofline of the machine, or with `durations` the time that the
    cost model of `--machine` gives, in whole microseconds.
    """

    durations: bool = False
    name: ClassVar[str] = "astra-sim"
    needs: ClassVar[frozenset[Need]] = frozenset({"machine"})
    wants_flops: ClassVar[bool] = True

    def encoder(self, program: Program, layout: Layout, durations: Durations | None) -> Encoder:
        _check_program(program)
        return super().encoder(program, layout, durations if self.durations else None)

    def check(self, job: TraceJob) -> None:
        """Raises `DiagnosticError` for jobs that ASTRA-sim cannot run: a single rank, and more
        groups than its tags can number."""
        if job.machine is not None:
            _dimensions(job, job.machine)
        largest = len(job.layout.groups.ids)
        if largest > LARGEST_GROUP_ID:
            raise error(
                f"the job has {largest} communicator groups, and ASTRA-sim's 32-bit message tags "
                f"hold {LARGEST_GROUP_ID}",
                remedy="choose a smaller mesh, or write --format chakra for other consumers",
            )
        if self.durations and job.durations is None:
            raise error(
                "the job has no durations of computations",
                remedy="compile it with --machine, or drop {durations} for a roofline",
            )

    def drops(self, program: Program, layout: Layout) -> Sequence[str]:
        losses = [*super().drops(program, layout)]
        losses += ["a stream for each communicator: a rank has one collective or send at a time"]
        if any(node.is_copy for node in program.prototypes):
            losses.append("copies beside collectives and sends: a rank has one of them at a time")
        if not self.durations:
            types = sorted({k.dtype for n in program.prototypes for k in n.kernels if k.dtype})
            if len(types) > 1:
                losses.append(f"one peak for products of all types ({', '.join(types)})")
        small = _smallest(program)
        if small is not None and small < layout.groups.ranks:
            losses.append(
                f"collectives of fewer bytes than there are ranks, {layout.groups.ranks}, get as "
                f"many (the smallest has {small})"
            )
        inner = [axis for axis, size in layout.mesh.items() if size > 1]
        of_one_pod = layout.start > 0 or layout.groups.ranks > prod(layout.mesh.values())
        joined = [
            group
            for group in program.groups
            if len(group.axes) > 1 and (of_one_pod or set(group.axes) < set(inner))
        ]
        if joined:
            names = ", ".join("+".join(g.axes) for g in joined)
            losses.append(
                f"a group over several axes ({names}) is one ring, and a step of it along several "
                "axes takes the link of the innermost"
            )
        if any(layout.other_pods.values()):
            losses.append(
                "the level between pods: a message to another one takes the link of the innermost "
                "dimension along which the ranks differ"
            )
        return losses

    def companions(self, job: TraceJob) -> Mapping[str, bytes]:
        machine = job.machine
        if machine is None:
            return {}
        dims, ranks = _dimensions(job, machine), job.layout.groups.ranks
        peak = _peak(job, machine)
        about: dict[str, object] = {
            "name": job.name,
            "ranks": ranks,
            "machine": machine.name,
            "peak_flops": peak,
            "model_flops": job.model.flops if job.model is not None else None,
            "mesh": dict(job.layout.mesh),
            "groups": {
                _group_name(axes): [first, first + len(job.layout.groups.members[axes]) - 1]
                for axes, first in job.layout.groups.first.items()
            },
        }
        waits = machine.efficiency.rendezvous is not None
        about |= {"rendezvous": True} if waits else {}
        bandwidth = machine.memory.bandwidth.value
        system = system_files.system(
            dims, peak, bandwidth, roofline=not self.durations, tensors=self.tensor_names
        )
        return {
            system_files.SYSTEM: system_files.text(system),
            system_files.NETWORK: network_text(dims).encode(),
            system_files.MEMORY: system_files.text(
                system_files.memory(machine.host if _copies(job) else None)
            ),
            "logical_topology.json": system_files.text(system_files.logical_topology(dims)),
            "run.sh": system_files.script(job.name, ranks, rendezvous=waits).encode(),
            system_files.ABOUT: system_files.text(about),
        }


def _dimensions(job: TraceJob, machine: Machine) -> list[Dimension]:
    """The dimensions of the network. Raises `DiagnosticError` if the job does not fit ASTRA-sim's
    network."""
    layouts = [job.layout_of(number) for number in range(len(job.members))]
    pods = {layout.pod: layout.mesh for layout in layouts}
    return pod_dimensions(pods, machine) if len(pods) > 1 else dimensions(job.layout.mesh, machine)


def _group_name(axes: GroupAxes) -> str:
    """`dp+tp`, or with several pods `main/dp+tp`."""
    pod = axes.axes[0] if axes.axes[0].endswith("/") else ""
    return pod + "+".join(axes.words[1:] if pod else axes.words)


def _peak(job: TraceJob, machine: Machine) -> float:
    """The FLOP/s of the element type in which the first class does most FLOPs of products;
    otherwise of bf16, otherwise the highest of the machine."""
    counts: Counter[str] = Counter()
    program = job.program(0)
    for node, count in zip(program.prototypes, program.counts.tolist(), strict=True):
        for kernel in node.kernels:
            if kernel.dtype:
                counts[kernel.dtype] += kernel.flops * count
    tables = (*machine.compute.vector.items(), *machine.compute.matrix.items())
    rates: dict[str, float] = {name: rate.value for name, rate in tables}
    wanted = [*(name for name, _ in counts.most_common()), "bf16"]
    return next((rates[name] for name in wanted if name in rates), max(rates.values()))


def _copies(job: TraceJob) -> bool:
    """Whether any rank of the job copies between device and host."""
    programs = map(job.program, range(len(job.members)))
    return any(node.is_copy for program in programs for node in program.prototypes)


def _smallest(program: Program) -> int | None:
    """The bytes of the smallest collective that is divided into parts (Sys::determine_chunk_size),
    or None."""
    sizes = (n.size for n in program.prototypes if n.is_collective and n.kind != "all_gather")
    return min(sizes, default=None)


def _check_program(program: Program) -> None:
    """Raises `DiagnosticError` for collectives that ASTRA-sim does not know."""
    for node in program.prototypes:
        if node.is_collective and node.kind not in _KINDS:
            raise error(
                f"ASTRA-sim has no algorithm for '{node.kind}' ('{node.name}')",
                remedy="write --format chakra for other consumers",
            )


ASTRA_SIM = AstraSimFormat()
