"""The JSON schema of `stagec analyze --json` against what the command prints."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest

from stagec.driver.cli import main

ROOT = Path(__file__).resolve().parents[2]
SCHEMA: dict[str, Any] = json.loads(
    (ROOT / "stagec" / "answers" / "analyze.schema.json").read_text(encoding="utf-8")
)
LAYER = "docs/examples/layer.stg"
LLAMA = "llama3-8b --set L=2"
JOBS = (
    LLAMA,
    f"{LLAMA} --dp 2 --tp 2 --sp --zero 3",
    f"{LLAMA} --dp 4 --ddp-bucket 26214400 --microbatches 2",
    LAYER,
)
OPEN_JOBS = (
    f"{LLAMA} --mesh dp,tp --sp --zero 3 --symbolic",
    f"{LLAMA} --mesh dp=4 --ddp-bucket 26214400 --symbolic",
)


@cache
def printed_text(job: str) -> str:
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()) as stdout:
        assert main(["analyze", *job.split(), "--json"]) == 0
    return stdout.getvalue()


def analyze(job: str) -> dict[str, Any]:
    """What `stagec analyze JOB --json` prints."""
    printed: dict[str, Any] = json.loads(printed_text(job))
    return printed


def validate(printed: Mapping[str, Any]) -> None:
    validator: Any = jsonschema.Draft202012Validator(SCHEMA)
    validator.validate(printed)


def inner(value: object) -> Iterator[object]:
    """A value and everything inside it."""
    yield value
    if isinstance(value, dict):
        children = list(cast("dict[str, object]", value).values())
    else:
        children = cast("list[object]", value) if isinstance(value, list) else []
    for child in children:
        yield from inner(child)


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


#: What only some jobs have: those of serving, pods, buckets of gradients; pods lack `repeated`.
SOME = {"serving", "caches", "communication", "repeated", "handover", "crossings"}


def test_every_object_of_the_schema_is_closed_and_complete() -> None:
    for value in inner(SCHEMA):
        schema = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        if schema.get("type") == "object" and "properties" in schema:
            assert schema["additionalProperties"] is False
            assert sorted(schema["required"]) == sorted({*schema["properties"]} - SOME)


@pytest.mark.parametrize("job", JOBS)
def test_numbers(job: str) -> None:
    printed = analyze(job)
    validate(printed)
    assert type(printed["parameters"]) is int
    printed["repeated"].clear()  # shares
    assert not [v for v in inner(printed) if isinstance(v, float)]


@pytest.mark.parametrize("job", OPEN_JOBS)
def test_expressions(job: str) -> None:
    printed = analyze(job)
    validate(printed)
    assert type(printed["parameters"]) is str
    printed["mesh"].clear()  # sizes that are known stay numbers
    printed["repeated"].clear()
    printed["classes"][0]["worst"] = None
    assert [v for v in inner(printed) if type(v) is int] == [1, 0]  # schema, example_rank


_BREAKS: Mapping[str, Callable[[dict[str, Any]], object]] = {
    "a missing field": lambda o: o["classes"][0].pop("memory"),
    "an unknown field": lambda o: o.update(extra=1),
    "a negative number": lambda o: o.update(ranks=-1),
    "a float": lambda o: o["classes"][0]["memory"].update(peak=1.5),
    "an unknown collective": lambda o: o["classes"][0]["collectives"][0].update(op="broadcast"),
}


@pytest.mark.parametrize("broken", _BREAKS)
def test_what_the_schema_refuses(broken: str) -> None:
    printed = copy.deepcopy(analyze(LAYER))
    _BREAKS[broken](printed)
    with pytest.raises(jsonschema.ValidationError):
        validate(printed)


def test_bytes_on_the_wire_follow_from_bytes() -> None:
    for row in analyze(JOBS[1])["classes"][0]["collectives"]:
        n, twice = row["group_size"], 2 if row["op"] == "all_reduce" else 1
        assert row["wire_bytes"] == -(-row["bytes"] * twice * (n - 1) // n)
