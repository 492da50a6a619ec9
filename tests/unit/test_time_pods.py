"""The time of two pods: caches that leave layer by layer, beside what is computed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from stagec.answers.time.timed import time_job
from stagec.ir.serving_step import PREFILL
from stagec.jobs.builder import JobBuilder
from stagec.jobs.pod_options import options_of_pod
from stagec.jobs.pods import Pods
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import PODS
from stagec.jobs.session import Session
from stagec.machines import load_machine
from stagec.pipeline.passes import Pass
from stagec.time.costs.network import message_seconds
from stagec.time.step import Issued, step_time
from tests.support import LLAMA, stagec, tiny_options
from tests.unit.test_perfetto import read
from tests.unit.test_step_time import arbitrary, compare

SIZES = "L=4,D=512,H=8,G=4,K=64,F=1024,V=1024"
WORDS = ("llama3-8b", "--serve", "disaggregated", "--batch", "8", "--prompt", "512", "--set", SIZES)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("tp=2", "tp=4,dp=2"),
        ("pp=2,microbatches=4", "tp=2,microbatches=2"),
        ("pp=2,microbatches=4,schedule=interleaved,chunks=2", "pp=4,microbatches=4"),
        ("dp=2,microbatches=2", ""),
    ],
)
@pytest.mark.parametrize("one_stream", [False, True])
def test_the_replay_of_a_pod_that_sends_is_the_clock(
    prefill: str, decode: str, one_stream: bool
) -> None:
    """Every node ends at the same picosecond. Messages to the other pod follow each other."""
    options = tiny_options(LLAMA, sizes={"L": 4}).changed(serve="disaggregated", batch=8, prompt=8)
    sizes = {n: v for n, v in options.sizes.items() if n not in ("B", "S")}
    pods = Pods.of(options.changed(sizes=sizes, prefill=prefill, decode=decode)).lower()
    issued = Issued.of(pods.modules[PREFILL])
    costs = dict.fromkeys(range(len(issued.classes)), arbitrary)
    compare(issued, costs, 0, overlap=True, one_stream=one_stream)


def test_a_pod_by_itself_is_the_step_without_the_other_one() -> None:
    """To the picosecond: what crosses takes no time there."""
    options = JobOptions(LLAMA).changed(serve="disaggregated", batch=8, prompt=512)
    options = options.changed(sizes={"L": 4}, prefill="pp=2,microbatches=2", decode="tp=4,dp=2")
    machine = load_machine("h100-sxm")
    pods = Pods.of(options).lower()
    for pod in PODS:
        alone = time_job(options_of_pod(pod, options), machine, Session(), levers=False).step
        actual = step_time(Issued.of(pods.modules[pod]), machine)
        assert actual.picoseconds == alone.picoseconds
        assert actual.parts(actual.slowest) == alone.parts(alone.slowest)


def test_each_pod_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    passes = JobBuilder.passes

    def counted(self: JobBuilder, *given: Any, **named: Any) -> Iterator[Pass]:
        begun.append(str(self.options.serve))
        yield from passes(self, *given, **named)

    monkeypatch.setattr(JobBuilder, "passes", counted)
    timed("--prefill", "tp=2", "--decode", "tp=4", "--machine", "h100-sxm")
    assert begun == ["prefill", "decode"]


def timed(*words: str | Path) -> dict[str, Any]:
    """What `stagec time --json` says of both pods."""
    ran = stagec("time", *WORDS, *words, "--json", "--no-levers")
    assert ran.code == 0, ran.err
    return dict(json.loads(ran.out))


def slow_network(folder: Path, by: int) -> Path:
    """An H100 whose nodes are joined by a network that is slower by a factor."""
    text = (files("stagec.machines") / "h100-sxm.toml").read_text()
    assert text.count('value = "50 GB/s"') == 1
    path = folder / f"slow{by}.toml"
    path.write_text(text.replace('value = "50 GB/s"', f'value = "{50 / by} GB/s"'))
    return path


def test_a_link_that_is_never_idle(tmp_path: Path) -> None:
    """Where the network is slow the link of a rank sends from the first layer on: the time to the
    first token lies between that of all messages, and that of prefill and all messages."""
    pods = ("--prefill", "", "--decode", "tp=2", "--machine")
    actual = timed(*pods, slow_network(tmp_path, 1000))
    machine = load_machine(str(slow_network(tmp_path, 1000)))
    messages = 4 * 2 * 2  # layers, keys and values, ranks that decode
    size = (actual["handover"]["bytes"] - 2 * 8 * 4) // messages  # beside two messages of tokens
    assert size == 8 * 512 * 2 * 64 * 2
    sent = messages * message_seconds(machine, size, machine.network[-1])
    prefill = actual["pods"]["prefill"]["step_seconds"]
    assert sent < actual["serving"]["ttft_seconds"] < sent + prefill
    assert actual["serving"]["ttft_seconds"] == prefill + actual["handover"]["exposed_seconds"]
    assert actual["serving"]["tpot_seconds"] == actual["pods"]["decode"]["step_seconds"]
    assert actual["handover"]["level"] == "infiniband"


def test_a_fast_network_hides_all_but_the_end(tmp_path: Path) -> None:
    """The same steps on three networks: only what is behind prefill differs."""
    pods = ("--prefill", "tp=2", "--decode", "tp=2", "--machine")
    slow, usual = timed(*pods, slow_network(tmp_path, 100)), timed(*pods, "h100-sxm")
    assert slow["pods"]["prefill"]["breakdown"] == usual["pods"]["prefill"]["breakdown"]
    for actual in (slow, usual):
        assert actual["handover"]["exposed_seconds"] <= actual["handover"]["alone_seconds"]
    assert usual["handover"]["exposed_seconds"] < slow["handover"]["exposed_seconds"]


def test_times_of_pods_are_reported() -> None:
    pods = ("--prefill", "pp=2,microbatches=2", "--decode", "tp=2,dp=2")
    ran = stagec("time", *WORDS, *pods, "--machine", "h100-sxm", "--no-levers")
    assert ran.code == 0, ran.err
    last, end = ran.out.splitlines()[-2:]
    assert last.startswith(
        "From prefill to decode: 16.00 MiB of caches and tokens in 72 messages over inf"
    )
    assert end.startswith("TTFT ")
    assert "; TPOT " in end


def test_a_page_has_the_figures_of_both_steps(tmp_path: Path) -> None:
    pods = ("--prefill", "tp=2", "--decode", "tp=2", "--machine", "h100-sxm", "--no-levers")
    ran = stagec("time", *WORDS, *pods, "--html", tmp_path / "page.html")
    assert ran.code == 0, ran.err
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    times = re.findall(r"TTFT ([\d.]+ \ws), .* TPOT ([\d.]+ \ws)", ran.out)[0]
    assert re.findall(r"<dt>TTFT</dt><dd>(.*?)</dd>.*?<dt>TPOT</dt><dd>(.*?)</dd>", text) == [times]
    assert re.findall(r"<h2>(Prefill|Decode)</h2>", text) == ["Prefill", "Decode"]
    assert f"stagec time {' '.join(WORDS[:3])}" in text
    heads = [line for line in ran.out.splitlines() if "llama3-8b on" in line]
    assert [head.partition(":")[0] for head in heads] == [*PODS]


def test_a_plot_has_a_bar_for_each_class_of_both_pods(tmp_path: Path) -> None:
    pods = ("--prefill", "pp=2,microbatches=2", "--decode", "tp=2", "--machine", "h100-sxm")
    ran = stagec("time", *WORDS, *pods, "--no-levers", "--html", tmp_path / "plot.svg")
    assert ran.code == 0, ran.err
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    names = re.findall(r">((?:prefill|decode) stage\d)<", drawn)
    assert names == ["prefill stage0", "prefill stage1", "decode stage0"]
    assert "<title>decode stage0\nmatrix products: " in drawn
    assert "\nbubble: " not in drawn


def test_a_trace_shows_both_pods(tmp_path: Path) -> None:
    """What `compile --format perfetto` shows of the job, nodes and bytes: the step of decode behind
    that of prefill, when the caches are there."""
    pods = ("--prefill", "pp=2,microbatches=2", "--decode", "tp=2,dp=2", "--machine", "h100-sxm")
    ran = stagec("time", *WORDS, *pods, "--no-levers", "--perfetto", tmp_path / "a.pftrace")
    assert ran.code == 0, ran.err
    more = ("--format", "perfetto", "--memory-events", "-o", tmp_path / "job", "--name", "job")
    assert stagec("compile", *WORDS, *pods, *more, "--quiet").code == 0
    shown, whole = read(tmp_path / "a.pftrace"), read(tmp_path / "job" / "job.pftrace")
    assert {name for name, _ in shown.slices} <= {name for name, _ in whole.slices}
    assert {name.rpartition("(")[2].partition("/")[0] for name, _ in shown.slices} == {*PODS}
    for where, slices in shown.slices.items():
        times = [(each.start, each.end) for each in whole.slices[where]]
        assert [(each.start, each.end) for each in slices] == times
    assert shown.counters.items() <= whole.counters.items()
