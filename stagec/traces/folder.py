"""Where a job is written: a working folder beside the asked-for one, which takes its place only
when complete.

The working folder has a fixed name, so that what an interrupted run left is found again.

One writer of a folder at a time: a lock file beside the folder, which says who has it.

The file is locked by the system, so that the lock ends with the processes that hold it, however
they end; what is written in it is for those who wait.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.files import umask
from stagec.support.json_values import is_object, object_in
from stagec.support.locks import lock_now, remove_locked
from stagec.traces.checksum import CHECKSUM_VERSION

#: Seconds to wait for a run on the same folder that is about to end.
_PATIENCE = 5.0
_STEP = 0.05
_MOST = 4096


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold a folder, which may not be there yet, against other runs.

    Raises `DiagnosticError` that says who has it.
    """
    path = folder.with_name(f".{folder.name}.lock")
    handle = _taken(path, folder)
    try:
        with suppress(OSError):  # on a full disk a lock without words is a lock
            os.ftruncate(handle, 0)
            os.lseek(handle, 0, os.SEEK_SET)
            os.write(handle, json.dumps(_holder()).encode())
        yield
    finally:
        remove_locked(handle, path)


def _taken(path: Path, folder: Path) -> int:
    deadline = time.monotonic() + _PATIENCE
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            is_locked = lock_now(handle)
            if not is_locked and time.monotonic() > deadline:
                os.lseek(handle, 0, os.SEEK_SET)
                raise _locked_by(os.read(handle, _MOST), folder)
        except BaseException:
            os.close(handle)
            raise
        if not is_locked:
            os.close(handle)
            time.sleep(_STEP)
            continue
        if _is_at(handle, path):
            return handle
        os.close(handle)  # the holder has ended meanwhile, and its file with it


def _is_at(handle: int, path: Path) -> bool:
    """Whether a file still has its name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _holder() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(["stagec", *sys.argv[1:]]),
    }


def _locked_by(contents: bytes, folder: Path) -> DiagnosticError:
    try:
        who: Any = json.loads(contents)
        pid, host = int(who["pid"]), str(who["host"])
        by = f"process {pid} on {host} since {who['since']}: {who['command']}"
        end = f"kill {pid}" + ("" if host == socket.gethostname() else f" on {host}")
    except (ValueError, KeyError, TypeError):
        by, end = "another run", "its process"
    return error(
        f"'{folder}' is being written by {by}",
        remedy=f"wait for it, choose another -o, or end it ({end})",
    )


MANIFEST = "manifest.json"


@contextmanager
def working_folder(target: Path, *, force: bool, resume: bool) -> Generator[Path]:
    """A folder to write to that becomes `target` in the end, which must be no symbolic link.

    With `resume` it is the one that an interrupted run left, or `target` itself where that is
    complete. A disk that fails leaves it, to be resumed; so does any end of a run with `resume`.
    Raises `DiagnosticError` if another run is writing there, or something would be lost.
    """
    _check_place(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _termination_raises(), locked(target):
        check_target(target, force=force, resume=resume)
        working, old = (target.with_name(f".{target.name}.{end}") for end in ("partial", "old"))
        in_place = resume and not working.exists() and target.is_dir() and any(target.iterdir())
        folder = target if in_place else working
        if not resume and working.exists():
            shutil.rmtree(working)
        folder.mkdir(exist_ok=True)
        try:
            yield folder
        except OSError as problem:
            kept = "what is written is kept: run the same command with --resume to go on"
            problem.add_note(kept)
            raise
        except BaseException:
            if not resume:
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                folder.rmdir()  # of a run with `resume` if it is empty
            raise
        if not in_place:
            folder.chmod(0o777 & ~umask())
            shutil.rmtree(old, ignore_errors=True)
            if target.exists() and force and any(target.iterdir()):
                target.rename(old)
            folder.rename(target)
            shutil.rmtree(old, ignore_errors=True)


def real_folder(folder: Path) -> Path:
    """The folder that is written to: of a symbolic link, what it points to."""
    return Path(os.path.realpath(folder)) if folder.is_symlink() else folder


def check_target(directory: Path, *, force: bool, resume: bool = False) -> None:
    """Refuse a target that would lose something. Raises `DiagnosticError`.

    With `resume`, earlier output of stagec is what is to be completed.
    """
    _check_place(directory)
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    working = directory.with_name(f".{directory.name}.partial")
    if not force and (not resume or working.exists()):
        raise error(
            f"'{directory}' is not empty", remedy="choose another -o, or replace it with --force"
        )
    _check_replaceable(directory)


def _check_place(directory: Path) -> None:
    """Refuse a file, and folders that the process stands in: such a folder cannot be replaced, and
    '.' has no name to put a lock beside."""
    if directory.exists() and not directory.is_dir():
        raise error(
            f"'{directory}' is a file, expected a directory to write to", remedy="choose another -o"
        )
    if directory.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise error(
            f"'{directory}' is or contains the working directory", remedy="choose another -o"
        )


def check_same_job(directory: Path, about: Mapping[str, object]) -> None:
    """Refuse to complete what another command has written whole. Raises `DiagnosticError`."""
    command = object_in(directory / MANIFEST).get("command")
    if command is not None and "command" in about and command != about["command"]:
        raise error(
            f"'{directory}' holds the traces of another command: {command}",
            remedy="choose another -o, or replace them with --force",
        )


def _check_replaceable(directory: Path) -> None:
    """Only what an earlier run wrote is replaced, and only if nothing else is there."""
    manifest = object_in(directory / MANIFEST)
    files, known = manifest.get("files"), manifest.get("manifest") in (1, CHECKSUM_VERSION)
    ours = {MANIFEST, *files} if known and is_object(files) else set[str]()
    foreign = sorted(p.name for p in directory.iterdir() if p.name not in ours)
    if foreign:
        raise error(
            f"'{directory}' holds files that stagec did not write, such as '{foreign[0]}'",
            remedy="choose another -o; --force replaces only what stagec wrote",
        )


@contextmanager
def _termination_raises() -> Generator[None]:
    """Turn SIGTERM into an exception while writing, so that a killed run cleans up."""

    def stop(signum: int, _frame: object) -> None:
        raise SystemExit(128 + signum)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
