"""Writing a job: node for node what the program says, the same bytes each time, all or nothing: a
run that fails or is killed leaves nothing under the asked-for name.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stagec.check.traces import check_directory
from stagec.formats.chakra.nodes import CollKind, NodeKind, TraceNode, encode_node
from stagec.formats.chakra.record_files import read_trace
from stagec.ir.param import attr_text
from stagec.jobs.builder import JobBuilder
from stagec.program.groups import GroupAxes
from stagec.program.nodes import Node
from stagec.text.printer import print_op
from stagec.traces.emit import EmittedJob, make_job
from stagec.traces.folder import MANIFEST
from stagec.traces.writer import Emission, Written, write_source
from tests.support import EXHAUSTIVE, LLAMA, LONG, MIXTRAL, assert_same_items, stagec, tiny_options

ROOT = Path(__file__).parents[2]


def job(model: str = LLAMA, **options: Any) -> EmittedJob:
    """The job of a tiny model."""
    return make_job(JobBuilder(tiny_options(model, **options)).lower(), "tiny")


def write(made: EmittedJob, directory: Path, **options: Any) -> Written:
    return write_source(made, directory, {"by": "test"}, Emission(**options))


def arguments(directory: Path, *more: str) -> list[str]:
    """`stagec compile` of a tiny model over four ranks."""
    sizes = "L=2,B=2,S=4,D=8,H=4,G=4,K=2,F=8,V=16"
    given = ["compile", LLAMA, "--set", sizes, "--dp", "2", "--tp", "2", "--quiet"]
    return [*given, "-o", str(directory), *more]


# -- the nodes: against a slow and plain writer


def coordinates(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """Row-major, last axis fastest."""
    actual: dict[str, int] = {}
    for name in reversed(list(mesh)):
        rank, actual[name] = divmod(rank, mesh[name])
    return actual


def plain_groups(made: EmittedJob) -> dict[GroupAxes, list[list[int]]]:
    """For each axes in order of use in the text: the groups of ranks that differ along these
    only."""
    mesh, program = made.mesh, made.classes[0].program()
    used = {node.group for node in program.nodes if node.group}
    text = print_op(made.classes[0].graph)
    written = {group: f"group = {attr_text(group.axes)}" for group in used}
    ranks = 1
    for size in mesh.values():
        ranks *= size
    where = [coordinates(r, mesh) for r in range(ranks)]
    result: dict[GroupAxes, list[list[int]]] = {}
    for group in sorted(used, key=lambda g: _place(written[g], text)):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(ranks):
            key = tuple(where[rank][a] for a in mesh if a not in group.axes)
            groups.setdefault(key, []).append(rank)
        for members in groups.values():
            order = {r: [where[r][a] for a in group.axes] for r in members}
            members.sort(key=order.__getitem__)
        result[group] = sorted(groups.values(), key=min)
    return result


def _place(words: str, text: str) -> int:
    actual = re.search(rf"{re.escape(words)}[,\]]", text)
    assert actual is not None
    return actual.start()


def plain_nodes(made: EmittedJob, rank: int) -> Iterator[TraceNode]:
    """The nodes of a rank, written out one by one."""
    number: dict[GroupAxes, int] = {}
    size: dict[GroupAxes, int] = {}
    next_id = 1
    for axes, groups in plain_groups(made).items():
        for members in groups:
            if rank in members:
                number[axes], size[axes] = next_id, len(members)
            next_id += 1
    for node in made.classes[0].program().nodes:
        yield plain_node(node, number, size)


def plain_node(
    node: Node, number: Mapping[GroupAxes, int], size: Mapping[GroupAxes, int]
) -> TraceNode:
    data = tuple(d.id for d in node.deps)
    control = tuple(d.id for d in node.after)
    if not node.group:
        attrs: dict[str, Any] = {
            "is_cpu_op": False,
            "num_ops": node.flops or 1,
            "tensor_size": node.size or 1,
        }
        return TraceNode(node.id, node.name, NodeKind.COMP, data, control, attrs)
    shard = node.size // size[node.group] if node.kind == "all_gather" else node.size
    attrs = {
        "is_cpu_op": False,
        "comm_type": int(CollKind[node.kind.upper()]),
        "comm_size": shard,
        "pg_name": str(number[node.group]),
    }
    return TraceNode(node.id, node.name, NodeKind.COLL, data, control, attrs)


BIG_MESH: dict[str, Any] = {"dp": 128, "tp": 2, "sp": True, "sizes": {"B": 128}}


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({}, [0]),
        ({"tp": 2}, [0, 1]),
        ({"dp": 2, "tp": 2, "sp": True, "zero": 3}, range(4)),
        ({"dp": 4, "zero": 1, "microbatches": 2, "ddp_bucket": 300}, [0, 3]),
        (BIG_MESH, [0, 1, 17, 18, 19, 127, 128, 199, 200, 255]),
    ],
)
def test_files_equal_those_of_a_plain_writer(
    options: dict[str, Any], ranks: range | list[int], tmp_path: Path
) -> None:
    made = job(**options)
    write(made, tmp_path / "out")
    for rank in ranks:
        actual = read_trace(tmp_path / "out" / f"tiny.{rank}.et")
        assert_same_items(actual, plain_nodes(made, rank), f"rank {rank}")


def test_ranks_with_longer_and_shorter_group_numbers_are_tested_above() -> None:
    made = job(**BIG_MESH)
    widths = {len(str(n)) for ids in made.groups.number.values() for n in ids}
    assert widths == {1, 2, 3}


@pytest.mark.parametrize("options", [{"dp": 2, "tp": 2, "sp": True, "zero": 3}, BIG_MESH])
def test_an_independent_reader_sees_the_same_nodes(options: dict[str, Any], tmp_path: Path) -> None:
    protolib: Any = pytest.importorskip("chakra.src.third_party.utils.protolib")
    schema: Any = pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    made = job(**options)
    write(made, tmp_path / "out")
    ranks = len(made.groups.number[made.classes[0].program().groups[0]])
    for rank in {0, ranks // 2, ranks - 1}:
        with protolib.openFileRd(str(tmp_path / "out" / f"tiny.{rank}.et")) as file:
            metadata, node = schema.GlobalMetadata(), schema.Node()
            assert protolib.decodeMessage(file, metadata)
            assert metadata.version == "0.0.4"
            for expected in plain_nodes(made, rank):
                assert protolib.decodeMessage(file, node)
                assert independent(node) == expected
            assert not protolib.decodeMessage(file, node)


def independent(node: Any) -> TraceNode:
    """A node of the public schema, each attribute from the member that consumers read."""
    names = {
        "is_cpu_op": "bool_val",
        "num_ops": "int64_val",
        "tensor_size": "uint64_val",
        "comm_type": "int64_val",
        "comm_size": "int64_val",
        "pg_name": "string_val",
    }
    attrs = {a.name: getattr(a, names[a.name]) for a in node.attr}
    assert all(a.HasField(names[a.name]) for a in node.attr)
    deps = tuple(node.data_deps), tuple(node.ctrl_deps)
    return TraceNode(node.id, node.name, node.type, *deps, attrs, node.duration_micros)


def test_the_groups_file_lists_each_used_group_in_ring_order(tmp_path: Path) -> None:
    made = job(dp=2, tp=4, sp=True)
    write(made, tmp_path / "out")
    actual = json.loads((tmp_path / "out" / "tiny.json").read_text())
    plain = [m for groups in plain_groups(made).values() for m in groups]
    assert actual == {str(i): members for i, members in enumerate(plain, 1)}
    assert [0, 1, 2, 3] in actual.values()
    assert [0, 4] in actual.values()
    assert list(range(8)) in actual.values()


def test_durations_follow_the_roofline(tmp_path: Path) -> None:
    ran = stagec(*arguments(tmp_path / "o", "--peak-tflops", "0.000001", "--memory-gbps", "0.001"))
    assert ran.code == 0
    for node in read_trace(tmp_path / "o" / f"{LLAMA}.0.et"):
        if node.kind != NodeKind.COMP:
            assert node.duration_micros == 0
            continue
        flops, size = int(str(node.attrs["num_ops"])), int(str(node.attrs["tensor_size"]))
        assert node.duration_micros == pytest.approx(max(flops, size), abs=1)


# -- files


def content(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def assert_same_files(actual: dict[str, bytes], expected: dict[str, bytes]) -> None:
    assert actual.keys() == expected.keys()
    assert [n for n, data in actual.items() if data != expected[n]] == []


@LONG
def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    """In this process, and in one with another hash seed, into different folders."""
    here, there = tmp_path / "here", tmp_path / "there"
    assert stagec(*arguments(here, "--zero", "3", "--sp")).code == 0
    env = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    command = [sys.executable, "-m", "stagec", *arguments(there, "--zero", "3", "--sp")]
    subprocess.run(command, check=True, env=env, cwd=ROOT)
    assert_same_files(content(here), content(there))


def test_the_manifest_names_every_file_with_size_and_checksum(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert stagec(*arguments(out)).code == 0
    files = content(out)
    manifest = json.loads(files.pop("manifest.json"))
    assert manifest["files"] == {
        name: {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
        for name, data in files.items()
    }
    assert manifest["ranks"] == 4
    assert manifest["mesh"] == {"dp": 2, "tp": 2}
    assert manifest["symbols"]["L"] == 2
    assert "stg.strategy" in manifest["strategy"]
    assert set(manifest["versions"]) >= {"stagec", "lark", "numpy", "protobuf", "sympy"}
    text = (ROOT / "stagec" / "models" / "llama.stg").read_text()
    assert manifest["inputs"]["<library>/llama.stg"] == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "more",
    [
        ["--zero", "2", "--sp", "--microbatches", "1", "--ddp-bucket", "512"],
        ["--no-async-tp", "--names", "short", "--name", "mine", "--memory-events"],
        ["--pp", "2", "--schedule", "interleaved", "--stage-layers", "1,2,1,0", "--set", "L=4,B=8"],
        ["--peak-tflops", "900", "--memory-gbps", "3000", "--granularity", "layer"],
    ],
    ids=lambda more: more[0],
)
def test_the_command_of_the_manifest_gives_the_same_traces(more: list[str], tmp_path: Path) -> None:
    same_again(arguments(tmp_path / "one", *more), tmp_path)


@LONG
def test_the_command_with_experts_gives_the_same_traces(tmp_path: Path) -> None:
    sizes = "L=2,S=64,D=64,M=64,V=64,B=4"
    loads = tmp_path / "loads.json"
    loads.write_text("[[5, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 2]]")
    given = ["--dp", "4", "--ep", "2", "--capacity-factor", "1", "--fp8", "e4m3", "--set", sizes]
    out = ["--expert-load", str(loads), "-o", str(tmp_path / "one"), "--quiet"]
    same_again(["compile", MIXTRAL, *given, *out], tmp_path)


def same_again(arguments: list[str], folder: Path) -> None:
    """The command that the manifest of `one` names writes the same."""
    assert stagec(*arguments).code == 0
    first, second = folder / "one", folder / "two"
    command = shlex.split(json.loads((first / "manifest.json").read_text())["command"])
    assert command[:2] == ["stagec", "compile"]
    ran = stagec(*command[1:], "-o", second, "--quiet")
    assert ran.code == 0, ran.err
    assert_same_files(content(first), content(second))


def test_one_corrupt_byte_is_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(job(dp=2, tp=2), out)
    assert stagec("check", out).code == 0
    file = out / "tiny.2.et"
    data = bytearray(file.read_bytes())
    for place in (0, 5, len(data) // 2, len(data) - 1):
        broken = bytearray(data)
        broken[place] ^= 1
        file.write_bytes(broken)
        ran = stagec("check", out)
        assert ran.code == 1, place
        assert "tiny.2.et" in ran.err
    file.write_bytes(data)
    assert stagec("check", out).code == 0


# -- all or nothing


def test_a_folder_with_content_is_refused_without_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert stagec(*arguments(out)).code == 0
    before = content(out)
    ran = stagec(*arguments(out, "--zero", "3"))
    assert ran.code == 1
    assert "is not empty" in ran.err
    assert "--force" in ran.err
    assert_same_files(content(out), before)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_force_replaces_earlier_output(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert stagec(*arguments(out, "--name", "old")).code == 0
    assert stagec(*arguments(out, "--name", "new", "--force")).code == 0
    assert {name.split(".")[0] for name in content(out)} == {"new", "manifest"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_force_does_not_replace_what_is_not_ours(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    for more in ([], ["--force"]):
        ran = stagec(*arguments(out, *more))
        assert ran.code == 1
        assert "help:" in ran.err
        assert content(out) == {"thesis.tex": b"years of work"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_force_does_not_delete_files_beside_ours(tmp_path: Path) -> None:
    """A folder with our manifest and something else holds something to lose."""
    out = tmp_path / "out"
    assert stagec(*arguments(out)).code == 0
    (out / "notes.txt").write_text("mine")
    ran = stagec(*arguments(out, "--force"))
    assert (out / "notes.txt").exists(), "a file that stagec did not write is gone"
    assert ran.code == 1


def test_a_manifest_of_another_tool_is_not_ours(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "manifest.json").write_text('{"name": "a browser extension"}')
    (out / "background.js").write_text("code")
    ran = stagec(*arguments(out, "--force"))
    assert ran.code == 1
    assert sorted(content(out)) == ["background.js", "manifest.json"]


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert stagec(*arguments(out)).code == 0
    assert "manifest.json" in content(out)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("text")
    ran = stagec(*arguments(out, "--force"))
    assert ran.code == 1
    assert "help:" in ran.err
    assert out.read_text() == "text"


@pytest.mark.parametrize("problem", [RuntimeError("bug"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_failure_midway_leaves_nothing(
    problem: BaseException, earlier: bool, tmp_path: Path
) -> None:
    """Neither under the asked-for name nor beside it; earlier output stays as it is."""
    out, made = tmp_path / "out", job(dp=2)
    if earlier:
        write(made, out)
    before = content(out) if earlier else None

    def fail(done: int, total: int) -> None:
        if done >= 1:
            raise problem

    with pytest.raises(type(problem)):
        write(made, out, force=True, progress=fail)
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if earlier else [])
    if before is not None:
        assert_same_files(content(out), before)


SLOW = """
import signal, sys, time
from pathlib import Path
from tests.unit.test_emit import job, write
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
made = job(dp=2)
def wait(done, total):
    print("writing", flush=True)
    time.sleep(60)
write(made, Path(sys.argv[1]), force=True, progress=wait)
"""


@LONG
@pytest.mark.parametrize(
    "sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=EXHAUSTIVE), signal.SIGKILL]
)
def test_a_killed_run_leaves_nothing_under_the_name(sent: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", SLOW, str(out)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        assert not out.exists()
        process.send_signal(sent)
        assert process.wait(10) != 0
    left = [p.name for p in tmp_path.iterdir()]
    assert "out" not in left
    if sent != signal.SIGKILL:
        assert left == []


def test_what_a_killed_run_left_does_not_stop_the_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / ".out.abc.partial").mkdir()
    write(job(dp=2), out)
    assert check_directory(out).ok()


# -- disks


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the reason and a remedy, and what is written can be completed."""
    real, calls = Path.write_bytes, [0]

    def full(self: Path, data: bytes) -> int:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return real(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    ran = stagec(*arguments(tmp_path / "out"))
    monkeypatch.undo()
    assert ran.code == 1
    assert "No space left" in ran.err
    assert "help: free space" in ran.err
    assert "--resume" in ran.err
    assert "Traceback" not in ran.err
    assert [p.name for p in tmp_path.iterdir()] == [".out.partial"]
    assert stagec(*arguments(tmp_path / "out", "--resume")).code == 0
    assert stagec(*arguments(tmp_path / "other")).code == 0
    assert_same_files(content(tmp_path / "out"), content(tmp_path / "other"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB, where one may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(small_disk: Path) -> None:
    ran = stagec(*arguments(small_disk / "out", "--set", "L=40"))
    assert ran.code == 1
    actual = re.search(r"the traces take about ([\d.]+) MB, and ([\d.]+) MB are free", ran.err)
    assert actual
    assert float(actual[1]) > float(actual[2])
    assert "--only-ranks" in ran.err
    assert list(small_disk.iterdir()) == []
    assert stagec(*arguments(small_disk / "out", "--set", "L=40"), "--resume").code == 1
    assert list(small_disk.iterdir()) == []


@LONG
def test_a_real_disk_that_fills_up(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the estimate did not help: a message, and a state that can be completed."""
    free = shutil.disk_usage("/")

    def usage(_: Path) -> Any:
        return free

    monkeypatch.setattr(shutil, "disk_usage", usage)
    job = arguments(small_disk / "out", "--set", "L=40")
    ran = stagec(*job)
    monkeypatch.undo()
    assert ran.code == 1
    assert "No space left" in ran.err
    assert "help: free space" in ran.err
    assert "--resume" in ran.err
    assert [p.name for p in small_disk.iterdir()] == [".out.partial"]
    command = ["mount", "-o", "remount,size=8m", str(small_disk)]
    subprocess.run(command, check=True)
    assert stagec(*job, "--resume").code == 0
    assert stagec(*arguments(small_disk / "other", "--set", "L=40")).code == 0
    assert_same_files(content(small_disk / "out"), content(small_disk / "other"))


def test_a_folder_that_nobody_may_write_to() -> None:
    ran = stagec(*arguments(Path("/proc/stagec-out")))
    assert ran.code == 1
    assert "/proc" in ran.err
    assert "help:" in ran.err
    assert "Traceback" not in ran.err


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    ran = stagec(*arguments(tmp_path / "file" / "out"))
    assert ran.code == 1
    assert "help:" in ran.err
    assert "Traceback" not in ran.err


def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    for name in ("../evil", "a/b", ".hidden", "a b", "manifest"):
        ran = stagec(*arguments(tmp_path / "out", "--name", name))
        if name == "manifest":
            assert ran.code == 1, "the groups file and the manifest would be one file"
        assert ran.code == 1
        assert "help:" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_files_are_writable_by_their_owner(tmp_path: Path) -> None:
    """ASTRA-sim opens traces for appending."""
    out = tmp_path / "out"
    write(job(dp=2), out)
    for path in out.iterdir():
        assert path.stat().st_mode & 0o600 == 0o600
    umask = os.umask(0)
    os.umask(umask)
    assert out.stat().st_mode & 0o777 == 0o777 & ~umask


def test_ranks_are_patched_not_serialised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks there are, a class is serialised once."""
    calls: list[int] = []

    def counted(node: TraceNode) -> bytes:
        calls[-1] += 1
        return encode_node(node)

    monkeypatch.setattr("stagec.formats.chakra.encode.encode_node", counted)
    for dp in (2, 256):
        calls.append(0)
        module = JobBuilder(tiny_options(LLAMA, dp=dp, sizes={"B": dp, "L": 8}, zero=0)).lower()
        written = write_source(make_job(module, "many"), tmp_path / str(dp), {})
        assert len(written.files) == dp + 2
        assert MANIFEST in written.files
    assert calls[0] == calls[1] > 0
