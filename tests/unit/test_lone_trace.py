"""One trace without those of the other ranks: `check`, `show` and `diff` say what they did not look
at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stagec.check.traces import check_directory, check_trace
from stagec.formats.chakra.nodes import NodeKind, TraceNode, encode_metadata, encode_node
from stagec.formats.chakra.record_files import read_trace
from tests.support import stagec

RANKS = 4


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job") / "job"
    words = ("--tp", "2", "--pp", "2", "--set", "L=2,S=64", "--name", "llama", "--quiet")
    assert stagec("compile", "llama3-8b", *words, "-o", folder).code == 0
    return folder


def trace(job: Path, rank: int) -> Path:
    return job / f"llama.{rank}.et"


def test_each_rank_of_a_sound_job_is_sound(job: Path) -> None:
    whole = check_directory(job)
    alone = [check_trace(trace(job, rank)) for rank in range(RANKS)]
    assert all(not report.errors and not report.warnings for report in alone)
    for count in ("nodes", "collectives", "sends", "ranks"):
        assert sum(getattr(report, count) for report in alone) == getattr(whole, count)
    assert all(len(report.alone) == 3 for report in alone)
    assert not whole.alone


def test_what_was_not_checked_is_said(job: Path, tmp_path: Path) -> None:
    done = stagec("check", trace(job, 1))
    assert (done.code, "llama.1.et: well-formed: 1 rank, " in done.out) == (0, True)
    assert "free of deadlock" not in done.out
    assert "whether its peers receive what it sends" in done.err
    assert "groups file" not in done.err
    without = shutil.copy(trace(job, 1), tmp_path / "llama.1.et")
    assert "there is no groups file NAME.json beside it" in stagec("check", without).err
    unnamed = shutil.copy(trace(job, 1), tmp_path / "rank-one.et")
    done = stagec("check", unnamed, "--json")
    actual = json.loads(done.out)
    assert (actual["ok"], actual["ranks"]) == (True, 1)
    assert any("the name of the file is not NAME.RANK.et" in text for text in actual["not_checked"])


def changed(path: Path, to: Path, change: Callable[[TraceNode], TraceNode]) -> Path:
    nodes = map(change, read_trace(path))
    to.write_bytes(encode_metadata("0.0.4") + b"".join(map(encode_node, nodes)))
    return to


def other_group(node: TraceNode) -> TraceNode:
    other = node.kind == NodeKind.COLL and {"pg_name": "2"}
    return replace(node, attrs={**node.attrs, **(other or {})})


def to_itself(node: TraceNode) -> TraceNode:
    other = node.kind == NodeKind.SEND and {"comm_dst": 0}
    return replace(node, attrs={**node.attrs, **(other or {})})


def in_a_circle(node: TraceNode) -> TraceNode:
    return replace(node, data_deps=(2,)) if node.id == 1 else node


def of_no_size(node: TraceNode) -> TraceNode:
    return replace(node, attrs={**node.attrs, "tensor_size": 0})


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (other_group, "not-a-member"),
        (to_itself, "self-message"),
        (in_a_circle, "dependency-cycle"),
        (of_no_size, "bad-value"),
    ],
)
def test_what_one_rank_shows_is_found(
    change: Callable[[TraceNode], TraceNode], code: str, job: Path, tmp_path: Path
) -> None:
    shutil.copy(job / "llama.json", tmp_path / "llama.json")
    report = check_trace(changed(trace(job, 0), tmp_path / "llama.0.et", change))
    assert code in {finding.code for finding in report.errors}


def test_what_is_no_trace_is_reported(job: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.0.et").write_bytes(trace(job, 0).read_bytes()[:-3])
    for path, expected in (
        (tmp_path / "broken.0.et", "truncated"),
        (job / "manifest.json", "it has none of version, attr"),
        (job / "llama.json", "it has none of version, attr"),
    ):
        done = stagec("check", path)
        assert (done.code, expected in done.err) == (1, True), done.err
    archive = tmp_path / "job.stagec"
    words = ("compile", "llama3-8b", "--set", "L=2,S=64", "--quiet", "--archive", archive)
    assert stagec(*words).code == 0
    for path, expected in (
        (job, "give one of its traces: "),
        (archive, "stagec materialize"),
        (tmp_path / "nothing", "no file or folder '"),
    ):
        done = stagec("show", path)
        assert (done.code, expected in done.err) == (1, True), done.err


def test_a_trace_is_compared_with_its_rank(job: Path, tmp_path: Path) -> None:
    """On both sides; ranks 0 and 3 of the job run other programs."""
    for words in ((trace(job, 3), job), (job, trace(job, 3))):
        done = stagec("diff", *words)
        assert done.code == 0, done.out
        assert f"compared with rank 3 of {'AB'[words[0] != job]}: 3 more" in done.out
    done = stagec("diff", trace(job, 0), trace(job, 3))
    assert (done.code, "more are not compared" in done.out) == (1, False)
    far = shutil.copy(trace(job, 3), tmp_path / "llama.7.et")
    done = stagec("diff", far, job)
    assert (done.code, "is the trace of rank 7, which B does not have" in done.err) == (1, True)
    done = stagec("diff", trace(job, 3), far)
    assert "groups are compared by their numbers: B has no groups file" in done.out
