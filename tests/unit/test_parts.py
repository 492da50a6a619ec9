"""Jobs of parts of a model: their traces are one job, and nothing is computed or held twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagec.formats.chakra.record_files import read_trace
from tests.oracle.test_parts import ENDS, path
from tests.support import EXHAUSTIVE, LONG, stagec
from tests.unit.test_perfetto import read as read_perfetto

BATCH = 8
#: Strategies of the encoder and of main.
CASES = (
    ("dp=4", "--dp 2 --tp 2 --microbatches 2"),
    ("tp=2,dp=2", "--tp 4 --sp --microbatches 2"),
    ("tp=4,sp", "--dp 4 --zero 3"),
    ("", "--tp 2"),
    ("dp=2,cp=2,cp-mode=ulysses", "--dp 2 --tp 2"),
    ("dp=2", "--pp 2 --microbatches 4 --tp 2"),
    ("pp=2,schedule=gpipe", "--pp 2 --microbatches 4 --schedule zb-h1"),
    ("dp=2", "--pp 2 --microbatches 4 --schedule interleaved --chunks 2"),
    ("dp=2", "--pp 2 --microbatches 4 --schedule dualpipev"),
)


def analysed(name: str, *words: str) -> dict[str, Any]:
    ran = stagec("analyze", path(name), "--set", f"B={BATCH}", *words, "--json")
    assert ran.code == 0, ran.err
    actual: dict[str, Any] = json.loads(ran.out)
    return actual


def flags(name: str, part: str) -> list[str]:
    return [word for end in ENDS[name] for word in ("--part", f"{end}: {part}")]


@LONG
@pytest.mark.parametrize(
    ("name", "part", "main"),
    [
        pytest.param(name, *c, marks=[] if name == "whisper" and i in (0, 5, 8) else EXHAUSTIVE)
        for name in ("whisper", "t5")
        for i, c in enumerate(CASES)
        if name == "whisper" or "pp" not in c[1]
    ],
)
def test_pods_are_one_job(name: str, part: str, main: str, tmp_path: Path) -> None:
    """The checker proves it, and each pod gets each byte of a value as often as it holds it."""
    words = (path(name), "--set", f"B={BATCH}", *main.split(), *flags(name, part))
    ran = stagec("compile", *words, "-o", tmp_path / "job")
    assert ran.code == 0, ran.err
    checked = stagec("check", tmp_path / "job", "--json")
    assert checked.code == 0, checked.out
    assert json.loads(checked.out)["rendezvous"]
    manifest = json.loads((tmp_path / "job" / "manifest.json").read_text())
    assert set(manifest["pods"]) == {"main", "encoder"}
    assert {c["pod"] for c in manifest["classes"]} == {"main", "encoder"}


@LONG
@pytest.mark.parametrize(
    "strategy", ["dp=2,tp=2", "dp=4,zero=3", *[pytest.param("tp=4,sp", marks=EXHAUSTIVE)]]
)
@pytest.mark.parametrize("name", ["whisper", "t5"])
def test_nothing_is_computed_twice(name: str, strategy: str) -> None:
    """Matrix products of all ranks, and parameters, are those of the step on one mesh with the
    strategy that both parts have here."""
    words = [w for flag in strategy.split(",") for w in f"--{flag}".split("=")]
    whole, actual = analysed(name, *words), analysed(name, *words, *flags(name, strategy))
    for phase in ("forward", "backward"):
        made = [_made(pod, phase) for pod in actual["pods"].values()]
        assert sum(made) == _made(whole, phase), phase
        assert all(made), phase
    assert sum(p["parameters"] for p in actual["pods"].values()) == whole["parameters"]


def _made(pod: dict[str, Any], phase: str) -> int:
    return sum(int(c["count"] * c["matmul_flops"][phase]) for c in pod["classes"])


def test_each_rank_gets_what_it_holds() -> None:
    """%e is [B, S, D] of 2 bytes: of main's four ranks each holds half of it, as dp splits it; of
    the encoder's four each gets back a quarter. The rest are the shares of the gradient norm, 4
    bytes for each of the eight pairs of ranks that meet, both ways."""
    actual = analysed("whisper", "--dp", "2", "--tp", "2", "--part", "encoder=e: dp=4")
    size = BATCH * 8 * 16 * 2
    crossed = {(c["source"], c["to"]): c["bytes"] for c in actual["crossings"]}
    assert crossed == {
        ("encoder", "main"): 4 * size // 2 + 8 * 4,
        ("main", "encoder"): 4 * size // 4 + 8 * 4,
    }


@pytest.mark.parametrize("more", ["", "--pp 2 --schedule dualpipev"])
def test_numbers_of_parts_are_checked_until_they_are_cut(more: str) -> None:
    words = ("--set", f"B={BATCH}", "--microbatches", "4", *more.split())
    ran = stagec("analyze", path("whisper"), *words, "--part", "encoder=e", "--check-numerics")
    assert ran.code == 0, ran.err


def test_an_encoder_does_not_wait_for_gradients(tmp_path: Path) -> None:
    """All microbatches leave before the gradient of the first one is needed."""
    words = ("--set", f"B={BATCH}", "--microbatches", "4", "--part", "encoder=e: dp=2")
    ran = stagec("compile", path("whisper"), *words, "-o", tmp_path / "job")
    assert ran.code == 0, ran.err
    nodes = {node.id: node for node in read_trace(tmp_path / "job" / "whisper.1.et")}
    sends = [n for n in nodes.values() if n.name.startswith("forward/mb3/e.send")]
    assert sends
    before, pending = set[int](), [n.id for n in sends]
    while pending:
        node = nodes[pending.pop()]
        pending += {*node.data_deps, *node.ctrl_deps} - before
        before |= {*node.data_deps, *node.ctrl_deps}
    assert {nodes[i].name.partition("/")[0] for i in before} == {"forward"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("analyze", "--limit", "h100"),
            "--limit for one job without --serve is an option of 'stagec memory'",
        ),
        (("analyze", "--machine", "h100-sxm"), "takes --machine only for a step of serving"),
        (("compile", "--serve", "mixed", "--steps", "2", "--dry-run"), "steps of one server"),
        (("analyze", "--preset", "llama3-405b-8k"), "a strategy of its own"),
        (
            ("analyze", "--serve", "mixed", "--step", "decode=4x8"),
            "--part cannot be used with --serve mixed",
        ),
        (("analyze", "--serve", "decode", "--context", "8"), "does not compute a value '%e'"),
    ],
)
def test_what_parts_do_not_have_is_refused(words: tuple[str, ...], says: str) -> None:
    command, *rest = words
    ran = stagec(command, path("whisper"), "--part", "encoder=e", *rest)
    assert ran.code == 1
    assert says in ran.err


@LONG
def test_expressions_are_those_of_the_numbers() -> None:
    """Of each pod they are what they are of one: with numbers they give the counts."""
    words = ("--dp", "2", "--tp", "2", "--part", "encoder=e: dp=4")
    numbers, actual = analysed("whisper", *words), analysed("whisper", *words, "--symbolic")
    assert actual["crossings"] == numbers["crossings"]
    for pod, each in actual["pods"].items():
        (mine,), (theirs,) = each["classes"], numbers["pods"][pod]["classes"]
        assert [row["dir"] for row in mine["p2p"]] == [row["dir"] for row in theirs["p2p"]]
        assert "B" in mine["flops"]["forward"]
    sent = [row["bytes"] for row in actual["pods"]["encoder"]["classes"][0]["p2p"]]
    assert "2*B*D*S/dp" in sent
    ran = stagec("analyze", path("whisper"), "--part", "encoder=e", "--symbolic")
    assert ran.code == 1
    assert "error: no value for B" in ran.err


@LONG
def test_pictures_show_all_parts(tmp_path: Path) -> None:
    """The pages of memory and of time, and the trace, have the classes of each pod."""
    words = (path("whisper"), "--set", f"B={BATCH}", "--dp", "2", "--part", "encoder=e: dp=4")
    page, snapshot = tmp_path / "memory.html", tmp_path / "memory.pickle"
    more = ("--html", page, "--snapshot", snapshot, "--compare", "--zero 1")
    ran = stagec("memory", *words, *more)
    assert ran.code == 0, ran.err
    for title in ("whisper (main)", "whisper (encoder)", "whisper (encoder) with --zero 1"):
        assert title in page.read_text()
    assert snapshot.stat().st_size
    assert "no such stage" in stagec("memory", *words, *more, "--stage", "encoder/1").err
    page, trace = tmp_path / "time.html", tmp_path / "time.pftrace"
    how = ("--machine", "h100-sxm", "--html", page, "--perfetto", trace, "--json", "--no-levers")
    ran = stagec("time", *words, *how)
    assert ran.code == 0, ran.err
    step = round(json.loads(ran.out)["step_seconds"] * 10**12)
    for name in ("main/stage0", "encoder/stage0"):
        assert f'"name":"{name}"' in page.read_text().replace(": ", ":")
    slices = read_perfetto(trace).slices
    assert {name for name, _ in slices} == {"rank 0 (main/stage0)", "rank 2 (encoder/stage0)"}
    assert max(each.end for actual in slices.values() for each in actual) <= step // 1000


def test_parts_do_not_vary() -> None:
    """Sweeps are of a job on one mesh; a search takes parts as they are given."""
    ran = stagec("analyze", path("whisper"), "--sweep", "part=encoder=e")
    assert ran.code == 2
    assert "'part' is neither a flag nor a symbol" in ran.err
    where = ("--ranks", "8", "--machine", "h100-sxm", "--batch", "8")
    ran = stagec("search", path("whisper"), "--part", "encoder=e: tp=1..2", *where)
    assert ran.code == 1
    assert "'1..2' is not a valid integer" in ran.err


@LONG
def test_memory_is_that_of_each_part() -> None:
    """The stash of an encoder that runs ahead is that of all microbatches."""
    actual: dict[int, dict[str, Any]] = {}
    for count in (1, 2):
        words = ("--set", f"B={BATCH}", "--microbatches", str(count), "--part", "encoder=e: dp=2")
        ran = stagec("memory", path("whisper"), *words, "--json", "--limit", "1KiB")
        assert ran.code == 1
        assert "encoder/stage0: peak " in ran.err
        actual[count] = json.loads(ran.out)["pods"]
    stash = {n: p["encoder"]["classes"][0]["categories"]["stash"] for n, p in actual.items()}
    assert stash[1] == stash[2] > 0


@LONG
@pytest.mark.parametrize(
    "flags",
    [
        ["--serve", "prefill", "--tp", "2", "--microbatches", "2"],
        ["--serve", "disaggregated", "--prefill", "tp=2,microbatches=2", "--decode", "tp=4"],
    ],
)
def test_parts_of_servers_are_one_job(flags: list[str], tmp_path: Path) -> None:
    """An encoder, what prefills and what decodes: the checker proves the job, memory and time tell
    of all pods."""
    words = [path("whisper"), *flags, "--batch", "8", "--prompt", "8"]
    words += ["--part", "encoder=e: dp=4,microbatches=2"]
    ran = stagec("compile", *words, "-o", tmp_path / "job")
    assert ran.code == 0, ran.err
    checked = stagec("check", tmp_path / "job", "--json")
    assert checked.code == 0, checked.out
    manifest = json.loads((tmp_path / "job" / "manifest.json").read_text())
    decodes = "disaggregated" in flags
    pods = ["prefill", "encoder", "decode"] if decodes else ["main", "encoder"]
    assert list(manifest["pods"]) == pods
    (crossed,) = manifest["crossings"]
    assert (crossed["source"], crossed["to"]) == ("encoder", pods[0])
    assert crossed["bytes"] == 2 * BATCH * 8 * 16 * 2  # %e, on both ranks that prefill
    ran = stagec("memory", *words, "--json")
    assert list(json.loads(ran.out)["pods"]) == pods
    ran = stagec("time", *words, "--machine", "h100-sxm", "--json", "--no-levers")
    assert ran.code == 0, ran.err
    actual = json.loads(ran.out)
    first = actual["pods"]["prefill"] if decodes else actual
    assert [c["name"] for c in first["classes"]] == [f"{pods[0]}/stage0", "encoder/stage0"]
    late = actual["handover"]["exposed_seconds"] if decodes else 0
    assert actual["serving"]["ttft_seconds"] == first["step_seconds"] + late


@pytest.mark.parametrize("name", ["t5", pytest.param("whisper", marks=EXHAUSTIVE)])
def test_stages_of_servers_are_one_job(name: str, tmp_path: Path) -> None:
    """No gradient comes back, so stages of both parts go together even where main gives words."""
    words = (path(name), "--serve", "prefill", "--batch", "8", "--prompt", "8", "--pp", "2")
    part = ("--microbatches", "2", "--part", "encoder=e: pp=2,dp=2")
    ran = stagec("compile", *words, *part, "-o", tmp_path / "job")
    assert ran.code == 0, ran.err
    checked = stagec("check", tmp_path / "job", "--json")
    assert checked.code == 0, checked.out
    assert json.loads(checked.out)["rendezvous"]
