"""Writes a job: one `.et` file per rank, the groups file and the manifest, all or nothing.

Files go to a temporary directory beside the asked-for one, which takes its place only when
complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stagec.support.diagnostics import error
from stagec.trace.classes import RankClass
from stagec.trace.encode import Encoder, Layout, Roofline
from stagec.trace.groups import Groups, number_groups
from stagec.trace.limits import exceeded_limits
from stagec.trace.nodes import Node, Program

MANIFEST = "manifest.json"
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """The rank classes and the mesh that runs them."""

    name: str
    classes: Sequence[RankClass]
    mesh: Mapping[str, int]
    roofline: Roofline | None = None

    @cached_property
    def groups(self) -> Groups:
        """The numbered communicator groups."""
        used = ((c.groups, c.members(self.mesh)) for c in self.classes)
        return number_groups(self.mesh, used)


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: bytes of each file, and the warnings that go with it."""

    directory: Path
    files: Mapping[str, int]
    warnings: tuple[str, ...] = field(default=())

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def write_job(
    job: Job,
    directory: Path,
    about: Mapping[str, object],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write the traces of all ranks of a job into `directory`.

    `about` goes into the manifest (inputs, strategy, versions). Raises `DiagnosticError` if the
    directory is not empty (and not `force`) or cannot be written.
    """
    check_target(directory, force=force)
    with _all_or_nothing(directory, force=force) as temporary:
        groups = job.groups
        files: dict[str, tuple[int, str]] = {}
        classes: list[dict[str, object]] = []
        for each in job.classes:
            program, ranks = each.program(), each.members(job.mesh)
            classes.append(_class_entry(each, program, ranks))
            encoder = Encoder(program, Layout(job.mesh, groups), job.roofline)
            for rank in ranks.tolist():
                name = f"{job.name}.{rank}.et"
                files[name] = _write(temporary / name, encoder.rank(rank))
                if progress is not None:
                    progress(len(files), groups.ranks)
        table = json.dumps(groups.table())
        files[f"{job.name}.json"] = _write(temporary / f"{job.name}.json", table.encode())
        ids = map(int, groups.table())
        nodes = max(_nodes_of(entry) for entry in classes)
        warnings = tuple(exceeded_limits(ids, groups.ranks, nodes))
        if "empty" in str(directory.resolve() / job.name):
            warnings += ("ASTRA-sim takes a path with the word 'empty' for no groups file at all",)
        manifest: dict[str, object] = {
            "manifest": 1,
            **about,
            "ranks": groups.ranks,
            "mesh": dict(job.mesh),
            "classes": classes,
            "consumer_limits_exceeded": list(warnings),
            "files": {n: {"bytes": size, "sha256": digest} for n, (size, digest) in files.items()},
        }
        text = json.dumps(manifest, indent=1) + "\n"
        files[MANIFEST] = _write(temporary / MANIFEST, text.encode())
    return Written(directory, {n: size for n, (size, _) in files.items()}, warnings)


def _class_entry(
    rank_class: RankClass, program: Program, ranks: npt.NDArray[np.int64]
) -> dict[str, object]:
    kinds: Counter[str] = Counter()
    for node, count in zip(program.prototypes, program.counts.tolist(), strict=True):
        kinds[_kind(node)] += count
    return {
        "name": rank_class.name,
        "count": len(ranks),
        "example_rank": int(ranks[0]),
        "coords": dict(rank_class.coords),
        "nodes": {kind: kinds[kind] for kind in ("comp", "coll", "send", "recv")},
    }


def _kind(node: Node) -> str:
    if node.is_message:
        return node.kind
    return "coll" if node.is_collective else "comp"


def _nodes_of(entry: Mapping[str, Any]) -> int:
    return sum(entry["nodes"].values())


def _write(path: Path, data: bytes | memoryview) -> tuple[int, str]:
    path.write_bytes(data)
    return len(data), hashlib.sha256(data).hexdigest()


def check_target(directory: Path, *, force: bool) -> None:
    """Refuse a target that would lose something. Raises `DiagnosticError`."""
    if directory.exists() and not directory.is_dir():
        raise error(
            f"'{directory}' is a file, expected a directory to write to",
            remedy="choose another -o",
        )
    if directory.is_symlink():
        raise error(
            f"'{directory}' is a symbolic link", remedy="give the directory that it points to"
        )
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    if not force:
        raise error(
            f"'{directory}' is not empty", remedy="choose another -o, or replace it with --force"
        )
    if directory.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise error(f"'{directory}' contains the working directory", remedy="choose another -o")
    _check_replaceable(directory)


def _check_replaceable(directory: Path) -> None:
    """Only what an earlier run wrote is replaced, and only if nothing else is there."""
    try:
        manifest: Any = json.loads((directory / MANIFEST).read_bytes())
        ours = {MANIFEST, *manifest["files"]} if manifest["manifest"] == 1 else set[str]()
    except (OSError, ValueError, KeyError, TypeError):
        ours = set[str]()
    foreign = sorted(p.name for p in directory.iterdir() if p.name not in ours)
    if foreign:
        raise error(
            f"'{directory}' holds files that stagec did not write, such as '{foreign[0]}'",
            remedy="--force replaces earlier output only; choose another -o",
        )


@contextmanager
def _all_or_nothing(directory: Path, *, force: bool) -> Generator[Path]:
    """A temporary directory that becomes `directory` on success and vanishes on any failure."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(
        tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".partial", dir=directory.parent)
    )
    with _termination_raises():
        try:
            yield temporary
            temporary.chmod(0o777 & ~_umask())
            _replace(temporary, directory, force=force)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _replace(new: Path, target: Path, *, force: bool) -> None:
    if target.exists() and force and any(target.iterdir()):
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
        target.rename(old / "was")
        new.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        new.rename(target)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
