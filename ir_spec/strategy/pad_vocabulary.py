"""Entries with which a vocabulary is filled up."""

from __future__ import annotations

from stagec.ir_spec.strategy.statement import Flag, Record, Section, Statement, parameter


class PadVocabularyRule(Record):
    """What the size of a vocabulary is a multiple of."""

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
            tries=(),
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
    """The vocabulary is filled up to a multiple of `multiple` and the ranks that split it, as in
    Megatron-LM (`--make-vocab-size-divisible-by`, times the ranks of tensor parallelism), so that
    128,256 entries over tp = 12 are 129,024 with 128; TensorRT-LLM does so with 1. With `whole`
    ranks do not count, as in vLLM and SGLang, whose `VocabParallelEmbedding` fills 32,001 entries
    up to 32,064, a multiple of 64, over any tp, and refuses a tp that does not divide these. The
    entries that are added have rows of the embedding, columns of the head and logits like others.
    """

    name, record = "stg.pad_vocabulary", PadVocabularyRule
    section = Section.PARTS
    example = "stg.pad_vocabulary[multiple = 128]"
