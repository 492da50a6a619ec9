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
    flags = {**MEGATRON, **BLOCKING, "recompute": "full_replay"}
    changes = {"network.infiniband.bandwidth": "12.5 GB/s"}
    yield from _deepspeed("deepspeed-multi", "megatron_deepspeed_a100_multi", flags, changes)


def deepspeed_single() -> Iterator[MeasuredStep]:
    """Megatron-DeepSpeed on 2 to 8 A100 of one node. The times are those without recompute: what a
    sequence takes longer at width 2,048 than at 1,024 (24 layers, microbatches of 8: 28.7 ms) is
    less than the products of four passes would take at 96% of the peak.

    They are sums rather than timed steps: a time for a layer and one for embedding and head, times
    layers and microbatches, and a time for the update (docs/decisions/102-sums-of-timed-layers.md).
    """
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


#: Tokens of a sequence of all runs of nanotron.
_TOKENS = 4096
#: Errors are told up to so many GPUs.
_JUDGED = 64
#: Feed-forward widths by the width of the model (nanotron, branch nouamane/bench2,
#: scaling_benchmarks.py). The memory that was measured agrees: 18 bytes for each parameter.
_FEED_FORWARD: Final[Mapping[int, int]] = {
    2048: 8192,
    3072: 8192,
    4096: 14336,
    8192: 28672,
    16384: 53248,
}
#: The runs measured collectives of 1 GiB before their steps. Inside a node an all_reduce moves 458
#: GB/s, or 425 where hosts compare their calls first, or 45 where messages between GPUs of a node
#: are off.
_COMPARES, _NO_MESSAGES = 445.0, 380.0
#: What a compared call takes hosts for each rank of its group, inside a node and beyond: loops of
#: ten collectives and a barrier. Inside a node devices take longer than hosts, but for the first
#: call and the barrier, which make 3.2 ms of 8 ranks; on 64 to 512 ranks hosts do.
CHECKS: Final[Mapping[str, float | str]] = {
    "efficiency.network.nvlink.check": 200e-6,
    "efficiency.network.efa.check": 297e-6,
}
#: Before this job, and where messages inside a node are off, runs with stages wait for each of two
#: small messages before a tensor by looking every 0.1 s whether it has come (branch
#: nouamane/bench2, p2p.py): all take 0.6 to 4 s for a microbatch, whatever its size.
_POLLS = 14_097_000
#: The attention of nanotron is FlashAttention 2, of which version 3, that the tables of the device
#: have, is 1.5 to 2 times as fast forward and 1.5 to 1.75 times backward (arXiv 2407.08608).
FLASH_2: Final[Mapping[str, float | str]] = {"efficiency.attention.rate.bf16": 1 / 1.6}


def layers_of_stages(layers: int, layer: int, head: int, stages: int) -> tuple[int, ...]:
    """The layers of each stage as nanotron shares them out (models/base.py, build_model): a stage
    ends with the block that takes the cost of all blocks so far to its part of the whole. `layer`
    and `head` are elements of the weights of a layer and of the head, which comes last. Where the
    cost meets the part the memory of the first stage says that it ends there."""
    found, stage, cost = [0] * stages, 0, 0
    for _ in range(layers):
        found[stage] += 1
        cost += layer
        if cost * stages >= (layers * layer + head) * (stage + 1):
            stage += 1
    return tuple(found)


def nanotron() -> Iterator[MeasuredStep]:
    """nanotron on 8 to 512 H100 of AWS (p5.48xlarge): an eager framework, SwiGLU in two
    computations, sequence-parallel tp, ZeRO-0 or 1 over dp, no recompute; untied embeddings here
    for all widths.

    Some runs compare the calls of all ranks before each collective: what they measured of the
    network before their steps says which (`_COMPARES`), and how long that takes (`CHECKS`). Judged
    are runs of up to 64 GPUs, but for those whose stages look for messages (`_POLLS`).
    """
    for row in read("nanotron_h100"):
        inside = float(row["all_reduce_inside"])
        words = ("tied", "tokens_per_second_per_gpu", "all_gather", "all_reduce_inside")
        n = {k: int(v) for k, v in row.items() if k not in words}
        width, gpus = n["width"], 8 * n["nodes"]
        batch = n["microbatch"] * n["microbatches"] * n["dp"]
        wide = _FEED_FORWARD[width]
        sizes = {"L": n["layers"], "D": width, "H": n["heads"], "G": n["kv_heads"]}
        sizes |= {"K": width // n["heads"], "F": wide}
        sizes |= {"V": n["vocabulary"], "S": _TOKENS, "B": batch}
        axes = {axis: n[axis] for axis in ("tp", "dp", "pp")}
        flags: dict[str, Any] = {
            **axes,
            "microbatches": n["microbatches"],
            "sp": n["tp"] > 1,
        }
        if n["pp"] > 1:
            layer, head = 4 * width**2 + 3 * wide * width, n["vocabulary"] * width
            flags["stage_layers"] = layers_of_stages(n["layers"], layer, head, n["pp"])
        if n["dp"] > 1:
            flags["zero"] = n["zero"]
            if n["zero"]:  # in one call after backward: trainer.py, make_ddp
                flags["ddp_bucket"] = 0
        mesh = " ".join(f"{axis} {size}" for axis, size in axes.items())
        changes: dict[str, float | str] = {**FLASH_2}
        if inside < _COMPARES:
            changes |= CHECKS
        polls = n["pp"] > 1 and (n["job"] < _POLLS or inside < _NO_MESSAGES)
        yield MeasuredStep(
            "nanotron",
            f"D {width}, {mesh} zero {n['zero']}, {n['microbatches']} x {n['microbatch']}",
            batch * _TOKENS / (gpus * float(row["tokens_per_second_per_gpu"])),
            gpus,
            "h100-p5",
            "llama_eager.stg",
            sizes,
            flags,
            f"D {width} B {batch} on {gpus}",
            changes,
            judged=gpus <= _JUDGED and not polls,
        )


SWEEPS: Final[Mapping[str, Source]] = {
    "deepspeed-multi": deepspeed_multi,
    "deepspeed-single": deepspeed_single,
    "b200": b200,
    "nanotron": nanotron,
}
