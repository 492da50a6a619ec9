"""Memory of a step in addition to parameters and activations: its batch and tables of rotations."""

from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged

#: Nothing of it is in the plan of memory.
NONE = "none"
SHARED, EACH = "shared", "each"
MADE, BUFFER, COS_SIN = "made", "buffer", "cos_sin"


class InputsRule(Record):
    """What a step has beside parameters and activations: tokens and tables of rotations."""

    tokens: str = flagged(
        "token_buffers",
        "Count the batch as memory, tokens and labels in 64 bits: in one tensor (shared) or two "
        "(each).",
        doc=(
            "tokens in 64 bits: one tensor that labels share (shared), or one for each (each), and "
            "arguments that are no tokens, such as pixels; none: not counted"
        ),
        choices=(NONE, SHARED, EACH),
        metavar="none|shared|each",
        rare=True,
        software=True,
    )
    rotations: str = flagged(
        "rotation_tables",
        "Count the tables of rotary embeddings: made by forward and kept until backward ends "
        "(made), or a buffer in fp32 that stays across steps, of complex numbers (buffer) or of "
        "cosines and sines (cos-sin).",
        doc=(
            "tables of rotations: made by forward, in the type of queries, and kept until backward "
            "ends (made); a buffer in fp32 from step to step, of complex numbers (buffer) or of "
            "cosines and sines (cos_sin); none: not counted"
        ),
        choices=(NONE, MADE, BUFFER, COS_SIN),
        metavar="none|made|buffer|cos-sin",
        rare=True,
        software=True,
    )


class InputsOp(Statement):
    """Memory of a step in addition to parameters and activations: tokens and tables of rotary
    embeddings, which the pass `hold-inputs` adds to the program.

    `rotations = made`: cosines and sines of all positions, which `LlamaRotaryEmbedding` of
    transformers returns in the type of its input, and which the products with queries and keys save
    for backward (models/llama/modeling_llama.py: `apply_rotary_pos_emb`). `buffer`: `freqs_cis`,
    64-bit complex numbers (torchtitan/models/llama3/model/model.py: `precompute_freqs_cis`), one
    for each pair of elements. `cos_sin`: a cosine and a sine for each element, as in torchtitan's
    Qwen3 (torchtitan/models/common/rope.py: `CosSinRoPE`).
    """

    name, record = "stg.inputs", InputsRule
    section = Section.MEMORY
    training = "there is no backward that keeps tables"
    example = "stg.inputs[tokens = shared, rotations = made]"
