"""The files in a directory of traces: trace files, the groups file and the manifest.

This module handles names, sizes and JSON only; it reads no traces.
"""

import json
import re
import reprlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path

from stagec.check.findings import CheckReport
from stagec.check.members import GroupMembers
from stagec.support.json_values import is_list, is_object, object_in
from stagec.traces.checksum import CHECKSUM, is_intact

MANIFEST_NAME = "manifest.json"
_TRACE_NAME = re.compile(r"(?P<name>.+)\.(?P<rank>0|[1-9][0-9]{0,8})", re.ASCII | re.DOTALL)
#: The suffixes of trace files, in order of priority: only files with the first one in a folder are
#: read.
_ENDS = (".et", ".et.gz", ".json", ".json.gz")
_GROUP_ID = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)


@dataclass(frozen=True, slots=True)
class GroupsFile:
    """The groups file: its path, and the members of each group id."""

    path: Path
    members: GroupMembers


#: The group of a collective without `pg_name`, for which simulators assume all ranks: a text that
#: no `pg_name` can be, and its id.
ALL_RANKS, ALL_RANKS_ID = "\0", 0


def group_id(text: str) -> int | None:
    """The id of a communicator: a decimal integer > 0 without sign or leading zeros, or 0 for
    `ALL_RANKS`; None for other texts."""
    if text == ALL_RANKS:
        return ALL_RANKS_ID
    return int(text) if _GROUP_ID.fullmatch(text) else None


def discover(directory: Path, report: CheckReport) -> tuple[str, dict[int, Path]]:
    """The name of the job, and its trace files by rank, lowest rank first."""
    if not directory.is_dir():
        _entries(directory, report)  # reports why it cannot be read
        return "", {}
    entries = _entries(directory, report)
    jobs_by_end = [_jobs(entries, end) for end in _ENDS]
    jobs = next((each for each in jobs_by_end if each), jobs_by_end[0])
    for path in entries:
        if path.suffix == ".et" and not _TRACE_NAME.fullmatch(path.stem):
            message = f"expected a trace named NAME.RANK.et, found {path.name}"
            report.error(path, "bad-name", message, "rename it, ranks counting from 0")
    if not jobs:
        message = "expected trace files NAME.RANK.et, found none"
        inside = next((e for e in entries if e.is_dir() and any(e.glob("*.[0-9]*.et"))), None)
        remedy = f"name the directory that holds traces: {inside}"
        if inside is None:
            form = object_in(directory / MANIFEST_NAME).get("format", "chakra")
            remedy = "name a directory that holds traces"
            if form != "chakra":
                remedy = f"its format is '{form}': add chakra to --format of 'stagec compile'"
        report.error(directory, "no-traces", message, remedy)
        return "", {}
    if len(jobs) > 1:
        names = ", ".join(sorted(jobs))
        message = f"expected the traces of one job, found {len(jobs)}: {names}"
        report.error(directory, "mixed-names", message, "keep one job per directory")
    name = max(sorted(jobs), key=lambda job: len(jobs[job]))
    files = dict(sorted(jobs[name].items()))
    _check_ranks(directory, name, files, report)
    return name, files


def _jobs(entries: Iterable[Path], end: str) -> dict[str, dict[int, Path]]:
    """The trace files with a suffix, by the name of the job and by rank."""
    jobs: dict[str, dict[int, Path]] = {}
    for path in entries:
        match = _TRACE_NAME.fullmatch(path.name.removesuffix(end))
        if match and path.name.endswith(end):
            jobs.setdefault(match["name"], {})[int(match["rank"])] = path
    return jobs


def job_of(path: Path) -> tuple[str, int | None]:
    """The name of the job, and the rank, from the name of a trace file: `llama` and 3 for
    `llama.3.et`. The rank is None if the name has none."""
    end = next((end for end in reversed(_ENDS) if path.name.endswith(end)), "")
    match = _TRACE_NAME.fullmatch(path.name.removesuffix(end))
    return (match["name"], int(match["rank"])) if match else (path.stem, None)


def _entries(directory: Path, report: CheckReport) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"expected a directory of traces: {reason}"
        report.error(directory, "no-directory", message, "name a directory that can be read")
        return []


def _check_ranks(
    directory: Path, name: str, files: Mapping[int, Path], report: CheckReport
) -> None:
    missing = next((rank for rank in range(len(files)) if rank not in files), None)
    if missing is not None and not written_of(directory, files):
        last = max(files)
        end = files[last].name.removeprefix(f"{name}.{last}")
        message = f"expected ranks 0 to {last}, found no {name}.{missing}{end}"
        report.error(directory, "missing-rank", message, "number the ranks from 0 without gaps")


def written_of(directory: Path, files: Sized) -> int:
    """The number of ranks of the job of which `--only-ranks` wrote fewer here, else 0."""
    manifest = object_in(directory / MANIFEST_NAME)
    ranks = manifest.get("ranks") if "ranks_written" in manifest else 0
    return ranks if isinstance(ranks, int) and ranks > len(files) else 0


def read_groups(directory: Path, name: str, report: CheckReport) -> GroupsFile | None:
    """The groups file of a job: `NAME.json`, else the only JSON file that looks like one."""
    path = directory / f"{name}.json"
    if not path.exists():
        candidates = [p for p in _entries(directory, report) if _looks_like_groups(p)]
        if len(candidates) != 1:
            return None
        path = candidates[0]
    try:
        parsed = _load(path)
    except (OSError, ValueError, RecursionError) as error:
        message = f'expected communicator groups like {{"1": [0, 1]}}: {error}'
        report.error(path, "bad-groups-file", message, _GROUPS_REMEDY)
        return GroupsFile(path, GroupMembers.of({}))
    if "empty" in str(path):
        message = "expected a path without the word 'empty', which ASTRA-sim takes for no file"
        report.warning(path, "empty-in-path", message, "rename the job or its directory")
    if not is_object(parsed):
        message = f"expected an object of groups, found {type(parsed).__name__}"
        report.error(path, "bad-groups-file", message, _GROUPS_REMEDY)
        return GroupsFile(path, GroupMembers.of({}))
    return GroupsFile(path, GroupMembers.of(dict(_parsed_groups(path, parsed, report))))


_GROUPS_REMEDY = "write one object: decimal ids > 0 to lists of distinct ranks"


def _looks_like_groups(path: Path) -> bool:
    if path.suffix != ".json" or path.name == MANIFEST_NAME:
        return False
    try:
        parsed = _load(path)
    except (OSError, ValueError, RecursionError):
        return False
    return is_object(parsed) and all(
        group_id(key) is not None and is_list(value) for key, value in parsed.items()
    )


def _load(path: Path) -> object:
    if not path.is_file():
        raise ValueError("it is not a regular file")
    parsed: object = json.loads(path.read_bytes(), object_pairs_hook=_distinct)
    return parsed


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a key occurs twice")
    return entries


def _parsed_groups(
    path: Path, entries: Mapping[str, object], report: CheckReport
) -> Iterator[tuple[int, tuple[int, ...]]]:
    for key, value in entries.items():
        number, members = group_id(key), _ranks(value)
        if number is None or members is None:
            actual = f"{key!r}: {reprlib.repr(value)}"
            message = f"expected a decimal id > 0 with a list of distinct ranks, found {actual}"
            report.error(path, "bad-groups-file", message, _GROUPS_REMEDY)
        else:
            yield number, members


def _ranks(value: object) -> tuple[int, ...] | None:
    if not is_list(value):
        return None
    ranks: list[int] = []
    for item in value:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < 1 << 63:
            return None
        ranks.append(item)
    return tuple(ranks) if len(set(ranks)) == len(ranks) else None


def check_manifest(directory: Path, traces: Mapping[int, Path], report: CheckReport) -> None:
    """Compare the files with the sizes and checksums in the manifest, if there is one, and the
    manifest with its own checksum."""
    path = directory / MANIFEST_NAME
    if not path.exists():
        return
    try:
        parsed = _object(_load(path))
        files = _manifest_files(parsed)
        _check_checksum(path, parsed, report)
    except (OSError, ValueError, RecursionError) as error:
        message = f'expected {{"files": {{NAME: {{"bytes": ..., "crc32": ...}}}}}}: {error}'
        report.error(path, "bad-manifest", message, "write the traces again")
        return
    for name, (size, checksum) in files.items():
        _check_file(directory / name, size, checksum, report)
    for trace in traces.values():
        if trace.name not in files:
            message = "expected every trace to be in the manifest, found one that is not"
            report.error(trace, "unlisted-file", message, "remove it, or write the traces again")


def _check_checksum(path: Path, parsed: Mapping[str, object], report: CheckReport) -> None:
    """Check the manifest's own checksum, which those of the first version and of other tools may
    lack."""
    version = parsed.get("manifest", 1)
    if (CHECKSUM in parsed or version != 1) and not is_intact(path.read_bytes()):
        message = f"expected the manifest with its own checksum ({CHECKSUM}), found another text"
        remedy = "write the traces again; the manifest changed after it was written"
        report.error(path, "wrong-checksum", message, remedy)


def _manifest_files(parsed: Mapping[str, object]) -> dict[str, tuple[int, str]]:
    files: dict[str, tuple[int, str]] = {}
    for name, entry in _object(parsed.get("files")).items():
        size, checksum = _object(entry).get("bytes"), _object(entry).get("crc32")
        if not isinstance(size, int) or not isinstance(checksum, str):
            raise ValueError(f"the entry of {name!r} lacks its size or its checksum")
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"{name!r} is not the name of a file of this directory")
        files[name] = size, checksum
    return files


def _object(value: object) -> dict[str, object]:
    if not is_object(value):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    return value


def _check_file(path: Path, size: int, checksum: str, report: CheckReport) -> None:
    remedy = "write the traces again; the file changed after it was written"
    if not path.is_file():
        message = "expected a file that the manifest names, found none"
        report.error(path, "missing-file", message, remedy)
        return
    try:
        actual_size, actual = path.stat().st_size, _crc32(path)
    except OSError as error:
        report.error(path, "missing-file", f"expected a readable file: {error}", remedy)
        return
    if actual_size != size:
        message = f"expected {size} bytes as in the manifest, found {actual_size}"
        report.error(path, "wrong-size", message, remedy)
    elif actual != checksum.lower():
        message = f"expected CRC-32 {checksum} as in the manifest, found {actual}"
        report.error(path, "wrong-checksum", message, remedy)


def _crc32(path: Path) -> str:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"
