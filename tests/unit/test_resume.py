"""Ranks by workers and in parts; interrupted runs are completed, whatever moment they died at."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stagec.check.traces import check_directory
from stagec.jobs.builder import JobBuilder
from stagec.traces import writer
from stagec.traces.emit import EmittedJob, make_job
from stagec.traces.folder import MANIFEST
from stagec.traces.writer import Emission, parse_ranges, ranges_text, write_source
from tests.support import LLAMA, stagec, tiny_options, tries

ROOT = Path(__file__).parents[2]
KILLS = tries(50)


def job(**options: Any) -> EmittedJob:
    """A pipeline of two stages."""
    given: dict[str, Any] = {"dp": 8, "pp": 2, "microbatches": 4, "sizes": {"B": 32}} | options
    return make_job(JobBuilder(tiny_options(LLAMA, **given)).lower(), "tiny")


def write(made: EmittedJob, directory: Path, **how: Any) -> None:
    write_source(made, directory, {"by": "test"}, Emission(**how))


def content(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_workers_writes_the_same_bytes(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job()
    write(made, tmp_path / "plain")
    monkeypatch.setattr(writer, "_SMALL_JOB", 0)
    monkeypatch.setattr(writer, "_UNIT_BYTES", 1 << 15)
    write(made, tmp_path / "out", workers=workers)
    assert content(tmp_path / "out") == content(tmp_path / "plain")


def test_some_ranks_are_those_of_the_whole_job(tmp_path: Path) -> None:
    made = job()
    write(made, tmp_path / "all")
    write(made, tmp_path / "some", ranks=parse_ranges("3,9-11"))
    whole, some = content(tmp_path / "all"), content(tmp_path / "some")
    traces = {f"tiny.{r}.et" for r in (3, 9, 10, 11)}
    assert some.keys() == {*traces, "tiny.json", MANIFEST}
    assert all(some[name] == whole[name] for name in (*traces, "tiny.json"))
    assert json.loads(some[MANIFEST])["ranks_written"] == "3,9-11"
    assert "ranks_written" not in json.loads(whole[MANIFEST])
    (problem,) = check_directory(tmp_path / "some").errors  # not one for each group and peer
    assert "expected all 16 ranks of the job, found 4 (--only-ranks)" in str(problem)
    write(made, tmp_path / "other", ranks=parse_ranges("3,9-11"))
    ran = stagec("diff", tmp_path / "some", tmp_path / "other")  # it compares what is there
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize("text", ["0", "0-3", "0,2-5,9", "7,8,9"])
def test_ranges_print_as_they_are_read(text: str) -> None:
    assert ranges_text(parse_ranges(text)) == text.replace("7,8,9", "7-9")


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1,,2", "0-99999999999", "²"])
def test_wrong_ranges_are_refused(text: str, tmp_path: Path) -> None:
    ran = stagec("compile", LLAMA, "-o", tmp_path / "out", "--only-ranks", text)
    assert (ran.code, "help: write ranks as" in ran.err) == (1, True), ran.err


def test_a_rank_that_is_not_there(tmp_path: Path) -> None:
    ran = stagec("compile", LLAMA, "--dp", "2", "-o", tmp_path / "out", "--only-ranks", "2")
    assert ran.code == 1
    assert "there is no rank 2" in ran.err
    assert list(tmp_path.iterdir()) == []


RUN = """
import os, sys
from pathlib import Path
from stagec.traces import writer
from tests.unit.test_resume import job, write
writer._SMALL_JOB, writer._UNIT_BYTES = 0, 1 << 15
made = job()
while sys.stdin.readline():
    child = os.fork()
    if not child:
        write(made, Path(sys.argv[1]), workers=2, resume=True)
        os._exit(0)
    print(child, flush=True)
    sys.stdin.readline()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Runs:
    """Runs of one compiled job: forks of a process."""

    def __init__(self, out: Path) -> None:
        self._out, self._partial = out, out.with_name(f".{out.name}.partial")
        self._process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(out)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def run(self, files: int | None = None, seconds: float = 0) -> int:
        """How a run ended; if `files` are given it was killed when there were more of them than
        at its start, or all were there, and these seconds had passed."""
        before = self.files()
        child = int(self._ask())
        if files is not None:
            for _ in range(100_000):  # not for ever, should the run fail
                if self._out.exists() or self.files() >= before + files:
                    break
                time.sleep(0.0002)
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        return int(self._ask())

    def files(self) -> int:
        """How many files a run that has not ended has written so far."""
        try:
            return len(list(self._partial.iterdir()))
        except FileNotFoundError:  # it has its final name
            return 0

    def _ask(self) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        return self._process.stdout.readline()

    def close(self) -> None:
        """No more runs."""
        self._process.communicate()


@pytest.mark.long
def test_killed_at_any_moment_a_run_is_completed_to_the_same_bytes(tmp_path: Path) -> None:
    write(job(), tmp_path / "expected")
    expected = content(tmp_path / "expected")
    out, chance, runs = tmp_path / "out", random.Random(1), Runs(tmp_path / "out")
    killed = seen = 0
    while killed < KILLS:
        ended = runs.run(chance.randrange(len(expected)), chance.uniform(0, 0.002))
        assert ended in (0, -signal.SIGKILL)
        killed += ended != 0
        seen += 0 < runs.files() < len(expected)
        if ended == 0 or killed % 7 == 0:
            assert runs.run() == 0
            assert content(out) == expected
            assert sorted(p.name for p in tmp_path.iterdir()) == ["expected", "out"]
            shutil.rmtree(out)
    runs.close()
    assert seen > KILLS // 10, "most kills came before or after the writing"


def test_what_is_there_is_compared_not_trusted(tmp_path: Path) -> None:
    made, out = job(), tmp_path / "out"
    write(made, out)
    expected = content(out)
    out.rename(tmp_path / ".out.partial")
    partial = tmp_path / ".out.partial"
    (partial / "tiny.1.et").write_bytes(b"\0" * len(expected["tiny.1.et"]))
    (partial / "tiny.2.et").write_bytes(expected["tiny.2.et"][:100])
    (partial / "tiny.3.et").unlink()
    (partial / "other.99.et").write_bytes(b"of another job")
    untouched = (partial / "tiny.4.et").stat().st_mtime_ns
    write(made, out, resume=True)
    assert content(out) == expected
    assert (out / "tiny.4.et").stat().st_mtime_ns == untouched
    assert not partial.exists()


def test_a_complete_folder_is_compared_in_place(tmp_path: Path) -> None:
    made, out = job(), tmp_path / "out"
    write(made, out)
    expected = content(out)
    (out / "tiny.0.et").write_bytes(b"damaged")
    write(made, out, resume=True)
    assert content(out) == expected


def test_a_folder_of_others_is_not_completed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    ran = stagec("compile", LLAMA, "-o", out, "--resume")
    assert ran.code == 1
    assert content(out) == {"thesis.tex": b"years of work"}


def test_another_job_is_not_completed(tmp_path: Path) -> None:
    out, words = tmp_path / "out", ("compile", LLAMA, "--set", "L=1", "--quiet", "-o")
    assert stagec(*words, out).code == 0
    expected = content(out)
    ran = stagec(*words, out, "--tp", "2", "--resume")
    assert ran.code == 1
    assert f"'{out}' holds the traces of another command: stagec compile" in ran.err
    assert content(out) == expected
    assert stagec(*words, out, "--only-ranks", "0", "--resume").code == 0
