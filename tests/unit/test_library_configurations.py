"""Models of the library that are texts are the programs of their imported configurations, under
each stack."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stagec.analysis.footprint import footprint
from stagec.ir.module import Module
from stagec.ir.param import attr_text
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.models import library
from stagec.pipeline.instrument import PLAN

Sizes = Mapping[str, int]


def _decoder(n: Sizes) -> dict[str, Any]:
    """The keys that all of these configurations have, for the sizes of a model."""
    return {
        "hidden_size": n["D"],
        "num_hidden_layers": n["L"] + n.get("L_dense", 0),
        "num_attention_heads": n["H"],
        "num_key_value_heads": n.get("G", n["H"]),
        "head_dim": n["K"],
        "intermediate_size": n.get("F", n.get("M")),
        "vocab_size": n["V"],
        "rope_theta": n["theta"],
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def _llama(n: Sizes) -> dict[str, Any]:
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def _mixtral(n: Sizes) -> dict[str, Any]:
    experts = {"num_local_experts": n["E"], "num_experts_per_tok": n["T"]}
    return {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **experts}


def _qwen(n: Sizes) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": n["M"],
        "num_experts": n["E"],
        "num_experts_per_tok": n["T"],
        "norm_topk_prob": True,
    }


def _deepseek(n: Sizes) -> dict[str, Any]:
    return {
        "moe_intermediate_size": n["M"],
        "n_routed_experts": n["E"],
        "n_shared_experts": n["F_shared"] // n["M"],
        "num_experts_per_tok": n["T"],
        "n_group": n["N"],
        "topk_group": n["N_top"],
        "q_lora_rank": n["Q"],
        "kv_lora_rank": n["C"],
        "qk_nope_head_dim": n["K"],
        "qk_rope_head_dim": n["R"],
        "v_head_dim": n["W"],
        "first_k_dense_replace": n["L_dense"],
    }


def _deepseek_v2(n: Sizes) -> dict[str, Any]:
    return _deepseek(n) | {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
        "norm_topk_prob": False,
    }


def _deepseek_v3(n: Sizes) -> dict[str, Any]:
    return _deepseek(n) | {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    }


#: The texts of models that transformers has. GPT and PaLM are those of Megatron-LM and of a paper;
#: transformers has no DLRM, and does not train DeepSeek-V3's multi-token prediction.
CONFIGURATIONS: Mapping[str, Callable[[Sizes], dict[str, Any]]] = {
    "llama.stg": _llama,
    "mixtral.stg": _mixtral,
    "qwen3_moe.stg": _qwen,
    "deepseek_v2.stg": _deepseek_v2,
    "deepseek_v3.stg": _deepseek_v3,
}
WITHOUT = {"gpt.stg", "palm.stg", "dlrm.stg", "dlrm_tables.stg", "deepseek_v3_mtp.stg"}
SMALL = {"B": 2, "S": 64}
USUAL = "transformers"
FLAGS: Mapping[str, dict[str, Any]] = {
    "ideal": {},
    USUAL: {"stack": "huggingface"},
    "transformers, autocast, checkpoints": {
        "stack": "huggingface",
        "param_dtype": "f32",
        "autocast": True,
        "recompute": "full",
    },
    "transformers, FSDP2": {"stack": "huggingface", "dp": 2, "zero": 3},
    "torchtitan": {"stack": "torchtitan"},
}


def test_each_text_has_a_configuration_or_none() -> None:
    texts = {model.text_name for model in library().values() if not model.is_configuration}
    assert CONFIGURATIONS.keys() | WITHOUT == texts


def planned(model: str, sizes: Sizes, flags: Mapping[str, Any]) -> Module:
    options = JobOptions(model, sizes=sizes, explicit=frozenset(flags), **flags)
    return JobBuilder(options, Session()).lower(until=PLAN)


def ops(module: Module) -> Counter[str]:
    """The operations of functions, each with its parameters and types. In which order a text
    writes the norms and rotations of queries and keys does not count."""
    lines: Counter[str] = Counter()
    for func in module.functions:
        for op in func.body.walk():
            attrs = sorted(f"{n} = {attr_text(v)}" for n, v in op.attrs.items())
            types = [str(v.type) for v in op.results]
            if op.region is None:
                types += [str(v.type) for v in op.operands]
                lines[f"{op.name} {attrs} {types}".replace("L_sparse", "L")] += 1
    return lines


def cases() -> Iterator[tuple[str, str]]:
    """All models with the flags of transformers, and one of each text with all flags."""
    seen = set[str]()
    for name, model in library().items():
        if model.text_name in CONFIGURATIONS:
            yield from ((name, f) for f in FLAGS if f == USUAL or model.text_name not in seen)
            seen.add(model.text_name)


@pytest.mark.parametrize(("name", "named"), list(cases()))
def test_it_is_its_configuration(name: str, named: str, tmp_path: Path) -> None:
    model, flags = library()[name], FLAGS[named]
    layers = {"L": 2} | ({"L_dense": 1} if "L_dense" in model.values else {})
    sizes = {**model.values, **layers}
    config = _decoder(sizes) | CONFIGURATIONS[model.text_name](sizes)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    both = [planned(name, SMALL | layers, flags), planned(str(file), SMALL, flags)]
    ours, imported = map(ops, both)
    assert ours - imported == imported - ours == Counter()
    figures = [footprint(module, name)["classes"] for module in both]
    assert figures[0][0]["moments"] == figures[1][0]["moments"]
