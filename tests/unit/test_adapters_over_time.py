"""Adapters that requests name, in slots of a replica: which are loaded, who waits, how long."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.serving.adapters import AdapterSlots
from stagec.serving.fleet import FleetPlan
from stagec.serving.policy import ServerLimits
from stagec.serving.replica import Replica
from stagec.serving.requests import Request, read_requests
from stagec.serving.simulate import Simulation
from tests.support import examples, stagec
from tests.unit.test_fleet import LIMITS as FLEET
from tests.unit.test_fleet import SlowJob, SlowReplica, SlowServer
from tests.unit.test_requests_over_time import Linear, loads, served

LOAD = 7 * 10**9
LIMITS = ServerLimits(64, 8)


def with_slots(requests: Sequence[Request], slots: int, load: int = LOAD) -> Simulation:
    return served(requests, LIMITS, replica0={"adapters": AdapterSlots(slots, load)})


def one_by_one(names: str) -> list[Request]:
    """Requests that come when those before them have ended."""
    return [Request(n * 10**6, 8, 4, adapter=name.strip()) for n, name in enumerate(names)]


@pytest.mark.parametrize(
    ("names", "slots", "expected"),
    [
        ("aaaa", 1, 1),
        ("abab", 1, 4),
        ("abab", 2, 2),
        ("abacab", 2, 4),
        ("abacac", 2, 3),
        (" a ", 1, 1),
    ],
)
def test_the_adapter_that_was_used_longest_ago_gives_way(
    names: str, slots: int, expected: int
) -> None:
    assert with_slots(one_by_one(names), slots).replicas[0].tally.adapters == expected


def test_the_step_that_begins_a_request_waits_for_its_adapter() -> None:
    run = with_slots(one_by_one("ab a"), 2)
    prompt = Linear().mixed(0, 0, [(8, 0)])
    times = [job.first - job.arrival for job in sorted(run.done, key=lambda j: j.number)]
    assert times == [prompt + LOAD, prompt + LOAD, prompt, prompt]


def test_a_request_waits_for_a_slot_and_others_do_not_wait_for_it() -> None:
    requests = [Request(0, 8, 30, adapter="a"), Request(10, 8, 4, adapter="b")]
    requests += [Request(20, 8, 4, adapter="a"), Request(30, 8, 4)]
    one, two, three, four = sorted(with_slots(requests, 1).done, key=lambda j: j.number)
    assert two.first > one.last
    assert max(three.last, four.last) < one.last
    replica: Replica = with_slots(requests, 2).replicas[0]
    assert replica.tally.adapters == 2


@examples(100)
@given(loads())
def test_slots_for_all_that_take_no_time_change_nothing(requests: list[Request]) -> None:
    named = [r.with_adapter("abc"[n % 3]) for n, r in enumerate(requests)]
    ends = [
        sorted((j.number, j.first, j.last) for j in run.done)
        for run in (served(requests, LIMITS), with_slots(named, 3, 0))
    ]
    assert ends[0] == ends[1]


@dataclass(eq=False)
class SlowSlots(SlowReplica):
    """Sequences one by one, each step by itself, and the adapters in slots, those used last at the
    end."""

    slots: int = 2
    kept: list[str] = field(default_factory=list[str])

    def plan(self, now: int) -> None:
        before, passed, loads = list(self.waiting), list[SlowJob](), 0
        self.waiting = []
        super().plan(now)
        budget = self.limits.tokens - sum(new for _, new in self.parts)
        while before and budget > 0 and len(self.running) < self.limits.sequences:
            job = before.pop(0)
            name = job.request.adapter
            free = [a for a in self.kept if all(a != j.request.adapter for j in self.running)]
            if name and name not in self.kept and len(self.kept) == self.slots and not free:
                passed.append(job)
                continue
            if name and name not in self.kept:
                loads += 1
                if len(self.kept) == self.slots:
                    self.kept.remove(free[0])
            if name:
                self.kept = [*(a for a in self.kept if a != name), name]
            self.running.append(job)
            self.parts.append((job, min(job.left, budget)))
            budget -= self.parts[-1][1]
        self.waiting = [*passed, *before]
        if self.parts:
            pieces = [(new, job.cached) for job, new in self.parts]
            self.until = now + loads * LOAD + self.costs.mixed(0, 0, pieces)


@examples(150)
@given(loads(), st.lists(st.sampled_from(["", "a", "b", "c", "d"]), min_size=25, max_size=25))
def test_every_event_is_that_of_the_simulator_that_steps(
    requests: list[Request], names: list[str]
) -> None:
    named = [replace(r, adapter=name) for r, name in zip(requests, names, strict=False)]
    slow = SlowServer(named, FleetPlan(), [])
    slow.each[:] = (SlowSlots(n, "up", FLEET, Linear()) for n in range(3))
    slow.run()
    how = {f"replica{n}": {"adapters": AdapterSlots(2, LOAD)} for n in range(3)}
    run = served(named, FLEET, count=3, **how)
    actual = sorted((j.number, j.first, j.last) for j in run.done)
    assert actual == sorted((j.number, j.first, j.last) for j in slow.done)


def test_prompts_of_two_adapters_have_no_block_in_common() -> None:
    one, other = (Request(0, 600, 4, prefix=(1,)).with_adapter(name) for name in "ab")
    assert one.prefix != other.prefix
    assert one.prefix == Request(0, 600, 4, prefix=(1,)).with_adapter("a").prefix


JOB = ("serve", "llama3-8b", "--set", "L=2", "--machine", "h100-sxm", "--prompt", "64", "--json")
LORA = ("--lora", "wq,wo", "--lora-rank", "64", "--max-loras", "2")


@pytest.mark.parametrize("stack", ["ideal", "vllm"])
def test_an_adapter_comes_over_the_link_of_the_host(stack: str) -> None:
    """Alone, TTFT is longer by the bytes of A and B of two layers: rank 64, in bf16. vLLM has slots
    of other modules, which it clears."""
    load = ("--stack", stack, "--concurrency", "1", "--count", "1", "--output-tokens", "4", *LORA)
    plain, named = (json.loads(stagec(*JOB, *load, *w).out) for w in ((), ("--adapters", "5")))
    took = named["times"]["ttft"]["mean"] - plain["times"]["ttft"]["mean"]
    bytes_ = 2 * 2 * 64 * (4096 + 4096) * 2
    assert took == pytest.approx(bytes_ / 64e9, rel=1e-6)
    assert named["pools"]["server"]["adapters"] == 1
    assert plain["pools"]["server"]["adapters"] == 0


def test_files_name_adapters(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("arrival,prompt,output,adapter\n0,64,4,legal\n0.1,64,4,\n0.2,64,4,code\n")
    assert [r.adapter for r in read_requests(path)] == ["legal", "", "code"]
    ran = stagec(*JOB, "--requests", str(path), *LORA)
    assert json.loads(ran.out)["pools"]["server"]["adapters"] == 2
    refused = stagec(*JOB, "--requests", str(path))
    assert (refused.code, "uses the adapter 'legal', but the server has none" in refused.err) == (
        1,
        True,
    )
    both = stagec(*JOB, "--requests", str(path), *LORA, "--adapters", "4")
    assert (both.code, "give the file a column 'adapter'" in both.err) == (1, True)
