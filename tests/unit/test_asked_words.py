"""The command that a page shows gives its options the values that they had."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

import stagec
from stagec.answers.serve import QUESTION
from stagec.jobs.request.command_line import asked_words
from stagec.jobs.request.option import CommandOption, values_of
from stagec.searches.asked import SEARCH, search_command
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
    assert replace(served, command="").as_json() == served.as_json()


def test_workers_and_kept_answers_are_not_part_of_a_search() -> None:
    given, _ = values_of(SEARCH, {"jobs": 2, "cache": False, "ranks": "8"})
    assert search_command({**given, "model": "llama3-8b"}) == "stagec search llama3-8b --ranks 8"
