"""Systems without what Linux has: macOS, which says nothing of the processors of a process, and
Windows, which has other locks and no forks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stagec.support import locks
from stagec.support.processors import processors
from tests.support import LLAMA, LONG, stagec

ROOT = Path(__file__).parents[2]
#: A process as on Windows: modules, functions and classes that it lacks.
LACKING = """
import multiprocessing.context, os, sys
for name in ("fcntl", "resource", "grp", "pwd", "termios"):
    sys.modules[name] = None
for name in ("sched_getaffinity", "pread", "pwrite", "fork", "getuid", "geteuid", "mkfifo"):
    delattr(os, name)
for name in ("ForkProcess", "ForkContext"):
    delattr(multiprocessing.context, name)
multiprocessing.get_all_start_methods = lambda: ["spawn"]
from stagec.driver.cli import main
"""


def test_processors_are_reported_where_the_system_tells_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if hasattr(os, "sched_getaffinity"):
        assert processors() == len(os.sched_getaffinity(0))  # noqa: TID251
        monkeypatch.delattr(os, "sched_getaffinity")
    assert processors() == os.cpu_count()
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processors() == 1


@LONG
def test_commands_run_without_what_windows_lacks(tmp_path: Path) -> None:
    """Those that ask for processors, and those that write: the answers are those of here."""
    sizes = ("--set", "L=2,B=4")
    sweep = ("analyze", LLAMA, *sizes, "--sweep", "tp=1,2", "--csv")
    write = ("compile", LLAMA, *sizes, "--dp", "2", "--quiet", "-o")
    line = f"main({[*sweep, '-o', str(tmp_path / 'rows.csv')]}) or "
    line += f"main({[*write, str(tmp_path / 'there')]})"
    ran = subprocess.run(
        [sys.executable, "-c", f"{LACKING}sys.exit({line})"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "rows.csv").read_text() == stagec(*sweep).out
    assert stagec(*write, tmp_path / "here").code == 0
    there, here = (
        {p.name: p.read_bytes() for p in (tmp_path / name).glob("*.et")}
        for name in ("there", "here")
    )
    assert there == here != {}
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".lock"]


class _Bytes:
    """Locks of bytes as Windows has them: of a file, by offset; the lock ends with the handle."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], int] = {}

    def locking(self, handle: int, mode: int, count: int) -> None:
        assert (mode, count) == (self.LK_NBLCK, 1)
        place = os.fstat(handle).st_ino, os.lseek(handle, 0, os.SEEK_CUR)
        holder = self.held.get(place)
        if holder is not None and holder != handle and _is_open(holder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        self.held[place] = handle


def _is_open(handle: int) -> bool:
    try:
        os.fstat(handle)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("system", ["windows", "none"])
def test_a_folder_has_one_writer_by_the_locks_that_there_are(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By bytes; without any lock writing goes on."""
    from stagec.traces.folder import locked

    monkeypatch.setattr(locks, "fcntl", None)
    monkeypatch.setattr(locks, "msvcrt", _Bytes() if system == "windows" else None)
    monkeypatch.setattr("stagec.traces.folder._PATIENCE", 0.0)
    out = tmp_path / "out"
    with locked(out):
        ran = stagec("compile", LLAMA, "--set", "L=2,B=4", "--quiet", "-o", out)
        assert ran.code == (system == "windows")
        assert (f"written by process {os.getpid()} on " in ran.err) is (system == "windows")
    assert stagec("compile", LLAMA, "--set", "L=2,B=4", "--quiet", "--force", "-o", out).code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_is_no_lock_of_another_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(locks, "fcntl", None)
    monkeypatch.setattr(locks, "msvcrt", SimpleNamespace(locking=full, LK_NBLCK=2))
    with pytest.raises(OSError, match="Input/output"), Path(__file__).open("rb") as file:
        locks.lock_now(file.fileno())
