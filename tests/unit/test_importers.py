"""Texts from configurations: their figures are those of the models, to the unit; whatever keys a
family has, the text is sound and compiles."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.importers.importing import import_model
from stagec.importers.registry import BUILT_IN
from stagec.ir.expr import evaluate
from stagec.ir.loads import planned_env
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.configurations import import_configuration
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.support.source import Source
from stagec.text.printer import print_module
from tests.configurations import FEATURED, configurations
from tests.support import analyse, counted, examples, parse, run_passes, stagec

DATA = Path(__file__).parents[1] / "data"
FIGURES: dict[str, Any] = json.loads((DATA / "models.json").read_text())
CONFIGS = {path.stem: path for path in sorted((DATA / "configs").glob("*.json"))}
KNOWN = {name for family in BUILT_IN for name in (*family.model_types, *family.marks)}


def _read(name: str) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads(CONFIGS[name].read_text())
    return actual


READ = [n for n in CONFIGS if (_read(n).get("model_type") or _read(n)["_class_name"]) in KNOWN]


def _sizes(name: str) -> dict[str, int]:
    """Those of the figures; a sequence as the configuration has it where they name none."""
    length = FIGURES[name]["flops_fwd"].get("S")
    return {"B": 1} if length is None else {"B": 1, "S": length}


#: Models that stand for the others in `make test`.
SOME = (
    "deepseek-v2-lite",
    "gemma-2-9b",
    "gpt2",
    "llama-3.2-1b",
    "mamba2-2.7b",
    "vit-base-patch16-224",
)


def _rows(names: list[str]) -> list[Any]:
    return [pytest.param(n, marks=() if n in SOME else pytest.mark.exhaustive) for n in names]


@pytest.mark.parametrize("name", _rows(READ))
def test_figures_are_those_of_the_model(name: str) -> None:
    """Parameters, and forward FLOPs of products with masks ignored, as PyTorch counts them."""
    expected = FIGURES[name]
    actual = analyse(str(CONFIGS[name]), sizes=_sizes(name))
    (stage,) = actual["classes"]
    assert actual["parameters"] == expected["params"]
    assert stage["matmul_flops"]["forward"] == expected["flops_fwd"]["total_dense"]


@pytest.mark.parametrize(
    "name", _rows([n for n in READ if "total_causal" in FIGURES[n]["flops_fwd"]])
)
def test_executed_products_are_those_of_the_pairs_seen(name: str) -> None:
    """Forward, masks counted: causal ones, windows, blocks, selected keys."""
    expected = FIGURES[name]["flops_fwd"]
    module = JobBuilder(JobOptions(str(CONFIGS[name]), sizes=_sizes(name))).lower()
    counts = counted(module)
    actual = evaluate(counts.matmul_executed["forward"], planned_env(module))
    assert actual == expected["total_causal"]


@pytest.mark.parametrize("name", ["gemma-3-4b-it", "llama-4-scout"])
def test_the_text_model_alone(name: str, tmp_path: Path) -> None:
    """The configuration inside of that with a tower is that of a model with the same products."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_read(name)["text_config"]))
    actual = analyse(str(path), sizes={"B": 1, "S": 4096})
    assert actual["parameters"] < FIGURES[name]["params"]
    (stage,) = actual["classes"]
    assert stage["matmul_flops"]["forward"] == FIGURES[name]["flops_fwd"]["total_dense"]


@pytest.mark.parametrize("name", READ)
def test_a_second_import_of_a_file_is_the_same_text(name: str) -> None:
    assert (
        import_configuration(str(CONFIGS[name]), Session()).text
        == import_configuration(str(CONFIGS[name]), Session()).text
    )


# -- random configurations


@pytest.mark.parametrize("model_type", FEATURED)
@examples(12)
@given(data=st.data())
def test_a_random_configuration_is_a_sound_text(model_type: str, data: st.DataObject) -> None:
    """It parses, its blocks open, its shapes and placements verify, and printing it changes
    nothing."""
    config = data.draw(configurations(model_type))
    text = import_model(Source("config.json", json.dumps(config)), BUILT_IN).text()
    module = parse(text)
    assert print_module(parse(print_module(module))) == print_module(module)
    run_passes(module, "inline,infer-shapes")
    assert not [op for op in module.walk() if op.name in ("stg.call", "stg.param")]


OPTIONS = st.fixed_dictionaries(
    {
        "--dp": st.sampled_from((1, 2)),
        "--tp": st.sampled_from((1, 2, 4)),
        "--pp": st.sampled_from((1, 2)),
        "--zero": st.sampled_from((0, 1, 3)),
        "--recompute": st.sampled_from(("none", "full")),
    }
)


@pytest.mark.parametrize("model_type", FEATURED)
@examples(3)
@given(data=st.data())
def test_a_random_configuration_compiles_and_checks(model_type: str, data: st.DataObject) -> None:
    config, options = data.draw(configurations(model_type)), data.draw(OPTIONS)
    with TemporaryDirectory() as folder:
        path, out = Path(folder) / "model.json", Path(folder) / "traces"
        path.write_text(json.dumps(config))
        words = [str(word) for pair in options.items() for word in pair]
        microbatches = 2 if int(str(options["--pp"])) > 1 else 1
        symbols = import_model(Source("config.json", json.dumps(config)), BUILT_IN).symbols
        length = min(32, config.get("max_position_embeddings", 32))
        sizes = f"B=8,S={length}" if "S" in symbols else "B=8"
        more = ["--microbatches", str(microbatches), "--set", sizes, "-o", str(out)]
        if options["--zero"]:  # in some small models no dimension of a table divides
            more += ["--shard-padding", "dim0"]
        made = stagec("compile", str(path), *words, *more)
        assert made.code == 0, made.err
        assert stagec("check", str(out)).code == 0
