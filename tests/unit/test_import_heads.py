"""The key `architectures` says what stands behind the layers: words, classes, or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.importers.importing import import_model
from stagec.importers.registry import BUILT_IN
from stagec.interp.pipeline import run_named
from stagec.ir.module import Module
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.support.diagnostics import DiagnosticError
from stagec.support.source import Source
from tests.configurations import small
from tests.support import STEP, analyse, inputs_of, run_passes

B, S, D, V = 2, 8, 32, 32
#: Families of each way to a head: the common one, without attention, of shared blocks.
DECODERS = ("llama", "gpt2", "gemma2", "zamba2")


def text_of(model_type: str, *architectures: str, **keys: Any) -> str:
    """The text of a small configuration with these architectures."""
    config = small(model_type, architectures=list(architectures), **keys)
    return import_model(Source("config.json", json.dumps(config)), BUILT_IN).text()


def file_of(folder: Path, model_type: str, *architectures: str, **keys: Any) -> Path:
    """The same as a file."""
    path = folder / f"{model_type}.stg"
    path.write_text(text_of(model_type, *architectures, **keys))
    return path


def figures(path: Path) -> tuple[int, int]:
    """Parameters, and FLOPs of products in forward."""
    actual = analyse(str(path), sizes={"B": B, "S": S})
    return actual["parameters"], actual["matmul_flops"]["forward"]


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_head_of_classes_replaces_that_of_words(model_type: str, tmp_path: Path) -> None:
    """Scores of all tokens count, as the reference computes them; those of words do not."""
    keys: dict[str, Any] = {"tie_word_embeddings": False, "num_labels": 3}
    width = small(model_type)["hidden_size"]
    vocabulary = small(model_type)["vocab_size"]
    (tmp_path / "words").mkdir()
    words = figures(file_of(tmp_path / "words", model_type, "XForCausalLM", **keys))
    for number, (head, bias) in enumerate(
        [("SequenceClassification", 0), ("TokenClassification", 3)]
    ):
        (tmp_path / str(number)).mkdir()
        actual = figures(file_of(tmp_path / str(number), model_type, f"XFor{head}", **keys))
        assert words[0] - actual[0] == width * (vocabulary - 3) - bias
        assert words[1] - actual[1] == 2 * B * S * width * (vocabulary - 3)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "ChatGLMModel"])
def test_language_models_are_read_as_before(name: str) -> None:
    assert text_of("llama", name) == text_of("llama")


def test_labels_are_counted_by_their_names() -> None:
    names = {str(i): f"LABEL_{i}" for i in range(5)}
    text = text_of("llama", "LlamaForSequenceClassification", id2label=names)
    assert "N_classes = 5," in text
    assert "%labels: i32[B])" in text


@pytest.mark.parametrize(
    ("model_type", "name", "expected"),
    [
        ("llama", "LlamaForQuestionAnswering", "SequenceClassification"),
        ("mamba2", "XForMultipleChoice", "CausalLM"),
        ("t5", "T5EncoderModel", "ConditionalGeneration"),
        ("bart", "BartForSequenceClassification", "ConditionalGeneration"),
        ("whisper", "WhisperForAudioClassification", "ConditionalGeneration"),
    ],
)
def test_other_heads_are_refused(model_type: str, name: str, expected: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        text_of(model_type, name)
    (actual,) = caught.value.diagnostics
    assert f"'{name}'" in actual.message
    assert expected in actual.message
    assert actual.remedy is not None
    assert "--ignore-key architectures" in actual.remedy


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2, "sp": True, "cp": 2},
        {"cp": 2, "cp_mode": "ulysses", "zero": 3},
        {"pp": 2, "schedule": "zbv", "chunks": 2, "microbatches": 2, "tp": 2, "sp": True},
    ],
)
def test_split_classes_equal_those_on_one_device(
    head: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The last token stands on one rank only; in the order of a zigzag it is the first one's."""
    path = file_of(tmp_path, "llama", f"LlamaFor{head}", num_labels=4)

    def module(pipeline: str, **given: Any) -> Module:
        builder = JobBuilder(JobOptions(str(path), sizes={"B": 8, "S": 16}, **given))
        return run_passes(builder.module, pipeline)

    plain = module(STEP)
    inputs = inputs_of(plain, 3)
    expected = run_named(plain, plain.env, inputs)
    placed = module(f"{STEP},partition,stages,units,plan", **options)
    actual = run_named(placed, placed.env, inputs)
    assert len(actual) == len(expected)
    (loss, *rest), (expected_loss, *_) = actual, expected
    np.testing.assert_allclose(actual[loss], expected[expected_loss], rtol=1e-10)
    for name in rest:
        theirs = expected[name.removesuffix("_g")]  # gathered
        np.testing.assert_allclose(actual[name], theirs, rtol=1e-8, atol=1e-9, err_msg=name)
