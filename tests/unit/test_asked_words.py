"""The command that a page shows gives its options the values that they had."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stagec
from stagec.answers.serve import QUESTION
from stagec.jobs.request.command_line import asked_words
from stagec.jobs.request.option import CommandOption, values_of
from stagec.searches.options import SEARCH, search_command
from tests.support import stagec as command

SERVE = {
    "batches": "1..8",
    "ttft": "500ms",
    "output_tokens": 64,
    "requests": "requests.csv",
    "rate": 2.5,
    "fail": ["1@1.5s+30s", "prefill:0@1min+2h"],
    "step_grid": "exact",
    "cache_blocks": "all",
    "route": "round-robin",
    "pause": "30ms",
}
SEARCHED = {
    "sizes": "L=2,S=4096",
    "machine": ["h100-sxm", "b200"],
    "tp": "1..4",
    "sp": "on,off",
    "limit": "60GiB",
    "price": "2.5,6",
    "pareto": "time,memory",
    "overlap": False,
    "exhaustive": True,
    "emit_run": "vllm=run",
    "part": "encoder=e: tp=2",
}


@pytest.mark.parametrize(
    ("options", "flags"), [(QUESTION.options, SERVE), (SEARCH, SEARCHED)], ids=["serve", "search"]
)
def test_the_words_of_options_give_their_values(
    options: tuple[CommandOption, ...], flags: dict[str, object]
) -> None:
    values, _ = values_of(options, flags)
    words = [*asked_words(options, values)]
    known = {option.words[0]: option for option in options}
    given: dict[str, Any] = {}
    while words:
        name = words.pop(0)
        if name in known and known[name].usual not in (True, False):
            option, text = known[name], words.pop(0)
            value = option.kind.read(text)
            value = option.merge((value,)) if option.merge is not None else value
            several = option.multiple and option.merge is None
            given[option.name] = (*given.get(option.name, ()), value) if several else value
        else:
            given[name.removeprefix("--no-").removeprefix("--")] = not name.startswith("--no-")
    assert given == {name: values[name] for name in flags}


def test_the_command_of_an_answer_gives_the_answer() -> None:
    served = stagec.job("llama3-8b", tp=2, sizes={"L": 1}, prompt=64).serve(
        "h100-sxm", batches=[1, 2], ttft=0.5
    )
    ran = command(*shlex.split(served.command)[1:])
    assert ran.out == str(served)
    assert served.command in served.page()
    last = served.points[-1]
    step = command(*shlex.split(last.command)[1:], "--json")
    assert json.loads(step.out)["step_seconds"] == last.steps[1].seconds
    assert f"{last.command} --html decode-2.html" in served.page()
    assert replace(served, command="").as_json() == served.as_json()


def test_the_command_of_a_sweep_has_its_ranks_and_its_file(tmp_path: Path) -> None:
    named, page = tmp_path / "configurations.toml", tmp_path / "sweep.html"
    named.write_text("[fsdp]\nzero = 3\n[tensor]\ntp = 2\n", "utf-8")
    words = ["time", "llama3-8b", "--ranks", "4", "--set", "L=1", "--machine", "h100-sxm"]
    words += ["--sweep", str(named)]
    ran = command(*words, "--html", str(page))
    assert ran.code == 0, ran.err
    text = page.read_text("utf-8")
    assert f"<code>{shlex.join(['stagec', *words])}</code>" in text
    assert "stagec time llama3-8b --ranks 4 --zero 3 --set L=1 --machine h100-sxm --html" in text


def test_workers_and_kept_answers_are_not_part_of_a_search() -> None:
    given, _ = values_of(SEARCH, {"jobs": 2, "cache": False, "ranks": "8"})
    assert search_command({**given, "model": "llama3-8b"}) == "stagec search llama3-8b --ranks 8"


def test_pages_of_a_search_name_the_file_of_a_machine(tmp_path: Path) -> None:
    machine, page = tmp_path / "devices.toml", tmp_path / "search.html"
    machine.write_text('base = "h100-sxm"\n', "utf-8")
    words = ("search", "llama3-8b", "--set", "L=1", "--ranks", "2", "--batch", "2")
    space = ("--tp", "1", "--zero", "3", "--recompute", "none", "--no-levers", "--no-cache")
    ran = command(*words, *space, "--machine", machine, "--html", page)
    assert ran.code == 0, ran.err
    assert f"--machine {machine} --html step-0.html" in page.read_text("utf-8")
