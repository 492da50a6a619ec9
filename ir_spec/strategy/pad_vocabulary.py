"""The padding of a vocabulary."""

from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, parameter


class PadVocabularyRule(Record):
    """The number of which the size of the vocabulary is a multiple."""

    multiple: int = parameter(
        "int",
        required=True,
        least=1,
        flag=Flag(
            "pad_vocab",
            "Pad the vocabulary to a multiple of this number and of the ranks that split it, as "
            "Megatron's --make-vocab-size-divisible-by does.",
            default=0,
            least=0,
            numerics=True,
            rare=True,
        ),
    )
    whole: bool = parameter(
        "flag",
        "the number is one of the whole vocabulary, not of each rank's part: ranks that do not "
        "divide what is filled up are refused",
    )


class PadVocabularyOp(Statement):
    """Pads the vocabulary to a multiple of `multiple` times the number of ranks that split it, as
    in Megatron-LM (`--make-vocab-size-divisible-by`, times the ranks of tensor parallelism), so
    that 128,256 entries over tp = 12 become 129,024 with 128; TensorRT-LLM does so with 1. With
    `whole`, the ranks do not count, as in vLLM and SGLang, whose `VocabParallelEmbedding` pads
    32,001 entries to 32,064, a multiple of 64, for any tp, and rejects a tp that does not divide
    this number. Padding has rows of the embedding, columns of the head and logits like other
    entries.
    """

    name, record = "stg.pad_vocabulary", PadVocabularyRule
    section = Section.PARTS
    example = "stg.pad_vocabulary[multiple = 128]"
