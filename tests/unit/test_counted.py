"""Configurations in the form of public releases: parameters, and forward FLOPs of 512 tokens, are
those that the reference has.

`tests/data/counted.json` holds them. `parameters` are the sum of `numel()` over the parameters of
the class of `transformers` 5.23.0 (5.24.0 for models of 2026), or of `diffusers` 0.42.1, made of
the configuration on the meta device, each shared one counted once; `flops` are what
`FlopCounterMode` of PyTorch 2.15.0 (2.13.0 for models of 2026) counts of its forward pass at B = 1,
S = 512, with eager attention (of Gemma 3n with dense layers only, which have the same products).
Some values are recalled from the releases; both sides have the same ones. `tower` are the FLOPs of
`get_image_features` of one image of the size that the configuration states. Of `qwen-7b`, `llama-
nemotron-super-49b`, `minicpm-v-2.6` and `kimi-k3`, which the reference does not have, it is the
count of the release. Of `molmo-7b-d`, `phi-3.5-vision`, `phi-4-multimodal-release` and
`vila1.5-3b`, which it does not have either, it is the count of the importer, which shows changes.
Of `longcat-flash`, experts without weights have none, as in the release, and a token takes rows of
8 of its 12 experts. Of `internlm-7b` it is the count of Llama with biases of attention, and of
`xlstm-7b` that without the products of its kernel. Of LLaVA in the form of its authors it is that
of the class of transformers, without the rows that this adds to the vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagec.ir.expr import evaluate
from stagec.ir.loads import planned_env
from stagec.ir.module import Module
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.configurations import import_configuration
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from tests.support import EXHAUSTIVE, analyse, counted

COUNTED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/counted.json").read_text())
#: Models that stand for the others in `make test`: one of each kind.
SOME = (
    "falcon-40b",
    "gemma-4-e2b",
    "lfm2-1.2b",
    "electra-small",
    "opus-mt-en-de",
    "dinov2-giant",
    "sd3.5-medium",
    "qwen3-vl-30b-a3b",
    "kimi-linear-48b",
    "deepseek-v4-flash",
    "pixart-sigma",
    "paligemma-3b",
)


def _rows(names: list[str]) -> list[Any]:
    return [pytest.param(n, marks=() if n in SOME else EXHAUSTIVE) for n in names]


def _lowered(name: str, folder: Path, sizes: dict[str, int]) -> Module:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(COUNTED[name]["config"]))
    return JobBuilder(JobOptions(str(path), sizes=sizes)).lower(verify=False)


@pytest.mark.parametrize("name", _rows(list(COUNTED)))
def test_parameters_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    module = _lowered(name, tmp_path, {"B": 8})
    actual = evaluate(counted(module).parameters, planned_env(module))
    assert actual == COUNTED[name]["parameters"]


@pytest.mark.parametrize("name", _rows([n for n, row in COUNTED.items() if "flops" in row]))
def test_products_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    module = _lowered(name, tmp_path, {"B": 1, "S": 512})
    actual = evaluate(counted(module).matmul["forward"], planned_env(module))
    assert actual == COUNTED[name]["flops"]


@pytest.mark.parametrize("name", _rows([n for n, row in COUNTED.items() if "tower" in row]))
def test_an_image_costs_what_the_reference_counts(name: str, tmp_path: Path) -> None:
    """A step with an image among its words has the products of a step of words, and those of the
    tower and of the projector; parameters are the same."""
    path, sizes = tmp_path / f"{name}.json", {"B": 1, "S": 4096}
    path.write_text(json.dumps(COUNTED[name]["config"]))
    text = path.with_suffix(".stg")
    text.write_text(import_configuration(str(path), Session(), images=True).text)
    words, seen = (analyse(str(p), sizes=sizes) for p in (path, text))
    assert seen["parameters"] == words["parameters"] == COUNTED[name]["parameters"]
    actual = seen["matmul_flops"]["forward"] - words["matmul_flops"]["forward"]
    unused = 0
    if name.startswith("llava"):  # the reference computes the last layer, which LLaVA does not use
        rows, d, f = 577, 1024, 4096
        unused = 2 * rows * (4 * d * d + 2 * d * f) + 4 * rows * rows * d
    assert actual + unused == COUNTED[name]["tower"]
