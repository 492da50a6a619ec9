"""Files that are written completely or not at all."""

import errno
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_file(path: Path, data: str | bytes) -> None:
    """Write a file atomically: afterwards it has its previous content or all of the data.

    For a symbolic link, its target is written; data for a device or a pipe is written directly.
    Raises `OSError` that names `path`.
    """
    with new_file(path) as file:
        file.write(data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data)


def check_new_file(path: Path) -> None:
    """Raise the `OSError` that writing this file would raise: its folder does not exist, or the
    path is a folder or a file without write permission."""
    try:
        target = Path(os.path.realpath(path))
        if _is_stream(path):
            return
        if not target.parent.is_dir():
            target.parent.stat()
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        _check_writable(target)
    except OSError as problem:
        problem.filename = str(path)
        raise


@contextmanager
def new_file(path: Path) -> Generator[BinaryIO]:
    """A file to write that replaces `path` when the block ends without an error. Raises `OSError`
    that names `path`."""
    try:
        target = Path(os.path.realpath(path))
        if _is_stream(path):
            with path.open("wb") as file:
                yield file
            return
        _check_writable(target)
        with _beside(target) as file:
            yield file
    except OSError as problem:
        problem.filename = str(path)
        problem.filename2 = None
        raise


def _is_stream(path: Path) -> bool:
    """Whether a path is a pipe or a device, or a link to one, such as `/dev/stdout`."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _check_writable(target: Path) -> None:
    """Raise `OSError` for a target that is a folder or not writable, which a rename would not."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _beside(target: Path) -> Generator[BinaryIO]:
    """A temporary file in the folder of the target, which is renamed to it at the end."""
    mode = target.stat().st_mode & 0o7777 if target.exists() else 0o666 & ~umask()
    handle, name = tempfile.mkstemp(prefix=".stagec-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)
        Path(name).chmod(mode)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def umask() -> int:
    """The file mode creation mask of this process."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
