"""The optimizer, the form of its update, and the clipping of gradients."""

from collections.abc import Iterator

from stagec.ir.core import Operation
from stagec.ir.expr import Expr, const, fraction
from stagec.ir_spec.strategy.flag_values import FlagValues, Statements
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged, parameter

KINDS = ("adamw", "adam8bit", "adafactor", "muon", "lion", "sgd", "none")
FORMS = ("fused", "foreach", "for_loop", "in_backward")
#: Where states of the optimizer that are in host memory are updated.
DEVICE, HOST = "device", "host"
#: Moments of tables with adam8bit: in blocks, as those of others, or in fp32.
BLOCKS, WIDE = "blocks", "f32"
#: The kinds whose update is one kernel or several, depending on the form.
BY_KERNELS = ("adamw", "sgd")


class OptimizerRule(Record):
    """The optimizer, the form of its update, and the largest norm of the gradients."""

    kind: str = flagged(
        "optimizer",
        "The optimizer.",
        doc="adamw, adam8bit, adafactor, muon, lion, sgd or none",
        required=True,
        positional=True,
        choices=KINDS,
        numerics=True,
    )
    clip: Expr = parameter("ratio", "the largest gradient norm", default=const(1), least=0)
    form: str = flagged(
        "optimizer_form",
        "AdamW is one kernel (fused), or several, each for all tensors (foreach) or for one after "
        "the other (for-loop); in-backward: use and free gradients as soon as they are computed, "
        "without clipping.",
        choices=FORMS,
        rare=True,
        software=True,
    )
    offloaded: str = flagged(
        "offload_update",
        "With --offload optimizer: states are copied to the device for their update (device), or "
        "the CPU updates them in host memory (host).",
        doc="where states in host memory are updated",
        choices=(DEVICE, HOST),
        needs=("offload",),
        rare=True,
        software=True,
    )
    tables: str = flagged(
        "table_moments",
        "With adam8bit: moments of embedding tables in blocks of 8 bits, or in fp32.",
        doc="moments of embedding tables with adam8bit: in blocks as others, or in f32",
        choices=(BLOCKS, WIDE),
        rare=True,
        software=True,
    )
    momentum: bool = flagged(
        "sgd_momentum", "SGD uses momentum.", needs=("optimizer",), numerics=True, rare=True
    )


class OptimizerOp(Statement):
    """The optimizer, with clipping of the gradient norm to `clip` (0: no clipping).

    | kind        | state of an element                                               |
    |-------------|-------------------------------------------------------------------|
    | `adamw`     | two moments                                                       |
    | `adam8bit`  | two moments of 8 bits, 8 bytes for each block of 256; in tensors  |
    |             | of less than 4,096 elements two of fp32 (bitsandbytes)            |
    | `adafactor` | fp32 means of rows and columns, of vectors one moment             |
    |             | (transformers, without a first moment)                            |
    | `muon`      | a momentum in matrices of layers, two moments of AdamW elsewhere  |
    | `lion`      | a momentum                                                        |
    | `sgd`       | none, with the flag `momentum` one                                |

    The master copy of `stg.dtypes` is additional. With `foreach`, AdamW needs memory for the roots
    of all second moments at once; with `for_loop`, for two tensors of the size of one parameter
    and, in a layer, the denominator of the previous one, also for the parameters that Muon leaves
    to AdamW. Adafactor and Muon process one tensor at a time. With `in_backward`, each gradient is
    freed as soon as it is used: there is no norm of all gradients, and only one microbatch.

    With `tables = f32`, moments of `adam8bit` have 32 bits for tables of words and positions, as in
    Trainer of transformers (trainer.py: `register_module_override` of each `nn.Embedding`).

    With `offloaded = host` the CPU updates states where `stg.offload` keeps them, as
    DeepSpeedCPUAdam does (deepspeed, ops/adam/cpu_adam.py). Their copies are no nodes, and the
    update takes the time in which host memory moves its bytes. It is an approximation: gradients
    and updated parameters cross the link beside backward and the update, and buffers on the device
    are those of an update there.
    """

    name, record = "stg.optimizer", OptimizerRule
    section = Section.MEMORY
    training = "there is no optimizer"
    example = "stg.optimizer[adamw, clip = 1]"

    def verify(self, op: Operation) -> Iterator[str]:
        yield from super().verify(op)
        kind, form = op.text("kind"), op.text("form", "fused")
        clip = op.expr("clip") if "clip" in op.attrs else const(1)
        if form == "foreach" and kind not in BY_KERNELS:
            yield f"'foreach' needs {' or '.join(BY_KERNELS)}, found {kind}"
        if form == "in_backward" and (clip.symbols or fraction(clip) != 0):
            yield (
                "expects 'clip = 0' with 'in_backward', which never has the norm of all gradients"
            )
        if op.flag("momentum") and kind != "sgd":
            yield f"'momentum' needs sgd, found {kind}"

    def from_flags(self, request: FlagValues) -> Statements:
        clip = 0 if request["optimizer_form"] == "in-backward" else 1
        values = self.flag_values(request)
        if not request["offload"]:
            values.pop("offloaded", None)
        yield {"kind": "adamw", "clip": clip, **values}
