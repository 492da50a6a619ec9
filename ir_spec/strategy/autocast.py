"""Products in 16 bits of a model whose parameters and activations are in 32."""

from collections.abc import Mapping
from typing import ClassVar

from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged, parameter


class AutocastRule(Record):
    """Products in 16 bits of a model whose parameters and activations are in 32."""

    on: bool = flagged(
        "autocast",
        "Parameters are fp32, unless --param-dtype is given; products and attention cast their "
        "operands to bf16, as torch.autocast does.",
        doc="products cast their operands",
        numerics=True,
    )
    to: str = parameter("name", "the element type of products", choices=("bf16", "f16"))
    attention: str = flagged(
        "autocast_attention",
        "With --autocast: attention casts its operands as products do, or is an operator that "
        "autocast does not cast for.",
        doc="cast: attention is a product; given: it takes operands in the types that they have",
        choices=("cast", "given"),
        needs=("autocast",),
    )
    sharded: str = parameter(
        "name",
        "with sharded parameters (ZeRO-3): products cast as well (cast), or software leaves that "
        "to its gathers (left)",
        choices=("cast", "left"),
    )
    split: str = parameter(
        "name",
        "with parameters that ranks split (tensor parallelism), or in a pipeline: products cast "
        "as well (cast), or stay in fp32 (left)",
        choices=("cast", "left"),
    )
    experts: str = parameter(
        "name",
        "products of experts cast where the others do (given), or always (cast)",
        choices=("given", "cast"),
    )


class AutocastOp(Statement):
    """Parameters and activations are f32, and ops cast their operands, by the lists of
    `torch.autocast`: products and attention take operands of the type `to` and return results of
    it; softmax, layer norms, powers and losses are f32; each other op has the widest type of its
    operands.

    A model that computes in 16 bits, as with `stg.dtypes[compute = bf16]` under ZeRO-3, has
    products in 16 bits anyway; softmax, layer norms and powers are f32 there too, if the job states
    `on` by itself (Trainer's `bf16` beside FSDP, accelerate/accelerator.py:
    `Accelerator.prepare_model`).

    Without `on`, nothing is cast but for experts. Nothing is cast either under
    ZeRO-3 with `sharded = left`: torchtitan's context does nothing with FSDP. Without FSDP it does
    nothing with tensor parallelism or a pipeline either (`split = left`; distributed/utils.py:
    `maybe_enable_amp`), which a job that states `on` by itself does not take from a stack. Expert
    parallelism does not count.

    With `experts = cast`, products of experts that would be in f32 are always in `to`: PyTorch has
    grouped products in bf16 alone, so torchtitan casts rows and weights for them, and results back
    (models/moe/moe.py: `_run_experts_grouped_mm`).

    The cast of a parameter is kept for all its uses and for backward, as in autocast's cache. An
    activation is cast by each product that takes it, and backward keeps each of these copies. A
    product with a packed parameter ([D, 2, F]) counts as several products. Attention that is a
    separate operator (`attention = given`) takes queries and keys in f32, as their rotation returns
    them, and its result has that type.
    """

    name, record = "stg.autocast", AutocastRule
    section = Section.KERNELS
    rare, software = True, True
    unless_given: ClassVar[Mapping[str, str]] = {"split": "on"}
    training = "weights of a server have the element type that it computes with"
    example = "stg.autocast[on]"
