"""Flags of Megatron-LM, vLLM, torchrun and others, and the options here that correspond to them."""

from collections.abc import Mapping

_HERE: Mapping[str, str] = {
    "--ranks N": "gpus num-gpus n-gpus world-size nproc-per-node",
    "--machine NAME": "gpu device hardware system",
    "--tp N": "tensor-parallel tensor-parallel-size tensor-model-parallel-size tp-size",
    "--pp N": "pipeline-parallel pipeline-parallel-size pipeline-model-parallel-size pp-size",
    "--dp N": "data-parallel data-parallel-size dp-size",
    "--cp N": "context-parallel context-parallel-size",
    "--ep N": "expert-parallel expert-parallel-size expert-model-parallel-size ep-size",
    "--sp": "sequence-parallel",
    "--chunks N": "virtual-pipeline-model-parallel-size",
    "--zero 1": "use-distributed-optimizer",
    "--zero 3": "fsdp use-torch-fsdp2",
    "--set B=N, all sequences of a step; of a server --batch N": "batch-size global-batch-size",
    "--microbatches N, how many": "micro-batch-size gradient-accumulation-steps",
    "--set S=N": "seq seqlen seq-length seq-len sequence-length max-model-len",
    "--set L=N": "num-layers",
    "--set D=N": "hidden-size",
    "--param-dtype, or --weight-dtype of a server": "dtype precision quantization",
    "--kv-dtype": "kv-cache-dtype",
    "--server-memory": "gpu-memory-utilization",
    "--recompute full": "recompute-granularity activation-checkpointing",
}
#: The option here, by the name of a flag of another tool.
FLAGS_HERE = {name: here for here, names in _HERE.items() for name in names.split()}


def flag_here(name: str) -> str | None:
    """`here it is --tp N` for an option of another tool; None for other names. Leading dashes are
    ignored, and underscores count as dashes."""
    here = FLAGS_HERE.get(name.lstrip("-").replace("_", "-"))
    return here and f"here it is {here}"
