"""Questions that define both a command and a method: `stagec NAME` and
`stagec.job(...).NAME(...)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.jobs.request.option import CommandOption
    from stagec.jobs.request.options import JobOptions
    from stagec.jobs.session import Session
    from stagec.machines import Machine
    from stagec.output.report import Report

#: Name -> the module with its `QUESTION`, which is imported on use, and one line of help.
QUESTIONS: Mapping[str, tuple[str, str]] = {
    "serve": ("stagec.answers.serve", "Compute rates of a server: TTFT, TPOT, tokens per second.")
}


@dataclass(frozen=True, slots=True)
class JobQuestion:
    """A question: `ask` takes the options of a job, the machine, the values of `options` by name,
    and the session. Its docstring is the help of the command. `machine` is the help of
    `--machine`, empty for a question without a machine."""

    name: str
    ask: Callable[[JobOptions, Machine | None, Mapping[str, Any], Session], Report]
    options: Sequence[CommandOption] = ()
    machine: str = ""


def needed(machine: Machine | None) -> Machine:
    """The machine of a question that requires one. Raises `DiagnosticError`."""
    if machine is None:
        raise error("no machine is given", remedy="add --machine h100-sxm, for example")
    return machine


def question_of(name: str) -> JobQuestion:
    """The question with this name in `QUESTIONS`."""
    question: JobQuestion = import_module(QUESTIONS[name][0]).QUESTION
    return question
