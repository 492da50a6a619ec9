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
_LLAMA: Keys = {**_ENCODER, "num_key_value_heads": 4, "rope_theta": 100}
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
    "bart": {**_PAIR, "max_position_embeddings": 8, "scale_embedding": True},
    "whisper": {**_PAIR, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 8},
    "vit": {**_VISION, "num_labels": 4},
    "deit": {**_VISION, "num_labels": 4, "qkv_bias": False},
    "clip": {
        "projection_dim": 8,
        "text_config": {**_ENCODER, "hidden_size": 8, "num_hidden_layers": 2},
        "vision_config": _VISION,
    },
    "siglip": {
        "text_config": {**_ENCODER, "num_hidden_layers": 2},
        "vision_config": _VISION,
    },
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
}


def tower(name: str) -> dict[str, Any]:
    """The configuration of that name."""
    key = "_class_name" if name[0].isupper() else "model_type"
    return {key: name.partition("-")[0], **TOWERS[name]}
