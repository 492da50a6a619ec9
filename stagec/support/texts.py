"""Reads texts: UTF-8, no longer than `MAX_BYTES` unless it is said."""

from importlib.resources import files
from pathlib import Path

from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.limits import MAX_BYTES, MAX_CONFIGURATION
from stagec.support.source import FileLoc, Source


def read_text(path: str, most: int = MAX_BYTES) -> Source:
    """The text of a file. Raises `DiagnosticError` for what is no text, or longer than
    `most` bytes, and `OSError`."""
    file = Path(path)
    if not path:
        raise error("the name of a file is empty", remedy="give one .stg file")
    if file.is_dir():
        raise error(f"{path} is a folder, expected a file", remedy="give one .stg file")
    if file.stat().st_size > most:
        raise _too_long(path, most)
    with file.open("rb") as stream:
        return decoded(path, stream.read(most + 1), most)


def file_text(path: Path, most: int, remedy: str) -> str:
    """The text of a file of at most so many bytes; the remedy is that of a longer one. Raises
    `DiagnosticError`, also for a file that cannot be read."""
    try:
        with path.open("rb") as stream:
            data = stream.read(most + 1)
    except OSError as e:
        raise error(f"{path}: {e.strerror}", remedy="give a file that can be read") from None
    if len(data) > most:
        raise error(f"{path}: longer than {most:,} bytes", remedy=remedy)
    return decoded(str(path), data, most).text


def decoded(name: str, data: bytes, most: int = MAX_BYTES) -> Source:
    """The text of these bytes. Raises `DiagnosticError` for what is no text, or too long."""
    if len(data) > most:
        raise _too_long(name, most)
    if b"\0" in data:
        where = _place(name, data, data.index(b"\0"))
        raise error("a NUL byte: the file is not text", where, remedy="give a text file")
    try:
        return Source(name, data.decode("utf-8-sig").replace("\r\n", "\n"))
    except UnicodeDecodeError as e:
        raise error(
            f"byte 0x{data[e.start]:02x} is not UTF-8",
            _place(name, data, e.start),
            remedy="save the file as UTF-8",
        ) from None


def _place(name: str, data: bytes, at: int) -> FileLoc:
    before = data[:at]
    return FileLoc(name, before.count(b"\n") + 1, at - before.rfind(b"\n"))


def _too_long(name: str, most: int) -> DiagnosticError:
    remedies = {
        MAX_BYTES: "state repeated layers once, in a stg.repeat",
        MAX_CONFIGURATION: "give a model's config.json, which has some kilobytes",
    }
    options = "leave out what is no option: a job or a sweep takes some kilobytes"
    remedy = options if name.endswith(".toml") else remedies.get(most)
    return error(f"{name} is longer than {most >> 20} MiB", remedy=remedy)


def package_text(path: str) -> str:
    """The text of a file of the package, by its path in it. Raises `OSError`."""
    return files("stagec").joinpath(path).read_text("utf-8")
