"""Cautions about a step time, which every output shows: constants of a machine that were never
measured, and groups that cross a level of the network without need."""

from collections.abc import Iterable, Iterator, Mapping

from stagec.ir_spec.strategy.kernels import DEVICE, UNFUSED
from stagec.machines import Machine
from stagec.machines.placement import straddling

#: Constants of which a machine without measurements has defaults.
_OF_STEPS = ("matmul", "attention", "memory", "sustained")


def cautions(machine: Machine, meshes: Iterable[Mapping[str, int]] = ()) -> tuple[str, ...]:
    """The cautions about a machine, and about jobs with these meshes on it."""
    of_jobs = (text for mesh in meshes for text in _of_groups(machine, mesh))
    return tuple(dict.fromkeys([*_of_constants(machine), *of_jobs]))


def of_software(
    machine: Machine, kernels: Iterable[str], blocks: Iterable[str] = ()
) -> Iterator[str]:
    """The cautions about kernels of attention, and of products in `blocks` of fp8, that the
    software names and for which the machine has no constants. Unfused attention is not a kernel."""
    attention, products = machine.efficiency.attention, machine.efficiency.matmul.kernels
    named = {n: attention.of_kernel(n.replace("-", "_")) for n in kernels if n not in UNFUSED}
    lacks = [f"attention kernel {n}" for n, own in named.items() if own is attention]
    lacks += [f"kernel of products {n}" for n in blocks if n not in (DEVICE, *products)]
    for kernel in lacks:
        yield (
            f"{machine.name} has no constants for the {kernel}, and uses its own "
            f"('stagec machines {machine.name}')"
        )


def _of_constants(machine: Machine) -> Iterator[str]:
    """Constants that are not fitted to measurements: errors are larger there than on measured
    machines. A roofline is an assumption that the machine states itself."""
    constants = machine.efficiency
    names = [n for n in _OF_STEPS if not getattr(constants, n).fitted]
    if names and constants.kernels != "roofline":
        yield (
            f"{machine.name} has defaults for {', '.join(names)}, not measured values: expect "
            f"larger errors than on measured machines ('stagec machines {machine.name}')"
        )


def _of_groups(machine: Machine, mesh: Mapping[str, int]) -> Iterator[str]:
    """Groups that cross a level although they would fit into one unit of it."""
    for group in straddling(machine, mesh):
        name = group.level
        yield (
            f"groups of {group.axis} lie in blocks of {group.block} ranks, and some of them cross "
            f"from one {name} of {group.ranks} ranks to the next, although one has room for "
            f"them: --used-ranks {name}={group.better} puts whole blocks into each"
        )
