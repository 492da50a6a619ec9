"""`stagec time`: its JSON against the schema, what adds up, and measured values that win."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stagec.driver.cli import main
from tests.support import LONG, stagec

ROOT = Path(__file__).resolve().parents[2]
SCHEMA: dict[str, Any] = json.loads((ROOT / "stagec/answers/time.schema.json").read_text("utf-8"))
LLAMA = "llama3-8b --set L=2,S=512 --machine h100-sxm"
JOBS = (
    LLAMA,
    f"{LLAMA} --dp 2 --tp 2 --sp --zero 3",
    f"{LLAMA} --pp 2 --microbatches 4 --no-overlap",
    "docs/examples/product.stg --machine a100-80g",
)


def timed(job: str) -> dict[str, Any]:
    """The object that is printed for a job."""
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()) as stdout:
        assert main(["time", *job.split(), "--json"]) == 0
    actual: dict[str, Any] = json.loads(stdout.getvalue())
    return actual


@pytest.mark.parametrize("job", JOBS)
def test_the_object_is_that_of_the_schema(job: str) -> None:
    actual = timed(job)
    validator: Any = jsonschema.Draft202012Validator(SCHEMA)
    validator.validate(actual)
    step = actual["step_seconds"]
    for entry in (actual, *actual["classes"]):
        assert sum(entry["breakdown"].values()) == pytest.approx(step, rel=1e-12)
    assert sum(link["seconds"] for link in actual["critical_path"]) == pytest.approx(
        step, rel=1e-12
    )
    assert max(each["seconds"] for each in actual["classes"]) == step
    could = actual["ranks"] * actual["peak_flops"] * step
    assert actual["hfu"] == actual["executed_flops"] / could
    assert actual["mfu"] == actual["model_flops"] / could
    if actual["tokens"] is not None:
        assert actual["tokens_per_second"] == actual["tokens"] / step


@pytest.mark.parametrize(("model", "tokens"), [("dlrm", None), ("llama3-8b", 8 * 8192)])
def test_tokens_are_those_of_sequences(model: str, tokens: int | None) -> None:
    """Rows of tables that a sample looks up are no tokens."""
    layers = ",L=1" if tokens else ""
    actual = timed(f"{model} --machine h100-sxm --no-levers --set B=8{layers}")
    assert actual["tokens"] == tokens


def test_distances_of_patches_are_no_tokens(tmp_path: Path) -> None:
    """A table of whole numbers of two dimensions is an input, of all images together."""
    config = {"model_type": "beit", "num_hidden_layers": 1, "use_relative_position_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert timed(f"{tmp_path} --machine h100-sxm --no-levers --set B=8")["tokens"] is None


@pytest.mark.parametrize("stack", ["ideal", "sglang", "vllm"])
def test_the_critical_path_adds_up_to_a_step_of_serving(stack: str) -> None:
    """With the time for which devices wait for the scheduler, as the breakdown has it."""
    words = "--serve", "decode", "--batch", "1", "--context", "8", "--set", "L=1", "--stack", stack
    ran = stagec("time", "llama3-8b", *words, "--machine", "h100-sxm", "--no-levers", "--json")
    step = json.loads(ran.out)
    path = sum(part["seconds"] for part in step["critical_path"])
    assert (
        path
        == pytest.approx(step["step_seconds"])
        == pytest.approx(sum(step["breakdown"].values()))
    )
    waits = [p["seconds"] for p in step["critical_path"] if p["part"] == "scheduler"]
    assert sum(waits) == pytest.approx(step["breakdown"].get("scheduler", 0))


SMALL_STEP = "gpt2", "--machine", "h100-sxm", "--no-levers", "--set", "L=2,B=1"


def test_a_step_beyond_its_threshold_exits_with_1() -> None:
    """For estimates that a CI job runs; the answer is printed all the same."""
    words = *SMALL_STEP, "--within"
    kept, late = stagec("time", *words, "10s"), stagec("time", *words, "1ms")
    assert (kept.code, late.code) == (0, 1)
    assert kept.out == late.out
    assert not kept.err
    assert "more than --within 1.00 ms" in late.err
    sweep = stagec("time", *words, "1ms", "--sweep", "tp=1,2")
    assert sweep.code == 1
    assert "--within is for one step of one job" in sweep.err


def test_a_remark_on_the_pipeline_is_made_once(tmp_path: Path) -> None:
    """The step and its memory are planned by one pipeline."""
    file = tmp_path / "m.stg"
    text = "stg.module @m {{ stg.symbols[B=4] stg.func @f(%x: bf16[B]) {{\n{}\n}} }}"
    file.write_text(text.format("%y = stg.gelu(%x)\nstg.return(%y)"), encoding="utf-8")
    ran = stagec("time", file, "--machine", "h100-sxm")
    assert ran.err.count("only the forward pass is compiled") == 1


def test_a_step_that_hosts_hold_up_says_so() -> None:
    """Of small work, on a machine whose hosts are known to be slow; not of large."""
    words = "--machine", "h100-sxm", "--no-levers", "--set", "L=2,B=1"
    expected = [stagec("time", model, *words).out for model in ("gpt2", "llama3-8b")]
    assert ["Hosts hold this step up" in text for text in expected] == [True, False]
    assert "--host-issue states" in expected[0]


@pytest.mark.parametrize(
    ("more", "warned"),
    [
        ("", True),
        ("--host-graphs", False),
        ("--serve decode --batch 2 --context 8", False),
        ("--serve prefill --batch 2 --prompt 8 --stack vllm", True),
    ],
)
def test_graphs_that_no_host_launches_are_not_left_out(more: str, warned: bool) -> None:
    words = "--machine", "h100-sxm", "--set", "L=1", "--no-graphs", *more.split()
    compiled = "compile", "--dry-run", "--format"
    for command in (("time", "--no-levers"), ("time", "--sweep", "tp=1"), (*compiled, "perfetto")):
        ran = stagec(*command, "llama3-8b", *words)
        assert ran.code == 0
        said = ran.err + ran.out.replace("\n", " ")
        assert ("--no-graphs has no effect" in said) == warned, command
    assert "no effect on chakra" in stagec(*compiled, "chakra", "llama3-8b", *words).err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--requests poisson:rate=25,count=2,prompt=20,output=4", "no effect on chakra"),
        ("--steps 2 --step decode=2x8 --machine h100-sxm", "no effect on chakra"),
        ("--requests poisson:rate=25,count=2,prompt=20,output=4 --machine h100-sxm", ""),
    ],
)
def test_graphs_of_steps_matter_where_their_times_do(more: str, says: str) -> None:
    words = "--serve", "mixed", "--set", "L=1", "--no-graphs", "--dry-run", *more.split()
    said = stagec("compile", "llama3-8b", *words).err
    assert says in said if says else "--no-graphs" not in said
    pictured = stagec("compile", "llama3-8b", *words, "--format", "perfetto")
    assert (pictured.code, "--steps and --requests compile several" in pictured.err) == (1, True)


@LONG
@pytest.mark.parametrize("more", ["--step-tokens 64", "--prompt-steps alone", "--stack vllm"])
@pytest.mark.parametrize(
    "command",
    [
        *("time --machine h100-sxm --no-levers", "time --machine h100-sxm --sweep tp=1"),
        *("analyze", "analyze --sweep tp=1", "memory", "compile --dry-run"),
    ],
)
def test_flags_of_a_scheduler_do_not_change_one_step(command: str, more: str) -> None:
    """What a stack says is no flag that was given."""
    words = "--set", "L=1", "--serve", "decode", "--batch", "2", "--context", "8"
    ran = stagec(*command.split(), "llama3-8b", *words, *more.split())
    said = ran.err + ran.out.replace("\n", " ")
    assert ("has no effect on one step" in said) == (more != "--stack vllm")


@pytest.mark.parametrize(("ranks", "expected"), [("1", True), ("2", False)])
def test_attention_that_stays_a_kernel_is_not_called_math(ranks: str, expected: bool) -> None:
    """It stays one where ranks split its sequence, which a remark says."""
    words = "--set", "L=1,S=1024", "--cp", ranks, "--attention", "math", "--no-levers"
    ran = stagec("time", "llama3-8b", "--machine", "h100-sxm", *words)
    assert ("attention: math" in ran.out) == expected
    assert ("changes nothing" in ran.err) != expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--machine", "h200"], ""),
        (["--machine", "mi300x"], "remark: mi300x has defaults for attention, memory"),
        (["--machine", "h200", "--sweep", "machine=h200,tpu-v5p"], "[1] tpu-v5p has defaults"),
    ],
)
def test_a_machine_that_was_not_measured_is_remarked_on(more: list[str], expected: str) -> None:
    """Its kernels are at their best, and in a step none is."""
    ran = stagec("time", "llama3-8b", "--set", "L=1", *more)
    assert ran.code == 0
    assert expected in ran.err + ran.out
    assert bool(ran.err) == expected.startswith("remark")


def test_utilizations_of_a_machine_without_matrix_units_for_16_bits(tmp_path: Path) -> None:
    """They count by the rate that products have there."""
    text = (ROOT / "stagec/machines/h100-sxm.toml").read_text()
    begin, end = text.index("[compute.matrix]"), text.index("[memory]")
    rates = '[compute.matrix]\nf8e4m3 = { value = "2 PFLOP/s", source = "own" }\n'
    rates += '[compute.vector]\nbf16 = { value = "100 TFLOP/s", source = "own" }\n'
    rates += 'f32 = { value = "50 TFLOP/s", source = "own" }\n'
    file = tmp_path / "mine.toml"
    file.write_text(text[:begin] + rates + text[end:])
    actual = timed(f"llama3-8b --set L=2 --machine {file} --no-levers")
    assert actual["peak_flops"] == 100e12
    assert 0 < actual["hfu"] < 1


def test_levers_are_never_slower() -> None:
    """Twice a rate, or a time that is gone, makes no step slower: a step waits for fewer things."""
    actual = timed(f"{LLAMA} --pp 2 --tp 2 --dp 2 --microbatches 4 --levers")
    assert len(actual["levers"]) == 7
    for lever in actual["levers"]:
        assert lever["step_seconds"] <= actual["step_seconds"]
        assert lever["speedup"] == actual["step_seconds"] / lever["step_seconds"]


@pytest.mark.parametrize(
    ("flags", "lever"),
    [
        ("--offload activations", "2 x host link"),
        ("--offload optimizer --offload-update host", "2 x host memory bandwidth"),
    ],
)
def test_a_better_host_helps_a_step_that_waits_for_it(flags: str, lever: str) -> None:
    actual = timed(f"llama3-8b --set L=4,B=2 --machine h100-sxm {flags} --levers")
    assert {each["name"]: each["speedup"] for each in actual["levers"]}[lever] > 1.02


def test_without_overlap_a_step_is_longer() -> None:
    job = f"{LLAMA} --dp 4 --zero 3 --no-levers"
    assert timed(f"{job} --no-overlap")["step_seconds"] > timed(job)["step_seconds"]


def test_what_was_measured_wins(tmp_path: Path) -> None:
    """A gather that was measured to take a second takes a second; the others are modelled."""
    job = f"{LLAMA} --tp 2 --sp --no-levers"
    modelled = timed(job)
    size = 512 * 4096 * 2
    table = tmp_path / "table.csv"
    table.write_text(f"kind,extents,microseconds\nall_gather,2x{size},1000000\n")
    actual = timed(f"{job} --measured {table}")
    assert modelled["found"]["matched"] == 0
    assert actual["found"]["matched"] == 1
    gathers = 2 * (2 * 2 + 1)  # of a layer two in forward, two in backward, and those of the ends
    assert actual["step_seconds"] - modelled["step_seconds"] >= gathers * 0.99


def test_fusion_makes_a_step_shorter() -> None:
    plain = timed(f"{LLAMA} --no-levers")
    fused = timed(f"{LLAMA} --no-levers --fusion elementwise")
    assert fused["step_seconds"] < plain["step_seconds"]
    assert fused["executed_flops"] == plain["executed_flops"]


def test_a_step_does_not_depend_on_the_plan_of_its_memory() -> None:
    """A pass that is shown is not left out."""
    job = f"{LLAMA} --dp 2 --zero 1"
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        planned = timed(f"{job} --print-after plan-memory")
    assert "stg.memory[" in shown.getvalue()
    assert timed(job) == planned
