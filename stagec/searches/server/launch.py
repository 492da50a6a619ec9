"""`--emit-run`: the command lines and files that start a server with an engine.

Flags are those of vLLM (`vllm serve --help`, `vllm-router`), SGLang (`sglang.launch_server`,
`sglang_router.launch_router`) and TensorRT-LLM (`trtllm-serve`, its `--config` YAML, and
`trtllm-serve disaggregated`).
"""

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd, prod
from pathlib import Path
from typing import Any, ClassVar, cast

from stagec.ir.expr import fraction
from stagec.ir.serving_step import PREFILL
from stagec.ir_spec.ops.quantized import FORMATS
from stagec.ir_spec.strategy.axes import SHARED_WIDTH, expert_parts, whole_experts
from stagec.ir_spec.strategy.scheduler import ALONE, BESIDE, SchedulerRule
from stagec.jobs.request.experts import mesh_axes
from stagec.jobs.request.option import Kind
from stagec.jobs.request.options import JobOptions
from stagec.searches.server.hosts import sglang_hosts, trtllm_hosts, vllm_hosts
from stagec.searches.serving_space import SERVER

_PORT, _BOOTSTRAP = 8000, 8998
_HEAD = """#!/bin/sh
# {about}
: "${{MODEL:?set MODEL to the weights: a folder or a repository}}"
"""
_CHECKPOINT = "# MODEL has weights of {dtype}: the engine reads that from its configuration\n"


@dataclass(frozen=True, slots=True)
class EngineRun:
    """An engine, and the folder for its launch files; None to print them."""

    engine: str
    folder: Path | None = None


class EngineRunType(Kind[EngineRun]):
    """`vllm`, or `vllm=FOLDER`."""

    name = "ENGINE[=FOLDER]"

    def read(self, text: str) -> EngineRun:
        """The engine and its folder."""
        engine, equals, folder = text.partition("=")
        if engine not in ENGINES:
            raise ValueError(f"'{engine}' is not one of {', '.join(ENGINES)}")
        if equals and not folder:
            raise ValueError(f"expects a folder, {engine}=run, found '{text}'")
        return EngineRun(engine, Path(folder) if folder else None)

    def text(self, value: EngineRun) -> str:
        return value.engine if value.folder is None else f"{value.engine}={value.folder}"


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """How the ranks of a worker share the model, in the terms of engines: each of `pp` stages has
    `dp` groups with sequences of their own, and each group splits attention over `tp` ranks;
    experts are split over `ep` groups of `moe_tp` ranks. `problem` says why engines have no flags
    for a layout."""

    tp: int
    dp: int
    pp: int
    ep: int
    moe_tp: int
    problem: str = ""

    @property
    def ranks(self) -> int:
        """The number of ranks of a stage."""
        return self.tp * self.dp


def layout_of(options: JobOptions, *, experts: bool) -> WorkerLayout:
    """The layout of a worker of a model with or without experts."""
    mesh = {axis: size or 1 for axis, size in mesh_axes(options).items()}
    tp, data, pp = (mesh.pop(axis, 1) for axis in ("tp", "ep", "pp"))
    own, dp = (1, data * tp) if options.dp_attention else (tp, data)
    flag = partial(getattr, options)
    each = 1 if whole_experts(flag) else tp // expert_parts(flag)
    ep, moe_tp = (options.ep, each) if experts else (1, own * dp)
    problem = ""
    if prod(mesh.values()) > 1:
        problem = "axes beside tp, pp, dp and ep"
    elif not experts and dp > 1:
        problem = "attention data parallelism of a dense model"
    elif ep * moe_tp != own * dp:
        problem = "experts on several ranks"
    return WorkerLayout(own, dp, pp, ep, moe_tp, problem)


@dataclass(frozen=True, slots=True)
class LaunchedWorker:
    """A kind of worker to start: its role (`server`, `prefill` or `decode`), the number of workers,
    the layout, the sequences in flight and the most tokens of a step of each group of ranks, and
    the tokens of the longest sequence. `options` has the types of weights and caches; `scheduler`
    the share of the memory, and whether prompts share steps with sequences that decode. `experts`
    is the number of experts of a layer, 0 for a dense model, and `devices` the number of devices of
    a host (0: as many as a worker has)."""

    role: str
    workers: int
    layout: WorkerLayout
    sequences: int
    tokens: int
    longest: int
    options: JobOptions
    scheduler: SchedulerRule
    experts: int = 0
    devices: int = 0

    @property
    def hosts(self) -> int:
        """The number of hosts of a worker."""
        ranks = self.layout.ranks * self.layout.pp
        return -(-ranks // (self.devices or ranks))

    @property
    def memory(self) -> float | None:
        """The share of the memory of a device that the engine uses; None if not stated."""
        share = self.scheduler.memory
        return None if share is None else float(fraction(share))

    @property
    def urls(self) -> list[str]:
        """The addresses of the workers, with placeholders for the names of hosts."""
        return [f"http://{self.role}-{n}:{_PORT}" for n in range(self.workers)]


class LaunchEngine(ABC):
    """An engine: the layouts that it supports, and its launch files."""

    #: Whether ranks of tp can split the cached tokens of a sequence (`--dcp`).
    splits_caches: ClassVar[bool] = False

    def lacks(self, layout: WorkerLayout, options: JobOptions) -> str:
        """What the engine has no flags for in a worker; empty if it has all."""
        if options.kv_dtype == "int8":
            return "caches in int8"
        if options.dcp > 1 and not self.splits_caches:
            return "cached tokens that ranks of tp split"
        if options.afd or options.part:
            return "attention and feed-forward on ranks of their own"
        return layout.problem

    def unsent(self, prefill: WorkerLayout, decode: WorkerLayout) -> str:
        """What the engine cannot send between a worker that prefills and one that decodes; empty if
        it can send caches."""
        return ""

    def adapted(self, options: JobOptions, sizes: Mapping[str, int]) -> JobOptions:
        """A worker of a model of these sizes as the engine starts it, where that is otherwise."""
        return options

    @abstractmethod
    def files(self, about: str, workers: Sequence[LaunchedWorker]) -> dict[str, str]:
        """The launch files by name, for one kind of worker, or for those that prefill and those
        that decode."""


class ScriptedEngine(LaunchEngine):
    """An engine whose workers are started by one command line each, with a router in front of
    several workers."""

    def files(self, about: str, workers: Sequence[LaunchedWorker]) -> dict[str, str]:
        files = {f"{w.role}.sh": self.server(about, w) for w in workers}
        if len(workers) > 1 or workers[0].workers > 1:
            files["router.sh"] = self.router(about, workers)
        return files

    @abstractmethod
    def server(self, about: str, worker: LaunchedWorker) -> str:
        """The script that starts a worker."""

    @abstractmethod
    def router(self, about: str, workers: Sequence[LaunchedWorker]) -> str:
        """The script that starts the router."""


def _script(about: str, words: Sequence[str], more: str = "") -> str:
    """A shell script with one flag on each line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("-") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return _HEAD.format(about=about) + more + " \\\n  ".join(lines) + "\n"


def _precision(options: JobOptions, fp8: str) -> tuple[list[str], str]:
    """The flags for the types of weights and caches, and a comment on the weights."""
    words, more = ["--dtype", "bfloat16"], ""
    if options.weight_dtype == "fp8":
        words += ["--quantization", "fp8"]
    elif options.weight_dtype not in (None, "bf16"):
        more = _CHECKPOINT.format(dtype=options.weight_dtype)
    if options.kv_dtype == "fp8":
        words += ["--kv-cache-dtype", fp8]
    return words, more


#: Where workers of other hosts ask for caches; vLLM's default is localhost.
_SIDE_CHANNEL = 'export VLLM_NIXL_SIDE_CHANNEL_HOST="$(hostname -i)"\n'
_STAGES = "caches of these pipeline stages between workers"
#: The ranks of adapters that vLLM supports (vllm/config/lora.py: MaxLoRARanks).
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: TensorRT-LLM's names of modules with adapters (lora_helper.py), by names of parameters.
_LORA_MODULES: Mapping[str, Sequence[str]] = {
    "wq": ["attn_q"],
    "wk": ["attn_k"],
    "wv": ["attn_v"],
    "wo": ["attn_dense"],
    "w_gate_up": ["mlp_h_to_4h", "mlp_gate"],
    "w_down": ["mlp_4h_to_h"],
}


class VLLM(ScriptedEngine):
    """vLLM."""

    splits_caches = True

    def lacks(self, layout: WorkerLayout, options: JobOptions) -> str:
        if layout.ep > 1 and layout.moe_tp > 1:
            return "experts that are split and shared out at once"
        if options.lora and options.lora_rank > VLLM_RANKS[-1]:
            return f"adapters of rank {options.lora_rank}, but of up to {VLLM_RANKS[-1]}"
        return super().lacks(layout, options)

    def unsent(self, prefill: WorkerLayout, decode: WorkerLayout) -> str:
        """Caches of stages: NixlConnector asserts one (vllm-project/vllm, issue 52913). Those of
        prefill may be pushed since pull request 45880, but vllm-router does not ask for that."""
        return _STAGES if max(prefill.pp, decode.pp) > 1 else ""

    def _ranks(self, worker: LaunchedWorker) -> list[str]:
        layout = worker.layout
        words = ["--tensor-parallel-size", str(layout.tp)]
        if layout.pp > 1:
            words += ["--pipeline-parallel-size", str(layout.pp)]
        if worker.options.dcp > 1 and worker.role != PREFILL:
            words += ["--decode-context-parallel-size", str(worker.options.dcp)]
        if layout.dp > 1:
            words += ["--data-parallel-size", str(layout.dp)]
        if layout.ep > 1:
            words.append("--enable-expert-parallel")
        if worker.options.redundant_experts:
            copies = {"num_redundant_experts": worker.options.redundant_experts}
            words += ["--enable-eplb", "--eplb-config", shlex.quote(json.dumps(copies))]
        if worker.options.two_batch_overlap:
            kernels = "high_throughput" if worker.role == PREFILL else "low_latency"
            words += ["--enable-dbo", "--all2all-backend", f"deepep_{kernels}"]
        return words

    def server(self, about: str, worker: LaunchedWorker) -> str:
        precision, more = _precision(worker.options, "fp8")
        more += _SIDE_CHANNEL if worker.role != SERVER else ""
        hosts, before = vllm_hosts(worker)
        words = ["vllm serve", '"$MODEL"', "--port", str(_PORT)]
        words += [*self._ranks(worker), *hosts]
        words += ["--max-num-seqs", str(worker.sequences)]
        words += ["--max-num-batched-tokens", str(worker.tokens)]
        words += ["--max-model-len", str(worker.longest), *precision]
        if worker.memory is not None:
            words += ["--gpu-memory-utilization", f"{worker.memory:g}"]
        if worker.options.page > 1:
            words += ["--block-size", str(worker.options.page)]
        if worker.options.lora:
            words += ["--enable-lora", "--max-loras", str(worker.options.max_loras)]
            rank = next(r for r in VLLM_RANKS if r >= worker.options.lora_rank)
            words += ["--max-lora-rank", str(rank)]
        if worker.role != SERVER:
            config = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
            words += ["--kv-transfer-config", shlex.quote(json.dumps(config))]
        return _script(about, words, before + more)

    def router(self, about: str, workers: Sequence[LaunchedWorker]) -> str:
        words = ["vllm-router", "--host", "0.0.0.0", "--port", str(_PORT)]
        words += ["--policy", "round_robin"]
        if len(workers) == 1:
            return _script(about, [*words, "--worker-urls", *workers[0].urls])
        words.append("--vllm-pd-disaggregation")
        for worker in workers:
            words += (word for url in worker.urls for word in (f"--{worker.role}", url))
        return _script(about, words)


#: Shared experts are whole on each rank (models/deepseek_v2.py of SGLang, `DeepseekV2MoE`).
_WHOLE_SHARED = "export SGLANG_SHARED_EXPERT_TP1=1\n"


class SGLang(ScriptedEngine):
    """SGLang, whose sizes are those of all groups of data-parallel attention together, and whose
    ranks have shared experts whole where their blocks do not divide."""

    def adapted(self, options: JobOptions, sizes: Mapping[str, int]) -> JobOptions:
        format_, width = FORMATS.get(options.weight_dtype or ""), sizes.get(SHARED_WIDTH, 0)
        if format_ is None or not width:
            return options
        block = gcd(width, options.weight_block or format_.rows or 1)
        whole = width % (block * options.tp) > 0
        return options.changed(whole_shared_experts=True) if whole else options

    def lacks(self, layout: WorkerLayout, options: JobOptions) -> str:
        if layout.pp > 1 and options.prompt_steps == BESIDE:
            return "prompts beside decode on pipeline stages"
        return super().lacks(layout, options)

    def unsent(self, prefill: WorkerLayout, decode: WorkerLayout) -> str:
        """Caches to stages of which there are not as many (sgl-project/sglang, pull request
        14265)."""
        return _STAGES if decode.pp not in (1, prefill.pp) else ""

    def server(self, about: str, worker: LaunchedWorker) -> str:
        layout = worker.layout
        precision, more = _precision(worker.options, "fp8_e4m3")
        more += _WHOLE_SHARED if worker.options.whole_shared_experts else ""
        words = ["python -m sglang.launch_server", "--model-path", '"$MODEL"']
        words += ["--host", "0.0.0.0", "--port", str(_PORT), "--tp-size", str(layout.ranks)]
        if layout.pp > 1:
            words += ["--pp-size", str(layout.pp)]
        if layout.dp > 1:
            words += ["--dp-size", str(layout.dp), "--enable-dp-attention"]
            # groups of one rank have heads and dense layers whole, as was timed
            words += ["--enable-dp-lm-head"]
            words += ["--moe-dense-tp-size", "1"] if layout.tp == 1 else []
        hosts, before = sglang_hosts(worker)
        words += [*hosts, *self._experts(worker)]
        words += ["--max-running-requests", str(worker.sequences * layout.dp)]
        words += ["--chunked-prefill-size", str(worker.tokens * layout.dp)]
        words += ["--context-length", str(worker.longest), *precision]
        if worker.memory is not None:
            words += ["--mem-fraction-static", f"{worker.memory:g}"]
        if worker.options.page > 1:
            words += ["--page-size", str(worker.options.page)]
        if worker.options.lora:
            words += ["--enable-lora", "--max-loras-per-batch", str(worker.options.max_loras)]
            words += ["--max-lora-rank", str(worker.options.lora_rank)]
            words += ["--lora-target-modules", "all"]
        if worker.role == SERVER:
            words += ["--enable-mixed-chunk"] if worker.scheduler.prompts != ALONE else []
        else:
            words += ["--disaggregation-mode", worker.role]
        if worker.role == PREFILL:
            words += ["--disaggregation-bootstrap-port", str(_BOOTSTRAP)]
        return _script(about, words, before + more)

    def _experts(self, worker: LaunchedWorker) -> list[str]:
        words: list[str] = []
        if worker.layout.ep > 1:
            words += ["--ep-size", str(worker.layout.ep)]
        if copies := worker.options.redundant_experts:
            words += ["--enable-eplb", "--ep-num-redundant-experts", str(copies)]
        if worker.options.two_batch_overlap:
            words += ["--moe-a2a-backend", "deepep", "--enable-two-batch-overlap"]
        return words

    def router(self, about: str, workers: Sequence[LaunchedWorker]) -> str:
        words = ["python -m sglang_router.launch_router", "--host", "0.0.0.0"]
        words += ["--port", str(_PORT)]
        if len(workers) == 1:
            return _script(about, [*words, "--worker-urls", *workers[0].urls])
        words.append("--pd-disaggregation")
        prefill, decode = workers
        words += (w for url in prefill.urls for w in ("--prefill", url, str(_BOOTSTRAP)))
        words += (w for url in decode.urls for w in ("--decode", url))
        return _script(about, words)


class TensorRTLLM(LaunchEngine):
    """TensorRT-LLM, with a YAML file for each kind of worker, and one for the server that joins
    them."""

    def lacks(self, layout: WorkerLayout, options: JobOptions) -> str:
        if layout.dp > 1 and layout.tp > 1:
            return "attention that is split within groups that have sequences of their own"
        if options.two_batch_overlap:
            return "two half batches that take turns"
        if others := [n for n in (options.lora or "").split(",") if n and n not in _LORA_MODULES]:
            return f"adapters of {others[0]}"
        return super().lacks(layout, options)

    def files(self, about: str, workers: Sequence[LaunchedWorker]) -> dict[str, str]:
        files: dict[str, str] = {}
        for worker in workers:
            several = len(workers) > 1
            files[f"{worker.role}.yaml"] = f"# {about}\n" + _yaml(self._config(worker, several))
            words = [*trtllm_hosts(worker), "trtllm-serve", '"$MODEL"']
            words += ["--host", "0.0.0.0", "--port", str(_PORT)]
            dtype = worker.options.weight_dtype
            more = "" if dtype in (None, "bf16") else _CHECKPOINT.format(dtype=dtype)
            script = _script(about, [*words, "--config", f"{worker.role}.yaml"], more)
            files[f"{worker.role}.sh"] = script
        if len(workers) > 1:
            files["disaggregated.yaml"] = f"# {about}\n" + _yaml(self._joined(*workers))
            words = ["trtllm-serve disaggregated", "-c", "disaggregated.yaml"]
            files["router.sh"] = _script(about, words)
        return files

    def _config(self, worker: LaunchedWorker, several: bool) -> dict[str, Any]:
        layout = worker.layout
        caches: dict[str, Any] = {"free_gpu_memory_fraction": worker.memory or 0.9}
        if worker.options.kv_dtype == "fp8":
            caches["dtype"] = "fp8"
        if worker.options.page > 1:
            caches["tokens_per_block"] = worker.options.page
        config: dict[str, Any] = {
            "backend": "pytorch",
            "tensor_parallel_size": layout.ranks,
            "pipeline_parallel_size": layout.pp,
        }
        if layout.ep > 1 or layout.moe_tp != layout.ranks:
            config["moe_expert_parallel_size"] = layout.ep
            config["moe_tensor_parallel_size"] = layout.moe_tp
        if copies := worker.options.redundant_experts:
            config["moe_config"] = {"load_balancer": {"num_slots": worker.experts + copies}}
        config |= {
            "enable_attention_dp": layout.dp > 1,
            "max_batch_size": worker.sequences,
            "max_num_tokens": worker.tokens,
            "max_seq_len": worker.longest,
            "enable_chunked_prefill": True,
            "kv_cache_config": caches,
        }
        if names := worker.options.lora:
            config["lora_config"] = {
                "max_lora_rank": worker.options.lora_rank,
                "max_loras": worker.options.max_loras,
                "lora_target_modules": [
                    each for name in names.split(",") for each in _LORA_MODULES[name]
                ],
            }
        if worker.role != PREFILL:
            config["cuda_graph_config"] = {
                "enable_padding": True,
                "max_batch_size": worker.sequences,
            }
        if several:
            config["disable_overlap_scheduler"] = worker.role == PREFILL
            config["cache_transceiver_config"] = {"backend": "DEFAULT"}
        return config

    def _joined(self, prefill: LaunchedWorker, decode: LaunchedWorker) -> dict[str, Any]:
        def pool(worker: LaunchedWorker) -> dict[str, Any]:
            urls = [url.removeprefix("http://") for url in worker.urls]
            return {"num_instances": worker.workers, "urls": urls}

        return {
            "hostname": "0.0.0.0",
            "port": _PORT,
            "backend": "pytorch",
            "context_servers": pool(prefill),
            "generation_servers": pool(decode),
        }


ENGINES: Mapping[str, LaunchEngine] = {"vllm": VLLM(), "sglang": SGLang(), "trtllm": TensorRTLLM()}


def engine_of(stack: str) -> LaunchEngine | None:
    """The engine that a stack describes; None if it describes no engine."""
    return ENGINES.get(stack.partition("@")[0])


def _yaml(data: Mapping[str, Any]) -> str:
    return "\n".join(_lines(data, "")) + "\n"


def _lines(data: Mapping[str, Any], before: str) -> Iterator[str]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield f"{before}{name}:"
            yield from _lines(cast("Mapping[str, Any]", value), before + "  ")
        else:
            # JSON is YAML, with quoted strings and lists in brackets
            yield f"{before}{name}: {value if isinstance(value, str) else json.dumps(value)}"
