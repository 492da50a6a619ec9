"""Parameters, FLOPs and caches of models that were counted in PyTorch, beside those of the texts
of the library.

The figures are those of the reference implementation without weights: its parameters, tied ones
once, and the forward FLOPs of one sequence as `torch.utils.flop_counter` counts them, masks
ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stagec.analysis.published import CountsOf, PublishedRow
from stagec.ir.expr import evaluate

SOURCE = "counted in PyTorch"


@dataclass(frozen=True, slots=True)
class CountedModel:
    """A model of the library: parameters, and forward FLOPs of a sequence of `length` tokens."""

    name: str
    parameters: int
    flops: int
    length: int = 4096


COUNTED = (
    CountedModel("gpt2", 124_439_808, 291_648_307_200, 1024),
    CountedModel("llama3.2-1b", 1_235_814_400, 12_322_261_172_224),
    CountedModel("mistral-7b", 7_241_732_096, 67_044_439_490_560),
    CountedModel("qwen2.5-7b", 7_615_616_512, 64_654_290_190_336),
    CountedModel("qwen3-8b", 8_190_735_360, 71_893_457_567_744),
    CountedModel("phi-4", 14_659_507_200, 129_622_112_993_280),
    CountedModel("olmo-2-7b", 7_298_617_344, 65_214_783_422_464),
    CountedModel("gemma-2-9b", 9_241_705_984, 87_247_965_650_944),
    CountedModel("gemma-3-4b", 4_300_079_472, 36_457_024_585_728),
    CountedModel("gpt-oss-20b", 20_914_757_184, 36_146_780_307_456),
    CountedModel("llama4-scout", 108_641_793_536, 148_694_452_142_080),
    CountedModel("deepseek-v3.2", 671_877_929_216, 407_740_572_762_112),
    CountedModel("deepseek-v2-lite", 15_706_484_224, 24_719_684_272_128),
    CountedModel("glm-4.5-air", 106_852_245_504, 142_809_810_075_648),
    CountedModel("kimi-k2", 1_026_408_209_408, 301_491_134_922_752),
)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A model of the library: FLOPs of one more token behind 4,096 cached ones, and bytes of these
    in caches, as `transformers` holds them in bf16."""

    name: str
    flops: int
    cache: int
    context: int = 4096


DECODED = (
    Decoded("llama3-8b", 17_157_324_800, 536_870_912),
    Decoded("llama3.2-1b", 3_008_495_616, 134_217_728),
    Decoded("mistral-7b", 16_368_271_360, 536_870_912),
    Decoded("mixtral-8x7b", 27_645_181_952, 536_870_912),
    Decoded("qwen2.5-7b", 15_785_140_224, 234_881_024),
    Decoded("qwen3-8b", 17_552_703_488, 603_979_776),
    Decoded("qwen3-30b-a3b", 9_305_325_568, 402_653_184),
    Decoded("phi-4", 31_646_842_880, 838_860_800),
    Decoded("glm-4.5-air", 34_867_937_280, 771_751_936),
)


def decoded_rows(compiled: CountsOf) -> Iterator[PublishedRow]:
    """Two rows for each model, each from the counts of its step of decode."""
    for model in DECODED:
        counts, sizes = compiled(model.name, serve="decode")
        env = {**sizes, "B": 1, "S": 1}
        now, before = {**env, "past": model.context}, {**env, "past": model.context - 1}
        found = {
            "decode FLOPs": (model.flops, evaluate(counts.matmul["forward"], now)),
            "cache bytes": (model.cache, evaluate(counts.memory["caches"], before)),
        }
        for what, (published, ours) in found.items():
            row = f"{model.name} {what}, {model.context} cached"
            yield PublishedRow(SOURCE, row, f"{published:,}", f"{ours:,}", published == ours)


def counted_rows(compiled: CountsOf) -> Iterator[PublishedRow]:
    """Two rows for each model, each from the counts of the compiled text."""
    for model in COUNTED:
        counts, sizes = compiled(model.name)
        env = {**sizes, "B": 1, "S": model.length}
        found = {
            "parameters": (model.parameters, evaluate(counts.parameters, env)),
            f"forward FLOPs, s = {model.length}": (
                model.flops,
                evaluate(counts.matmul["forward"], env),
            ),
        }
        for what, (published, ours) in found.items():
            texts = (f"{published:,}", f"{ours:,}")
            yield PublishedRow(SOURCE, f"{model.name} {what}", *texts, published == ours)
