"""What the families share: a fault, a family, commands in this process, and a tiny job."""

from __future__ import annotations

import atexit
import io
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from random import Random

from stagec.driver.cli import main
from stagec.pipeline.plugins import Loaded, load_plugins
from stagec.support.diagnostics import DiagnosticError, render

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


def quietly(run: Callable[[], object]) -> None:
    """What a run says instead of a result can be shown."""
    try:
        run()
    except DiagnosticError as problem:
        shown(problem)


def in_process(words: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    out, err, stdin = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(MODEL.encode()))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main(words)
    finally:
        sys.stdin = stdin
    return code, out.getvalue(), err.getvalue()


class _Job:
    """A tiny job that seeds are made from, as a folder and as an archive."""

    @cached_property
    def _place(self) -> Path:
        place = Path(tempfile.mkdtemp(prefix="stagec-fuzz-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        model = place / "tiny.stg"
        model.write_text(MODEL)
        words = ["compile", str(model), "--dp", "2", "--tp", "2", "--pp", "2", "--quiet"]
        words += ["--microbatches", "2"]
        for target in (["-o", str(place / "job")], ["--archive", str(place / "job.stagec")]):
            code, _, err = in_process([*words, *target])
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
