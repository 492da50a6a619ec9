"""The format in which weights of the blocks are stored in serving, and frozen ones in training."""

from stagec.ir_spec.ops.quantized import ACTIVATIONS, FORMATS, PARTS
from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

#: Activations have the element type of the format.
AUTO = "auto"
#: Routers have weights of this type, and products in it.
WIDE = "f32"


class WeightsRule(Record):
    """The format of the weights of the blocks."""

    format: str = flagged(
        "weight_dtype",
        "Element type of the blocks' weights in serving, and of frozen weights in training.",
        doc="bf16 (as they are), fp8, int8, int4, mxfp4, nvfp4 or nf4",
        positional=True,
        choices=("bf16", *FORMATS),
        numerics=True,
    )
    activations: str = flagged(
        "activation_dtype",
        "Element type of activations in products (auto: fp8 with fp8 and mxfp4 weights, fp4 with "
        "nvfp4; otherwise, or if the machine has no such units, unchanged).",
        choices=(AUTO, *ACTIVATIONS),
        needs=("weight_dtype",),
        numerics=True,
        rare=True,
    )
    block: int = flagged(
        "weight_block",
        "Elements of a block of weights along a dimension (default: that of the format).",
        "int",
        doc="elements of a block along a dimension (0: as the format has them)",
        least=0,
        needs=("weight_dtype",),
        numerics=True,
        rare=True,
    )
    parts: str = flagged(
        "weight_parts",
        "Which weights have this type (auto: in a model with experts mxfp4 and nvfp4 in all but "
        "attention, int4 in experts that a router chooses; otherwise in all blocks).",
        doc=(
            "all blocks, feed_forward (all that is not attention), outputs (these, and the last "
            "product of attention), experts (those that a router chooses), or auto (as "
            "checkpoints have the format)"
        ),
        choices=(AUTO, *PARTS),
        needs=("weight_dtype",),
        numerics=True,
        rare=True,
    )
    routers: str = flagged(
        "router_dtype",
        "Element type of the weights of routers and of the products with them (given: as the model "
        "has them).",
        doc="f32: weights of routers have this type, and products with them; given",
        choices=("given", WIDE),
        needs=(EXPERTS,),
        numerics=True,
        rare=True,
    )
    fill: str = flagged(
        "fill_experts",
        "The format in which experts are filled up with columns where ranks have no whole blocks "
        "of them.",
        doc=(
            "mxfp4: experts in this format are filled up with columns where the ranks that split "
            "them have no whole blocks; none"
        ),
        choices=("none", "mxfp4"),
        needs=("weight_dtype", EXPERTS),
        rare=True,
        software=True,
    )


class WeightsOp(Statement):
    """The weights of the blocks are stored in few bits, with scales for blocks of elements. Bytes
    of a weight of n elements, its matrix being rows (contracted) by columns:

    | format  | elements | a block has | it shares                | bytes          |
    |---------|----------|-------------|--------------------------|----------------|
    | `fp8`   | f8e4m3   | 128 x 128   | an f32 scale             | n + 4n/16384   |
    | `int8`  | 8 bits   | a column    | a bf16 scale             | n + 2n/rows    |
    | `int4`  | 4 bits   | 128 rows    | bf16 scale, 4-bit zero   | n/2 + 2.5n/128 |
    | `mxfp4` | f4e2m1   | 32 rows     | a scale of 8 bits        | n/2 + n/32     |
    | `nvfp4` | f4e2m1   | 16 rows     | an f8e4m3 scale          | n/2 + n/16     |
    | `nf4`   | 4 bits   | 64 rows     | a scale of 8 bits        | n/2 + n/64     |

    Unless `activations` says otherwise, products take activations in f8e4m3s with `fp8` and `mxfp4`
    (an f32 scale for each 128 elements, as in DeepGEMM, or an 8-bit scale for each 32: the same
    number of bytes), in f4e2m1s with `nvfp4` (an 8-bit scale for each 16), and otherwise unchanged:
    the kernel converts weights to their type (W4A16, W8A16); for `nf4`, a separate kernel does so
    before. The f32 scale of a tensor in nvfp4 is not counted, nor are those of rows in int8, nor
    the one for each 256 scales in nf4.

    Checkpoints of models with 4-bit experts have attention in 16 bits: gpt-oss-120b, and Kimi-K2.5,
    GLM-5 and MiniMax-M2.5 of nvidia. Kimi-K2.5 of moonshotai has only experts in `int4`, in blocks
    of 32 rows. `parts` overrides this: Qwen3-235B-A22B-NVFP4 has `all` weights in 4 bits.
    DeepSeek-R1-0528-FP4-v2, -V3.1 and -V3.2 of nvidia have `outputs`, all but what attention makes
    of its input (`wo` in the model card; exclude_modules has no `o_proj`).

    With `routers = f32` the weights of routers have 32 bits, and so have their inputs, which are
    cast. No unit for matrices multiplies these. vLLM, SGLang and TensorRT-LLM do so for MiniMax-M2,
    but not for DeepSeek or Kimi K2 (vLLM, models/minimax_m2.py: `params_dtype = torch.float32`).

    In training, frozen weights, as with `stg.lora`, are stored in this format (QLoRA, arXiv
    2305.14314): products of forward and of backward convert them to the type of the activations,
    those of `nf4` to bf16 where activations are in f32, whose casts then surround the product
    (bitsandbytes, nn/modules.py: Linear4bit.forward). `prepare_model_for_kbit_training` of peft
    makes all other parameters f32: `stg.dtypes[param = f32]`.
    """

    name, record = "stg.weights", WeightsRule
    section = Section.SERVING
    example = "stg.weights[int4]"
