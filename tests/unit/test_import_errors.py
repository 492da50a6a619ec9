"""Files that are no configurations, or wrong ones: a message at the place, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.importers.importing import import_model
from stagec.importers.reading.json_text import MAX_DEPTH
from stagec.importers.registry import BUILT_IN
from stagec.support.diagnostics import DiagnosticError
from stagec.support.source import FileLoc, Source
from tests.configurations import small
from tests.support import examples, stagec

TYPES = [name for family in BUILT_IN for name in family.model_types]


def problem(text: str) -> DiagnosticError:
    """The error that a text gives."""
    with pytest.raises(DiagnosticError) as caught:
        import_model(Source("config.json", text), BUILT_IN).text()
    return caught.value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a JSON object, the file is empty"),
        ("  \n", "expected a JSON object, the file is empty"),
        ("llama", "expected a JSON object, found 'l'"),
        ("[1, 2]", "expected a JSON object, found '['"),
        ('"llama"', "expected a JSON object, found '\"'"),
        ("{", "expected a key in quotes, the file ends"),
        ("{'a': 1}", 'expected a key in quotes, found "\'"'),
        ('{"a" 1}', "expected ':' after 'a', found '1'"),
        ('{"a": }', "is not JSON: Expecting value"),
        ('{"a": 1,}', "expected a key in quotes, found '}'"),
        ('{"a": "b', "the file ends in a value"),
        ('{"a": [1, 2', "expected ',' or ']', the file ends"),
        ('{"a": tru}', "is not JSON: Expecting value"),
        ('{"a": 1} {"b": 2}', "expected the end of the file after the object, found '{'"),
        ('{"a": 1e999999999}', "a number has more than 40 digits"),
        ('{"a": 1e' + "9" * 30 + "}", "a number has more than 40 digits"),
        ('{"a": ' + "9" * 5000 + "}", "a number has more than 40 digits"),
        ('{"a": ' + "[" * 100_000, f"values are nested deeper than {MAX_DEPTH}"),
        ('{"a": ' * 100_000, f"values are nested deeper than {MAX_DEPTH}"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ("{}", "config.json has no key 'model_type'"),
        ('{"weight_map": {}}', "it looks like an index of weights"),
        ('{"do_sample": true}', "it looks like a configuration of generation"),
        ('{"dim": 4096}', "it looks like the sizes of a release's own code, such as params.json"),
        ('{"_class_name": "FluxPipeline"}', "is an index of a pipeline of diffusers"),
        ('{"model_type": null}', "'model_type' is null, expected the type of a model"),
        ('{"model_type": 3}', "'model_type' is 3, expected a string"),
        ('{"model_type": ["llama"]}', "'model_type' is a list of 1, expected a string"),
        ('{"model_type": "qwen33"}', "unknown model type 'qwen33'"),
        (
            '{"model_type": "glm5_next"}',
            "the model type 'glm5_next' is not modeled: it has an indexer of pooled keys",
        ),
    ],
)
def test_what_is_no_configuration_is_reported(text: str, message: str) -> None:
    (diagnostic,) = problem(text).diagnostics
    assert message in diagnostic.message
    assert diagnostic.remedy
    assert isinstance(diagnostic.loc, FileLoc)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", True, "is true, expected an integer from 1"),
        ("hidden_size", "32", "is '32', expected an integer"),
        ("hidden_size", 32.5, "is 32.5, expected an integer"),
        ("hidden_size", 0, "is 0, expected an integer from 1"),
        ("hidden_size", -4, "is -4, expected an integer from 1"),
        ("hidden_size", 10**12, "expected an integer from 1 to 16,777,216"),
        ("hidden_size", [32], "is a list of 1, expected an integer"),
        ("num_hidden_layers", 10**6, "expected an integer from 1 to 4,096"),
        ("num_key_value_heads", 3, "is 3, which does not divide 4 heads"),
        ("tie_word_embeddings", 1, "is 1, expected true or false"),
        ("hidden_act", "sofmax", "expected one of 'silu'"),
        ("hidden_act", {}, "is an object, expected one of 'silu'"),
        ("rope_theta", float("nan"), "is NaN or Infinity, expected a number"),
        ("rope_theta", float("inf"), "is NaN or Infinity, expected a number"),
        ("rope_theta", "1e4", "is '1e4', expected a number"),
        ("rope_theta", 1e300, "expected a number up to 281474976710656"),
        ("rope_theta", 0.5, "expected a positive whole number"),
        ("rope_theta", -100, "expected a positive whole number"),
        ("rope_scaling", "yarn", "is 'yarn', expected an object"),
        ("rope_scaling", {"rope_type": "spiral"}, "expected one of 'default'"),
        (
            "rope_scaling",
            {"type": "yarn", "factor": 4.0, "twist": 2},
            "unknown key 'rope_scaling.twist'",
        ),
        ("partial_rotary_factor", 0.4, "rotates 3 of 8 elements"),
        ("partial_rotary_factor", 2.0, "expected a share, from 0 to 1"),
        ("sliding_windows", 3, "unknown key 'sliding_windows'"),
        ("attention_dropout", "0.1", "is '0.1', expected a rate from 0 to 1"),
        ("attention_dropout", True, "is true, expected a rate from 0 to 1"),
        ("attention_dropout", 1.5, "expected a rate from 0 to 1"),
    ],
)
def test_a_wrong_value_is_reported_at_its_key(key: str, value: Any, message: str) -> None:
    text = json.dumps(small("llama", **{key: value}), indent=1)
    (diagnostic,) = problem(text).diagnostics
    assert message in diagnostic.message
    assert isinstance(diagnostic.loc, FileLoc)
    line = text.splitlines()[diagnostic.loc.line - 1]
    inner = "twist" if "twist" in message else "rope_type" if "default" in message else key
    assert line.strip().startswith(f'"{inner}"')


@pytest.mark.parametrize(
    ("model_type", "section", "key", "value", "message"),
    [
        ("swin", "", "mlp_ratio", 0, "is 0, expected a positive number"),
        ("swinv2", "", "window_size", 1, "is 1, expected an integer from 2"),
        ("roberta", "", "max_position_embeddings", 2, "leaves no position beside 2"),
        ("gemma2", "", "query_pre_attn_scalar", -1, "is -1, expected a positive number"),
        ("gemma2", "", "query_pre_attn_scalar", 1e-300, "a positive number of at most 18 decimals"),
        ("internvl", "", "downsample_ratio", -0.5, "is -0.5, expected a positive number"),
        ("llama4", "vision_config", "pixel_shuffle_ratio", 0, "is 0, expected a positive number"),
        ("qwen3_vl", "vision_config", "deepstack_visual_indexes", "8", "expected a list"),
        ("gpt2", "", "resid_pdrop", 1e-300, "expected a rate from 0 to 1 of at most 18 decimals"),
        ("gpt2", "", "attn_pdrop", 1.5, "is 1.5, expected a rate from 0 to 1"),
    ],
)
def test_a_wrong_value_of_a_family_is_reported_at_its_key(
    model_type: str, section: str, key: str, value: Any, message: str
) -> None:
    config = small(model_type)
    (config.setdefault(section, {}) if section else config)[key] = value
    text = json.dumps(config, indent=1)
    (diagnostic,) = problem(text).diagnostics
    assert message in diagnostic.message
    assert isinstance(diagnostic.loc, FileLoc)
    assert text.splitlines()[diagnostic.loc.line - 1].strip().startswith(f'"{key}"')


@pytest.mark.parametrize("model_type", ["smollm3", "mistral"])
def test_a_list_has_an_element_for_each_layer(model_type: str) -> None:
    key = {"smollm3": "no_rope_layers", "mistral": "layer_types"}[model_type]
    given = {"smollm3": [1, 0, 1], "mistral": ["full_attention"] * 3}[model_type]
    (diagnostic,) = problem(json.dumps(small(model_type, **{key: given}))).diagnostics
    assert diagnostic.message == f"'{key}' has 3 elements, expected 4"


def test_all_keys_that_are_not_known_are_reported_at_once() -> None:
    actual = problem(json.dumps(small("llama", first_key=1, second_key=[]))).diagnostics
    assert [d.message.split("'")[1] for d in actual] == ["first_key", "second_key"]


def test_a_key_with_null_is_a_key_left_out() -> None:
    text = json.dumps(small("llama", attention_sinks=None, head_dim=None))
    plain = json.dumps(small("llama"))
    models = [import_model(Source("config.json", t), BUILT_IN).text() for t in (text, plain)]
    assert models[0] == models[1]


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_null_is_no_size_of_a_model(key: str) -> None:
    (diagnostic,) = problem(json.dumps(small("llama", **{key: None}))).diagnostics
    assert diagnostic.message == f"'{key}' is null, expected an integer"
    assert "leave the key out" in (diagnostic.remedy or "")


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("t5", {"is_gated_act": True}, "'is_gated_act' is true, which 'feed_forward_proj'"),
        ("t5", {"is_gated_act": False, "feed_forward_proj": "gated-gelu"}, "is 'gated-gelu'"),
        ("llama", {"use_qk_norm": True}, "'use_qk_norm' is true, which its family does not do"),
        ("qwen3", {"use_qk_norm": False}, "'use_qk_norm' is false, which its family does not do"),
        ("mamba2", {"intermediate_size": 48}, "which is not expand * hidden_size: expected 64"),
        ("grok-1", {"widening_factor": 8}, "'widening_factor' gives the width 170, but"),
        ("llama", {"a": 1e308}, "unknown key 'a', which may change the computation: 1.00000e+308"),
        ("llama", {"shared_expert_intermediate_size": 8}, ", which may change"),
    ],
)
def test_a_key_that_contradicts_the_others_is_reported(
    model_type: str, keys: dict[str, Any], message: str
) -> None:
    (diagnostic,) = problem(json.dumps(small(model_type, **keys))).diagnostics
    assert message in diagnostic.message


def test_keys_that_are_not_known_are_left_out_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small("llama", first_key=1, rope_scaling=None, second_key=[])))
    actual = stagec("import", path, "--ignore-unknown")
    assert actual.code == 0
    assert actual.err.count("remark: ignored the unknown key ") == 2
    assert "ignored the unknown key 'first_key': 1" in actual.err
    path.write_text(json.dumps(small("llama")))
    assert stagec("import", path, "--ignore-unknown").out == actual.out


# -- files


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    actual = stagec("import", path)
    assert actual.code == 1
    assert "is longer than 16 MiB" in actual.err


def test_a_list_of_all_quantized_modules_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    modules = [f"model.layers.{i}.self_attn.q_proj" for i in range(40_000)]
    quantized = {"modules_to_not_convert": modules}
    path.write_text(json.dumps(small("llama", quantization_config=quantized)))
    assert path.stat().st_size > 1 << 20
    assert stagec("import", path).code == 0


@pytest.mark.parametrize("data", [b"\xff\xfe{\x00}\x00", b"\x00" * 20, b'{"model_type": "\xe9"}'])
def test_bytes_that_are_no_text_are_reported(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    actual = stagec("import", path)
    assert (actual.code, actual.out) == (1, "")
    assert "config.json:1:" in actual.err


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(small("llama")).encode())
    assert stagec("import", path).code == 0


def test_a_wrong_configuration_writes_nothing(tmp_path: Path) -> None:
    path, out = tmp_path / "config.json", tmp_path / "out.stg"
    out.write_text("what was there")
    path.write_text(json.dumps(small("llama", hidden_size=-1)))
    assert stagec("import", path, "-o", out).code == 1
    assert out.read_text() == "what was there"


def test_a_folder_stands_for_its_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    actual = stagec("import", folder)
    assert actual.code == 1
    assert "has no config.json" in actual.err
    (folder / "config.json").write_text(json.dumps(small("llama")))
    assert stagec("import", folder).out == stagec("import", folder / "config.json").out
    counted = stagec("analyze", folder, "--set", "B=2,S=8", "--json")
    assert counted.code == 0
    assert json.loads(counted.out)["model"] == "my-model"


# -- plug-ins

PLUGIN = """from stagec.api import ModelFamily, Plugin
PLUGIN = Plugin(name="mine", families=({},))
"""


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("'llama'", "registers 'llama' as a family of models"),
        ('ModelFamily("Mine", ("llama",), print)', "families 'Llama' and 'Mine' both read 'llama'"),
    ],
)
def test_a_wrong_family_of_a_plugin_is_reported(family: str, message: str, tmp_path: Path) -> None:
    plugin, config = tmp_path / "mine.py", tmp_path / "config.json"
    plugin.write_text(PLUGIN.format(family))
    config.write_text(json.dumps(small("llama")))
    actual = stagec("import", config, "--plugin", plugin)
    assert actual.code == 1
    assert message in actual.err


# -- mutated configurations

_WORDS = ("", "llama", "full_attention", "silu", "yarn", "nan")
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.floats(), st.sampled_from(_WORDS)
)
_VALUES = st.recursive(
    _SCALARS,
    lambda v: st.one_of(st.lists(v, max_size=5), st.dictionaries(st.sampled_from(_WORDS), v)),
    max_leaves=6,
)


@examples(300)
@given(st.sampled_from(TYPES), st.data())
def test_a_mutated_configuration_is_read_or_refused(model_type: str, data: st.DataObject) -> None:
    """Any value at any key gives a text or a diagnostic with a place, never anything else."""
    given = small(model_type)
    key = data.draw(st.sampled_from([*given, "layer_types", "sliding_window", "rope_parameters"]))
    text = json.dumps({**given, key: data.draw(_VALUES)})
    start = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.sampled_from((0, 0, 1, 5, len(text))))
    text = text[:start] + text[start + cut :]
    try:
        import_model(Source("config.json", text), BUILT_IN).text()
    except DiagnosticError as problem:
        actual = problem.diagnostics
    else:
        return
    assert actual
    assert all(d.remedy and isinstance(d.loc, FileLoc) for d in actual)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("LlamaForCausalLM", "llama"), ("Qwen2MoeForCausalLM", "qwen2_moe"), ("T5Model", "t5")],
)
def test_a_model_type_that_is_missing_is_that_of_the_class(architecture: str, kind: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        import_model(Source("c.json", f'{{"architectures": ["{architecture}"]}}'), BUILT_IN)
    assert f'add the key: "model_type": "{kind}"' in str(caught.value.diagnostics[0].remedy)


def test_a_class_that_is_not_read_has_no_model_type() -> None:
    with pytest.raises(DiagnosticError) as caught:
        import_model(Source("c.json", '{"architectures": ["LlamaMoEForCausalLM"]}'), BUILT_IN)
    assert "llama" not in str(caught.value.diagnostics[0].remedy)


@pytest.mark.parametrize(
    ("model_type", "key"),
    [("llava", "text_config"), ("molmo2", "adapter_config"), ("phi4_multimodal", "audio_config")],
)
def test_a_section_that_is_missing_is_to_be_added(model_type: str, key: str) -> None:
    """To ignore it would not help."""
    without = {k: v for k, v in small(model_type).items() if k != key}
    caught = problem(json.dumps(without)).diagnostics[0]
    assert caught.message == f"the key '{key}' is missing"
    assert caught.remedy == f'add it: "{key}": VALUE'
