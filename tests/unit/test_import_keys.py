"""Keys that are left out, that say what a family does anyway, or that change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagec.importers.importing import import_model
from stagec.importers.registry import BUILT_IN
from stagec.importers.writing.text import ModelText
from stagec.ir_spec.phases import Phase
from stagec.support.diagnostics import DiagnosticError
from stagec.support.source import Source
from tests.configurations import small
from tests.support import analyse, parse, run_passes


def imported(config: dict[str, Any]) -> ModelText:
    """The text of a configuration."""
    return import_model(Source("config.json", json.dumps(config)), BUILT_IN)


@pytest.mark.parametrize("model_type", ["glm4_moe", "jais2", "llama", "qwen2", "glm4v"])
def test_heads_share_the_width_where_their_size_is_left_out(model_type: str) -> None:
    config = small(model_type)
    sizes = imported({k: v for k, v in config.items() if k != "head_dim"}).symbols
    values = {name: sizes[name].value or 0 for name in "DHK"}
    assert values["K"] * values["H"] == values["D"]


@pytest.mark.parametrize("model_type", ["glm", "glm4", "internlm3"])
def test_heads_of_some_classes_have_a_size_of_their_own(model_type: str) -> None:
    """These classes of transformers have 128, whatever the width; null is for the share of it."""
    config = small(model_type)
    left_out = imported({k: v for k, v in config.items() if k != "head_dim"}).symbols
    assert left_out["K"].value == 128
    null = imported({**config, "head_dim": None}).symbols
    assert null["K"].value == config["hidden_size"] // config["num_attention_heads"]


@pytest.mark.parametrize(
    ("model_type", "symbol"), [("vit", "N"), ("convnext", "N"), ("swin", "N"), ("beit", "M")]
)
def test_classes_are_two_where_nothing_says_how_many(model_type: str, symbol: str) -> None:
    config = small(model_type)
    left_out = {k: v for k, v in config.items() if k not in ("num_labels", "id2label")}
    assert imported(left_out).symbols[symbol].value == 2


def test_groups_of_experts_stand_beside_the_states_of_scans() -> None:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = small("nemotron_h", **experts, moe_shared_expert_intermediate_size=8)
    config |= {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4}
    plain = imported({**config, "n_group": 1}).symbols
    text = imported({**config, "n_group": 2})
    assert plain["N"].value == text.symbols["N"].value
    assert (text.symbols["N_groups"].value, text.symbols["N_top"].value) == (2, 1)
    module = run_passes(parse(text.text()), "inline,infer-shapes,verify")
    assert module.phase == Phase.SHAPED.label


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("llama", {"top_k": 50, "min_p": 0.1, "max_new_tokens": 20}),
        ("llama", {"transformers.js_config": {"dtype": "q4"}}),
        ("llama", {"image_seq_length": 576, "use_qk_norm": False}),
        ("gpt2", {"n_special": 0, "predict_special_tokens": True}),
        ("qwen3", {"use_qk_norm": True}),
        ("qwen3_moe", {"qk_norm": True, "shared_expert_intermediate_size": 0}),
        ("mamba2", {"intermediate_size": 64}),
        ("mamba2", {"time_step_min": -1e308}),
        ("t5", {"is_gated_act": False}),
        ("qwen3_next", {"output_gate_type": "swish"}),
        ("bailing_moe_v2", {"use_rmsnorm": True}),
        ("hunyuan_v1_moe", {"pad_id": 3}),
        ("grok-1", {"key_size": 8, "widening_factor": 3, "intermediate_size": 64}),
    ],
)
def test_a_key_that_restates_or_has_no_effect_changes_nothing(
    model_type: str, keys: dict[str, Any]
) -> None:
    sizes = {"intermediate_size": 64} if "widening_factor" in keys else {}
    with_them, without = imported(small(model_type, **keys)), imported(small(model_type, **sizes))
    expected = [{n: s.value for n, s in text.symbols.items()} for text in (with_them, without)]
    assert expected[0] == expected[1]
    assert with_them.functions == without.functions


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_next"])
def test_a_shared_block_without_a_width_is_left_out(model_type: str) -> None:
    text = imported(small(model_type, shared_expert_intermediate_size=0)).text()
    assert "F_shared" not in text
    assert "F_shared" in imported(small(model_type)).text()


def test_phi_by_the_keys_of_its_first_releases() -> None:
    """The same model as by the keys that it has now; rows of the table are whole multiples."""
    old = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_head_kv": None, "n_inner": None}
    old |= {"n_positions": 32, "rotary_dim": 4, "vocab_size": 65, "flash_attn": False}
    new = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    new |= {"intermediate_size": 128, "max_position_embeddings": 32, "vocab_size": 128}
    texts = [
        imported({"model_type": "phi-msft", "rope_theta": 100, **old}),
        imported({"model_type": "phi", "rope_theta": 100, "partial_rotary_factor": 0.5, **new}),
    ]
    assert texts[0].functions == texts[1].functions
    expected = [{n: s.value for n, s in text.symbols.items()} for text in texts]
    assert expected[0] == expected[1]


def test_internvl_by_the_keys_of_releases_is_the_converted_one() -> None:
    release, converted = (imported(small(name)) for name in ("internvl_chat", "internvl"))
    assert release.functions == converted.functions
    assert {n: s.value for n, s in release.symbols.items()} == {
        n: s.value for n, s in converted.symbols.items()
    }


def test_a_layer_without_parts_is_left_out() -> None:
    text = imported(small("nemotron-nas")).text()
    assert "stg.order" not in text
    assert text.count("stg.repeat") == 3
    config = small("nemotron-nas")
    config["block_configs"] = [{"attention": {"no_op": True}, "ffn": {"no_op": True}}] * 4
    with pytest.raises(DiagnosticError, match="has no layer that computes something"):
        imported(config)
    config["block_configs"] = [{"attention": {"replace_with_linear": True}}] * 4
    with pytest.raises(DiagnosticError, match="replace_with_linear' is true, which is not modeled"):
        imported(config)
    with pytest.raises(DiagnosticError, match="'block_configs' has 3 elements, expected 4"):
        imported({**config, "block_configs": [{}] * 3})


def test_lists_of_layers_go_on_with_those_for_multi_token_prediction() -> None:
    longer = small("step3p5", num_nextn_predict_layers=2)
    for key in ("layer_types", "rope_theta", "partial_rotary_factors"):
        longer[key] = [*longer[key], *longer[key][:2]]
    assert imported(longer).text() == imported(small("step3p5")).text()


def test_the_first_layer_selects_its_keys() -> None:
    config = small("glm_moe_dsa", indexer_types=["shared", *["full"] * 3])
    with pytest.raises(DiagnosticError, match="has no full indexer in the first layer"):
        imported(config)
    by_list = imported(small("glm_moe_dsa", indexer_types=["full", "shared", "shared", "full"]))
    by_word = imported(small("glm_moe_dsa", index_topk_pattern="FSSF"))
    assert by_list.text() == by_word.text()
    assert "@mla[indexed = given]" in by_list.text()


def test_layers_that_share_selected_keys_have_no_cache_of_an_indexer(tmp_path: Path) -> None:
    """A latent of 8 and 2 rotated elements in each of four layers, a key of 4 in each indexer."""
    for types, indexers in ((["full"] * 4, 4), (["full", "shared", "shared", "full"], 2)):
        path = tmp_path / f"{indexers}.json"
        path.write_text(json.dumps(small("glm_moe_dsa", indexer_types=types)))
        (stage,) = analyse(str(path), serve="decode", batch=1, context=8)["classes"]
        tokens, bf16 = 9, 2
        assert stage["memory"]["caches"] == (4 * (8 + 2) + indexers * 4) * tokens * bf16


def test_a_version_of_minicpm_v_that_is_not_read_is_named() -> None:
    with pytest.raises(DiagnosticError, match=r"'version' is 2.5, .*: expected 2.6, 4, 4.5"):
        imported(small("minicpmv", version=2.5))


@pytest.mark.parametrize("more", [{"final_logit_softcapping": None}, {"head_dim": 8}])
def test_a_decoder_of_another_form_than_its_encoder(more: dict[str, Any]) -> None:
    config = small("t5gemma")
    text = imported({**config, "decoder": {**config["decoder"], **more}}).text()
    run_passes(parse(text), "inline,infer-shapes")
    assert ("stg.tanh(" in text) == ("head_dim" in more)


def test_rows_of_equal_numbers_of_tokens_need_the_kinds_of_layers() -> None:
    config = small("deepseek_v4")
    rates = {"compress_rate_csa": 8, "compress_rate_hca": 8}
    kept = {k: v for k, v in config.items() if k not in ("layer_types", "compress_rates")}
    count = config["num_hidden_layers"]
    with pytest.raises(DiagnosticError, match="does not say which layers have an indexer"):
        imported({**kept, **rates, "compress_ratios": [8] * count})


@pytest.mark.parametrize("base", [None, {"a": 1}])
def test_a_file_of_adapters_without_the_name_of_its_model(base: object) -> None:
    with pytest.raises(DiagnosticError) as caught:
        imported({"base_model_name_or_path": base, "peft_type": "LORA"})
    assert caught.value.diagnostics[0].remedy == "give the config.json of a model"


def test_a_base_stands_also_in_the_object_of_its_scaling() -> None:
    """As version 5 of transformers writes it; the same text as with the key beside it."""
    scaling, base = {"rope_type": "linear", "factor": 2.0}, {"rope_theta": 500}
    config = {k: v for k, v in small("llama").items() if k != "rope_theta"}
    beside = imported({**config, **base, "rope_scaling": scaling})
    within = imported({**config, "rope_scaling": {**scaling, **base}})
    assert within.text() == beside.text()
    assert within.symbols["theta"].value == 500


def test_two_names_of_a_size_have_one_value() -> None:
    """Releases state old names beside new ones; which one a reader takes must not matter."""
    config = small("qwen3_moe")
    same = imported({**config, "num_local_experts": config["num_experts"]}).text()
    assert same == imported(config).text()
    with pytest.raises(DiagnosticError, match="'num_local_experts' is 8, but 'num_experts' is 4"):
        imported({**config, "num_local_experts": 8})


def test_a_size_of_the_language_model_is_that_of_the_whole() -> None:
    config = small("qwen2_5_vl")
    again = {"hidden_size": config["hidden_size"], "bos_token_id": 5}
    imported({**config, "bos_token_id": 3, "text_config": again})
    with pytest.raises(DiagnosticError, match=r"'text_config.hidden_size' is 8, but 'hidden_"):
        imported({**config, "text_config": {"hidden_size": 8}})


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("bloom", "n_inner", 8),
        ("zamba2", "add_bias_linear", True),
        ("mixtral", "hidden_act", "relu"),
    ],
)
def test_what_the_class_does_not_do_is_refused(kind: str, key: str, value: object) -> None:
    with pytest.raises(DiagnosticError, match=f"'{key}' is"):
        imported({**small(kind), key: value})


def test_heads_of_zamba2_share_the_width_that_it_expands_to() -> None:
    config = small("zamba2")
    with pytest.raises(DiagnosticError, match=r"'mamba_headdim' gives .* elements of all heads"):
        imported({**config, "mamba_expand": 2 * config.get("mamba_expand", 2)})


def test_adapters_of_a_release_are_declared() -> None:
    """A step of texts has them, and does not use them: of each product rank * (in + out)."""
    config = small("phi4mm")
    text = imported({**config, "vision_lora": {"r": 2, "layer": "", "lora_alpha": 4}}).text()
    assert "bf16[L, F, R_v | frozen]" in text
    assert "speech_qkv" not in text


def test_a_file_with_the_keys_of_a_language_model_only_is_that_model() -> None:
    words = {k: v for k, v in small("step3p5").items() if k != "model_type"}
    alone = imported({"model_type": "step3p7", **words})
    assert alone.symbols == imported({"model_type": "step3p5", **words}).symbols
    assert any("tower" in note for note in alone.notes)


def test_the_first_layers_of_step_are_dense_as_the_key_states() -> None:
    given = {k: v for k, v in small("step3p5").items() if k != "moe_layers_enum"}
    one, two = (imported({**given, "first_k_dense_replace": n}) for n in (1, 2))
    assert one.text() != two.text()
