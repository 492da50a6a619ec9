"""Small configurations of encoders, towers and diffusion transformers, whose sizes divide by 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Keys = Mapping[str, Any]
_ENCODER: Keys = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 8,
    "max_position_embeddings": 8,
    "vocab_size": 16,
}
_VISION: Keys = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 8,
    "image_size": 6,
    "patch_size": 2,
    "num_channels": 3,
}
_PAIR: Keys = {
    "d_model": 16,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8,
    "vocab_size": 16,
}
_PYRAMID: Keys = {
    "num_channels": 3,
    "patch_size": 2,
    "image_size": 16,
    "depths": [4, 4],
    "num_labels": 4,
}
_LLAMA: Keys = {**_ENCODER, "num_key_value_heads": 4, "rope_theta": 100}
_DINO: Keys = {k: v for k, v in _VISION.items() if k != "intermediate_size"}
_SEEN: Keys = {"depth": 2, "hidden_size": 8, "intermediate_size": 8}
_HEARD: Keys = {
    "num_mel_bins": 9,
    "d_model": 8,
    "encoder_layers": 2,
    "encoder_ffn_dim": 8,
    "output_dim": 16,
}
_SOUND: Keys = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 4,
    "max_source_positions": 8,
}
_EXPERTS: Keys = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_DELTA: Keys = {
    "head_dim": 8,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 2,
    "linear_value_head_dim": 2,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_WAVES: Keys = {
    **{k: v for k, v in _ENCODER.items() if k != "max_position_embeddings"},
    "conv_dim": [8, 8, 8],
    "conv_kernel": [10, 3, 2],
    "conv_stride": [5, 2, 2],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
#: One side of a T5Gemma.
_GEMMA_SIDE: Keys = {
    "num_attention_heads": 4,
    "head_dim": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "vocab_size": 16,
    "max_position_embeddings": 8,
    "sliding_window": 3,
    "rope_theta": 100,
}
#: By name: the first part is the model type, or the class.
TOWERS: Mapping[str, Keys] = {
    "bert": {**_ENCODER, "type_vocab_size": 2},
    "bert-vectors": {**_ENCODER, "architectures": ["BertModel"]},
    "roberta": {
        **_ENCODER,
        "max_position_embeddings": 10,
        "architectures": ["RobertaForSequenceClassification"],
        "num_labels": 4,
    },
    "distilbert": {"dim": 16, "n_layers": 4, "n_heads": 4, "hidden_dim": 8, "vocab_size": 16}
    | {"max_position_embeddings": 8},
    "t5": {"d_model": 16, "num_layers": 4, "num_heads": 4, "d_kv": 4, "d_ff": 8}
    | {"vocab_size": 16, "n_positions": 8, "relative_attention_num_buckets": 4},
    "t5-gated": {"d_model": 16, "num_layers": 2, "num_heads": 4, "d_kv": 4, "d_ff": 8}
    | {"vocab_size": 16, "n_positions": 8, "feed_forward_proj": "gated-gelu"}
    | {"tie_word_embeddings": False},
    "t5gemma": {
        "vocab_size": 16,
        "encoder": {**_GEMMA_SIDE, "hidden_size": 16, "num_key_value_heads": 4},
        "decoder": {**_GEMMA_SIDE, "hidden_size": 8, "num_key_value_heads": 4},
    },
    "electra": {**_ENCODER, "embedding_size": 8, "type_vocab_size": 2},
    "electra-replaced": {
        **_ENCODER,
        "embedding_size": 16,
        "architectures": ["ElectraForPreTraining"],
    },
    "albert": {**_ENCODER, "embedding_size": 8, "type_vocab_size": 2},
    "modernbert": {**_ENCODER, "global_attn_every_n_layers": 2, "local_attention": 4},
    "nomic_bert": {**_ENCODER, "type_vocab_size": 2},
    "esm": {**_ENCODER, "position_embedding_type": "rotary"},
    "mpnet": {**_ENCODER, "max_position_embeddings": 10, "relative_attention_num_buckets": 4},
    "ernie": {**_ENCODER, "type_vocab_size": 2},
    "megatron-bert": {**_ENCODER, "type_vocab_size": 2},
    "roberta-prelayernorm": {**_ENCODER, "max_position_embeddings": 10},
    "xlm-roberta-xl": {**_ENCODER, "max_position_embeddings": 10, "type_vocab_size": 1},
    "deberta": {**_ENCODER, "relative_attention": True, "pos_att_type": "c2p|p2c"},
    "deberta-v2": {
        **_ENCODER,
        "relative_attention": True,
        "position_buckets": 4,
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "conv_kernel_size": 3,
    },
    "umt5": {"d_model": 16, "num_layers": 4, "num_heads": 4, "d_kv": 4, "d_ff": 8}
    | {"vocab_size": 16, "n_positions": 8, "relative_attention_num_buckets": 4},
    "switch_transformers": {
        "d_model": 16,
        "num_layers": 4,
        "num_heads": 4,
        "d_kv": 4,
        "d_ff": 8,
        "vocab_size": 16,
        "n_positions": 16,
        "relative_attention_num_buckets": 4,
        "num_experts": 4,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
    },
    "mbart": {**_PAIR, "max_position_embeddings": 8},
    "plbart": {**_PAIR, "max_position_embeddings": 8},
    "blenderbot": {**_PAIR, "max_position_embeddings": 8},
    "pegasus": {**_PAIR, "max_position_embeddings": 8, "activation_function": "relu"},
    "marian": {**_PAIR, "max_position_embeddings": 8, "activation_function": "swish"},
    "m2m_100": {**_PAIR, "max_position_embeddings": 8},
    "bart": {**_PAIR, "max_position_embeddings": 8, "scale_embedding": True},
    "whisper": {**_PAIR, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 8},
    "wav2vec2": {**_WAVES, "architectures": ["Wav2Vec2ForCTC"]},
    "wav2vec2-stable": {
        **_WAVES,
        "do_stable_layer_norm": True,
        "feat_extract_norm": "layer",
        "conv_bias": True,
        "architectures": ["Wav2Vec2ForSequenceClassification"],
        "num_labels": 4,
        "classifier_proj_size": 8,
    },
    "hubert": {**_WAVES, "architectures": ["HubertModel"]},
    "wavlm": {**_WAVES, "num_buckets": 8, "architectures": ["WavLMModel"]},
    "vit": {**_VISION, "num_labels": 4},
    "beit": {**_VISION, "num_labels": 4, "use_relative_position_bias": True},
    "beit-shared": {
        **_VISION,
        "use_shared_relative_position_bias": True,
        "use_mask_token": True,
        "use_mean_pooling": False,
        "architectures": ["BeitModel"],
    },
    "deit": {**_VISION, "num_labels": 4, "qkv_bias": False},
    "deit-teacher": {**_VISION, "num_labels": 4}
    | {"architectures": ["DeiTForImageClassificationWithTeacher"]},
    "dinov2": {
        **_DINO,
        "mlp_ratio": 2,
        "use_swiglu_ffn": True,
        "architectures": ["Dinov2ForImageClassification"],
        "num_labels": 4,
    },
    "dinov2_with_registers": {**_DINO, "mlp_ratio": 2, "num_register_tokens": 2},
    "convnext": {**_PYRAMID, "hidden_sizes": [8, 16]},
    "convnextv2": {**_PYRAMID, "hidden_sizes": [8, 16]},
    "swin": {**_PYRAMID, "embed_dim": 8, "num_heads": [4, 4], "window_size": 4, "mlp_ratio": 2.0},
    "swinv2": {
        "num_channels": 3,
        "patch_size": 2,
        "image_size": 16,
        "embed_dim": 8,
        "depths": [4, 4],
        "num_heads": [4, 4],
        "window_size": 4,
        "mlp_ratio": 2.0,
        "num_labels": 4,
    },
    "swinv2-wide": {
        "patch_size": 1,
        "image_size": 8,
        "embed_dim": 8,
        "depths": [2, 1, 1],
        "num_heads": [4, 4, 4],
        "window_size": 4,
        "architectures": ["Swinv2Model"],
    },
    "dinov3_vit": {**_VISION, "num_register_tokens": 2},
    "clip": {
        "projection_dim": 8,
        "text_config": {**_ENCODER, "hidden_size": 8, "num_hidden_layers": 2},
        "vision_config": _VISION,
    },
    "siglip": {"text_config": {**_ENCODER, "num_hidden_layers": 2}, "vision_config": _VISION},
    "clip_vision_model": {**_VISION, "architectures": ["CLIPVisionModelWithProjection"]}
    | {"projection_dim": 8},
    "clip_text_model": _ENCODER,
    "siglip_vision_model": _VISION,
    "siglip_vision_model-patches": {**_VISION, "vision_use_head": False},
    "siglip_text_model": {**_ENCODER, "projection_size": 8},
    "DiTTransformer2DModel": {
        "num_attention_heads": 4,
        "attention_head_dim": 4,
        "in_channels": 4,
        "num_layers": 5,
        "sample_size": 4,
        "num_embeds_ada_norm": 3,
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "norm_elementwise_affine": False,
    },
    "FluxTransformer2DModel": {
        "num_attention_heads": 4,
        "attention_head_dim": 4,
        "in_channels": 4,
        "num_layers": 2,
        "num_single_layers": 2,
        "joint_attention_dim": 8,
        "pooled_projection_dim": 8,
        "guidance_embeds": True,
    },
    "QwenImageTransformer2DModel": {
        "num_attention_heads": 4,
        "attention_head_dim": 4,
        "in_channels": 4,
        "out_channels": 1,
        "num_layers": 4,
        "joint_attention_dim": 8,
        "axes_dims_rope": [2, 1, 1],
    },
    "PixArtTransformer2DModel": {
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "num_layers": 4,
        "sample_size": 4,
        "cross_attention_dim": 48,
        "caption_channels": 8,
        "use_additional_conditions": True,
    },
    "WanTransformer3DModel": {
        "num_attention_heads": 4,
        "attention_head_dim": 4,
        "in_channels": 2,
        "num_layers": 4,
        "ffn_dim": 8,
        "text_dim": 8,
        "freq_dim": 4,
    },
    "SD3Transformer2DModel": {
        "num_attention_heads": 4,
        "attention_head_dim": 4,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 6,
        "sample_size": 8,
        "joint_attention_dim": 8,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 8,
        "qk_norm": "rms_norm",
        "dual_attention_layers": [0, 1],
    },
    "qwen3_vl": {
        "text_config": {**_LLAMA, "head_dim": 4},
        "vision_config": {**_SEEN, "out_hidden_size": 16, "deepstack_visual_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "text_config": {**_LLAMA, **_EXPERTS, "head_dim": 4},
        "vision_config": {**_SEEN, "out_hidden_size": 16, "deepstack_visual_indexes": [0]},
    },
    "qwen2_5_omni_thinker": {
        "text_config": _LLAMA,
        "vision_config": {**_SEEN, "out_hidden_size": 16},
        "audio_config": _HEARD,
    },
    "qwen3_omni_moe": {
        "thinker_config": {
            "text_config": {**_LLAMA, **_EXPERTS, "head_dim": 4},
            "vision_config": {**_SEEN, "out_hidden_size": 16, "deepstack_visual_indexes": [0]},
            "audio_config": {**_HEARD, "downsample_hidden_size": 4},
        }
    },
    "qwen3_5": {
        "text_config": {**_LLAMA, **_DELTA},
        "vision_config": {**_SEEN, "out_hidden_size": 16},
    },
    "qwen3_5_moe": {
        "text_config": {**_LLAMA, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 8},
        "vision_config": {**_SEEN, "out_hidden_size": 16},
    },
    "glm4v": {
        "text_config": {**_LLAMA, "head_dim": 4},
        "vision_config": {**_SEEN, "out_hidden_size": 16},
    },
    "glm4v_moe": {
        "text_config": {
            **_LLAMA,
            "head_dim": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
        },
        "vision_config": {**_SEEN, "out_hidden_size": 16},
    },
    "glm46v": {
        "text_config": {**_LLAMA, "head_dim": 4, "model_type": "glm4v_text"},
        "vision_config": {**_SEEN, "out_hidden_size": 16},
    },
    "kimi_k25": {
        "text_config": {
            **{k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
            "model_type": "kimi_k2",
            "max_position_embeddings": 16,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        "vision_config": {
            "vt_hidden_size": 8,
            "vt_intermediate_size": 8,
            "vt_num_hidden_layers": 2,
            "init_pos_emb_height": 4,
            "init_pos_emb_width": 4,
        },
    },
    "mistral3": {
        "text_config": {**_LLAMA, "model_type": "mistral"},
        "vision_config": {**_VISION, "model_type": "pixtral"},
    },
    "internvl": {
        "text_config": {**_LLAMA, "model_type": "qwen2"},
        "vision_config": {**_VISION, "model_type": "internvl_vision", "image_size": [6, 6]},
        "downsample_ratio": 0.5,
    },
    "minimax_m3_vl": {
        "text_config": {
            **_LLAMA,
            "max_position_embeddings": 16,
            "head_dim": 4,
            "rotary_dim": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 8,
        },
        "vision_config": {**_VISION, "spatial_merge_size": 2},
        "projector_hidden_size": 16,
    },
    "qwen3_asr": {
        "thinker_config": {
            "text_config": {**_LLAMA, "head_dim": 4},
            "audio_config": {
                "d_model": 8,
                "encoder_layers": 2,
                "encoder_ffn_dim": 16,
                "num_mel_bins": 16,
                "output_dim": 16,
                "downsample_hidden_size": 4,
            },
        }
    },
    "minicpmv": {
        **_LLAMA,
        "version": 2.6,
        "query_num": 4,
        "vision_config": {**_VISION, "model_type": "siglip"},
    },
    "minicpmv4_6": {
        "text_config": {**_LLAMA, **_DELTA, "model_type": "qwen3_5_text"},
        "vision_config": _VISION,
        "merger_times": 2,
    },
    "kimi_vl": {
        "text_config": {
            **_LLAMA,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "q_lora_rank": None,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 4,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "max_position_embeddings": 16,
        },
        "vision_config": {
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "intermediate_size": 8,
            "patch_size": 2,
            "init_pos_emb_height": 4,
            "init_pos_emb_width": 4,
        },
    },
    "kimi_k3": {
        "text_config": {
            **{k: v for k, v in _LLAMA.items() if k != "rope_theta"},
            "num_hidden_layers": 4,
            "max_position_embeddings": 16,
            "hidden_act": "situ",
            "activation_situ_linear_beta": 25.0,
            "moe_intermediate_size": 8,
            "routed_expert_hidden_size": 8,
            "latent_moe_use_norm": True,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 4,
            "attn_res_block_size": 2,
            "mla_use_output_gate": True,
            "linear_attn_config": {
                "full_attn_layers": [2, 4],
                "kda_layers": [1, 3],
                "num_heads": 4,
                "head_dim": 4,
                "short_conv_kernel_size": 3,
                "use_full_rank_gate": True,
            },
        },
        "vision_config": {
            "vt_hidden_size": 8,
            "vt_num_hidden_layers": 2,
            "vt_intermediate_size": 8,
            "qkv_hidden_size": 12,
            "norm_type": "rmsnorm",
            "mm_projector_type": "patchmergerv2",
            "patch_size": 2,
            "init_pos_emb_height": 4,
            "init_pos_emb_width": 4,
        },
    },
    "paddleocr_vl": {
        "text_config": {**_LLAMA, "head_dim": 4, "max_position_embeddings": 16},
        "vision_config": {**_VISION, "num_hidden_layers": 2},
    },
    "glm_ocr": {
        "text_config": {**_LLAMA, "max_position_embeddings": 16},
        "vision_config": {**_SEEN, "num_heads": 2, "image_size": 6, "patch_size": 2},
    },
    "llava_llama": {
        **_LLAMA,
        "max_position_embeddings": 16,
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_tower": "openai/clip-vit-large-patch14",
    },
    "vila": {
        "llm_cfg": {**_LLAMA, "model_type": "llama", "max_position_embeddings": 16},
        "vision_tower_cfg": {**_VISION, "model_type": "siglip_vision_model"},
        "mm_projector_cfg": {"mm_projector_type": "mlp_downsample_3x3_fix"},
        "mm_hidden_size": 32,
    },
    "phi3_v": {**_LLAMA, "max_position_embeddings": 16},
    "phi4_multimodal": {
        **_LLAMA,
        "max_position_embeddings": 16,
        "vision_config": {**_VISION, "num_hidden_layers": 2},
        "audio_config": {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_blocks": 2,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 8,
            "input_size": 9,
            "depthwise_separable_out_channel": 8,
            "time_reduction": 4,
            "kernel_size": 2,
            "nemo_conv_channels": 4,
            "bias_max_distance": 4,
        },
    },
    "molmo": {**_LLAMA, "qkv_bias": True},
    "molmo2": {
        "text_config": {
            **_LLAMA,
            "model_type": "molmo2_text",
            "max_position_embeddings": 16,
            "head_dim": 4,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_scaling_layers": [1, 2],
        },
        "vit_config": {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "image_default_input_size": [4, 4],
            "image_patch_size": 2,
        },
        "adapter_config": {
            "vit_layers": [-3, -4],
            "hidden_size": 8,
            "num_attention_heads": 2,
            "head_dim": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 8,
            "text_hidden_size": 16,
        },
    },
    "internvl_chat": {
        "llm_config": {**_LLAMA, "model_type": "qwen2"},
        "vision_config": {**_VISION, "model_type": "intern_vit_6b", "image_size": 6},
        "downsample_ratio": 0.5,
        "select_layer": -1,
    },
    "paligemma": {
        "text_config": {**_LLAMA, "model_type": "gemma", "head_dim": 4},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
    },
    "idefics3": {
        "text_config": {**_LLAMA, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "idefics3_vision"},
    },
    "video_llama_3": {
        "text_config": {**_LLAMA, "model_type": "qwen2"},
        "vision_config": {k: v for k, v in _VISION.items() if k != "image_size"},
    },
    "ovis2": {
        "text_config": {**_LLAMA, "model_type": "qwen2"},
        "vision_config": {**_VISION, "vocab_size": 16, "hidden_stride": 2},
    },
    "got_ocr2": {
        "text_config": {**_LLAMA, "model_type": "qwen2"},
        "vision_config": {
            **_DINO,
            "mlp_dim": 8,
            "output_channels": 4,
            "window_size": 2,
            "global_attn_indexes": [1, 3],
        },
    },
    "idefics2": {
        "text_config": {**_LLAMA, "model_type": "mistral", "sliding_window": None},
        "vision_config": _VISION,
        "perceiver_config": {
            "resampler_depth": 2,
            "resampler_head_dim": 4,
            "resampler_n_heads": 2,
            "num_key_value_heads": 1,
            "resampler_n_latents": 4,
        },
    },
    "aria": {
        "text_config": {
            **_LLAMA,
            "model_type": "aria_text",
            "max_position_embeddings": 16,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 2,
        },
        "vision_config": {**_VISION, "model_type": "idefics3_vision"},
        "projector_patch_to_query_dict": {"9": 4},
    },
    "granite_speech": {
        "text_config": {**_LLAMA, "model_type": "granite", "attention_multiplier": 0.25},
        "encoder_config": {
            "input_dim": 8,
            "hidden_dim": 8,
            "num_layers": 2,
            "num_heads": 2,
            "output_dim": 4,
            "max_pos_emb": 4,
            "conv_kernel_size": 3,
        },
        "projector_config": {
            "model_type": "blip_2_qformer",
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "encoder_hidden_size": 8,
        },
    },
    "audioflamingo3": {"text_config": {**_LLAMA, "model_type": "qwen2"}, "audio_config": _SOUND},
    "glmasr": {
        "text_config": {**_LLAMA, "model_type": "llama"},
        "audio_config": {k: v for k, v in _SOUND.items() if k != "max_source_positions"},
    },
    "cohere2_vision": {
        "text_config": {**_LLAMA, "model_type": "cohere2", "sliding_window": 4},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
        "alignment_intermediate_size": 16,
    },
    "lighton_ocr": {
        "text_config": {**_LLAMA, "model_type": "qwen3", "head_dim": 4},
        "vision_config": {**_VISION, "model_type": "pixtral"},
    },
    "lfm2_vl": {
        "text_config": {**_LLAMA, "model_type": "lfm2", "full_attn_idxs": [0]},
        "vision_config": {**_VISION, "model_type": "siglip2_vision_model", "num_patches": 9},
        "projector_hidden_size": 16,
    },
    "exaone4_5": {
        "text_config": {**_LLAMA, "model_type": "exaone4"},
        "vision_config": {
            "depth": 2,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_heads": 4,
            "num_key_value_heads": 2,
            "out_hidden_size": 16,
        },
    },
    "step3p7": {
        "text_config": {
            **_LLAMA,
            "max_position_embeddings": 16,
            "head_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "sliding_window": 4,
        },
        "vision_config": {
            "width": 8,
            "layers": 2,
            "heads": 2,
            "patch_size": 2,
            "image_size": 4,
            "mlp_ratio": 2,
        },
    },
    "aya_vision": {
        "text_config": {**_LLAMA, "model_type": "cohere2", "sliding_window": 4},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
    },
    "qwen2_audio": {
        "text_config": {**_LLAMA, "model_type": "qwen2"},
        "audio_config": {"d_model": 8, "encoder_layers": 2, "encoder_ffn_dim": 8},
    },
    "voxtral": {
        "text_config": {**_LLAMA, "model_type": "llama"},
        "audio_config": {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 32},
    },
    "qwen2_5_vl": {
        **_LLAMA,
        "vision_config": {
            "depth": 2,
            "hidden_size": 8,
            "intermediate_size": 8,
            "out_hidden_size": 16,
        },
    },
    "qwen2_vl": {
        **_LLAMA,
        "vision_config": {"depth": 2, "embed_dim": 8, "hidden_size": 16, "mlp_ratio": 2},
    },
    "mllama": {
        "text_config": {**_LLAMA, "cross_attention_layers": [1, 3]},
        "vision_config": {**_VISION, "attention_heads": 2, "num_global_layers": 2},
    },
    "llava": {
        "text_config": {**_LLAMA, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    },
}
#: What a text has besides B that is no key of the configuration.
SIZES: Mapping[str, Mapping[str, int]] = {
    "DiTTransformer2DModel": {"U": 8},
    "FluxTransformer2DModel": {"U": 8, "S": 4, "X": 8},
    "SD3Transformer2DModel": {"U": 8, "S": 4},
    "PixArtTransformer2DModel": {"U": 8, "S": 8},
    "QwenImageTransformer2DModel": {"U": 8, "S": 8, "X": 8},
    "WanTransformer3DModel": {"S": 8, "X": 8},
    "qwen3_omni_moe": {"S": 16},
    "wav2vec2": {"S": 8},
    "wav2vec2-stable": {"S": 8},
    "hubert": {"S": 8},
    "wavlm": {"S": 8},
    "switch_transformers": {"S": 16, "T": 16},
    "molmo": {"D_v": 4, "F_v": 4, "L_v": 1, "P_v": 1, "N_v": 4},
    "llava_llama": {"D_v": 4, "F_v": 4, "L_v": 1, "P_v": 1, "N_v": 4},
    "phi3_v": {"D_v": 4, "F_v": 4, "L_v": 1, "P_v": 1, "N_v": 4},
}


#: Types of models that have a hyphen themselves.
_HYPHENATED = ("deberta-v2", "megatron-bert", "roberta-prelayernorm", "xlm-roberta-xl")


def tower(name: str) -> dict[str, Any]:
    """The configuration of that name."""
    key = "_class_name" if name[0].isupper() else "model_type"
    kind = name if name in _HYPHENATED else name.partition("-")[0]
    return {key: kind, **TOWERS[name]}
