"""The families of inputs: what each starts from, how an input is changed, and what must hold.

An input is bytes, so that a corpus is a folder of files. Whatever the bytes are, a run ends in a
result or in diagnostics that can be shown: everything else is a fault, a `FaultError` or another
exception.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, cast

import click
import zstandard

from stagec.driver.cli import COMMANDS, cli, main
from stagec.ir.module import Module
from stagec.pipeline.manager import PassManager
from stagec.pipeline.plugins import Loaded, load_plugins
from stagec.pipeline.verify import verify_module
from stagec.support.diagnostics import DiagnosticError, render
from stagec.support.source import Source
from stagec.text.build import parse_module
from stagec.text.printer import print_module
from stagec.trace.archive import MAGIC, VERSION, Archive
from stagec.trace.chakra import TraceError
from stagec.trace.check import check_directory
from stagec.trace.check_archive import check_archive
from stagec.trace.place import MANIFEST, check_target
from stagec.trace.seal import SEAL, sealed
from stagec.trace.show import totals
from tools.fuzzing.mutate import (
    Kinds,
    kinds_of,
    mutate_bytes,
    mutate_json,
    mutate_text,
    tokens,
)

ROOT = Path(__file__).resolve().parents[2]
LIT = ROOT / "tests" / "lit"
#: Longest seeds, in tokens: light inputs, many of them.
_LIGHT = 400


class FaultError(Exception):
    """A property that does not hold."""


@dataclass(frozen=True)
class Family:
    """Inputs of one kind. `run` returns, or raises what is a fault."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    mutate: Callable[[Random, bytes, Sequence[bytes]], bytes]
    run: Callable[[bytes, Path], None]


@lru_cache(maxsize=1)
def loaded() -> Loaded:
    """The built-in ops, passes and pipelines."""
    return load_plugins(())


def shown(problem: DiagnosticError) -> None:
    """Something is said, and it can be shown."""
    if not problem.diagnostics:
        raise FaultError("an error without a diagnostic")
    for diagnostic in problem.diagnostics:
        render(diagnostic, {})


# -- texts -----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def texts() -> list[bytes]:
    """Every part of every lit test of the language that is not long, without comments."""
    files = sorted(f for f in LIT.rglob("*.stg") if f.parts[-2] != "Inputs")
    parts = [p for f in files for p in f.read_text(encoding="utf-8").split("// -----\n")]
    plain = [re.sub(r"//[^\n]*", "", p) for p in parts]
    return [p.encode() for p in plain if 20 < len(tokens(p)) < _LIGHT]


@lru_cache(maxsize=1)
def kinds() -> Kinds:
    """The tokens of all seeds."""
    return kinds_of([t.decode() for t in texts()])


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _mutate_text(chance: Random, seed: bytes, seeds: Sequence[bytes]) -> bytes:
    if chance.random() < 0.05:
        return mutate_bytes(chance, seed)
    return mutate_text(chance, _text(seed), kinds(), _text(chance.choice(seeds))).encode()


def parsed(text: str) -> Module | None:
    """The module of a text; None where diagnostics say that it is none."""
    try:
        return parse_module(Source("fuzz.stg", text), loaded().registry, allow_unregistered=True)
    except DiagnosticError as problem:
        shown(problem)
        return None


def _run_parser(data: bytes, _: Path) -> None:
    """What is printed reads back as the same."""
    module = parsed(_text(data))
    if module is None:
        return
    printed = print_module(module)
    again = parsed(printed)
    if again is None:
        raise FaultError("what is printed does not parse")
    if print_module(again) != printed:
        raise FaultError("what is printed reads back as something else")


def _run_verifier(data: bytes, _: Path) -> None:
    module = parsed(_text(data))
    if module is not None:
        _quietly(lambda: verify_module(module))


def _quietly(run: Callable[[], object]) -> None:
    try:
        run()
    except DiagnosticError as problem:
        shown(problem)


# -- pipelines: a line of passes, and a module -----------------------------------------------------

#: The passes that suit a module of each phase.
_PASSES = {
    "parsed": (
        "infer-shapes,verify,propagate-sharding,insert-collectives,clean",
        "infer-shapes,apply-strategy,differentiate,add-optimizer,clean",
        "forward",
        "train",
        "bind,infer-shapes,canonicalize,eliminate-common-subexpressions,eliminate-dead-code",
    ),
    "shaped": ("clean,propagate-sharding,insert-collectives,clean", "verify,canonicalize"),
    "sharded": ("insert-collectives,clean", "insert-collectives,coalesce-collectives,clean"),
    "partitioned": ("coalesce-collectives,split-stages,plan-memory,lower-to-trace", "clean"),
}
_WORDS = (
    "train",
    "clean",
    "place",
    "+after(infer-shapes):",
    "-verify",
    "{",
    "}",
    "(",
    ",",
    "=",
    "x",
)


@lru_cache(maxsize=1)
def _pipelines() -> list[bytes]:
    found: list[bytes] = []
    for text in texts():
        phase = re.search(rb"phase = (\w+)", text)
        name = phase[1].decode() if phase else "parsed"
        found += [p.encode() + b"\n" + text.lstrip() for p in _PASSES.get(name, ("verify",))]
    return found


def _mutate_pipeline(chance: Random, seed: bytes, seeds: Sequence[bytes]) -> bytes:
    """Mostly the module is changed; in a few inputs the passes are."""
    line, _, text = seed.partition(b"\n")
    if chance.random() < 0.15:
        words = re.split(r"\b", line.decode())
        known = [*loaded().passes, *_WORDS]
        for _ in range(chance.randint(1, 2)):
            at = chance.randrange(len(words))
            words[at : at + chance.choice((0, 1))] = [chance.choice([*known, *words])]
        return "".join(words).replace("\n", " ").encode() + b"\n" + text
    return line + b"\n" + _mutate_text(chance, text, texts())


def _run_pipeline(data: bytes, _: Path) -> None:
    line, _, text = _text(data).partition("\n")
    module = parsed(text)
    if module is None:
        return

    def run() -> None:
        PassManager(loaded().pipeline(line)).run(module)

    _quietly(run)


# -- command lines: one word a line ----------------------------------------------------------------

MODEL = """stg.module @tiny {
  stg.symbols[B = 8, S = 4, D = 8, F = 16, L = 2, V = 16]
  stg.func @step(%x: bf16[B, S, D], %w: bf16[L, D, F | param], %v: bf16[L, F, D | param]) -> f32[] {
    %y = stg.repeat[count = L, carry = 1] (%h = %x, %a = %w, %b = %v) {
      %g = stg.einsum["bsd,df->bsf"](%h, %a)
      %n = stg.gelu(%g)
      %r = stg.einsum["bsf,fd->bsd"](%n, %b)
      stg.yield(%r)
    }
    %f = stg.cast[f32](%y)
    %l = stg.einsum["bsd,bsd->"](%f, %f)
    stg.return(%l)
  }
}
"""
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
    "0", "-1", "1", "2", "3", "7", "64", "1e9", "nan", "inf", "99999999999999999999", "", " ", "x",
    "x=1", "=", "B=0", "B=3", "B=8,D=8", "Q=1", "dp=2", "dp=2,tp=2", "dp", "pp=2,dp", "tp=0", "é",
    "\udcff", "--", "-", "-h", "--help", "tiny.stg", "s.stg", "job", "job.stagec", "none", "out",
    "no/such/out", "/dev/full", "/proc/x", "all", "full", "selective", "1f1b", "zbv", "gpipe",
    "dualpipe", "bf16", "f32", "always", "never", "80GB", "h100", "0-1,3", "llama3-8b", "(a, b)",
    "[1, 2]", "plain", "zigzag", "ring", "ulysses", "best-fit", "op", "block", "layer",
)  # fmt: skip
#: Options that reach out of this process, or take long by design.
_LEFT_OUT = frozenset({"--scheduler", "--jobs", "--sweep", "--limit"})
_INPUTS = {"tiny.stg": MODEL, "s.stg": STRATEGY}


def _lines() -> list[bytes]:
    return ["\n".join(line.split()).encode() for line in _LINES]


@lru_cache(maxsize=32)
def _options(command: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The options of a command with values of their type; none for a flag."""
    if command not in COMMANDS:
        return ()
    with click.Context(cli) as context:
        found = cli.get_command(context, command)
    options = [p for p in (found.params if found else ()) if isinstance(p, click.Option)]
    return tuple(
        (name, () if option.is_flag else _values(option.type))
        for option in options
        for name in option.opts
        if name not in _LEFT_OUT
    )


def _values(kind: click.ParamType[object]) -> tuple[str, ...]:
    if isinstance(kind, click.Choice):
        return tuple(map(str, cast("click.Choice[str]", kind).choices))
    if isinstance(kind, click.types.IntParamType):
        return ("0", "1", "2", "3", "4", "8", "64", "1000000", "99999999999999999999")
    if isinstance(kind, click.types.FloatParamType):
        return ("0", "1", "2.5", "1e9", "nan", "inf")
    return _ODD_WORDS


def _mutate_line(chance: Random, seed: bytes, seeds: Sequence[bytes]) -> bytes:
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
    if words[0] not in COMMANDS or words[0] == "test" or not _LEFT_OUT.isdisjoint(words):
        return
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for name, text in _INPUTS.items():
        (work / name).write_text(text)
    shutil.copytree(job().folder, work / "job")
    shutil.copy(job().archive, work / "job.stagec")
    before = {p.name for p in work.iterdir()}
    with chdir(work):
        code, err = in_process(words)
    if code not in (0, 1, 2):
        raise FaultError(f"exit code {code}: {_kind_of_bug(err)}")
    if "Traceback" in err or (code and not err):
        raise FaultError("a traceback" if "Traceback" in err else f"exit code {code} in silence")
    left = sorted(p.name for p in work.iterdir() if p.name not in before)
    if any(name.startswith(".") for name in left):
        raise FaultError(f"half-written: {left}")


def _kind_of_bug(err: str) -> str:
    found = re.search(r"internal error: (\w+)", err)
    return found[1] if found else "?"


def in_process(words: Sequence[str]) -> tuple[int, str]:
    """Exit code and stderr of a command."""
    out, err, stdin = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(MODEL.encode()))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main(words)
    finally:
        sys.stdin = stdin
    return code, err.getvalue()


# -- archives and folders: a name, and bytes -------------------------------------------------------


class _Job:
    """A tiny job that seeds are made from, as a folder and as an archive."""

    @cached_property
    def _place(self) -> Path:
        import tempfile

        place = Path(tempfile.mkdtemp(prefix="stagec-fuzz-"))
        model = place / "tiny.stg"
        model.write_text(MODEL)
        words = ["compile", str(model), "--dp", "2", "--tp", "2", "--pp", "2", "--quiet"]
        words += ["--microbatches", "2"]
        for target in (["-o", str(place / "job")], ["--archive", str(place / "job.stagec")]):
            code, err = in_process([*words, *target])
            if code:
                raise FaultError(f"the seed of archives and folders does not compile: {err}")
        return place

    @property
    def folder(self) -> Path:
        return self._place / "job"

    @property
    def archive(self) -> Path:
        return self._place / "job.stagec"

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """The files of the folder by name."""
        return {p.name: p.read_bytes() for p in sorted(self.folder.iterdir())}


@lru_cache(maxsize=1)
def job() -> _Job:
    """The tiny job."""
    return _Job()


_HEAD = struct.Struct("<16sIQQ32s")


def _archives() -> list[bytes]:
    return [job().archive.read_bytes()]


def _mutate_archive(chance: Random, seed: bytes, _: Sequence[bytes]) -> bytes:
    """Mostly the index, with a right checksum, so that what comes behind it is reached."""
    if chance.random() < 0.3:
        return mutate_bytes(chance, seed)
    size = _HEAD.unpack(seed[: _HEAD.size])[2]
    index = zstandard.ZstdDecompressor().decompress(seed[-size:])
    raw = mutate_bytes(chance, index) if chance.random() < 0.1 else mutate_json(chance, index)
    packed = zstandard.ZstdCompressor().compress(raw)
    head = _HEAD.pack(MAGIC, VERSION, len(packed), len(raw), sha256(raw).digest())
    return head + seed[_HEAD.size : len(seed) - size] + packed


def _run_archive(data: bytes, folder: Path) -> None:
    path = folder / "fuzz.stagec"
    path.write_bytes(data)

    def run() -> None:
        check_archive(path)
        archive = Archive.open(path)
        for rank in (0, archive.groups.ranks - 1):
            list(archive.nodes(rank))

    try:
        _quietly(run)
    except TraceError as problem:
        str(problem)


def _folders() -> list[bytes]:
    return [name.encode() + b"\n" + data for name, data in job().files.items()]


def _mutate_folder(chance: Random, seed: bytes, _: Sequence[bytes]) -> bytes:
    """One file of a folder; a manifest mostly with a right checksum."""
    name, _, data = seed.partition(b"\n")
    if not name.endswith(b".json") or chance.random() < 0.2:
        return name + b"\n" + mutate_bytes(chance, data)
    changed = mutate_json(chance, data)
    if name == MANIFEST.encode() and chance.random() < 0.8:
        found: Any = json.loads(changed or b"0")
        if isinstance(found, dict):
            changed = sealed({k: v for k, v in cast("dict[str, Any]", found).items() if k != SEAL})
    return name + b"\n" + changed


def _run_folder(data: bytes, folder: Path) -> None:
    """Checking reports, showing reads, and nothing of others is replaced."""
    target = folder / "job"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    name, _, content = data.partition(b"\n")
    for other, usual in job().files.items():
        (target / other).write_bytes(content if other.encode() == name else usual)
    report = check_directory(target)
    for finding in (*report.errors, *report.warnings):
        str(finding)
    if name.endswith(b".et"):
        try:
            totals(target / name.decode())
        except TraceError as problem:
            str(problem)
    _quietly(lambda: check_target(target, force=True))


FAMILIES = {
    family.name: family
    for family in (
        Family("parser", texts, _mutate_text, _run_parser),
        Family("verifier", texts, _mutate_text, _run_verifier),
        Family("pipelines", _pipelines, _mutate_pipeline, _run_pipeline),
        Family("command-lines", _lines, _mutate_line, _run_line),
        Family("archives", _archives, _mutate_archive, _run_archive),
        Family("folders", _folders, _mutate_folder, _run_folder),
    )
}
