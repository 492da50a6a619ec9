"""Steps of small models of families, beside what PyTorch 2.14.1 with transformers 5.24.0 held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import stagec

#: Recorded under fake tensors, as tools/torch_memory does, with one function in the place of fused
#: attention, where its result lies as queries with PyTorch's own for CPUs: a configuration, flags
#: beside the stack, and bytes by category.
ROWS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data/torch_families.json").read_text()
)

#: Llama 3 as torchtitan compiles it, by Inductor for CPUs, with kernels that compute nothing: sizes
#: of the whole batch, flags beside the stack, and bytes by category.
COMPILED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data/torch_compiled.json").read_text()
)


def _title(row: dict[str, Any]) -> str:
    return " ".join([row["config"]["model_type"], *row["flags"].values()])


def _compiled_title(row: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in row["flags"].items())


@pytest.mark.parametrize("row", ROWS, ids=_title)
def test_what_model_code_keeps_is_met(row: dict[str, Any], tmp_path: Path) -> None:
    """After forward, at the peak and after the update; within what counters and tokens are."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(row["config"]))
    sizes = f"B={row['sequences']},S={row['tokens']}"
    flags = [text for name, value in row["flags"].items() for text in _flag(name, value)]
    given = ["--stack", "huggingface", "--recompute", "none", *flags, "--set", sizes, "--json"]
    _check(row, "memory", str(path), *given)


@pytest.mark.parametrize("row", COMPILED, ids=_compiled_title)
def test_what_inductor_allocates_is_met(row: dict[str, Any]) -> None:
    """With and without checkpoints and FSDP2: logits in bf16, repeated keys, buffers reused."""
    sizes = ",".join(f"{name}={size}" for name, size in row["sizes"].items())
    flags = [text for name, value in row["flags"].items() for text in _flag(name, value)]
    given = ["--stack", "torchtitan-compiled", *flags, "--set", sizes, "--json"]
    _check(row, "memory", "llama3-8b", *given)


def _check(row: dict[str, Any], *command: str) -> None:
    actual = json.loads(stagec(*command).out)["classes"][0]["moments"]
    for moment in ("after_forward", "peak", "after_update"):
        expected = row[moment]
        assert actual[moment]["total"] == pytest.approx(sum(expected.values()), rel=0.0025)
        activations = actual[moment]["by"]["activations"]
        if moment != "after_update":
            assert activations == pytest.approx(expected["activations"], rel=0.005)


def _flag(name: str, value: str) -> list[str]:
    return [f"--{name}"] if value == "on" else [f"--{name}", value]
