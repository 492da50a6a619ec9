"""Sweeps over configurations of a model: many rows of one framework on one machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

from stagec.analysis.measured import MeasuredStep, Source, read
from stagec.analysis.measured.published import BLOCKING, MEGATRON, MEGATRON_CORE, scattered


def _deepspeed(
    source: str, name: str, flags: Mapping[str, Any], changes: Mapping[str, str]
) -> Iterator[MeasuredStep]:
    """GPT of Megatron-DeepSpeed: feed-forward width 4D, 51,200 words as in its examples."""
    for row in read(name):
        n = {k: int(v) for k, v in row.items() if k not in ("ms", "billions")}
        width, gpus = n["width"], n["gpus"]
        sizes = {"L": n["layers"], "D": width, "H": n["heads"], "K": width // n["heads"]}
        sizes |= {"F": 4 * width, "V": 51200, "S": n["sequence"], "B": n["batch"]}
        axes = {axis: n[axis] for axis in ("tp", "dp", "pp")}
        microbatches = n["batch"] // (n["microbatch"] * n["dp"])
        mesh = " ".join(f"{axis} {size}" for axis, size in axes.items())
        yield MeasuredStep(
            source,
            f"D {width} L {n['layers']} B {n['batch']}, {mesh} microbatch {n['microbatch']}",
            float(row["ms"]) * 1e-3,
            gpus,
            "a100-80g",
            "gpt3-175b",
            sizes,
            {**flags, **axes, "microbatches": microbatches, **scattered(axes)},
            f"D {width} L {n['layers']} B {n['batch']} on {gpus}",
            changes,
        )


def deepspeed_multi() -> Iterator[MeasuredStep]:
    """Megatron-DeepSpeed on 64 and 256 A100, full recompute; 8 x 100 Gb/s leave a node.

    The source says 150 GB/s inside a node. The same job took as long on nodes of 300 GB/s
    (18.4B, tp 8, dp 32: 9.40 s there, 9.60 to 9.93 s here), so links are those of the machine.
    """
    flags = {**MEGATRON, **BLOCKING, "recompute": "full"}
    changes = {"network.infiniband.bandwidth": "12.5 GB/s"}
    yield from _deepspeed("deepspeed-multi", "megatron_deepspeed_a100_multi", flags, changes)


def deepspeed_single() -> Iterator[MeasuredStep]:
    """Megatron-DeepSpeed on 2 to 8 A100 of one node. The times are those without recompute."""
    flags = {**MEGATRON, **BLOCKING}
    yield from _deepspeed("deepspeed-single", "megatron_deepspeed_a100_single", flags, {})


#: Model and sizes by the start of a case's name: configs/models of MooreThreads/SimuMax. Of few
#: layers one is dense, which the measured memory tells.
_B200: Final[Mapping[str, tuple[str, Mapping[str, int]]]] = {
    "llama3_70b": ("llama3-70b", {}),
    "llama3_405b": ("llama3-405b", {"G": 16}),
    "deepseekv2": ("deepseek-v2", {"L_dense": 1}),
    "deepseekv3": ("deepseek-v3", {"L_dense": 1}),
}
_SIZE = re.compile(r"_(l|tp|ep|pp|dp|cp|seq|mbc)(\d+)")


def b200() -> Iterator[MeasuredStep]:
    """Megatron-Core on 8 B200: microbatches of one sequence of 4,096 tokens unless it says so,
    sequence parallelism with tp, no recompute (docs/strategy.md of MooreThreads/SimuMax)."""
    for row in read("megatron_b200"):
        case = row["case"]
        name = next(n for n in _B200 if case.startswith(n))
        model, own = _B200[name]
        given = {n: int(v) for n, v in _SIZE.findall(case)}
        axes = {axis: given.get(axis, 1) for axis in ("tp", "cp", "pp", "dp", "ep")}
        length, batch = given.get("seq", 4096), axes["dp"] * given["mbc"]
        layers = given["l"] - own.get("L_dense", 0)
        flags = {**MEGATRON_CORE, **axes, "microbatches": given["mbc"], "sp": axes["tp"] > 1}
        if name == "deepseekv2":  # 153.6 tokens an expert and sequence are 154
            flags["capacity_factor"] = Fraction(385, 384)
        sizes = {**own, "S": length, "B": batch, "L": layers}
        title, seconds = case.removesuffix("_cef"), float(row["real_ms"]) * 1e-3
        yield MeasuredStep("b200", title, seconds, 8, "b200", model, sizes, flags)


#: Tokens of a sequence of all runs.
_TOKENS = 4096
#: Errors are told up to so many GPUs.
_JUDGED = 64


def nanotron() -> Iterator[MeasuredStep]:
    """nanotron on 8 to 512 H100: an eager framework, SwiGLU in two computations, sequence-parallel
    tp, ZeRO-0 or 1 over dp, no recompute; untied embeddings here for all widths.

    Judged are runs of up to 64 GPUs without pipeline and with tp inside a node. Of the others many
    are ill: 40 s where 1 s is expected. With pp > 1 and tp >= 4 a layer takes 80 us for each
    tensor-parallel rank and computation, whatever the size of the microbatch.
    """
    for row in read("nanotron_h100"):
        n = {k: int(v) for k, v in row.items() if k not in ("tied", "tokens_per_second_per_gpu")}
        width, gpus = n["width"], 8 * n["nodes"]
        batch = n["microbatch"] * n["microbatches"] * n["dp"]
        sizes = {"L": n["layers"], "D": width, "H": n["heads"], "G": n["kv_heads"]}
        sizes |= {"K": width // n["heads"], "F": 14336 if width == 4096 else 4 * width}
        sizes |= {"V": n["vocabulary"], "S": _TOKENS, "B": batch}
        axes = {axis: n[axis] for axis in ("tp", "dp", "pp")}
        flags = {**axes, "microbatches": n["microbatches"], "sp": n["tp"] > 1}
        if n["dp"] > 1:
            flags["zero"] = n["zero"]
        mesh = " ".join(f"{axis} {size}" for axis, size in axes.items())
        yield MeasuredStep(
            "nanotron",
            f"D {width}, {mesh} zero {n['zero']}, {n['microbatches']} x {n['microbatch']}",
            batch * _TOKENS / (gpus * float(row["tokens_per_second_per_gpu"])),
            gpus,
            "h100-sxm",
            "llama_eager.stg",
            sizes,
            flags,
            f"D {width} B {batch} on {gpus}",
            judged=gpus <= _JUDGED and n["pp"] == 1 and n["tp"] <= 8,
        )


SWEEPS: Final[Mapping[str, Source]] = {
    "deepspeed-multi": deepspeed_multi,
    "deepspeed-single": deepspeed_single,
    "b200": b200,
    "nanotron": nanotron,
}
