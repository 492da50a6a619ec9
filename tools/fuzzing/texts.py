"""Families of texts: the parser, the verifier, passes, and modules of all phases."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir
from functools import lru_cache
from pathlib import Path
from random import Random

from stagec.analysis.report import analysis
from stagec.ir.module import Module
from stagec.ir_spec.phases import Phase
from stagec.pipeline.manager import PassManager
from stagec.pipeline.passes import Pass
from stagec.pipeline.verify import phase_of, verify_module
from stagec.support.diagnostics import DiagnosticError, NotAnIntegerError
from stagec.support.source import Source
from stagec.text.build import parse_module
from stagec.text.printer import print_module
from stagec.traces.emit import make_job
from tools.fuzzing.base import MODEL, Family, FaultError, in_process, loaded, quietly, shown
from tools.fuzzing.mutate import Lexicon, lexicon_of, mutate_bytes, mutate_text, tokens

LIT = Path(__file__).resolve().parents[2] / "tests" / "lit"
#: Longest seeds, in tokens: light inputs, many of them.
_LIGHT = 400


@lru_cache(maxsize=1)
def texts() -> list[bytes]:
    """Every part of every lit test of the language that is not long, without comments."""
    files = sorted(f for f in LIT.rglob("*.stg") if f.parts[-2] != "Inputs")
    parts = [p for f in files for p in f.read_text(encoding="utf-8").split("// -----\n")]
    plain = [re.sub(r"//[^\n]*", "", p) for p in parts]
    return [p.encode() for p in plain if 20 < len(tokens(p)) < _LIGHT]


@lru_cache(maxsize=1)
def known() -> Lexicon:
    """The tokens of all seeds."""
    return lexicon_of([t.decode() for t in texts()])


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _mutate_text(chance: Random, seed: bytes, seeds: Sequence[bytes]) -> bytes:
    if chance.random() < 0.05:
        return mutate_bytes(chance, seed)
    return mutate_text(chance, _text(seed), known(), _text(chance.choice(seeds))).encode()


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
        quietly(lambda: verify_module(module))


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
    "sharded": ("insert-collectives,clean", "insert-collectives,narrow-collectives,units,clean"),
    "partitioned": (
        "units,stages,plan,lower-to-trace",
        "hoist-reductions,narrow-collectives,keep-gathered-parameters,plan,place-buffers",
        "clean",
    ),
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
    pipelines: list[bytes] = []
    for text in texts():
        if parsed(_text(text)) is None:
            continue
        phase = re.search(rb"phase = (\w+)", text)
        name = phase[1].decode() if phase else "parsed"
        pipelines += [p.encode() + b"\n" + text.lstrip() for p in _PASSES.get(name, ("verify",))]
    return pipelines


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


def _run_pipeline(data: bytes, folder: Path) -> None:
    line, _, text = _text(data).partition("\n")
    module = parsed(text)
    if module is None:
        return

    def run() -> None:
        PassManager(loaded().pipeline(line)).run(module)

    with chdir(folder):
        quietly(run)


# -- modules of all phases, through the rest of the compile ----------------------------------------

_JOBS = (
    "--dp 2 --zero 1",
    "--dp 2 --tp 2 --zero 3 --recompute full",
    "--pp 2 --microbatches 2 --dp 2",
)


@lru_cache(maxsize=1)
def _dumps() -> list[bytes]:
    dumps: list[bytes] = []
    with tempfile.TemporaryDirectory() as place, chdir(place):
        Path("tiny.stg").write_text(MODEL)
        for number, words in enumerate(_JOBS):
            dump = ["--dry-run", "--quiet", "--dump-dir", str(number)]
            in_process(["compile", "tiny.stg", *words.split(), *dump])
            dumps += [p.read_bytes() for p in sorted(Path(str(number)).iterdir())]
    return dumps


def _run_dump(data: bytes, _: Path) -> None:
    module = parsed(_text(data))
    if module is None:
        return

    def run() -> None:
        passes = loaded().pipeline("train").passes
        phase = phase_of(module)
        PassManager(next((p for p in _tails(passes) if _may_run(p, phase)), ())).run(module)
        if module.phase == Phase.LOWERED.label and len(module.env) < _MOST_SYMBOLS:
            analysis(module, "fuzz")
            job = make_job(module, "fuzz")
            if len(job.members[0]) < _MOST_RANKS:
                bytes(job.encoder(0).rank(int(job.members[0][0])))

    try:
        quietly(run)
    except NotAnIntegerError as problem:  # which the command line tells of
        str(problem)


_MOST_SYMBOLS, _MOST_RANKS = 100, 5000


def _tails(passes: Sequence[Pass]) -> Iterator[Sequence[Pass]]:
    return (passes[at:] for at in range(len(passes)))


def _may_run(passes: Sequence[Pass], phase: Phase) -> bool:
    try:
        PassManager(passes).check_order(phase)
    except DiagnosticError:
        return False
    return True


TEXTS = (
    Family("parser", texts, _mutate_text, _run_parser),
    Family("verifier", texts, _mutate_text, _run_verifier),
    Family("pipelines", _pipelines, _mutate_pipeline, _run_pipeline),
    Family("dumps", _dumps, _mutate_text, _run_dump),
)
