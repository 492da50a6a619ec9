"""The family of command lines: one word a line, run in a folder with a model and a job."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import chdir
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import cast
from unittest.mock import patch

import click

from stagec.driver.cli import COMMANDS, cli
from stagec.driver.shell.run import DEBUG
from tools.fuzzing.base import MODEL, Family, FaultError, in_process, job

STRATEGY = "stg.strategy @s[mesh = @pod] {\n  stg.split[B, over = dp]\n}\n"
_SIZES = "L=2,B=8,S=16"
_LINES = (
    "analyze tiny.stg --dp 2",
    "analyze tiny.stg s.stg --dp 2 --json",
    "analyze tiny.stg --dp 2 --zero 3 --microbatches 2 -o out.txt",
    "compile tiny.stg --dp 2 --quiet -o out",
    "compile tiny.stg --dp 2 --archive out.stagec --force",
    "compile tiny.stg --pp 2 --microbatches 4 --set L=2 -o out --names short",
    "memory tiny.stg --dp 2 --json",
    "memory tiny.stg --dp 2 --html out.html --snapshot out.pickle",
    "opt tiny.stg -p infer-shapes,verify -o out.stg",
    "opt tiny.stg -p train --print-after all --dump-dir out",
    "opt - -p infer-shapes --print-generic",
    "check job --json",
    "show job/tiny.0.et -n 3",
    "materialize job.stagec -o out --only-ranks 0",
    "check job.stagec",
    "schedule 1f1b --stages 4 --microbatches 8",
    "schedule zbv --stages 2 --microbatches 4 --json",
    "schedule --list",
    "models",
    "models llama3-8b",
    "presets",
    "passes infer-shapes",
    "ops stg.einsum",
)
_ODD_WORDS = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "64",
    "1e9",
    "nan",
    "inf",
    "99999999999999999999",
    "",
    " ",
    "x",
    "x=1",
    "=",
    "B=0",
    "B=3",
    "B=8,D=8",
    "Q=1",
    "dp=2",
    "dp=2,tp=2",
    "dp",
    "pp=2,dp",
    "tp=0",
    "é",
    "\udcff",
    "--",
    "-",
    "-h",
    "--help",
    "tiny.stg",
    "s.stg",
    "job",
    "job.stagec",
    "none",
    "out",
    "no/such/out",
    "/dev/full",
    "/proc/x",
    "all",
    "full",
    "selective",
    "1f1b",
    "zbv",
    "gpipe",
    "dualpipe",
    "bf16",
    "f32",
    "always",
    "never",
    "80GB",
    "h100",
    "0-1,3",
    "llama3-8b",
    "(a, b)",
    "[1, 2]",
    "plain",
    "zigzag",
    "ring",
    "ulysses",
    "best-fit",
    "op",
    "block",
    "layer",
)
#: Options that reach out of this process, or take long by design.
LEFT_OUT = frozenset({"--scheduler", "--jobs", "--sweep", "--limit"})
_INPUTS = {"tiny.stg": MODEL, "s.stg": STRATEGY}


def _lines() -> list[bytes]:
    return ["\n".join(line.split()).encode() for line in _LINES]


@lru_cache(maxsize=32)
def _options(command: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The options of a command with values of their type; none for a flag."""
    if command not in COMMANDS:
        return ()
    with click.Context(cli) as context:
        known = cli.get_command(context, command)
    options = [p for p in (known.params if known else ()) if isinstance(p, click.Option)]
    return tuple(
        (name, () if option.is_flag else _values(option.type))
        for option in options
        for name in option.opts
        if name not in LEFT_OUT
    )


def _values(kind: click.ParamType[object]) -> tuple[str, ...]:
    if isinstance(kind, click.Choice):
        return tuple(map(str, cast("click.Choice[str]", kind).choices))
    if isinstance(kind, click.types.IntParamType):
        return ("0", "1", "2", "3", "4", "8", "64", "1000000", "99999999999999999999")
    if isinstance(kind, click.types.FloatParamType):
        return ("0", "1", "2.5", "1e9", "nan", "inf")
    return _ODD_WORDS


def mutate_line(chance: Random, seed: bytes, seeds: Sequence[bytes]) -> bytes:
    """Mostly options with values of their type, so that the command runs."""
    words = os.fsdecode(seed).split("\n")
    options = dict(_options(words[0]))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(1, len(words) + 1)
        match chance.randrange(10):
            case 0 if at < len(words):
                words[at] = chance.choice(options.get(words[at - 1]) or _ODD_WORDS)
            case 1:
                del words[at : at + chance.choice((1, 2))]
            case 2:
                words[at:at] = os.fsdecode(chance.choice(seeds)).split("\n")[1:3]
            case 3:
                words.insert(at, chance.choice(_ODD_WORDS))
            case 4 if len(words) > 2:
                other = chance.randrange(1, len(words))
                at = min(at, len(words) - 1)
                words[at], words[other] = words[other], words[at]
            case _ if options:
                name = chance.choice(list(options))
                words += [name, chance.choice(options[name])] if options[name] else [name]
            case _:
                words.append(chance.choice(_ODD_WORDS))
    return os.fsencode("\n".join(words))


def _run_line(data: bytes, folder: Path) -> None:
    """Exit code 0, 1 or 2, no traceback, and after a failure nothing half-written."""
    job()
    words = os.fsdecode(data).split("\n")
    if words[0] not in COMMANDS or words[0] == "test" or not LEFT_OUT.isdisjoint(words):
        return
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for name, text in _INPUTS.items():
        (work / name).write_text(text)
    shutil.copytree(job().folder, work / "job")
    shutil.copy(job().archive, work / "job.stagec")
    run_words(words, work)


def run_words(words: Sequence[str], work: Path) -> tuple[int, str]:
    """Run a command in a folder: exit code and stdout. Raises `FaultError` for another exit code
    than 0, 1 or 2, for a failure without a word, and for what is half-written."""
    before = {p.name for p in work.iterdir()}
    with chdir(work):
        code, out, err = in_process(words)
        if code not in (0, 1, 2):
            raise FaultError(f"exit code {code}: {_bug(words, err)}")
    left = sorted(p.name for p in work.iterdir() if p.name not in before)
    if any(name.startswith(".") for name in left):
        raise FaultError(f"half-written: {left}")
    if "Traceback" in err or (code and not out + err):
        raise FaultError("a traceback" if "Traceback" in err else f"exit code {code} in silence")
    return code, out


def _bug(words: Sequence[str], err: str) -> str:
    """What kind of exception ends a line, and the function that raises it: run once more, where a
    bug has a traceback."""
    match = re.search(r"internal error: (\w+)", err)
    with patch.dict(os.environ, {DEBUG: "1"}):
        _, _, again = in_process(words)
    places = re.findall(r'File ".*/(\w+\.py)", line \d+, in (\w+)', again)
    return f"{match[1] if match else '?'} in {':'.join(places[-1]) if places else '?'}"


LINES = (Family("command-lines", _lines, mutate_line, _run_line),)
