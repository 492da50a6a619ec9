"""Vision-language models whose step takes images: its figures are those of words and those of the
tower, and a step under a strategy computes what it computes on one device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.interp.pipeline import run_named
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.configurations import import_configuration
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.support.diagnostics import DiagnosticError
from tests.configurations import small
from tests.support import EXHAUSTIVE, LONG, STEP, analyse, inputs_of, run_passes, stagec

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
FIGURES: Mapping[str, Any] = json.loads((CONFIGS.parent / "models.json").read_text())
_WORDS: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 16,
    "max_position_embeddings": 32,
    "rope_theta": 100,
}
_EYES: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 8,
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 3,
}


def _beside(words: str, eyes: str, **more: Any) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """A language model beside a tower of another family."""
    config = {
        "text_config": {**_WORDS, "model_type": words},
        "vision_config": {**_EYES, "model_type": eyes},
    }
    return {**config, **more}, {"S": 32, "I_v": 2}


#: Small configurations, and sizes of their images.
SMALL: Mapping[str, tuple[Mapping[str, Any], Mapping[str, int]]] = {
    "qwen2_5_vl": (
        {
            **_WORDS,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]},
            "vision_config": {
                "depth": 4,
                "hidden_size": 16,
                "intermediate_size": 8,
                "num_heads": 4,
                "out_hidden_size": 16,
                "patch_size": 2,
                "spatial_merge_size": 2,
                "window_size": 4,
                "fullatt_block_indexes": [1, 3],
                "temporal_patch_size": 2,
                "in_chans": 3,
            },
        },
        {"S": 32, "N_v": 32, "I_v": 2},
    ),
    "qwen2_vl": (
        {
            **_WORDS,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]},
            "vision_config": {
                "depth": 4,
                "embed_dim": 16,
                "mlp_ratio": 2,
                "num_heads": 4,
                "hidden_size": 16,
                "patch_size": 2,
            },
        },
        {"S": 32, "N_v": 32, "I_v": 2},
    ),
    "qwen3_vl": (
        {
            "text_config": {**_WORDS, "head_dim": 4},
            "vision_config": {
                "depth": 4,
                "hidden_size": 16,
                "intermediate_size": 8,
                "num_heads": 4,
                "patch_size": 2,
                "num_position_embeddings": 9,
                "out_hidden_size": 16,
                "deepstack_visual_indexes": [0, 2],
            },
        },
        {"S": 32, "N_v": 32, "I_v": 2},
    ),
    "mllama": (
        {
            "text_config": {**_WORDS, "cross_attention_layers": [1, 3]},
            "vision_config": {
                "hidden_size": 16,
                "attention_heads": 4,
                "intermediate_size": 8,
                "image_size": 6,
                "patch_size": 2,
                "max_num_tiles": 2,
                "num_hidden_layers": 4,
                "num_global_layers": 2,
                "supported_aspect_ratios": [[1, 1], [1, 2]],
                "intermediate_layers_indices": [1, 3],
                "vision_output_dim": 48,
            },
        },
        {"S": 16},
    ),
    "gemma3": (
        {
            "text_config": {**_WORDS, "head_dim": 4, "sliding_window": 6},
            "vision_config": _EYES,
            "mm_tokens_per_image": 4,
        },
        {"S": 32, "I_v": 2},
    ),
    "llama4": (
        {
            "text_config": {
                **_WORDS,
                "head_dim": 4,
                "attention_chunk_size": 4,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "intermediate_size_mlp": 24,
                "interleave_moe_layer_step": 2,
            },
            "vision_config": {
                **_EYES,
                "intermediate_size": 64,
                "pixel_shuffle_ratio": 0.5,
                "projector_input_dim": 8,
                "projector_output_dim": 8,
                "vision_output_dim": 8,
            },
        },
        {"S": 32, "I_v": 2},
    ),
    "llava": _beside("llama", "clip_vision_model"),
    "mistral3": _beside("mistral", "pixtral"),
    "internvl": _beside("qwen2", "internvl_vision", downsample_ratio=0.5),
    "paligemma": _beside("gemma", "siglip_vision_model", projection_dim=16),
    "idefics3": _beside("llama", "siglip_vision_model", scale_factor=2),
}
#: Models that stand for the others in `make test`.
SOME = ("qwen2_5_vl", "mllama", "internvl")
STRATEGIES: Mapping[str, dict[str, Any]] = {
    "heads": {"tp": 2, "sp": True, "dp": 2},
    "ring": {"cp": 2, "tp": 2, "sp": True},  # for cross attention: gathered
    "plain ring": {"cp": 2, "cp_order": "plain", "zero": 3},
    "gather": {"cp": 2, "cp_mode": "all-gather"},
    "exchange": {"cp": 2, "cp_mode": "ulysses", "recompute": "full"},
    "stages": {"pp": 2, "microbatches": 2, "dp": 2, "zero": 1},
    "chunks": {"pp": 2, "schedule": "zbv", "chunks": 2, "microbatches": 2, "tp": 2},
    "fsdp": {"dp": 4, "zero": 3, "recompute": "selective"},
}


@pytest.fixture
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The text of a small model that takes images."""

    def file(model_type: str) -> Path:
        path = tmp_path_factory.getbasetemp() / f"{model_type}-images.stg"
        if not path.exists():
            given = path.with_suffix(".json")
            given.write_text(json.dumps({"model_type": model_type, **SMALL[model_type][0]}))
            path.write_text(import_configuration(str(given), Session(), images=True).text)
        return path

    return file


def _module(path: Path, pipeline: str, **options: Any) -> Module:
    sizes = {"B": 8, **SMALL[path.stem.removesuffix("-images")][1]}
    return run_passes(JobBuilder(JobOptions(str(path), sizes=sizes, **options)).module, pipeline)


@cache
def _plain(path: Path) -> tuple[dict[str, Array], dict[str, Array]]:
    module = _module(path, STEP)
    inputs = inputs_of(module, 5)
    return inputs, run_named(module, module.env, inputs)


@pytest.mark.parametrize(
    ("model_type", "strategy"),
    [
        pytest.param(name, strategy, marks=() if place < 3 and name in SOME else EXHAUSTIVE)
        for name in SMALL
        for place, strategy in enumerate(STRATEGIES)
    ],
)
def test_a_step_equals_that_on_one_device(model_type: str, strategy: str, file_of: Any) -> None:
    """Loss, updated parameters and optimizer state, which hold every gradient."""
    path = file_of(model_type)
    inputs, expected = _plain(path)
    options = dict(STRATEGIES[strategy])
    if model_type == "mllama" and options.get("cp") and "cp_mode" not in options:
        options |= {"cp_mode": "all-gather"}
        options.pop("cp_order", None)
    module = _module(path, f"{STEP},partition,stages,units,plan", **options)
    actual = run_named(module, module.env, inputs)
    assert len(actual) == len(expected)
    for name in actual:
        plain = name.removesuffix("_g").removesuffix("_sum")  # gathered; of microbatches
        theirs = expected[plain]
        np.testing.assert_allclose(actual[name], theirs, rtol=1e-8, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("model_type", SMALL)
def test_tower_and_projector_are_scopes(model_type: str, file_of: Any) -> None:
    """`vision` and `projector` are all that has a width of the tower, and the rest has none."""
    path = file_of(model_type)
    plan = "inline,infer-shapes,freeze-parameters"

    def frozen(names: str) -> set[str]:
        given = _module(path, plan, freeze=names).parameters()
        return {p.name for p in given if p.tensor.role == "frozen"}

    every = {p.name: str(p.tensor) for p in _module(path, plan).parameters()}
    unused = {name for name in every if "/unused/" in name}
    tower, projector = frozen("vision"), frozen("projector") - unused
    words = frozen("*, !vision, !projector")
    assert unused <= tower
    assert tower
    assert projector
    assert sorted([*tower, *projector, *words]) == sorted(every)
    assert not {name for name in words if "_v" in every[name]}
    assert all("_v" in every[name] for name in projector if "norm" in name)
    assert not {name for name in tower if "D," in every[name].replace("D_v", "")}
    step = _module(path, STEP, freeze="*,!projector")
    trained = {value.name for value in step.trainable()}
    assert trained == projector


def _qwen_tower(patches: int) -> int:
    """FLOPs of the tower of Qwen2.5-VL-7B for an image, product by product."""
    d, f, merged = 1280, 3420, 4 * 1280
    layer = 2 * patches * (4 * d * d + 3 * d * f)
    windows, full = 4 * patches * 64 * d, 4 * patches * patches * d
    merger = 2 * (patches // 4) * (merged * merged + merged * 3584)
    return 2 * patches * 3 * 2 * 14 * 14 * d + 32 * layer + 28 * windows + 4 * full + merger


@pytest.mark.parametrize("patches", [1024, 4096])
def test_figures_of_qwen_are_those_of_words_and_of_the_tower(patches: int, tmp_path: Path) -> None:
    """S tokens, those of images among them, cost as much as S words."""
    path = tmp_path / "qwen.stg"
    path.write_text(
        import_configuration(str(CONFIGS / "qwen2.5-vl-7b.json"), Session(), images=True).text
    )
    published = FIGURES["qwen2.5-vl-7b"]
    actual = analyse(str(path), sizes={"B": 1, "S": 4096, "N_v": patches})
    assert actual["parameters"] == published["params"]
    words = published["flops_fwd"]["total_dense"]
    assert actual["matmul_flops"]["forward"] == words + _qwen_tower(patches)


@LONG
@pytest.mark.parametrize("experts", [False, True])
def test_figures_of_qwen3_are_those_of_words_and_of_the_tower(
    experts: bool, tmp_path: Path
) -> None:
    """Three layers of the tower have mergers of their own besides the last one."""
    words = {**_WORDS, "hidden_size": 64, "head_dim": 16}
    if experts:
        words |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    vision = {"out_hidden_size": 64}
    config = {
        "model_type": "qwen3_vl_moe" if experts else "qwen3_vl",
        "text_config": words,
        "vision_config": vision,
    }
    path = tmp_path / "qwen3.json"
    path.write_text(json.dumps(config))
    text = path.with_suffix(".stg")
    text.write_text(import_configuration(str(path), Session(), images=True).text)
    seen = analyse(str(text), sizes={"B": 1, "S": 4096, "N_v": 1024})
    read = analyse(str(path), sizes={"B": 1, "S": 4096})
    assert seen["parameters"] == read["parameters"]
    d, f, n = 1152, 4304, 1024
    layer = 2 * n * (4 * d * d + 2 * d * f) + 4 * n * n * d
    merger = 2 * (n // 4) * (4 * d * 4 * d + 4 * d * 64)
    tower = 2 * n * 3 * 2 * 16 * 16 * d + 27 * layer + 4 * merger
    assert seen["matmul_flops"]["forward"] - read["matmul_flops"]["forward"] == tower


def test_figures_of_qwen2_are_those_of_words_and_of_the_tower(tmp_path: Path) -> None:
    """The tower of Qwen2-VL has no gate, and all patches of an image see each other."""
    words = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064}
    config = {"model_type": "qwen2_vl", **words, **heads, "vision_config": {"hidden_size": 3584}}
    path = tmp_path / "qwen2.json"
    path.write_text(json.dumps(config))
    text = path.with_suffix(".stg")
    text.write_text(import_configuration(str(path), Session(), images=True).text)
    seen = analyse(str(text), sizes={"B": 1, "S": 4096, "N_v": 1024})
    read = analyse(str(path), sizes={"B": 1, "S": 4096})
    assert seen["parameters"] == read["parameters"]
    d, f, n = 1280, 5120, 1024
    layer = 2 * n * (4 * d * d + 2 * d * f) + 4 * n * n * d
    merger = 2 * (n // 4) * (4 * d * 4 * d + 4 * d * 3584)
    tower = 2 * n * 3 * 2 * 14 * 14 * d + 32 * layer + merger
    assert seen["matmul_flops"]["forward"] - read["matmul_flops"]["forward"] == tower


@pytest.mark.parametrize("tiles", [1, 4])
def test_figures_of_llama_are_those_of_words_of_the_tower_and_of_cross_attention(
    tiles: int, tmp_path: Path
) -> None:
    """The tower computes rows of a tile in multiples of eight, as the reference pads them."""
    path = tmp_path / "llama.stg"
    file = CONFIGS / "llama-3.2-11b-vision.json"
    path.write_text(import_configuration(str(file), Session(), images=True).text)
    published, s = FIGURES["llama-3.2-11b-vision"], 4096
    actual = analyse(str(path), sizes={"B": 1, "S": s, "X_v": tiles})
    if tiles == 4:  # positions are those of four tiles
        assert actual["parameters"] == published["params"]
    d, dv, f, rows, seen = 4096, 1280, 5120, 1608 * tiles, 1601 * tiles
    layer = 2 * rows * (4 * dv * dv + 2 * dv * f) + 4 * rows * rows * dv
    tower = 2 * tiles * 1600 * 3 * 14 * 14 * dv + 40 * layer + 2 * seen * 6 * dv * d
    cross = 2 * s * (2 * d * d + 3 * d * 14336) + 4 * seen * d * 1024 + 4 * s * seen * d
    words = published["flops_fwd"]["total_dense"]
    assert actual["matmul_flops"]["forward"] == words + tower + 8 * cross


def test_models_without_images_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(small("llama")))
    with pytest.raises(DiagnosticError, match="Llama has no model of images with text"):
        import_configuration(str(path), Session(), images=True)
    actual = stagec("import", path, "--images")
    assert actual.code == 1
    assert "drop --images, or import one of Qwen2.5-VL, Qwen2-VL, Llama 3.2 Vision" in actual.err
