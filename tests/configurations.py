"""Small configurations of every family, and the keys that each may have."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.towers import SIZES as TOWER_SIZES
from tests.towers import TOWERS, tower

Keys = Mapping[str, Any]

#: Sizes that divide by 4, at which a step takes milliseconds.
SMALL: Keys = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": 32,
    "rope_theta": 100,
}
#: Families whose heads all have their own keys and values, or one for all.
UNGROUPED = """
    internlm baichuan bloom codegen falcon gpt2 gpt-sw3 gpt_bigcode gpt_neo gpt_neox gptj mpt
    openai-gpt opt persimmon chatglm qwen glm_moe_dsa deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2
    RefinedWeb RefinedWebModel mistral4
"""
#: Families without a base of rotary positions.
UNROTATED = "openai-gpt bloom chatglm codegen gpt2 gpt-sw3 gpt_bigcode gpt_neo gptj mpt opt"
_EXPERTS: Keys = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_WIDE: Keys = {"num_experts": 4, "num_experts_per_tok": 2}
_ROUTED: Keys = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}
_LATENT: Keys = {
    **_ROUTED,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
}
_HEADS_OF_LATENTS: Keys = {k: v for k, v in _LATENT.items() if k not in _ROUTED}
_MIXED = ["full_attention", "sliding_attention"] * 2
_GEMMA4: Keys = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 32,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 8,
}
_GEMMA3N: Keys = {
    "num_hidden_layers": 6,
    "intermediate_size": [16] * 6,
    "head_dim": 8,
    "altup_num_inputs": 3,
    "laurel_rank": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "activation_sparsity_pattern": [0.75, 0.75, 0, 0, 0, 0],
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 32,
}
_GEMMA3: Keys = {"head_dim": 8, "sliding_window": 6, "sliding_window_pattern": 2}
_LLAMA4: Keys = {
    "head_dim": 8,
    "attention_chunk_size": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 24,
    "interleave_moe_layer_step": 2,
}
_GROWN: Keys = {
    "rope_type": "default",
    "rope_theta": 100,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 4,
}
_MINIMAX3: Keys = {
    **_EXPERTS,
    "head_dim": 8,
    "rotary_dim": 4,
    "dense_intermediate_size": 24,
    "shared_intermediate_size": 8,
    "moe_layer_freq": [0, 1, 1, 1],
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 0, 1, 1],
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 8,
        "sparse_block_size": 2,
        "sparse_topk_blocks": 2,
    },
}
_COMPRESSED: Keys = {
    **{k: v for k, v in _ROUTED.items() if k != "first_k_dense_replace"},
    "num_key_value_heads": 1,
    "intermediate_size": None,
    "head_dim": 8,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 8,
    "o_groups": 4,
    "o_lora_rank": 4,
    "index_n_heads": 4,
    "index_head_dim": 4,
    "index_topk": 2,
    "sliding_window": 3,
    "compress_ratios": [0, 2, 4, 2],
    "compress_rate_csa": 2,
    "compress_rate_hca": 4,
    "compress_rope_theta": 200,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
}
#: What a family needs besides the sizes.
NEEDS: Mapping[str, Keys] = {
    "gemma3": _GEMMA3,
    "llama4": _LLAMA4,
    "gemma3n_text": _GEMMA3N,
    "gemma3n": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gemma4": _GEMMA4,
    "vaultgemma": {"head_dim": 8, "query_pre_attn_scalar": 4, "sliding_window": 6},
    "cwm": {"head_dim": 8, "sliding_window": 6},
    "ministral3": {"head_dim": 8},
    "jais2": {"head_dim": 8},
    "minicpm3": _HEADS_OF_LATENTS,
    "youtu": _HEADS_OF_LATENTS,
    "glm4_moe_lite": _LATENT,
    "flex_olmo": _WIDE,
    "axk1": _LATENT,
    "sarvam_mla": {**{k: v for k, v in _LATENT.items() if k != "q_lora_rank"}},
    "sarvam_moe": {**_ROUTED, "head_dim": 8},
    "mellum": {**_EXPERTS, "head_dim": 8, "sliding_window": 6, "layer_types": _MIXED},
    "granite_swa": {"sliding_window": 6, "layer_rope_theta": [0, 100, 100, 50]},
    "granitemoe_swa": {
        **_WIDE,
        "shared_intermediate_size": 8,
        "sliding_window": 6,
        "layer_rope_theta": [0, 100, 100, 50],
    },
    "flint": {
        **_EXPERTS,
        "head_dim": 8,
        "sliding_window": 6,
        "shared_expert_intermediate_size": 8,
        "mlp_only_layers": [0],
        "layer_types": _MIXED,
    },
    "apertus1p5_text": {"output_vocab_size": 16},
    "iquestcoder": {"head_dim": 8},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2},
    "kolibri1": {
        **_EXPERTS,
        "intermediate_size": None,
        "head_dim": 8,
        "sliding_window": 6,
        "shared_expert_intermediate_size": 8,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "lfm3": {"head_dim": 8, "sliding_window": 6, "conv_L_cache": 3},
    "bailing_hybrid": {
        **{k: v for k, v in _LATENT.items() if k not in ("n_routed_experts", "q_lora_rank")},
        "num_experts": 4,
        "head_dim": 8,
        "layer_group_size": 2,
        "short_conv_kernel_size": 3,
    },
    "cohere2_moe": {
        **_WIDE,
        "head_dim": 8,
        "sliding_window": 6,
        "num_shared_experts": 1,
        "first_k_dense_replace": 2,
        "prefix_dense_intermediate_size": 24,
    },
    "minimax_m3": _MINIMAX3,
    "minimax_m3_vl_text": {
        **{k: v for k, v in _MINIMAX3.items() if k != "sparse_attention_config"},
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
        "index_n_heads": 4,
        "index_head_dim": 8,
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "nemotron-nas": {
        "intermediate_size": None,
        "block_configs": [
            {"attention": {"n_heads_in_group": 1}, "ffn": {"ffn_mult": 3.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 24.0}},
            {"attention": {"n_heads_in_group": 1}, "ffn": {"no_op": True}},
            {"attention": {"no_op": True}, "ffn": {"no_op": True}},
        ],
    },
    "laguna": {
        **_EXPERTS,
        "head_dim": 8,
        "sliding_window": 6,
        "num_attention_heads": 4,
        "num_attention_heads_per_layer": [4, 8, 4, 8],
        "shared_expert_intermediate_size": 8,
        "layer_types": _MIXED,
    },
    "step3p5": {
        **_EXPERTS,
        "head_dim": 8,
        "num_attention_groups": 4,
        "moe_layers_enum": "1,2,3",
        "share_expert_dim": 8,
        "sliding_window": 6,
        "layer_types": _MIXED,
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4},
        "rope_theta": [100, 50, 100, 50],
        "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
    },
    "exaone_moe": {**_EXPERTS, "num_shared_experts": 1, "sliding_window": 6},
    "solar_open": {**_ROUTED, "first_k_dense_replace": 0, "head_dim": 8},
    "hy_v3": {**_EXPERTS, "num_shared_experts": 1, "head_dim": 8},
    "afmoe": {
        **_EXPERTS,
        "num_shared_experts": 1,
        "head_dim": 8,
        "sliding_window": 6,
        "mup_enabled": True,
    },
    "mimo_v2_flash": {
        **_ROUTED,
        "n_shared_experts": None,
        "head_dim": 8,
        "v_head_dim": 4,
        "swa_num_key_value_heads": 4,
        "partial_rotary_factor": 0.5,
        "sliding_window": 6,
        "hybrid_layer_pattern": [0, 1, 1, 0],
    },
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 4, "sliding_window": 6},
    "gemma3_text": _GEMMA3,
    "olmo3": {"sliding_window": 6},
    "cohere2": {"sliding_window": 6},
    "gpt_oss": {"head_dim": 8, "sliding_window": 6, "num_local_experts": 4, **_WIDE},
    "llama4_text": _LLAMA4,
    "deepseek_v4": _COMPRESSED,
    "deepseek_ref": _COMPRESSED,
    "longcat_flash": {
        **_HEADS_OF_LATENTS,
        "num_layers": 2,
        "num_hidden_layers": 4,
        "moe_topk": 2,
        "n_routed_experts": 2,
        "expert_ffn_hidden_size": 8,
        "zero_expert_num": 2,
    },
    "deepseek_v32": {**_LATENT, "index_n_heads": 4, "index_head_dim": 4, "index_topk": 5},
    "qwen3": {"head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"window_size": 3},
    "bloom": {"seq_length": 32},
    "mixtral": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "olmoe": _WIDE,
    "dbrx": {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 2}},
    "granitemoe": {"num_local_experts": 4},
    "granitemoeshared": {"num_local_experts": 4, "shared_intermediate_size": 8},
    "glm4_moe": {**_ROUTED, "head_dim": 8},
    "dots1": _ROUTED,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8},
    "minimax_m2": {**_WIDE, "head_dim": 8, "rotary_dim": 4},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [2] * 4},
    "grok-1": _WIDE,
    "bailing_moe": {**_EXPERTS, "num_shared_experts": 1},
    "bailing_moe_v2": {**_EXPERTS, "num_shared_experts": 1},
    "git": {**_EXPERTS},
    "grok-2": {**_EXPERTS},
    "grok2": {**_EXPERTS},
    "glm_moe_dsa": {**_LATENT, "index_n_heads": 4, "index_head_dim": 4, "index_topk": 8},
    "chatglm": {"kv_channels": 8},
    "deepseek": _ROUTED,
    "deepseek_v2": _LATENT,
    "mistral4": {**_LATENT, "rope_parameters": _GROWN},
    "deepseek_v3": {**_LATENT, "n_group": 2, "topk_group": 1},
    "kimi_k2": {**_LATENT, "n_group": 1, "topk_group": 1},
}
_CHOSEN: Keys = {"num_experts_per_tok": 2}
_BASE: Keys = {"hidden_size": 16, "vocab_size": 16, "num_hidden_layers": 4}
_HEADS: Keys = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 16}
_MAMBA2: Keys = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 2,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 4,
}
_DELTA: Keys = {
    "head_dim": 8,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 2,
    "linear_value_head_dim": 2,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "partial_rotary_factor": 0.5,
}
#: State-space models, linear attention and hybrids.
SCANS: Mapping[str, Keys] = {
    "mamba": {**_BASE, "state_size": 2, "conv_kernel": 3, "time_step_rank": 2},
    "falcon_mamba": {**_BASE, "state_size": 2, "conv_kernel": 3, "time_step_rank": 2},
    "mamba2": {
        **_BASE,
        "hidden_size": 32,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 4,
        "state_size": 4,
        "conv_kernel": 3,
        "chunk_size": 4,
    },
    "jamba": {
        **_BASE,
        **_HEADS,
        **_CHOSEN,
        "num_experts": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 2,
        "mamba_d_conv": 3,
        "mamba_dt_rank": 2,
    },
    "bamba": {**_BASE, **_HEADS, **_MAMBA2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_BASE,
        **_HEADS,
        **_MAMBA2,
        **_CHOSEN,
        "num_local_experts": 4,
        "shared_intermediate_size": 8,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.5,
    },
    "nemotron_h": {
        **_BASE,
        **_HEADS,
        "head_dim": 4,
        "hybrid_override_pattern": "M-E*",
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 4,
        "ssm_state_size": 2,
        "conv_kernel": 3,
        "chunk_size": 4,
    },
    "falcon_h1": {
        **_BASE,
        **_HEADS,
        **_MAMBA2,
        "mamba_d_ssm": 32,
        "key_multiplier": 0.5,
        "ssm_multipliers": [1, 0.5, 1, 0.25, 1],
    },
    "zamba2": {
        **_BASE,
        **_HEADS,
        "num_hidden_layers": 6,
        "num_mem_blocks": 2,
        "adapter_rank": 2,
        "use_mem_rope": True,
        "use_shared_attention_adapter": True,
        "hybrid_layer_ids": [1, 3, 5],
        "n_mamba_heads": 4,
        "mamba_headdim": 8,
        "mamba_d_state": 2,
        "mamba_d_conv": 3,
        "chunk_size": 4,
    },
    "qwen3_next": {
        **_BASE,
        **_HEADS,
        **_CHOSEN,
        "head_dim": 8,
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 2,
        "linear_conv_kernel_dim": 3,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
    },
    "qwen3_5_text": {**_BASE, **_HEADS, **_DELTA},
    "qwen3_5_moe_text": {
        **_BASE,
        **_HEADS,
        **_CHOSEN,
        **_DELTA,
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
    "lfm2": {**_BASE, **_HEADS, "block_multiple_of": 4, "full_attn_idxs": [1], "rope_theta": 100},
    "lfm2_moe": {
        **_BASE,
        **_HEADS,
        **_CHOSEN,
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "minimax_m1": {
        **_BASE,
        **_HEADS,
        **_CHOSEN,
        "num_local_experts": 4,
        "attn_type_list": [0, 0, 1, 0],
        "layernorm_linear_attention_alpha": 1.5,
    },
    "kimi_linear": {
        **_BASE,
        **_HEADS_OF_LATENTS,
        "num_attention_heads": 4,
        "intermediate_size": 16,
        "q_lora_rank": None,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 8,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1, 3, 4],
            "num_heads": 4,
            "head_dim": 2,
            "short_conv_kernel_size": 3,
        },
    },
    "recurrent_gemma": {
        **_BASE,
        **_HEADS,
        "attention_window_size": 6,
        "conv1d_width": 3,
        "block_types": ["recurrent", "attention"],
    },
    "zamba": {
        **_BASE,
        **_HEADS,
        "num_hidden_layers": 6,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 2,
        "mamba_d_conv": 3,
        "mamba_dt_rank": 2,
    },
    "olmo_hybrid": {
        **_BASE,
        **_HEADS,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 4,
        "linear_conv_kernel_dim": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100},
    },
    "rwkv": {**_BASE, "intermediate_size": 16},
    "xlstm": {
        **{k: v for k, v in _BASE.items() if k != "num_attention_heads"},
        "num_heads": 4,
        "ffn_proj_factor": 1.5,
        "ffn_round_up_to_multiple_of": 8,
        "chunk_size": 4,
    },
    "rwkv5": {**_BASE, "head_size": 4, "intermediate_size": 16},
    "rwkv6": {**_BASE, "head_size": 4, "intermediate_size": 16},
    "rwkv7": {
        **_BASE,
        "num_hidden_layers": 5,
        "head_dim": 4,
        "intermediate_size": 16,
        "decay_low_rank_dim": 2,
        "a_low_rank_dim": 2,
        "v_low_rank_dim": 2,
        "gate_low_rank_dim": 2,
    },
}
#: Models whose small configuration is that of another one.
ALIASES = {
    "llava_mistral": "llava_llama",
    "llava_qwen": "llava_llama",
    "phi4mm": "phi4_multimodal",
    "blenderbot-small": "blenderbot",
    "vipllava": "llava",
    "qianfan_ocr": "internvl",
    "deepseek_vl": "idefics3",
    "musicflamingo": "audioflamingo3",
    "pp_chart2table": "got_ocr2",
    "minicpmv4_7": "minicpmv4_6",
    "data2vec-text": "roberta",
    "data2vec-vision": "beit",
    "unispeech": "wav2vec2",
    "unispeech-sat": "wav2vec2",
    "metaclip_2": "clip",
    "camembert": "roberta",
    "llava_next": "llava",
    "llava_next_video": "llava",
    "llava_onevision": "llava",
    "smolvlm": "idefics3",
    "qwen2_5_omni": "qwen2_5_omni_thinker",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe",
    "mvp": "plbart",
    "mt5": "t5-gated",
    "xlm-roberta": "roberta",
    "minimax": "minimax_m1",
    "minimax_text_01": "minimax_m1",
}
_TIED: Keys = {"tie_word_embeddings": (True, False)}
_BIASED: Keys = {"attention_bias": (True, False)}
_GROUPS: Keys = {"num_key_value_heads": (2, 4)}
_LLAMA: Keys = {**_TIED, **_BIASED, **_GROUPS}
_WINDOW: Keys = {"sliding_window": (3, 32, None)}
_SCALED: Keys = {"rope_scaling": (None, {"rope_type": "linear", "factor": 2.0})}
_ACTIVATIONS = ("gelu", "relu", "relu2", "silu")
#: Keys that change what a family computes, with values to try.
FEATURES: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "llama": {
        **_LLAMA,
        **_SCALED,
        "mlp_bias": (True, False),
        "head_dim": (4, 8, None),
        "hidden_act": ("silu", "relu", "relu2", "gelu"),
    },
    "mistral": {**_TIED, **_WINDOW, **_GROUPS},
    "qwen2": {
        **_WINDOW,
        "use_sliding_window": (True, False),
        "max_window_layers": (0, 2, 4),
        "dual_chunk_attention_config": ({"chunk_size": 8}, None),
    },
    "internlm": {"bias": (True, False), "rotary": ({"base": 10000, "type": "dynamic"}, None)},
    "qwen3": {**_LLAMA, "rope_parameters": (None, {"rope_theta": 10, "rope_type": "default"})},
    "phi3": {**_WINDOW, "partial_rotary_factor": (0.5, 1.0)},
    "seed_oss": {**_LLAMA, "attention_out_bias": (True, False)},
    "ernie4_5": {**_TIED, "use_bias": (True, False)},
    "smollm3": {"no_rope_layers": ([1, 1, 1, 0], [0, 0, 1, 1]), "no_rope_layer_interval": (2, 3)},
    "internlm2": {"bias": (True, False), **_GROUPS},
    "internlm3": {"bias": (True, False), "qkv_bias": (True, False)},
    "exaone4": {**_WINDOW, "sliding_window_pattern": (2, "LLLG")},
    "glm": {**_BIASED, "partial_rotary_factor": (0.5, 0.25)},
    "glm4": _BIASED,
    "arcee": {"mlp_bias": (True, False)},
    "gpt2": {"n_inner": (16, None), **_TIED},
    "gpt_bigcode": {"multi_query": (True, False)},
    "openai-gpt": {"afn": ("gelu", "relu"), **_TIED},
    "mamba": {"use_bias": (True, False), "use_conv_bias": (True, False)},
    "mamba2": {"use_bias": (True, False), "use_conv_bias": (True, False)},
    "falcon_h1": {
        "mamba_conv_bias": (True, False),
        "mamba_rms_norm": (True, False),
        "mlp_bias": (True, False),
        "ssm_multipliers": ([0.5, 0.25, 0.75, 0.125, 2.0],),
        "key_multiplier": (0.5, 0.25),
        "mlp_multipliers": ([0.5, 0.25],),
    },
    "nemotron_h": {"moe_latent_size": (4, None)},
    "lfm3": {"use_attention_gate": (True, False), "use_sandwich_norm": (True, False)},
    "bailing_hybrid": {"kda_safe_gate": (True, False), "q_lora_rank": (8, None)},
    "cohere2_moe": {
        "shared_expert_combination_strategy": ("sum", "average"),
        "expert_selection_fn": ("softmax", "sigmoid"),
        "prefix_dense_sliding_window_pattern": (1, 2),
        "rms_norm_eps": (1e-5, None),
    },
    "minicpmv": {"version": (2.6, 4.0, 4.5)},
    "llava_llama": {
        "mm_patch_merge_type": ("flat", "spatial_unpad"),
        "mm_vision_tower": ("google/siglip-so400m-patch14-384",),
    },
    "molmo": {"attention_layer_norm": (True, False), "norm_after": (True, False)},
    "hyperclovax": {"use_post_norm": (True, False), "attention_multiplier": (0.25, None)},
    "granite_swa": {"layer_rope_theta": ([100] * 4, None)},
    "laguna": {"gating": ("per-head", True), "moe_routed_scaling_factor": (2.5, 1.0)},
    "step3p5": {
        "rope_scaling": (None, {"rope_type": "llama3", "factor": 2.0}),
        "moe_layers_enum": ([1, 3], "2,3"),
        "num_nextn_predict_layers": (0, 1),
    },
    "kimi_linear": {
        "moe_renormalize": (True, False),
        "mla_use_nope": (True, False),
        "first_k_dense_replace": (0, 1, 4),
        "q_lora_rank": (8, None),
    },
    "olmo_hybrid": {
        "linear_allow_neg_eigval": (True, False),
        "linear_num_key_heads": (2, 4),
        "rope_parameters": (None, {"rope_type": "default", "rope_theta": 100}),
        **_BIASED,
    },
    "recurrent_gemma": {
        "hidden_activation": ("gelu", "silu"),
        "attention_window_size": (3, 32),
        "logits_soft_cap": (30.0, 0),
        "attention_bias": (True, False),
        "lru_width": (8, 16, None),
    },
    "zamba": {"n_mamba_heads": (1, 2), "mamba_conv_bias": (True, False), **_GROUPS},
    "opt": {
        "do_layer_norm_before": (True, False),
        "word_embed_proj_dim": (8, None),
        "enable_bias": (True, False),
        "activation_function": ("relu", "gelu"),
    },
    "mpt": {"no_bias": (True, False), "attn_config": ({"alibi": True}, {"clip_qkv": 8.0})},
    "gpt_neox": {"use_parallel_residual": (True, False), "rotary_pct": (0.5, 1.0)},
    "falcon": {
        "multi_query": (True, False),
        "new_decoder_architecture": (True, False),
        "parallel_attn": (True, False),
        "alibi": (True, False),
        "bias": (True, False),
    },
    "starcoder2": {**_WINDOW, "use_bias": (True, False)},
    "stablelm": {
        "use_qkv_bias": (True, False),
        "qk_layernorm": (True, False),
        "use_parallel_residual": (True, False),
    },
    "cohere": {"use_qk_norm": (True, False), "logit_scale": (0.5, 1)},
    "olmo": {"clip_qkv": (8, None)},
    "persimmon": {"qk_layernorm": (True, False)},
    "gemma2": {
        "attn_logit_softcapping": (50.0, None),
        "final_logit_softcapping": (30.0, None),
        "sliding_window": (6, 64),
    },
    "gemma3_text": {
        "sliding_window_pattern": (2, 3),
        "rope_local_base_freq": (50.0, 100),
        "attention_bias": (True, False),
    },
    "olmo3": {
        "layer_types": (["full_attention"] * 2 + ["sliding_attention"] * 2, ["full_attention"] * 4)
    },
    "cohere2": {"logit_scale": (0.25, 1), "sliding_window_pattern": (2, 4)},
    "gpt_oss": {"attention_bias": (True, False), "swiglu_limit": (7.0, 1.5)},
    "llama4_text": {
        "interleave_moe_layer_step": (1, 2),
        "use_qk_norm": (True, False),
        "attn_temperature_tuning": (True, False),
        "attention_chunk_size": (4, 16),
    },
    "glm_moe_dsa": {"indexer_types": (["full", "full", "shared", "shared"], ["full"] * 4)},
    "axk1": {"n_group": (2,), "topk_group": (1,)},
    "deepseek_v32": {"index_topk": (3, 64), "first_k_dense_replace": (0, 1, 4)},
    "mixtral": _WINDOW,
    "phimoe": {"attention_bias": (True, False), "lm_head_bias": (True, False)},
    "qwen2_moe": {"decoder_sparse_step": (1, 2), "norm_topk_prob": (True, False)},
    "qwen3_moe": {"mlp_only_layers": ([], [0], [1, 2]), "norm_topk_prob": (True, False)},
    "olmoe": {"norm_topk_prob": (True, False), "clip_qkv": (8, None)},
    "granite": {
        "attention_multiplier": (0.5, 0.125),
        "residual_multiplier": (0.22, 1.0),
        "embedding_multiplier": (12, 1),
        "logits_scaling": (8.0, 1),
    },
    "granitemoe": {"residual_multiplier": (0.22, 1.0)},
    "glm4_moe": {"use_qk_norm": (True, False), "n_shared_experts": (0, 1, 2)},
    "dots1": {"first_k_dense_replace": (0, 2)},
    "ernie4_5_moe": {"moe_layer_start_index": (0, 2), "moe_layer_interval": (1, 2)},
    "minimax_m2": {"use_qk_norm": (True, False)},
    "minicpm": {"scale_emb": (12, 1), "scale_depth": (1.4,), "dim_model_base": (16,)},
    "chatglm": {"add_qkv_bias": (True, False), "rope_ratio": (1, 50)},
    "bailing_moe": {"use_qkv_bias": (True, False), "first_k_dense_replace": (0, 1)},
    "bailing_moe_v2": {"use_qk_norm": (True, False), "n_group": (2,), "topk_group": (1,)},
    "git": {"attn_logit_softcapping": (30.0, 50)},
    "deepseek": {"moe_layer_freq": (1, 2), "norm_topk_prob": (True, False)},
    "deepseek_v2": {"q_lora_rank": (8, None), "topk_method": ("greedy", "group_limited_greedy")},
    "deepseek_v3": {"first_k_dense_replace": (0, 1, 4), "routed_scaling_factor": (2.5, 1.0)},
    "gemma4_text": {
        "enable_moe_block": (True, False),
        "attention_k_eq_v": (True, False),
        "hidden_size_per_layer_input": (0, 4),
        "final_logit_softcapping": (30.0, None),
        "num_kv_shared_layers": (0, 2),
        "hidden_activation": ("gelu", "silu"),
    },
    "gemma3n_text": {"hidden_activation": ("gelu", "silu")},
    "lfm2": {"full_attn_idxs": ([0, 2], [3]), "conv_bias": (True, False)},
    "mimo_v2_flash": {"attention_value_scale": (0.707, None), "first_k_dense_replace": (0, 2)},
    "afmoe": {"mup_enabled": (True, False), "num_dense_layers": (1, 2)},
    "exaone_moe": {"sliding_window_pattern": (2, "LLLG"), "first_k_dense_replace": (0, 1)},
    "apertus": _LLAMA,
    "eurobert": {**_LLAMA, "mlp_bias": (True, False)},
    "nanochat": {"final_logit_softcapping": (15.0, 0)},
    "minicpm3": {"q_lora_rank": (8, None), "scale_depth": (1.4, 1)},
    "qwen3_5_text": {"layer_types": (None, ["full_attention"] * 4)},
    "modernbert": {"attention_bias": (True, False), "norm_bias": (True, False)},
    "bert": {"hidden_act": _ACTIVATIONS},
    "albert": {"hidden_act": _ACTIVATIONS},
    "deberta-v2": {"conv_act": _ACTIVATIONS, "pos_att_type": (["c2p"], ["p2c"])},
    "convnext": {"hidden_act": _ACTIVATIONS},
    "swin": {"hidden_act": _ACTIVATIONS, "qkv_bias": (True, False)},
    "swinv2": {"hidden_act": _ACTIVATIONS, "qkv_bias": (True, False)},
    "wav2vec2": {
        "feat_extract_activation": _ACTIVATIONS,
        "feat_extract_norm": ("group", "layer"),
        "conv_bias": (True, False),
        "num_conv_pos_embeddings": (3, 4),
    },
    "PixArtTransformer2DModel": {"attention_bias": (True, False)},
    "mbart": {"scale_embedding": (True, False)},
    "SD3Transformer2DModel": {"qk_norm": ("rms_norm", None), "dual_attention_layers": ([], [0])},
}


#: Families that stand for the others in `make test`.
FIRST = ("llama", "mistral", "falcon", "deepseek_v2")
#: The families with features to try, and `exhaustive` all but the first ones.
FEATURED = [
    pytest.param(name, marks=() if name in FIRST else pytest.mark.exhaustive) for name in FEATURES
]


#: Families whose experts have so few tokens of a short sequence.
LONGER = ("grok", "grok-1", "grok1", "llama4", "llama4_text", "switch_transformers")


def small(model_type: str, **more: Any) -> dict[str, Any]:
    """A small configuration of a family."""
    name = ALIASES.get(model_type, model_type)
    if name in TOWERS:
        given = {**tower(name), **more}
        return given | ({"model_type": model_type} if "model_type" in given else {})
    if name in SCANS:
        return {"model_type": model_type, **SCANS[name], **more}
    given = {"model_type": model_type, **SMALL, **NEEDS.get(model_type, {}), **more}
    left_out = ["num_key_value_heads"] * (model_type in UNGROUPED.split())
    left_out += ["rope_theta"] * (model_type in UNROTATED.split())
    return {key: value for key, value in given.items() if key not in left_out}


def sizes_of(model_type: str, batch: int, length: int) -> dict[str, int]:
    """The sizes of a small job; models of `TOWERS` have sequences of their own, and few tokens of
    experts have to divide over many ranks."""
    name = ALIASES.get(model_type, model_type)
    length *= 2 if model_type in LONGER else 1
    own = TOWER_SIZES.get(name, {}) if name in TOWERS else {"S": length}
    return {"B": batch, **own}


def configurations(model_type: str) -> st.SearchStrategy[dict[str, Any]]:
    """Small configurations of a family with features drawn."""
    features = FEATURES.get(model_type, {})
    drawn = st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in features.items()})
    return drawn.map(lambda keys: small(model_type, **keys))


def variants(model_type: str, draws: int = 8) -> Iterator[tuple[str, dict[str, Any]]]:
    """Small configurations of a family, by name: without a feature, with each value of each, and
    some random choices of all, the same ones in every run."""
    yield "", small(model_type)
    features, draw = FEATURES.get(model_type, {}), random.Random(model_type)
    for key, values in features.items():
        for value in values:
            yield f"{key}={json.dumps(value)}", small(model_type, **{key: value})
    for number in range(draws if len(features) > 1 else 0):
        keys = {key: draw.choice(values) for key, values in features.items()}
        yield f"draw {number}", small(model_type, **keys)
