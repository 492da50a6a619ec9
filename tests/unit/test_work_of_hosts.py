"""What hosts do beside launching kernels: updates of offloaded states
(stagec/time/costs/host_update.py), and the time of a trainer between steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import stagec
from stagec.answers.time.answer import StepAnswer
from stagec.machines import load_machine
from stagec.time.costs.host_update import SHARE, host_update_seconds

SIZES = {"L": 2, "B": 8, "S": 128}


def step(sizes: Mapping[str, int] = SIZES, **flags: Any) -> StepAnswer:
    sizes = {**SIZES, **sizes}
    answer = stagec.job("llama3-8b", sizes=sizes, dp=8, zero=2, **flags).time("a100-80g")
    assert isinstance(answer, StepAnswer)
    return answer


def test_ranks_of_a_host_share_its_memory() -> None:
    machine = load_machine("a100-80g")
    one, all_of_it, nodes = (host_update_seconds(machine, 10**9, n) for n in (1, 8, 64))
    assert one == pytest.approx(1e9 / (SHARE * 409.6e9))
    assert all_of_it == nodes == pytest.approx(8 * one)


def test_a_machine_without_figures_of_its_host_has_those_of_the_link() -> None:
    machine = load_machine("tpu-v5e")
    assert machine.host.memory is None
    assert host_update_seconds(machine, 10**9, 8) == 1e9 / machine.host.bandwidth.value


def test_the_host_updates_offloaded_states_of_deepspeed() -> None:
    kept, host = step(stack="deepspeed"), step(stack="deepspeed", offload="optimizer")
    device = step(stack="deepspeed", offload="optimizer", offload_update="device")
    assert host.breakdown["optimizer"] > 10 * kept.breakdown["optimizer"]
    assert "host copies" not in host.breakdown
    assert device.breakdown["optimizer"] == kept.breakdown["optimizer"]
    assert device.breakdown["host copies"] > 0


def test_copies_take_time_without_nodes_of_traces() -> None:
    kept, moved = step(), step(offload="activations")
    assert moved.step_seconds > kept.step_seconds
    assert moved.step_seconds == step(offload="activations", memory_nodes=True).step_seconds


def test_a_trainer_lets_devices_wait_between_steps() -> None:
    """However long a step is, and also where hosts hold it up."""
    for sizes in ({"B": 8}, {"B": 64}, {"S": 8}):
        before, after = (step(host_between=time, sizes=sizes) for time in ("", "60 ms"))
        assert after.step_seconds == pytest.approx(before.step_seconds + 0.06, abs=1e-9)
        assert after.breakdown["host between steps"] == pytest.approx(0.06)
        assert sum(after.breakdown.values()) == pytest.approx(after.step_seconds)
