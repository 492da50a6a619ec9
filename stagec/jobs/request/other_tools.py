"""Flags of Megatron-LM, vLLM, torchrun and others, and the options here that correspond to them."""

from collections.abc import Mapping

_HERE: Mapping[str, str] = {
    "--ranks N": "gpus num-gpus n-gpus world-size nproc-per-node",
    "--ranks N, of all nodes": "nodes nnodes num-nodes",
    "--machine NAME": "gpu device hardware system",
    "--tp N": "tensor-parallel tensor-parallel-size tensor-model-parallel-size tp-size",
    "--pp N": "pipeline-parallel pipeline-parallel-size pipeline-model-parallel-size pp-size",
    "--dp N": "data-parallel data-parallel-size dp-size ddp",
    "--cp N": "context-parallel context-parallel-size",
    "--ep N": "expert-parallel expert-parallel-size expert-model-parallel-size ep-size",
    "--sp": "sequence-parallel",
    "--chunks N": "virtual-pipeline-model-parallel-size",
    "--zero 1": "use-distributed-optimizer",
    "--zero 3": "fsdp use-torch-fsdp2 zero3",
    "--zero N": "zero-stage",
    "--attention flash-2": "flash-attn flash-attention use-flash-attn use-flash-attention",
    "--set B=N, all sequences of a step; of a server --batch N": "batch-size global-batch-size",
    "--microbatches N, how many": "micro-batch-size gradient-accumulation-steps "
    "grad-accum grad-accumulation",
    "--set S=N": "seq seqlen seq-length seq-len sequence-length max-model-len context-length",
    "--set L=N": "layers num-layers n-layers",
    "--set D=N": "hidden-size",
    "--param-dtype, or --weight-dtype of a server": "dtype precision quantization",
    "--kv-dtype": "kv-cache-dtype",
    "--server-memory": "gpu-memory-utilization",
    "--stack NAME": "engine backend framework",
    "--prompt N": "isl input-len input-length prompt-len",
    "--output-tokens N": "osl output-len output-length max-new-tokens",
    "--rate R": "qps request-rate",
    "--batches N,..., or --max-batch N of requests over time": "max-num-seqs max-batch-size",
    "--ttft TIME and --tpot TIME": "slo sla tpot-limit ttft-limit",
    "--limit SIZE": "gpu-memory memory-limit max-memory",
    "-o": "out out-dir output-dir",
    "the first argument": "model model-name",
    "--recompute full": "recompute-granularity activation-checkpointing "
    "gradient-checkpointing grad-checkpointing",
}
#: The option here, by the name of a flag of another tool.
FLAGS_HERE = {name: here for here, names in _HERE.items() for name in names.split()}


def flag_here(name: str) -> str | None:
    """`here it is --tp N` for an option of another tool; None for other names. Leading dashes are
    ignored, and underscores count as dashes."""
    here = FLAGS_HERE.get(name.lstrip("-").replace("_", "-"))
    return here and f"here it is {here}"
