"""A config.json of a checkpoint with quantized weights: what a server says that has others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.configurations import small
from tests.support import stagec

STORED: dict[str, tuple[Any, str]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    "gptq": ({"quant_method": "gptq", "bits": 4}, "int4"),
    "awq": ({"quant_method": "awq", "bits": 3}, "and the type of its weights"),
    "auto-round": ({"quant_method": "auto-round", "bits": 4}, "int4"),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
    "eight bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    "groups": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
        },
        "int4",
    ),
    "groups of fp8": (
        {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}},
        "fp8",
    ),
    "groups of fp4": (
        {"config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}},
        "nvfp4",
    ),
    "several groups": (
        {
            "config_groups": {
                "a": {"weights": {"num_bits": 8, "type": "int"}},
                "b": {"weights": {"num_bits": 4, "type": "int"}},
            }
        },
        "and the type of its weights",
    ),
    "other": ({"quant_method": "aqlm"}, "and the type of its weights"),
}
DECODE = ("--serve", "decode", "--batch", "4", "--context", "8")
SEARCH = (*DECODE, "--ranks", "1", "--machine", "h100-sxm", "--jobs", "1", "--no-levers")
SERVE = ("--prompt", "8", "--machine", "h100-sxm", "--batches", "1,2")
OVER_TIME = ("--prompt", "8", "--machine", "h100-sxm", "--rate", "9", "--count", "2")


def written(folder: Path, quantization: Any) -> str:
    path = folder / "small.json"
    path.write_text(json.dumps({**small("llama"), "quantization_config": quantization}))
    return str(path)


def test_experts_may_have_a_type_of_their_own(tmp_path: Path) -> None:
    path, quantization = tmp_path / "small.json", {"quant_method": "fp8"}
    given = {**small("deepseek_v4"), "quantization_config": quantization, "expert_dtype": "fp4"}
    path.write_text(json.dumps(given))
    done = stagec("analyze", str(path), *DECODE)
    assert "give --weight-dtype mxfp4 --weight-parts experts" in done.err


@pytest.mark.parametrize("case", STORED)
def test_a_server_warns_of_other_weights(case: str, tmp_path: Path) -> None:
    quantization, words = STORED[case]
    done = stagec("analyze", written(tmp_path, quantization), *DECODE)
    assert done.code == 0
    assert "warning: 'quantization_config': the checkpoint has quantized weights" in done.err
    assert f"help: give --weight-dtype {words}\n" in done.err


@pytest.mark.parametrize("quantization", [None, {}])
def test_no_quantization_is_not_said(quantization: Any, tmp_path: Path) -> None:
    assert stagec("analyze", written(tmp_path, quantization), *DECODE).err == ""


@pytest.mark.parametrize(
    "words",
    [("search", *SEARCH), ("serve", *SERVE), ("serve", *OVER_TIME)],
    ids=["search", "serve", "over time"],
)
def test_it_is_said_once_and_not_of_what_has_them(words: tuple[str, ...], tmp_path: Path) -> None:
    command, *rest = words
    model = written(tmp_path, {"quant_method": "fp8"})
    assert stagec(command, model, *rest).err.count("quantized weights") == 1
    assert "quantized weights" not in stagec(command, model, *rest, "--weight-dtype", "fp8").err


def test_training_says_nothing(tmp_path: Path) -> None:
    assert "quantized" not in stagec("analyze", written(tmp_path, {"quant_method": "fp8"})).err
