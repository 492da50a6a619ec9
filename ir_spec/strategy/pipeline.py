"""Pipeline stages and their schedule."""

from stagec.ir_spec.strategy.axes import REPLICAS
from stagec.ir_spec.strategy.flag_values import Axes, FlagValues, Statements
from stagec.ir_spec.strategy.statement import Flag, Record, Statement, flagged, parameter


class PipelineRule(Record):
    """The repeated layers are divided into stages over an axis; evenly without `layers`."""

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
    """Divides the repeated layers into pipeline stages over an axis.

    Each rank has `chunks` parts of the model. `layers` is the number of layers of each part, first
    to last; by default all parts have the same number, or the first and the last have fewer,
    because they also have the embedding and the head. The schedule is a built-in one or that of a
    plug-in. Receivers assemble a scattered message with an all_gather.

    With `afd` (attention-FFN disaggregation, in serving), one of two stages has the attention of
    all layers with its caches, and the other one has the rest of them (`separate-attention`).
    """

    name, record = "stg.pipeline", PipelineRule
    example = 'stg.pipeline[over = pp, schedule = "interleaved", chunks = 2]'

    def from_flags(self, request: FlagValues) -> Statements:
        if "pp" in request.axes:
            said = {"over": "pp", "schedule": request["schedule"], **self.flag_values(request)}
            scatter = request.over("tp", REPLICAS) if request["scatter_gather"] else ()
            yield {**said, "scatter": scatter} if scatter else said
