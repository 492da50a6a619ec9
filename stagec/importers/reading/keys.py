"""Keys of configurations that do not change the computation of a training step, for all
families."""

#: Names, versions and files.
_ABOUT = (
    "architectures auto_map _name_or_path name_or_path model_type transformers_version "
    "custom_pipelines is_composition is_llama_config "
    "task_specific_params id2label label2id num_labels finetuning_task "
    "problem_type license_name tokenizer_class processor_class language unsloth_version "
    "unsloth_fixed internal_version model_name framework save_step base_model "
    "transformers.js_config"
)
#: Element types, devices, kernels: the strategy determines the execution.
_EXECUTION = (
    "torch_dtype dtype use_bfloat16 quantization_config attn_implementation _attn_implementation "
    "use_flash_attn use_flash_attention flash_attention _flash_attn_2_enabled use_cache "
    "gradient_checkpointing "
    "pretraining_tp torchscript fuse_norm fused_mlp use_fused_rms_norm return_dict "
    "output_attentions output_hidden_states is_decoder_only chunk_size_feed_forward "
    "pruned_heads ep_size scan_layers use_parallel_embedding keys_to_ignore_at_inference "
    "init_device init_method output_past reorder_and_upcast_attn fused_add_norm "
    "scale_attention_softmax_in_fp32 use_mem_eff_path use_mambapy use_associative_scan "
    "use_mamba_kernels pad_vocab_size_multiple fp32_residual_connection "
    "residual_in_fp32 rms_norm_fp32 layernorm_in_fp32 "
    "attention_softmax_in_fp32 apply_query_key_layer_scaling masked_softmax_fusion "
    "use_memory_efficient_attention fp32_lm_head compression_config tensor_parallel_degree"
)
#: The numbers of special tokens.
_TOKENS = (
    "bad_words_ids suppress_tokens begin_suppress_tokens forced_decoder_ids pad_token pad_id "
    "add_bos_token add_eos_token prefix tokenizer_name padding_idx predict_special_tokens "
    "image_seq_length ignore_index"
)
#: Regularisation: texts only have rates of dropout (docs/models.md).
_DROPOUT = "drop_path_rate token_dropout"
#: Suffixes of keys of tokens and of dropout.
ENDINGS = (
    *("_token_id", "_token_ids", "_token_index"),
    *("dropout", "dropout_prob", "dropout_rate", "layerdrop", "pdrop"),
)
#: Prefixes of keys of files, and of layers for multi-token prediction.
BEGINNINGS = ("_", "mtp_")
#: Initialization, small constants, auxiliary losses, and layers for multi-token prediction, which
#: transformers leaves out too (docs/models.md).
_TRAINING = (
    "initializer_range initializer_factor init_std embedding_initializer_range "
    "rescale_prenorm_residual rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps "
    "norm_epsilon layernorm_epsilon rms_norm_epsilon aux_loss_alpha router_aux_loss_coef "
    "router_z_loss_coef seq_aux output_router_logits router_jitter_noise input_jitter_noise "
    "aux_loss_coef z_loss_coefficient router_aux_loss_coefficient "
    "z_loss_coeff load_balancing_loss_coef ce_loss_weight router_dtype "
    "moe_router_fp32 ntk_threshold num_nextn_predict_layers num_mtp_modules "
    "num_mtp_layers use_mtp"
)
#: Text generation.
_GENERATION = (
    "temperature top_k top_p min_p do_sample max_length max_new_tokens min_new_tokens min_length "
    "repetition_penalty length_penalty "
    "num_beams num_beam_groups num_return_sequences early_stopping diversity_penalty "
    "encoder_no_repeat_ngram_size no_repeat_ngram_size exponential_decay_length_penalty "
    "remove_invalid_values return_dict_in_generate typical_p output_scores generation_config "
    "num_logits_to_keep top_k_tokens cache_implementation tf_legacy_loss use_return_dict "
    "tie_weights_ renormalize_logits constraints force_words_ids sequence_bias low_memory max_time "
    "stop_strings penalty_alpha guidance_scale epsilon_cutoff eta_cutoff encoder_repetition_penalty"
)

#: Keys of towers that every configuration class has, or that only processors of media read.
_OF_TOWERS = ("tie_word_embeddings", "video_seq_length")
OF_SECTIONS: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("vision_config", "audio_config", "vision_tower_cfg", "mm_projector_cfg"), _OF_TOWERS
)

#: The values of keys that turn a feature off, or that all families have which do not read the key.
OFF: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_bias": (False,),
    "attention_output_bias": (False,),
    "attn_logit_softcapping": (0,),
    "clip_qkv": (0,),
    "cross_attention_hidden_size": (),
    "final_logit_softcapping": (0,),
    "is_decoder": (True, False),
    "is_encoder_decoder": (False,),
    "language_model_only": (False,),
    "add_classification_head": (False,),
    "compression_ratio": (1,),
    "lm_head_bias": (False,),
    "logit_scale": (1,),
    "mlp_bias": (False,),
    "mlp_only_layers": ([],),
    "moe_layer_freq": (1,),
    "norm_type": ("rms", "rmsnorm", "rms_norm", "layer_norm", "layernorm"),
    "num_dense_layers": (0,),
    "parallel_attn": (False,),
    "per_layer_config": ({},),
    "position_embedding_type": ("rope", "rotary", "rotary_embedding"),
    "prefix_lm": (False,),
    "moe_shared_expert_intermediate_size": (0,),
    "n_shared_experts": (0,),
    "n_special": (0,),
    "norm_before_gate": (True,),
    "qk_layernorm": (False,),
    "qk_norm": (False,),
    "qkv_bias": (False,),
    "rope_interleaved": (False,),
    "rotary_scaling_factor": (1,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "shared_expert_intermediate_size": (0,),
    "shared_intermediate_size": (0,),
    "sliding_window": (0, -1),
    "tie_encoder_decoder": (False,),
    "use_bias": (False,),
    "use_cla": (False,),
    "use_mla": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_qkv_bias": (False,),
    "use_sliding_window": (False,),
}

#: The sizes that every class of models requires: no class of transformers for these families
#: accepts null for them.
_SIZES = (
    "hidden_size n_embd d_model num_hidden_layers n_layer n_layers num_layers "
    "num_attention_heads n_head n_heads vocab_size"
)
SIZES = frozenset(_SIZES.split())

NO_EFFECT = frozenset(
    " ".join((_ABOUT, _EXECUTION, _TOKENS, _DROPOUT, _TRAINING, _GENERATION)).split()
)


def has_no_effect(key: str) -> bool:
    """Whether a key has no effect on the computation of a training step in any family."""
    return key in NO_EFFECT or key.startswith(BEGINNINGS) or key.endswith(ENDINGS)
