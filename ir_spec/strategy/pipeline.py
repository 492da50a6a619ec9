"""Pipeline stages and their schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stagec.ir_spec.strategy.axes import REPLICAS
from stagec.ir_spec.strategy.flag_values import Axes, FlagValues
from stagec.ir_spec.strategy.statement import Flag, Record, Statement, flagged, parameter


class PipelineRule(Record):
    """The repeated layers are cut into stages over an axis; no `layers`: evenly."""

    over: str = parameter("axis", "the mesh axis", required=True)
    schedule: str = flagged(
        "schedule",
        "Pipeline schedule; 'stagec schedule' lists them.",
        "str",
        default="1f1b",
        metavar="NAME",
        needs=("pp",),
    )
    chunks: int = flagged(
        "chunks",
        "Parts of the model per stage (default: the schedule's own).",
        "int",
        least=0,
        needs=("pp",),
    )
    layers: tuple[int, ...] = flagged(
        "stage_layers",
        "Layers of each part of the model, first to last: 7,8*14,7 (default: evenly).",
        "ints",
        doc="layers of each part of the model",
        metavar="N,N*COUNT,...",
        needs=("pp",),
        rare=True,
    )
    scatter: Axes = parameter(
        "axes",
        "mesh axes over which ranks send a part each of what all hold",
        flag=Flag(
            "scatter_gather",
            "Tensor-parallel ranks with the same value send one part each to the next stage, "
            "which gathers it.",
            "switch",
            False,
            needs=("pp", "tp"),
            rare=True,
        ),
    )
    afd: bool = flagged(
        "afd",
        "With --serve and --pp 2: attention of all layers runs on one stage, their feed-forward "
        "on the other one, and two microbatches alternate.",
        needs=("pp",),
        rare=True,
    )


class PipelineOp(Statement):
    """Cuts the repeated layers into pipeline stages over an axis.

    Each rank holds `chunks` parts of the model. `layers` gives the layers of each part, first to
    last; by default all have the same, or the first and the last have fewer, for they hold
    embedding and head. The schedule is a built-in one or that of a plug-in. Receivers put the parts
    of a message that is scattered together with an all_gather.

    With `afd` (attention and feed-forward apart, in serving) one of two stages has attention of all
    layers with its caches, and the other one the rest of them (`separate-attention`).
    """

    name, record = "stg.pipeline", PipelineRule
    example = 'stg.pipeline[over = pp, schedule = "interleaved", chunks = 2]'

    def from_flags(self, request: FlagValues) -> Iterator[Mapping[str, Any]]:
        if "pp" in request.axes:
            said = {"over": "pp", "schedule": request["schedule"], **self.flag_values(request)}
            scatter = request.over("tp", REPLICAS) if request["scatter_gather"] else ()
            yield {**said, "scatter": scatter} if scatter else said
