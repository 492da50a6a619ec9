"""Files are written whole or not at all; one run at a time writes a folder, and the other
reports its process."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stagec.support.files import check_new_file, new_file, write_file
from tests.support import LLAMA, LONG, stagec

ROOT = Path(__file__).parents[2]
SIZES = ["--set", "L=2,B=4", "--quiet"]
MODULE = "stg.module @m {\n}\n"
#: Commands that write one file with -o or an option like it.
WRITERS = {
    "opt": ["opt", "IN", "-o", "OUT"],
    "analyze": ["analyze", LLAMA, "--set", "L=2", "-o", "OUT"],
    "analyze --json": ["analyze", LLAMA, "--set", "L=2", "--json", "-o", "OUT"],
    "memory": ["memory", LLAMA, "--set", "L=2", "-o", "OUT"],
    "memory --html": ["memory", LLAMA, "--set", "L=2", "--html", "OUT"],
    "memory --snapshot": ["memory", LLAMA, "--set", "L=2", "--snapshot", "OUT"],
    "schedule --svg": ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--svg", "OUT"],
    "compile --archive": ["compile", LLAMA, *SIZES, "--force", "--archive", "OUT"],
}


def command(name: str, folder: Path) -> list[str]:
    (folder / "in.stg").write_text(MODULE)
    places = {"IN": str(folder / "in.stg"), "OUT": str(folder / "out")}
    return [places.get(word, word) for word in WRITERS[name]]


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_there_stays_when_the_disk_is_full(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, out = command(name, tmp_path), tmp_path / "out"
    out.write_text("before")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    ran = stagec(*words)
    assert (ran.code, "No space left" in ran.err) == (1, True), ran.err
    assert str(out) in ran.err
    assert out.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.stg", "out"]
    monkeypatch.undo()
    assert stagec(*words).code == 0
    assert out.read_bytes() != b"before"


def test_an_error_while_writing_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_file(path, "before")

    def write_half() -> None:
        with new_file(path) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    link, path = tmp_path / "link", tmp_path / "folder" / "file"
    path.parent.mkdir()
    link.symlink_to(path)
    for text in ("one", "two"):
        write_file(link, text)
        assert link.is_symlink()
        assert path.read_text() == text


def test_permissions_are_those_of_the_file_or_of_a_new_one(tmp_path: Path) -> None:
    old, new, plain = tmp_path / "old", tmp_path / "new", tmp_path / "plain"
    old.write_text("")
    old.chmod(0o640)
    plain.write_text("")
    write_file(old, "x")
    write_file(new, "x")
    assert old.stat().st_mode & 0o777 == 0o640
    assert new.stat().st_mode == plain.stat().st_mode


def test_a_pipe_without_a_name_is_written_to() -> None:
    """As `-o /dev/stdout` in a pipeline is."""
    reading, writing = os.pipe()
    path = Path(f"/dev/fd/{writing}")
    check_new_file(path)
    write_file(path, "text")
    assert os.read(reading, 99) == b"text"
    os.close(reading)
    os.close(writing)


def test_a_device_is_written_to_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, "text")
    assert os.read(reader, 99) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("target", ["", "no/such/x"])
def test_a_place_that_cannot_be_written_is_named(target: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory") as raised:
        write_file(tmp_path / target, "x")
    assert raised.value.filename == str(tmp_path / target)
    assert list(tmp_path.iterdir()) == []


# -- folders


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix == ".et"}


def test_a_link_to_a_folder_is_written_through(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)  # first to nothing, then to an old job
    for more in ([], ["--force"], ["--resume"]):
        ran = stagec("compile", LLAMA, *SIZES, "-o", link, *more)
        assert ran.code == 0, ran.err
        assert link.is_symlink()
        assert content(real)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


HOLD = """
import sys, time
from pathlib import Path
from stagec.traces.folder import working_folder
with working_folder(Path(sys.argv[1]), force=False, resume=False):
    print("writing", flush=True)
    time.sleep(60)
"""


@LONG
def test_the_second_writer_is_reported_who_has_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagec.traces.folder._PATIENCE", 0.1)
    out = tmp_path / "out"
    words = [sys.executable, "-c", HOLD, str(out)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"writing\n"
        for more in ([], ["--force"], ["--resume"]):
            ran = stagec("compile", LLAMA, *SIZES, "-o", out, *more)
            assert ran.code == 1
            assert f"'{out}' is being written by process {first.pid} on " in ran.err
            assert f"stagec {out}" in ran.err, "the command of the other"
            assert f"kill {first.pid}" in ran.err
        first.send_signal(signal.SIGKILL)
    assert stagec("compile", LLAMA, *SIZES, "-o", out).code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOLCK, 0), (errno.ENOTSUP, 0), (errno.EIO, 1)]
)
def test_a_file_system_without_locks_is_written_to(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some clusters have; other faults of a disk are reported."""

    def flock(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("stagec.support.locks.fcntl.flock", flock)
    ran = stagec("compile", LLAMA, *SIZES, "-o", tmp_path / "out")
    assert ran.code == code
    assert ("error: " in ran.err) is bool(code)
    assert (tmp_path / "out").exists() is not bool(code)


TWO = """
import sys
from stagec.driver.cli import main
sys.stdin.readline()
sys.exit(main(sys.argv[1:]))
"""


@LONG
def test_of_two_writers_one_wins_and_the_other_is_reported(tmp_path: Path) -> None:
    """Whatever moment each comes at: no traceback, no folder that is not there."""
    out = tmp_path / "out"
    words = [sys.executable, "-c", TWO, "compile", LLAMA, *SIZES, "--dp", "2", "-o", str(out)]
    runs = [
        subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("\n")
        run.stdin.flush()
    expected = [run.communicate()[1] for run in runs]
    codes = sorted(run.returncode for run in runs)
    assert codes == [0, 1], expected
    for text in filter(None, expected):
        assert "is being written by process" in text or "is not empty" in text, text
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert stagec("check", out).code == 0
