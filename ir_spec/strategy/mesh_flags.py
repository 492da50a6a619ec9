"""The flags for the axes of a mesh and their order."""

from stagec.ir_spec.strategy.axes import AXES, EXPERTS, PARTS
from stagec.ir_spec.strategy.statement import Flag


def _axis(name: str, help: str, *needs: str) -> Flag:
    return Flag(name, help, "int", 1, least=1, needs=needs)


FLAGS = (
    _axis("dp", "Data-parallel ranks."),
    _axis("tp", "Tensor-parallel ranks."),
    _axis("pp", "Pipeline stages."),
    _axis("dp_replicate", "HSDP: replicas of the shard groups."),
    _axis("dp_shard", "HSDP: ranks of a shard group."),
    _axis("cp", "Context-parallel ranks."),
    _axis("ep", "Expert-parallel ranks, taken from the data-parallel ones.", EXPERTS),
)
#: The order of these axes: ranks are numbered row-major, so that those along the last are
#: neighbours.
MESH_ORDER = Flag(
    "mesh_order",
    "Order of these mesh axes, slowest first, within the places that they have: dp,pp makes "
    "pipeline stages neighbours (default: pp, dp, ep, cp, tp).",
    "order",
    "",
    metavar="AXIS,...",
    choices=AXES,
    rare=True,
)
#: The flag that splits an axis of data parallelism in two.
RESHARD_RANKS = Flag(
    "reshard_ranks",
    "ZeRO-3: neighbouring ranks over which blocks stay split between forward and backward, in "
    "place of all ranks.",
    "int",
    1,
    least=1,
    needs=(tuple(PARTS),),
    only=("zero", 3),
    rare=True,
    software=True,
)
#: The flags of a mesh other than its axes.
OF_MESH = {flag.name: flag for flag in (MESH_ORDER, RESHARD_RANKS)}
