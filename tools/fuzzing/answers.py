"""Families of commands that answer from files: a command line, and a file that it reads.

An input has the words of the line, one a line; behind a zero byte the name of a file, and behind
another one what stands in that file in place of its usual content.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import NoReturn
from zlib import crc32

from stagec.pipeline.manager import PassManager
from tools.fuzzing import samples
from tools.fuzzing.base import MODEL, Family, FaultError, loaded
from tools.fuzzing.lines import LEFT_OUT, STRATEGY, mutate_line, run_words
from tools.fuzzing.mutate import (
    Lexicon,
    lexicon_of,
    mutate_bytes,
    mutate_json,
    mutate_text,
    tame_json,
)
from tools.fuzzing.texts import parsed

Files = dict[str, bytes]
#: How often an input has another line, and how often one of these has the usual files.
_OTHER_LINE, _USUAL_FILES, _ANY_BYTES = 0.3, 0.3, 0.1


@dataclass(frozen=True)
class _Answers:
    """A command: its lines and the files that they read. `variants` are other contents of files to
    start from, `then` looks at what a good run prints and leaves, `always` stands behind a line."""

    lines: tuple[str, ...]
    files: Callable[[], Files]
    variants: Callable[[], Sequence[tuple[str, bytes]]] = tuple
    then: Callable[[str, Path], None] | None = None
    always: tuple[str, ...] = ()

    def seeds(self) -> list[bytes]:
        """Each line with each file that it names, or that a program of its names."""
        contents = [*self.variants()] or [*self.files().items()]
        return [
            b"\0".join(("\n".join(words).encode(), name.encode(), data))
            for words in map(str.split, self.lines)
            for name, data in contents
            if name.partition("/")[0] in words or name.endswith(".txt")
        ]

    def mutate(self, chance: Random, seed: bytes, seeds: Sequence[bytes]) -> bytes:
        """Mostly the file, in ways that its reader mostly takes."""
        line, name, data = seed.split(b"\0", 2)
        if chance.random() >= _OTHER_LINE:
            return b"\0".join((line, name, self._other(chance, name.decode(), data)))
        line = mutate_line(chance, line, [each.split(b"\0", 1)[0] for each in seeds])
        if chance.random() >= _USUAL_FILES:
            data = self._other(chance, name.decode(), data)
        return b"\0".join((line, name, data))

    def _other(self, chance: Random, name: str, data: bytes) -> bytes:
        suffix = Path(name).suffix
        if chance.random() < _ANY_BYTES or suffix == ".et":
            return mutate_bytes(chance, data)
        if suffix == ".json":
            return chance.choice((mutate_json, tame_json))(chance, data)
        text = data.decode("utf-8", "replace")
        return mutate_text(chance, text, _lexicon(text), text).encode()

    def run(self, data: bytes, folder: Path) -> None:
        """A result or a diagnostic, and what is printed as JSON is JSON."""
        line, *changed = data.split(b"\0", 2)
        words = os.fsdecode(line).split("\n")
        if not words[0] or not LEFT_OUT.isdisjoint(words):
            return
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        for name, content in (self.files() | dict([_decoded(changed)] if changed else [])).items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(content)
        samples.write_program(work)
        code, out = run_words([*words, *self.always], work)
        elsewhere = {"-o", "--output", "-h", "--help"} | {w for w in words if w[:8] == "--print-"}
        if code == 0 and "--json" in words and not elsewhere & {*words}:
            json.loads(out, parse_constant=_not_finite)
        if code == 0 and self.then is not None:
            self.then(out, work)


def _decoded(changed: Sequence[bytes]) -> tuple[str, bytes]:
    return changed[0].decode(), changed[1]


@lru_cache(maxsize=16)
def _lexicon(text: str) -> Lexicon:
    return lexicon_of([text])


def _not_finite(word: str) -> NoReturn:
    raise FaultError(f"prints {word} as JSON")


# -- what comes out --------------------------------------------------------------------------------


def _imported(out: str, _: Path) -> None:
    """What import writes is a text that is sound; of every fourth, the types are inferred too."""
    if not out.startswith("//"):
        return  # help, or nothing
    module = parsed(out)
    if module is None:
        raise FaultError("what import writes does not parse")
    if crc32(out.encode()) % 4 == 0:
        PassManager(loaded().pipeline("inline,infer-shapes,verify")).run(module)


def _fitted(_: str, work: Path) -> None:
    """What is fitted is a machine."""
    path = work / "fitted.toml"
    if path.exists() and run_words(["machines", path.name], work)[0]:
        raise FaultError("what is fitted is no machine")


def _measured(_: str, work: Path) -> None:
    """What is measured is a table."""
    line = "time tiny.stg --machine tpu-v4 --dp 2 --measured table.csv"
    if (work / "table.csv").exists() and run_words(line.split(), work)[0]:
        raise FaultError("what is measured is no table")


# -- the families ----------------------------------------------------------------------------------


def _texts() -> dict[str, bytes]:
    return {"tiny.stg": MODEL.encode(), "s.stg": STRATEGY.encode(), "m.toml": samples.machine()}


_COMMANDS: Mapping[str, _Answers] = {
    "time": _Answers(
        (
            "time tiny.stg --machine m.toml --dp 2 --zero 1",
            "time tiny.stg s.stg --machine m.toml --dp 2",
            "time tiny.stg --machine tpu-v4 --pp 2 --microbatches 2 --json",
            "time tiny.stg --machine m.toml --tp 2 --measured t.csv --json",
            "time c.json --machine m.toml --serve decode --context 16 --tp 2 --json",
        ),
        lambda: {**_texts(), "t.csv": samples.table(), "c.json": samples.decoder()},
    ),
    "search": _Answers(
        (
            "search tiny.stg --ranks 2 --machine m.toml --batch 8 --dp 1,2",
            "search tiny.stg --ranks 4 --machine tpu-v4 --batch 8 --tp 1..2 --zero 0,1 --json",
            "search tiny.stg --ranks 2 --machine m.toml --batch 8 --space space.stg",
        ),
        lambda: {**_texts(), "space.stg": samples.SPACE},
        always=("--jobs", "1"),
    ),
    "serve": _Answers(
        (
            "serve c.json --machine m.toml --prompt 16 --output-tokens 4 --batches 1,2",
            "serve c.json --machine tpu-v4 --tp 2 --prompt 16 --batches 2 --json",
            "serve c.json --machine m.toml --serve disaggregated --prompt 16 --batches 2 --json",
        ),
        lambda: {"c.json": samples.decoder(), "m.toml": samples.machine()},
    ),
    "import": _Answers(
        ("import c.json",),
        dict[str, bytes],
        variants=lambda: [("c.json", data) for data in samples.configurations()],
        then=_imported,
    ),
    "fit": _Answers(
        (
            "fit --measured t.csv --machine m.toml -o fitted.toml",
            "fit --measured t.csv --machine m.toml --json",
        ),
        lambda: {"t.csv": samples.table(), "m.toml": samples.machine()},
        then=_fitted,
    ),
    "measure": _Answers(
        ("measure p.json -o table.csv", "measure p.json --json", "measure p.json p.json"),
        lambda: {"p.json": samples.profile(), "tiny.stg": MODEL.encode()},
        then=_measured,
    ),
    "simulate": _Answers(
        ("simulate job --astra-sim ./sim --json", "simulate job --astra-sim ./sim --totals"),
        samples.simulated,
    ),
    "convert": _Answers(
        (
            *(f"convert job -o out --to {to}" for to in ("chakra", "json", "chrome", "kineto")),
            "convert job/tiny.0.et -o out --to json --gzip",
        ),
        samples.traces,
    ),
}

ANSWERS = tuple(
    Family(name, lru_cache(maxsize=1)(each.seeds), each.mutate, each.run)
    for name, each in _COMMANDS.items()
)
