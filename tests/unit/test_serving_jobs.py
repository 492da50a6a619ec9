"""Jobs of several steps of serving: each step has the nodes of a compile of its own, and takes
caches and tokens from the steps before."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagec.jobs.admission import cache_room, largest_step
from stagec.jobs.request.limit import Limit
from stagec.jobs.request.machine import machine_of
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.jobs.step_modules import StepModules
from stagec.program.nodes import Node, Program
from stagec.program.steps import Sequel, SteppedClass, stepped_classes
from stagec.serving.policy import ServerLimits
from stagec.serving.requests import Request
from stagec.serving.step import parse_step
from stagec.serving.stepped import stepped_server
from stagec.support.diagnostics import DiagnosticError
from tests.support import LLAMA, MIXTRAL, stagec, tiny_options

#: Steps of three structures; those of one structure differ in all sizes.
STEPS = (
    "prefill=1x4+0,prefill=1x6+0",
    "decode=1x4,decode=1x6,chunk=1x8+0",
    "decode=2x9,decode=3x7,chunk=1x5+0",
    "decode=1x5",
    "decode=4x11",
)
ORDER = (0, 1, 2, 2, 3, 4, 3, 1)
ONE = {"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2}, {"pp": 4, "tp": 2}


def job_of(model: str, **options: Any) -> JobOptions:
    job = tiny_options(model, **options)
    sizes = {n: v for n, v in job.sizes.items() if n not in ("S", "B")}
    return job.changed(serve="mixed", sizes=sizes)


def classes_of(job: JobOptions) -> tuple[list[SteppedClass], StepModules]:
    """The classes of a job of the steps above, on stages as many under way as there are."""
    modules = StepModules(job, Session())
    steps = [parse_step(text) for text in STEPS]
    after = [min(i, job.pp) if i >= job.pp else 0 for i in range(len(ORDER))]
    classes = [modules.classes(step) for step in steps]
    sequel = Sequel(ORDER, after, [modules.local_groups * s.sampled for s in steps])
    return stepped_classes(classes, sequel), modules


def by_step(program: Program) -> dict[int, list[Node]]:
    """The nodes of a program by the number of the step in their names, which is taken off."""
    actual: defaultdict[int, list[Node]] = defaultdict(list)
    for node in program.nodes:
        step, _, name = node.name.partition("/")
        actual[int(step.removeprefix("s"))].append(replace(node, name=name))
    return actual


def is_token(node: Node) -> bool:
    """Whether it is an end of a message of sampled tokens."""
    return node.is_message and "/sampled" in node.name


def work(nodes: Sequence[Node]) -> list[tuple[object, ...]]:
    return [
        (n.name, n.kind, n.size, n.flops, n.matmul, n.out, n.kernel, n.group, n.over, n.by)
        for n in nodes
    ]


@pytest.mark.long
@pytest.mark.parametrize("options", [*ONE, {"dp": 2, "ep": 2}], ids=str)
def test_each_step_is_a_compile_of_its_own(options: dict[str, Any]) -> None:
    job = job_of(MIXTRAL if "ep" in options else LLAMA, **options)
    actual, modules = classes_of(job)
    assert modules.compiles == 3
    own = [StepModules(job, Session()).classes(parse_step(text)) for text in STEPS]
    for number, each in enumerate(actual):
        steps = by_step(each.program())
        for place, which in enumerate(ORDER):
            nodes = [n for n in steps[place] if not is_token(n)]
            assert work(nodes) == work(own[which][number].program().nodes)


@pytest.mark.parametrize("options", ONE, ids=str)
def test_steps_take_caches_and_tokens_from_those_before(options: dict[str, Any]) -> None:
    """An append waits for the appends of the step before in the same layer, and what takes tokens
    in for what has sampled them, on stages for the message with them."""
    job = job_of(LLAMA, **options)
    for each in classes_of(job)[0]:
        program = each.program()
        step = {n.id: int(n.name.partition("/")[0].removeprefix("s")) for n in program.nodes}
        layer = {n.id: n.name.split("layers/")[0].partition("/")[2] for n in program.nodes}
        for node in program.nodes:
            earlier = [d for d in node.deps if step[d.id] < step[node.id]]
            if node.kind == "append":
                assert [d.kind for d in earlier] == ["append"] * (step[node.id] > 0)
                assert all(layer[d.id] == layer[node.id] for d in earlier)
                assert all(step[d.id] == step[node.id] - 1 for d in earlier)
            elif node.kind == "embedding" and step[node.id] >= job.pp:
                (maker,) = earlier
                assert step[maker.id] == step[node.id] - job.pp
                assert maker.kind == ("recv" if job.pp > 1 else maker.kind)
                assert job.pp > 1 or maker.name.endswith("logits_sampled")
            else:
                assert not earlier


@pytest.mark.parametrize("options", [{"pp": 2}, {"pp": 4, "tp": 2}], ids=str)
def test_stages_send_what_they_sample(options: dict[str, Any]) -> None:
    """A message a step, of four bytes for each token of a group, from the last stage to the first;
    none for steps whose tokens no step takes."""
    job = job_of(LLAMA, **options)
    actual, _ = classes_of(job)
    sent, received = ([n for n in actual[i].program().nodes if is_token(n)] for i in (-1, 0))
    sampled = [parse_step(STEPS[which]).sampled for which in ORDER[: len(ORDER) - job.pp]]
    assert [(n.kind, n.size, n.by) for n in sent] == [("send", 4 * n, 1) for n in sampled]
    assert [(n.kind, n.size, n.tag) for n in received] == [("recv", n.size, n.tag) for n in sent]
    ends: Counter[tuple[str, int]] = Counter()
    for each in actual:
        for node in each.program().nodes:
            if node.is_message:
                ends[node.over, node.tag] += 1 if node.kind == "send" else -1
    assert not any(ends.values())


@pytest.mark.long
def test_traces_are_whole(tmp_path: Path) -> None:
    """The command writes traces that pass the check, and says in the manifest what each step
    holds."""
    folder = tmp_path / "job"
    requests = tmp_path / "r.csv"
    requests.write_text("arrival,prompt,output\n0,5,3\n0.01,9,2\n0.015,2,4\n")
    sizes = ",".join(f"{n}={v}" for n, v in job_of(LLAMA).sizes.items())
    line = f"compile {LLAMA} --set {sizes} --pp 2 --tp 2 --serve mixed --chunk 8"
    done = stagec(*line.split(), "--requests", requests, "-o", folder)
    assert done.code == 0, done.err
    checked = stagec("check", folder)
    assert (checked.code, "0 errors, 0 warnings" in checked.out) == (0, True), checked
    serving = json.loads((folder / "manifest.json").read_text())["serving"]
    (runs,) = serving["steps"]
    order = [number for number, count in runs for _ in range(count)]
    steps = [parse_step(serving["compositions"][number]) for number in order]
    assert sum(s.tokens for s in steps) == (5 + 3 - 1) + (9 + 2 - 1) + (2 + 4 - 1)
    assert sum(s.sampled for s in steps) == 3 + 2 + 4
    assert max(s.tokens for s in steps) <= 8
    command = json.loads((folder / "manifest.json").read_text())["command"]
    assert f"--serve mixed --chunk 8 --pp 2 --tp 2 --set {sizes}" in command
    assert f"--requests {requests}" in command
    assert (serving["policy"], serving["requests"], serving["served"]) == ("fcfs", 3, 3)


def test_equal_steps_are_compiled_once() -> None:
    """With contexts rounded up, 200 steps of decode are few distinct ones of one compile."""
    modules = StepModules(job_of(LLAMA, tp=2), Session())
    steps = [parse_step("decode=4x100").later(i).rounded(64) for i in range(200)]
    distinct = list(dict.fromkeys(steps))
    assert [str(s) for s in distinct] == [f"decode=4x{n}" for n in (128, 192, 256, 320)]
    classes = [modules.classes(step) for step in distinct]
    assert modules.compiles == 1
    order = [distinct.index(s) for s in steps]
    (actual,) = stepped_classes(classes, Sequel(order, [0, *[1] * 199], [4] * len(distinct)))
    assert len(actual.program()) == 200 * len(classes[0][0].program())
    assert len(actual.program().prototypes) == len(distinct) * len(classes[0][0].program())


@pytest.mark.parametrize("pp", [1, 2])
def test_figures_of_a_mixed_step(pp: int) -> None:
    """Caches hold all tokens after the step, by hand: 2 (K and V) x 2 bytes x G x K a layer."""
    job = job_of(LLAMA, tp=2, pp=pp)
    sizes = ",".join(f"{n}={v}" for n, v in job.sizes.items())
    given = f"analyze {LLAMA} --set {sizes} --tp 2 --pp {pp} --serve mixed --json"
    more = ("--microbatches", "1") if pp > 1 else ()
    done = stagec(*given.split(), *more, "--step", "decode=3x7,chunk=1x4+0,prefill=2x5+6")
    assert done.code == 0, done.err
    token = 4 * (job.sizes["G"] or 0) * (job.sizes["K"] or 0) * (job.sizes["L"] or 0) // (2 * pp)
    serving = json.loads(done.out)["serving"]
    assert serving["cache_bytes_per_token"] == token
    assert serving["cache_bytes"] == token * (3 * 8 + 4 + 2 * 11)


SHARED = [
    ("llama3-8b", "--set L=1,D=64,F=64,V=64,H=4,G=4,K=8 --dp 2 --pp 1", 2),
    ("mixtral-8x7b", "--set L=1,D=64,M=64,V=64,H=4,G=4,K=8 --dp 4 --ep 2", 2),
    ("mixtral-8x7b", "--set L=1,D=64,M=64,V=64,H=4,G=4,K=8 --dp 2 --ep 2", 1),
]


@pytest.mark.parametrize(("model", "flags", "replicas"), SHARED, ids=[f for _, f, _ in SHARED])
def test_groups_share_the_requests(model: str, flags: str, replicas: int, tmp_path: Path) -> None:
    """Each request is served once; ranks that no collective joins have steps of their own, and the
    job is still sound."""
    folder, requests = tmp_path / "job", tmp_path / "r.csv"
    asked = [(0, 5, 3), (0, 9, 2), (0.005, 2, 4), (0.01, 7, 6), (0.02, 3, 1)]
    rows = "\n".join(",".join(map(str, row)) for row in asked)
    requests.write_text(f"arrival,prompt,output\n{rows}\n")
    line = f"compile {model} {flags} --serve mixed --chunk 8 -o {folder}"
    done = stagec(*line.split(), "--requests", requests)
    assert done.code == 0, done.err
    serving = json.loads((folder / "manifest.json").read_text())["serving"]
    assert len(serving["steps"]) == replicas
    reported = done.out.partition("Tokens: ")[2].splitlines()[0].replace(",", "")
    tokens = sum(int(n) for n in re.findall(r"(\d+) of [a-z]+(?! )", reported.partition(";")[0]))
    assert tokens == sum(prompt + output - 1 for _, prompt, output in asked)
    assert f"{sum(output for _, _, output in asked)} sampled" in reported
    assert (serving["served"], serving["sharing"]) == (len(asked), "round robin")
    checked = stagec("check", folder)
    assert (checked.code, "0 errors, 0 warnings" in checked.out) == (0, True), checked


@pytest.mark.long
def test_a_server_admits_what_the_machine_has_room_for() -> None:
    """By hand: 2 (K and V) x 2 bytes x G x K x L a token, split over tp; another block is too
    much. No step of the requests is larger than the machine."""
    job = job_of(LLAMA, tp=2)
    modules, machine = StepModules(job, Session()), machine_of("h100-sxm", Session())
    requests = [Request(0, 40, 30) for _ in range(12)]
    largest = largest_step(requests, 64, 8)
    assert (largest.tokens, largest.sequences) == (8 + 40, 9)
    full = modules.compiled(largest).figures()
    taken = full.peak - full.memory["caches"]
    block = 16 * 4 * (job.sizes["G"] or 0) * (job.sizes["K"] or 0) * (job.sizes["L"] or 0) // 2
    reserve = machine.memory.capacity.value - machine.left(1)
    small = machine.changed({"memory.capacity": taken + 11 * block + block // 2 + reserve})
    room = cache_room([modules], small, largest, 16)
    assert (room.taken, room.blocks) == (taken, 11)
    assert cache_room([modules], machine, largest, 16, Limit("given", room.room)) == room
    limits = ServerLimits(64, 8, room.blocks)
    replica, run = stepped_server(requests, limits, lambda step: (1, 1), 1000)
    run.run()
    steps = {each.step for each in replica.steps}
    assert len(run.done) == len(requests)
    assert max(s.sequences for s in steps) > 1
    assert all(modules.compiled(step).figures().peak <= room.room for step in steps)
    none = machine.changed({"memory.capacity": taken - 1 + reserve})
    with pytest.raises(DiagnosticError, match=r": 1 B are missing"):
        cache_room([modules], none, largest, 16)


@pytest.mark.parametrize(("encoder", "fixed"), [(100, 7), (16, 1)])
def test_keys_and_values_of_an_encoder_are_blocks_of_each_sequence(
    encoder: int, fixed: int
) -> None:
    """As many as its tokens take, since each has keys and values of the same size."""
    sizes = {"S": encoder, "D": 64, "F": 64, "H": 4, "K": 16, "V": 64}
    modules = StepModules(JobOptions("t5-base", sizes=sizes), Session())
    machine = machine_of("h100-sxm", Session())
    room = cache_room([modules], machine, largest_step([Request(0, 4, 9)], 64, 8), 16)
    assert room.fixed == fixed
    limits = ServerLimits(64, 8, room.blocks, 16, fixed=fixed)
    assert [limits.blocks_for(n) for n in (0, 1, 16, 17)] == [0, fixed + 1, fixed + 1, fixed + 2]


def test_weights_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    requests = "poisson:rate=9,count=2,prompt=9,output=2"
    line = f"compile llama3-70b --serve mixed --machine h100-sxm --dry-run --requests {requests}"
    refused = stagec(*line.split())
    assert refused.code == 1
    assert " are missing" in refused.err
    assert "--cache-blocks all" in refused.err
    assert stagec(*line.split(), "--cache-blocks", "all").code == 0


PLUGIN = """
from stagec.api import BatchingPolicy, Plugin, StepPlan

class OneByOne(BatchingPolicy):
    name = "one-by-one"
    summary = "a request at a time"

    def plan(self, state):
        chosen = [*state.running, *state.waiting][:1]
        return StepPlan([(live, min(live.left, state.limits.tokens)) for live in chosen])

PLUGIN = Plugin(name="mine", policies=(OneByOne(),))
"""


def test_a_policy_of_a_plugin_is_used(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    line = "compile llama3-8b --set L=1 --serve mixed --policy one-by-one --dry-run"
    more = "--requests", "poisson:rate=1000,count=3,prompt=5,output=2", "--plugin", file
    done = stagec(*line.split(), *more)
    assert done.code == 0, done.err
    assert "policy one-by-one" in done.out
    assert done.out.count("prefill=1x5+0 ") == done.out.count("decode=1x5 ") == 3
    file.write_text(PLUGIN.replace("OneByOne(),", "OneByOne,"))
    wrong = stagec(*line.split(), *more)
    assert wrong.code == 1
    assert "as a batching policy" in wrong.err
