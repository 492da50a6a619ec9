"""Models imported from small configurations: a step under a strategy computes what it computes on
one device, for every family; what makes no sense for a family is refused, with what would.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.importers.registry import BUILT_IN
from stagec.interp.pipeline import run_named
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.support.diagnostics import DiagnosticError
from tests.configurations import SCANS, sizes_of, small
from tests.support import EXHAUSTIVE, STEP, inputs_of, pairwise, run_passes

PLACED = f"{STEP},partition,stages,units,plan"
#: schedule, stages, chunks, microbatches
PIPELINES = (
    ("", 1, 0, 1),
    ("1f1b", 2, 1, 2),
    ("interleaved", 2, 2, 2),
    ("zbv", 2, 2, 2),
    ("dualpipe", 2, 2, 4),
)
FACTORS: Mapping[str, Sequence[Any]] = {
    "tensor": ((1, False), (2, False), (2, True), (4, True)),
    "context": ("", "all-gather", "ulysses", "ring"),
    "data": ((1, 1), (2, 1), (2, 2)),  # ranks, of which share the experts
    "zero": (0, 1, 3),
    "pipeline": PIPELINES,
    "recompute": ("none", "selective", "full"),
}
#: A strategy that uses most, for `make test`.
MOST: Mapping[str, Any] = {
    "tensor": (2, True),
    "context": "ring",
    "data": (1, 1),
    "zero": 0,
    "pipeline": ("zbv", 2, 2, 2),
    "recompute": "selective",
}
#: Strategies for each family; all families together have every pair of options.
STRATEGIES = 8
TYPES = [(*family.model_types, *family.marks) for family in BUILT_IN]

#: Without a dimension S; with a loss of pairs of the batch.
DINO = ("dinov2", "dinov2_with_registers", "dinov3_vit")
SEEN = ("clip_vision_model", "siglip_vision_model")
UNSPLIT = (
    "beit",
    "data2vec-vision",
    "convnext",
    "convnextv2",
    "swin",
    "swinv2",
    "vit",
    "deit",
    *DINO,
    *SEEN,
)
PAIRED = ("clip", "metaclip_2", "siglip")
#: Attention that no ring takes: to another sequence, with a bias, to selected keys.
_CROSS = ("t5gemma", "bart", "whisper", "mbart", "plbart", "mvp", "blenderbot", "pegasus", "marian")
_BY_DISTANCE = ("t5", "mt5", "umt5", "switch_transformers", "mpnet")
_CONDITIONED = ("PixArtTransformer2DModel", "WanTransformer3DModel")
_COMPRESSED = ("deepseek_v4", "deepseek_ref")
_SELECTED = ("deepseek_v32", "glm_moe_dsa", "minimax_m3", "minimax_m3_vl_text", *_COMPRESSED)
GATHERED = (*_BY_DISTANCE, *_CROSS, *_CONDITIONED, *_SELECTED, "m2m_100", "blenderbot-small")
#: Attention to texts and images in one row, of which S are texts: they are gathered.
JOINT = ("FluxTransformer2DModel", "SD3Transformer2DModel", "QwenImageTransformer2DModel")
#: Patches of a square, X along a side: no order of X is one of theirs.
SQUARES = ("DiTTransformer2DModel", "SD3Transformer2DModel")
#: Keys and values have one head: nothing to exchange.
ONE_HEAD = ("gpt_bigcode", "falcon", "RefinedWeb", "RefinedWebModel")
#: Zigzag is no order for a scan or a convolution beside attention.
ALONE = ("mamba", "falcon_mamba", "mamba2", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm")
_DELTAS = ("qwen3_5", "qwen3_5_moe", "minicpmv4_6", "minicpmv4_7")
_LINEAR = ("minimax", "minimax_text_01", "lfm2_vl", "lfm3", "bailing_hybrid", "kimi_k3", *_DELTAS)
SCANNED = (*(n for n in SCANS if n not in ALONE), *_LINEAR)
#: Nor is it for convolutions that see both sides.
CONVOLVED = ("wav2vec2", "unispeech", "unispeech-sat", "hubert", "wavlm")


def _rows() -> list[Any]:
    rows = list(pairwise(FACTORS))
    cases: list[Any] = []
    for place, names in enumerate(TYPES):
        for model_type in names:
            quick = () if model_type == names[0] and place % 3 == 0 else (EXHAUSTIVE,)
            cases.append(pytest.param(model_type, MOST, id=f"{model_type}-most", marks=quick))
            for number in range(STRATEGIES):
                row = rows[(place * STRATEGIES + number) % len(rows)]
                name = f"{model_type}-{number}"
                cases.append(pytest.param(model_type, row, id=name, marks=EXHAUSTIVE))
    return cases


def _options(model_type: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a combination, with what the family takes in place of what it does not."""
    schedule, pp, chunks, microbatches = row["pipeline"]
    if model_type in PAIRED:  # one microbatch, which not all schedules take
        staged = schedule in ("1f1b", "zbv") and not row["context"]
        pp, microbatches = (pp if staged else 1), 1
    dp, ep = row["data"]
    given: dict[str, Any] = {"dp": dp, "microbatches": microbatches, "recompute": row["recompute"]}
    given["zero"] = row["zero"]
    if pp > 1:
        given |= {"pp": pp, "schedule": schedule, "chunks": chunks}
    if "expert" in " ".join(small(model_type)):
        given["ep"] = ep
    context = row["context"] if model_type not in UNSPLIT else ""
    tp, sp = row["tensor"]
    given["tp"] = min(tp, 2) if context == "ulysses" else tp  # four heads go round
    given["sp"] = sp and model_type not in UNSPLIT
    return given | _context(model_type, context)


def _context(model_type: str, mode: str) -> dict[str, Any]:
    no_heads = ONE_HEAD + _COMPRESSED
    few = model_type in {"ring": GATHERED + JOINT, "ulysses": no_heads}.get(mode, ())
    given: dict[str, Any] = {"cp": 2, "cp_mode": "all-gather" if few else mode} if mode else {}
    if given.get("cp_mode") == "ring" and model_type in (*SCANNED, *CONVOLVED, *SQUARES):
        given["cp_order"] = "plain"
    return given


def _module(path: Path, pipeline: str, **options: Any) -> Module:
    builder = JobBuilder(JobOptions(str(path), sizes=sizes_of(path.stem, 8, 16), **options))
    return run_passes(builder.module, pipeline)


@lru_cache(maxsize=1)  # the cases of a family stand together
def _plain(path: Path) -> tuple[dict[str, Array], dict[str, Array]]:
    module = _module(path, STEP)
    inputs = inputs_of(module, 2)
    return inputs, run_named(module, module.env, inputs)


@pytest.fixture
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file of a family's small configuration."""

    def file(model_type: str) -> Path:
        path = tmp_path_factory.getbasetemp() / f"{model_type}.json"
        path.write_text(json.dumps(small(model_type)))
        return path

    return file


@pytest.mark.parametrize(("model_type", "row"), _rows())
def test_a_step_equals_that_on_one_device(
    model_type: str, row: dict[str, Any], file_of: Any
) -> None:
    """Loss, updated parameters and optimizer state, which hold every gradient."""
    path = file_of(model_type)
    inputs, expected = _plain(path)
    module = _module(path, PLACED, **_options(model_type, row))
    actual = run_named(module, module.env, inputs)
    assert len(actual) == len(expected)
    (loss, *rest), (expected_loss, *_) = actual, expected
    np.testing.assert_allclose(actual[loss], expected[expected_loss], rtol=1e-10)
    for name in rest:
        theirs = expected[name.removesuffix("_g")]  # gathered
        np.testing.assert_allclose(actual[name], theirs, rtol=1e-8, atol=1e-9, err_msg=name)


_GATHER = "--cp-mode all-gather"
#: Families, options that make no sense for them, what is said, and what would.
REFUSED: Sequence[tuple[Sequence[str], dict[str, Any], str, str]] = (
    (("t5", "mt5"), {"cp": 2}, "does not support bias", _GATHER),
    (("bart", "whisper"), {"cp": 2}, "is cross attention of T queries to S keys", _GATHER),
    (("deepseek_v32", "glm_moe_dsa"), {"cp": 2}, "does not support selected", _GATHER),
    (JOINT[::2], {"cp": 2}, "no op can use X in a ring", _GATHER),
    (SQUARES, {"cp": 2}, "zigzag is an order of X", "--cp-order plain"),
    (ONE_HEAD, {"cp": 2, "cp_mode": "ulysses"}, "does not divide over tp*cp", _GATHER),
    (SCANNED, {"cp": 2}, "needs S in order", "--cp-order plain"),
    (CONVOLVED, {"cp": 2}, "moves S, whose parts", "--cp-order plain"),
    (UNSPLIT, {"cp": 2}, "no sequence dimension to split", "--tp"),
    (UNSPLIT, {"tp": 2, "sp": True}, "no sequence dimension to split", "--tp"),
    (("llama", "vit", "mamba"), {"dp": 2, "ep": 2}, "has no experts", "leave it out"),
    (PAIRED, {"microbatches": 2}, "has pairs along B", "--microbatches 1"),
    (("mamba2", "rwkv7"), {"cp": 8, "cp_mode": "ulysses"}, "does not divide", "choose cp among"),
    (("jamba",), {"tp": 8}, "does not divide", "tp"),
)


@pytest.mark.parametrize(
    ("model_type", "options", "message", "remedy"),
    [
        pytest.param(name, *rest, id=f"{name}-{number}", marks=EXHAUSTIVE if place else ())
        for number, (names, *rest) in enumerate(REFUSED)
        for place, name in enumerate(names)
    ],
)
def test_what_makes_no_sense_is_refused(
    model_type: str, options: dict[str, Any], message: str, remedy: str, file_of: Any
) -> None:
    with pytest.raises(DiagnosticError) as caught:
        _module(file_of(model_type), PLACED, **options)
    (first, *_) = caught.value.diagnostics
    assert message in first.message
    assert remedy in (first.remedy or "")
