"""Switches of a strategy: on and off, in every form of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import stagec as library
from stagec.driver.shell.options import options_of_compare
from stagec.jobs.pod_options import read_flags
from stagec.jobs.request.command_line import job_words
from stagec.jobs.request.flags import FLAGS
from stagec.jobs.session import Session
from stagec.jobs.stack import read_stack, stack_flags
from stagec.models import stacks
from stagec.pipeline.plugins import load_plugins
from stagec.support.diagnostics import DiagnosticError
from tests.support import stagec

SWITCHES = [name for name, flag in FLAGS.items() if flag.kind == "switch"]
JOB = ("llama3-8b", "--set", "L=2,B=2", "--dp", "2", "--stack", "huggingface")


def stated() -> set[str]:
    """The switches that a shipped stack states."""
    lines = [read_stack(name, Session(), load_plugins(()).registry) for name in stacks()]
    return {n for each in lines for n in stack_flags(each, ()) if FLAGS[n].kind == "switch"}


def test_stacks_state_switches() -> None:
    assert {"ddp_copies", "shard_copies", "moe_sort", "host_graphs"} <= stated()


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize(
    ("value", "wanted"), [((), True), (("on",), True), (("off",), False), (("FALSE",), False)]
)
def test_a_switch_has_a_value(name: str, value: tuple[str, ...], wanted: bool) -> None:
    """Before a model, behind it, with an equals sign, in the flags of a pod, and as it is written
    again."""
    option = FLAGS[name].option
    forms = [f"{option} {' '.join(value)} llama3-8b", f"llama3-8b {' '.join((option, *value))}"]
    forms += [f"llama3-8b {option}={word}" for word in value]
    for form in forms:
        options = options_of_compare(form)
        assert (options.model, options.strategy) == ("llama3-8b", None)
        assert getattr(options, name) is wanted
        assert name in options.explicit
        again = options_of_compare(" ".join(job_words(options)))
        assert (getattr(again, name), again.explicit) == (wanted, options.explicit)
    pods = [" ".join((option, *value)), ",".join((option[2:], *value, "tp=2"))]
    for form in (*pods, *(f"{option[2:]}={word}" for word in value)):
        given = read_flags("--prefill", form)
        assert getattr(given, name) is wanted
        assert name in given.explicit


def test_a_switch_that_is_on_has_its_other_spelling() -> None:
    assert options_of_compare("llama3-8b --no-async-tp").async_tp is False
    with pytest.raises(DiagnosticError, match="no-sp"):
        options_of_compare("llama3-8b --no-sp")


def test_values_of_other_options_stay() -> None:
    """A switch is a flag in a value, and behind two dashes words are arguments."""
    ran = stagec("memory", *JOB, "--compare", "--sp", "--html", "-o", "-")
    assert "--sp=" not in ran.err
    assert options_of_compare("--sp -- off").model == "off"


@pytest.mark.parametrize(("word", "said"), [("maybe", "no strategy file 'maybe'"), ("=2", "on")])
def test_another_value_is_refused(word: str, said: str) -> None:
    flag = ["--ddp-copies" + word] if word.startswith("=") else ["--ddp-copies", word]
    ran = stagec("memory", *JOB, *flag)
    assert ran.code
    assert said in ran.err


def bucket(text: str) -> str:
    return next(line.partition("//")[0].strip() for line in text.splitlines() if "bucket" in line)


def test_a_user_disagrees_with_a_stack(tmp_path: Path) -> None:
    """On the command line, in a job file, in Python, and in a sweep, gradients that are views of
    buckets (`gradient_as_bucket_view`) are the same job."""

    def peaks(*words: str | Path) -> Any:
        return stagec("memory", *words, "--grads", "persistent").out

    assert bucket(stagec("memory", *JOB, "--print-strategy").out).startswith("stg.bucket[copies,")
    off = (*JOB, "--ddp-copies", "off")
    assert bucket(stagec("memory", *off, "--print-strategy").out) == "stg.bucket[bytes = 26214400]"
    file = tmp_path / "job.toml"
    file.write_text(stagec("memory", *off, "--print-job").out, encoding="utf-8")
    assert "ddp_copies = false" in file.read_text(encoding="utf-8")
    sizes = {"L": 2, "B": 2}
    flags: dict[str, Any] = {"dp": 2, "stack": "huggingface", "grads": "persistent"}
    job = library.job("llama3-8b", sizes=sizes, **flags, ddp_copies=False)
    assert peaks(*off) == peaks(file) == str(job.memory())
    assert "--ddp-copies off" in job.command
    assert peaks(*JOB) != peaks(*off)
    swept: Sequence[str] = peaks(*JOB, "--sweep", "ddp-copies=on,off").split("\n")
    cells = {row.split()[0]: row for row in swept if row.split()[:1] in (["on"], ["off"])}
    assert cells["on"].split()[1:] != cells["off"].split()[1:]


def test_a_search_varies_a_switch() -> None:
    words = ("--ranks", "2", "--tp", "1", "--pp", "1", "--machine", "h100-sxm", "--jobs", "1")
    space = ("--zero", "0", "--recompute", "none", "--ddp-copies", "on,off", "--no-cache")
    ran = stagec("search", *JOB[:3], "--stack", "huggingface", *words, *space)
    assert ran.code == 0, ran.err
    assert "--ddp-copies off" in ran.out
