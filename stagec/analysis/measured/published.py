"""Steps of papers and of pages of frameworks: few rows, each a model of its own.

The file has strategy and sizes in the words of this compiler; the conventions here are what all
rows of a source have in common.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from stagec.analysis.measured import MeasuredStep, Source, read

#: Megatron-LM of 2021 and 2022 with `--fp16`: gradients are summed up and reduced as they are, in
#: one call when backward is done (megatron/model/distributed.py, `--DDP-impl local`). Softmax with
#: its mask is a kernel, and so is each norm (megatron/model/fused_softmax.py, apex); TorchScript
#: makes one of bias and GeLU, and of bias, dropout and residual (fused_bias_gelu.py,
#: transformer.py, `bias_dropout_add_fused_train`), and no more: dropout of attention reads what
#: softmax wrote. Gradients of a microbatch are added to the sum by kernels of their own: products
#: add to sums in fp32 only (megatron/arguments.py, `gradient_accumulation_fusion`). Tensor-parallel
#: ranks send a part each of what they hold alike (`scatter_gather_tensors_in_pipeline`).
MEGATRON: Final[Mapping[str, Any]] = {
    "param_dtype": "f16",
    "grad_dtype": "f16",
    "reduce_dtype": "f16",
    "ddp_bucket": 0,
    "fusion": "pointwise",
}
#: Megatron-LM of 2022 with `--bf16`: products add gradients up in fp32
#: (megatron/mpu/layers.py, `gradient_accumulation_fusion`, of February 2022 and on by default).
MEGATRON_BF16: Final[Mapping[str, Any]] = {
    "param_dtype": "bf16",
    "ddp_bucket": 0,
    "fusion": "pointwise",
    "fuse_gradients": True,
}
#: Before `async_tensor_model_parallel_allreduce` (arXiv 2205.05198, section 4.2.2, has it).
BLOCKING: Final[Mapping[str, Any]] = {"async_tp": False}
#: Megatron-Core: Transformer Engine's fused attention, norms and SwiGLU, everything else alone; the
#: distributed optimizer reduces fp32 gradients in buckets beside backward
#: (`--use-distributed-optimizer --overlap-grad-reduce`), and products add to their sums
#: (`gradient_accumulation_fusion`, on by default).
MEGATRON_CORE: Final[Mapping[str, Any]] = {"zero": 1, "fusion": "none", "fuse_gradients": True}


def replayed(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of Megatron for full recompute: all of a block runs again, to its last computation
    (megatron/mpu/random.py, `CheckpointFunction`)."""
    return {"recompute": "full_replay"} if flags.get("recompute") == "full" else {}


def scattered(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of Megatron-LM of 2021 for messages between stages."""
    alike = flags.get("tp", 1) > 1 and flags.get("pp", 1) > 1 and not flags.get("sp", False)
    return {"scatter_gather": True} if alike else {}


def _rows(source: str) -> Iterator[tuple[str, int, float, dict[str, Any], dict[str, int]]]:
    for row in read("steps"):
        if row["source"] == source:
            given, sizes = json.loads(row["strategy"]), json.loads(row["sizes"])
            yield row["row"], int(row["gpus"]), float(row["measured_s"]), given, sizes


def korthikanti() -> Iterator[MeasuredStep]:
    """arXiv 2205.05198, table 5: GPT on A100 with full recompute, and with sequence parallelism and
    selective recompute.

    The paper does not say which 16 bits. Its authors' products added to sums in fp32 by then, with
    which runs of one microbatch and of many are alike in error; with sums in fp16 those of many
    would be 4% slower than the others.
    """
    for name, gpus, seconds, given, sizes in _rows("korthikanti"):
        flags = {**MEGATRON_BF16, **given, **scattered(given), **replayed(given)}
        machine, model = "a100-80g", "gpt3-175b"
        yield MeasuredStep("korthikanti", name, seconds, gpus, machine, model, sizes, flags)


def narayanan() -> Iterator[MeasuredStep]:
    """arXiv 2104.04473, table 1: GPT on A100, full recompute."""
    for name, gpus, seconds, given, sizes in _rows("narayanan"):
        flags = {**MEGATRON, **BLOCKING, **given, **scattered(given), **replayed(given)}
        machine, model = "a100-80g", "gpt3-175b"
        yield MeasuredStep("narayanan", name, seconds, gpus, machine, model, sizes, flags)


def mcore() -> Iterator[MeasuredStep]:
    """README of NVIDIA/Megatron-LM, 2024: weak scaling on H100. Untied embeddings give the number
    of parameters in the names of the rows. The README names `--overlap-param-gather` for them.

    The rows `dp64` have the published throughput of a GPU on as many GPUs as 64 data-parallel ranks
    are: with those of the README (768 and 3,072) the batch does not divide.
    """
    for name, _, seconds, given, sizes in _rows("mcore"):
        flags = {**MEGATRON_CORE, "overlap_param_gather": True, **given}
        gpus = given["dp"] * given["tp"] * given["pp"]
        machine, model = "h100-sxm", "gpt_rope.stg"
        yield MeasuredStep("mcore", name, seconds, gpus, machine, model, sizes, flags)


#: The model and its layers by its name in a row (torchtitan/models/llama/__init__.py).
_TITAN: Final[Mapping[str, tuple[str, int]]] = {
    "8B": ("llama3-8b", 32),
    "70B": ("llama3-70b", 80),
    "405B": ("llama3-405b", 126),
}


def split_points(layers: int, stages: int) -> tuple[int, ...]:
    """The layers of each stage as torchtitan shares them out (parallelisms/pipelining_utils.py,
    `generate_split_points`): the first has the quotient, those in the middle one more while there
    are layers over, the last what is left."""
    each, over = divmod(layers, stages)
    found = [each + (0 < i <= over) for i in range(stages - 1)]
    return (*found, layers - sum(found))


def _titan_pipeline(given: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The flags of torchtitan with a pipeline. FSDP keeps what the first microbatch gathered, and
    reduces all of a stage behind its last backward, for which computations wait: that is ZeRO-1
    with one call (torch/distributed/pipelining/stage.py, `backward_maybe_with_nosync`). Where a run
    does not say how many microbatches there are, there are as many as ranks in the pipeline
    (torchtitan/parallelisms/pipelining_utils.py, `build_pipeline_schedule`, until January 2025).
    The text of the page does not say, so the 32 of the row are the sequences of its local batch."""
    return {
        "zero": 1,
        "ddp_bucket": 0,
        "overlap_param_gather": True,
        "microbatches": given["pp"],
        "stage_layers": split_points(layers, given["pp"] * given.get("chunks", 1)),
    }


def torchtitan() -> Iterator[MeasuredStep]:
    """pytorch/torchtitan, docs/performance.md and benchmarks, compiled: TorchInductor fuses
    element-wise computations. The page names the versions that ran: torchtitan 9dec370, PyTorch
    1963fc8 and torchao eab345c, all of December 2024.

    Selective recompute repeats every second product of a block and keeps attention
    (torchtitan/models/llama/parallelize_llama.py, `selective_ac_option = "op"`): of the separate
    products of Llama these are wk, wo and w3, 36% of the FLOPs, which is here every third block in
    full. FSDP drops what it gathered for a block behind its forward, but for the last one
    (`apply_fsdp`).

    A compiled block waits for each of its collectives at once, behind its call
    (torch/distributed/_functional_collectives.py, `_maybe_wrap_tensor`), and TorchInductor leaves
    the order as it is (torch/_inductor/config.py, `reorder_for_compute_comm_overlap`). Tables of
    405B name asynchronous tensor parallelism, which does not wait.

    Products of 8 bits scale each operand by its own largest element (torchtitan/float8.py, "only
    dynamic tensor scaling (the default) is supported"): their casts are kernels. Context
    parallelism gathers keys in one call and computes with those of one rank after the other, with a
    merge behind each (torch/distributed/tensor/experimental/_attention.py,
    `_templated_ring_attention`): here they go round.
    """
    for name, gpus, seconds, given, sizes in _rows("torchtitan"):
        model, layers = _TITAN[name.split()[0]]
        flags: dict[str, Any] = {"fusion": "elementwise", **given}
        if flags["recompute"] == "selective":
            flags |= {"recompute": "full", "recompute_every": 3}
        if flags.get("pp", 1) > 1:
            flags |= _titan_pipeline(given, layers)
        else:
            flags |= {"reshard_after_forward": "last"}
            flags |= {"async_tp": False} if flags.get("tp", 1) > 1 else {}
        if "fp8" in flags:
            flags |= {"fp8_scaling": "current"}
        if flags.get("cp", 1) > 1:
            flags |= {"cp_mode": "ring"}
        own = {**sizes, "L": layers}
        yield MeasuredStep("torchtitan", name, seconds, gpus, "h100-500w", model, own, flags)


PUBLISHED: Final[Mapping[str, Source]] = {
    "korthikanti": korthikanti,
    "narayanan": narayanan,
    "mcore": mcore,
    "torchtitan": torchtitan,
}
