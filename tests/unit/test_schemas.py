"""The published schemas of answers: outputs have them, and others do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import click
import jsonschema
import pytest

from stagec.driver import cli
from stagec.output.report import Report
from stagec.validation.answer import FiguresAnswer, MemoryAnswer, ServersAnswer, StepsAnswer
from stagec.validation.bytes import BytesError
from stagec.validation.errors import StepError, summaries
from stagec.validation.figures import PublishedRow
from stagec.validation.measured_servers import MeasuredServer, ServerError, server_summaries
from stagec.validation.steps import MeasuredStep
from tests.support import assert_schema, schema_of, stagec

FOLDER = Path(__file__).resolve().parents[2] / "stagec" / "answers"
SIZES = ("--set", "L=2,S=256,D=256,F=512,V=1024,H=8,G=4,K=32,B=16")
SERVED = ("--set", "L=2,D=256,F=512,V=1024,H=8,G=4,K=32")
JOB, SERVER = ("llama3-8b", *SIZES), ("llama3-8b", *SERVED)
H100 = ("--machine", "h100-sxm")
PODS = ("--serve", "disaggregated", "--prompt", "32", "--prefill", "tp=2", "--decode", "tp=1")
SPACE = ("--ranks", "2", "--pp", "1", "--cp", "1", "--zero", "1", "--jobs", "1", "--no-cache")
WHISPER, PART = ("whisper-large-v3", "--set", "B=4,L=1,L_dec=1"), ("--part", "encoder=e: dp=2")
_LIMITED = ("--prompt", "64", "--batches", "1", "--tpot", "1us")
_LENGTHS = ("--lengths", "prompt=~40,output=9")
_STACK = ("--stack", "nemo")
_PRICED = ("--price", "2,1", "--objective", "cost")
_DRAFT = ("--speculative", "2", "--draft", "llama3-8b[L=1,D=64,F=64,V=1024,H=4,G=4,K=32]: on=model")
_DECODE = ("--serve", "decode", "--batch", "4", "--context", "64")
_STEPS = (*SPACE[:6], "--serve", "decode", "--batch", "4,8", "--context", "64")
_SERVERS = (
    *("--serve", "server", "--ranks", "2", "--prompt", "64", "--output-tokens", "8"),
    *("--batch", "4", "--tp", "1", "--stack", "vllm", "--verify", "1", "--jobs", "1"),
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "analyze": ("analyze", *JOB, "--stack", "deepspeed", "--dp", "2"),
    "analyze a step of serving": ("analyze", *SERVER, *_DECODE, "--tp", "2", *H100),
    "analyze, sizes open": ("analyze", *SERVER, *_DECODE, "--symbolic"),
    "analyze stages with one table": ("analyze", "gpt2", "--set", "B=4,L=2,S=64", "--pp", "2"),
    "analyze pods": ("analyze", *SERVER, *PODS, "--batch", "4"),
    "analyze parts": ("analyze", *WHISPER, *PART),
    "analyze two models": ("analyze", *SERVER, *_DECODE, *_DRAFT),
    "time": ("time", *JOB, "--pp", "2", *_STACK, *H100),
    "time of two models": ("time", *SERVER, *_DECODE, *_DRAFT, "--accepted", "1.5", *H100),
    "time of prefill": ("time", *SERVER, "--serve", "prefill", *_DECODE[2:], *H100),
    "time of a step of serving": ("time", *SERVER, *_DECODE, "--stack", "vllm", *H100),
    "time of drafts": ("time", *SERVER, *_DECODE, "--speculative", "2", "--accepted", "1", *H100),
    "time of pods": ("time", *SERVER, *PODS, "--batch", "4", *H100),
    "time of parts": ("time", *WHISPER, *PART, *H100),
    "memory": ("memory", *JOB, "--tp", "2"),
    "memory of stages": ("memory", *JOB, "--pp", "2", "--limit", "80GiB", "--fit", "caching"),
    "memory with advice": ("memory", *JOB, "--dp", "2", "--limit", "20MB", "--advise"),
    "memory on hosts": ("memory", *JOB, "--dp", "2", "--offload", "optimizer"),
    "memory of pods": ("memory", *SERVER, *PODS, "--batch", "4"),
    "memory of two models": (
        *("memory", *SERVER, "--serve", "decode", "--batch", "4", "--context", "64", *_DRAFT),
    ),
    "serve": ("serve", *SERVER, "--prompt", "64", "--batches", "1,2", *H100),
    "serve of pods": ("serve", *SERVER, *PODS, "--batches", "1,2", *H100),
    "requests over time": ("serve", *SERVER, "--rate", "9", "--count", "5", *_LENGTHS, *H100),
    "requests to pods": (
        *("serve", *SERVER, *PODS, "--concurrency", "2", "--count", "4", "--tpot", "1us", *H100),
    ),
    "requests to replicas that come and go": (
        *("serve", *SERVER, "--rate", "90", "--count", "9", *_LENGTHS, *H100),
        *("--autoscale", "1..2", "--mtbf", "30ms", "--price", "2"),
    ),
    "serve within limits": ("serve", *SERVER, *_LIMITED, "--machine", "mi300x"),
    "search": ("search", *JOB, *SPACE, *H100),
    "search, all of it": ("search", *JOB, *SPACE, *H100, "--sensitivity", "--neighbours"),
    "search for a front": ("search", *JOB, *SPACE, *H100, "--pareto", "time,memory", *_STACK),
    "searches": ("search", *JOB, *SPACE, "--machine", "h100-sxm,a100", *_PRICED),
    "search of steps": ("search", *SERVER, *_STEPS, "--jobs", "1", "--no-cache", *H100),
    "search of pods": ("search", *WHISPER, *PART, *SPACE, *H100, "--neighbours", "--sensitivity"),
    "sweep of pods": ("memory", *SERVER, *PODS, "--batch", "4", "--sweep", "tp=1,2"),
    "servers": ("search", *SERVER, *_SERVERS, "--emit-run", "vllm", *H100),
    "servers that do not run": (
        *("search", *SERVER, *_SERVERS, "--pp", "2", "--price", "2", *H100),
    ),
    "search that finds nothing": ("search", "llama3-70b", *SPACE, *H100, "--set", "B=8"),
    "machines": ("machines",),
    "machines, one of them": ("machines", "tpu-v5p"),
    "models": ("models",),
    "presets": ("presets",),
    "stacks": ("stacks",),
    "schedule, all of them": ("schedule",),
    "schedule": ("schedule", "1f1b", "--stages", "2", "--microbatches", "3"),
    "schedule with fractions": (
        *("schedule", "zbv", "--stages", "2", "--microbatches", "3", "--costs", "F=1/3,B=2,W=0.5"),
        *("--transfer", "1/7"),
    ),
    "passes": ("passes",),
    "passes, a pipeline": ("passes", "place"),
    "ops": ("ops",),
    "ops, one of them": ("ops", "einsum"),
    "doctor": ("doctor",),
}
#: Schemas of what a command prints for other questions.
OTHERS = {"requests": "serve", "servers": "search", "sweep": "time"}


def test_each_command_with_json_has_a_schema_and_no_other() -> None:
    names = sorted(path.name.partition(".")[0] for path in FOLDER.glob("*.schema.json"))
    assert names == sorted({*OTHERS, *filter(_has_json, cli.COMMANDS)})
    for name in names:
        jsonschema.Draft202012Validator.check_schema(schema_of(name).schema)


def _has_json(name: str) -> bool:
    command = cli.cli.get_command(click.Context(cli.cli), name)
    return command is not None and any("--json" in each.opts for each in command.params)


@pytest.mark.parametrize("name", COMMANDS)
def test_outputs_have_it(name: str) -> None:
    words = COMMANDS[name]
    ran = stagec(*words, "--json")
    actual = json.loads(ran.out)
    first = name.partition(" ")[0]
    assert_schema(first if first in OTHERS else words[0], actual)


def test_checks_and_differences_have_it(tmp_path: Path) -> None:
    for folder, flags in (("a", ()), ("b", ("--sp",))):
        assert stagec("compile", *JOB, "--tp", "2", *flags, "-o", tmp_path / folder).code == 0
    outputs = [
        ("check", stagec("check", tmp_path / "a", "--json")),
        ("diff", stagec("diff", tmp_path / "a", tmp_path / "a", "--json")),
        ("diff", stagec("diff", tmp_path / "a", tmp_path / "b", "--json")),
    ]
    (tmp_path / "a" / "llama3-8b.1.et").unlink()
    outputs.append(("check", stagec("check", tmp_path / "a", "--json")))
    for name, ran in outputs:
        assert_schema(name, json.loads(ran.out))
    assert json.loads(outputs[-1][1].out)["errors"]


def test_lines_of_show_have_it(tmp_path: Path) -> None:
    assert stagec("compile", *JOB, "--pp", "2", "-o", tmp_path / "a").code == 0
    lines = stagec("show", tmp_path / "a" / "llama3-8b.0.et", "--all", "--json").out.splitlines()
    nodes = [json.loads(line) for line in lines]
    assert {"comp", "send"} <= {node["kind"] for node in nodes}
    for node in nodes:
        assert_schema("show", node)


def test_rows_of_validate_have_it() -> None:
    step = MeasuredStep("source", "row", 1.0, 8, "h100-sxm", "llama3-8b", {"B": 8}, {"tp": 2})
    server = MeasuredServer(
        *("source", "row", 0.1, 0.01, "h200", "llama3-8b"),
        *(4, 128, 1, 1.0, {"L": 2}, {"tp": 2, "stack": "vllm"}),
    )
    steps = [StepError(step, 1.1), StepError(step, "no such mesh")]
    servers = [ServerError(server, (0.1, 0.02)), ServerError(server, "no such mesh")]
    kept = [("total", 10, 11, 0.1), ("buffers", 1, 2, None)]
    answers: list[Report] = [
        FiguresAnswer([PublishedRow("source", "row", "1", "2", ok=False)]),
        StepsAnswer(steps, summaries(steps)),
        ServersAnswer(servers, server_summaries(servers)),
        MemoryAnswer([BytesError("source", "row", "peak", *each) for each in kept]),
    ]
    for answer in answers:
        actual = answer.as_json()
        assert_schema("validate", actual)
        next(objects(actual)).popitem()
        assert not schema_of("validate").is_valid(actual)


@pytest.mark.parametrize("name", ["memory", "serve", "doctor", "schedule", "machines, one of them"])
def test_other_outputs_do_not_have_it(name: str) -> None:
    """Without any one of its fields an output is refused, and with one more, at every depth."""
    actual = json.loads(stagec(*COMMANDS[name], "--json").out)
    check = schema_of(COMMANDS[name][0])
    wrong = 0
    for inner in objects(actual):
        for key in [*inner]:
            value = inner.pop(key)
            wrong += not check.is_valid(actual)
            inner[key] = value
        inner["another"] = 1
        wrong += not check.is_valid(actual)
        del inner["another"]
    assert check.is_valid(actual)
    assert wrong > 20


def objects(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield cast("dict[str, Any]", value)
        yield from objects(list(cast("dict[str, Any]", value).values()))
    elif isinstance(value, list):
        for inner in cast("list[object]", value):
            yield from objects(inner)
