"""Offloading: same numbers with explicit copies, bytes moved from the device to the host.

Closed forms of Llama 3 8B with few layers on one rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.analysis.footprint import footprint
from stagec.formats.chakra.nodes import NodeKind
from stagec.formats.chakra.record_files import read_trace
from stagec.ir.opdef import Array
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.program.classes import rank_classes
from stagec.program.nodes import Node
from stagec.schedule.registry import SCHEDULES
from stagec.support.diagnostics import DiagnosticError
from tests.support import (
    GPT,
    LLAMA,
    PLACE,
    STEP,
    analyse,
    compiled,
    each_value,
    inputs_of,
    only_program,
    operations,
    pairwise,
    run_numeric,
    stagec,
    tiny_module,
)

BOTH = "activations,optimizer"
MEMORY: Mapping[int, str] = {NodeKind.MEM_STORE: ".store", NodeKind.MEM_LOAD: ".load"}
FACTORS: Mapping[str, Sequence[Any]] = {
    "model": (LLAMA, GPT),
    "offload": ("activations", "optimizer", BOTH),
    "axes": ({"tp": 1}, {"tp": 2}, {"dp": 2, "tp": 2}),
    "sp": (False, True),
    "zero": (0, 1, 3),
    "recompute": ("none", "selective", "full"),
    "microbatches": (1, 2),
    "tp_inputs": ("regather", "save-gathered"),
    "reshard_after_forward": ("always", "never"),
}
L, S, D, H, G, K, F, V = 3, 8192, 4096, 32, 8, 128, 14336, 128256
PARAMETERS = L * (D * K * (2 * H + 2 * G) + 3 * D * F + 2 * D) + 2 * V * D + D
#: What a layer stashes: inputs of both norms and of all products, attention's with statistics.
STASHED = S * (2 * (4 * D + 2 * H * K + 2 * G * K + 3 * F) + 4 * H)


@cache
def plain(model: str) -> tuple[dict[str, Array], list[Array]]:
    """Inputs and results of the step on one device."""
    module = tiny_module(model, STEP)
    inputs = inputs_of(module, 2)
    return inputs, run_numeric(module, inputs)


@pytest.mark.parametrize("row", each_value(pairwise(FACTORS), str))
def test_a_step_equals_that_on_one_device(row: dict[str, Any]) -> None:
    options = dict(row)
    model = options.pop("model")
    options |= options.pop("axes")
    if options["zero"] < 3:
        options.pop("reshard_after_forward")
    inputs, expected = plain(model)
    module = tiny_module(model, f"{STEP},{PLACE},plan", **options)
    assert operations(module, "stg.copy")
    names = [v.name for v in module.main.body.terminator.operands]
    for name, x, y in zip(names, expected, run_numeric(module, inputs), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10, err_msg=name)


def memory(**options: Any) -> dict[str, int]:
    result = analyse(LLAMA, sizes={"L": L, "B": 1}, **options)
    return dict(result["classes"][0]["memory"])


def test_the_stash_of_the_blocks_moves_to_the_host() -> None:
    here, there = memory(), memory(offload="activations")
    assert here["host"] == 0
    assert there["host"] == L * STASHED
    assert here["stash"] - there["stash"] == L * STASHED
    assert here["peak"] - there["peak"] == L * STASHED
    assert there["optimizer"] == here["optimizer"]


def test_optimizer_state_moves_to_the_host() -> None:
    """12 bytes a parameter: two moments and the master copy, in fp32."""
    there = memory(offload="optimizer")
    assert (there["host"], there["optimizer"]) == (12 * PARAMETERS, 0)


def test_the_update_holds_one_parameter_at_a_time() -> None:
    """The worst one is that with most elements: gate and up of all layers, or the embedding;
    beside it the loss and the clipping factor."""
    largest = max(2 * L * D * F, V * D)
    there = memory(offload="optimizer")
    assert there["transient"] == 12 * largest + 8


def test_sharded_state_takes_a_share_of_the_host() -> None:
    there = memory(offload=BOTH, dp=1, dp_shard=1, tp=2, sp=True)
    whole = L * 2 * D + D
    assert there["host"] == 12 * ((PARAMETERS - whole) // 2 + whole) + L * STASHED // 2


def test_gathered_parameters_are_no_activations() -> None:
    """What `never` keeps stays on the device."""
    options = {"dp": 2, "zero": 3, "offload": "activations"}
    kept = analyse(LLAMA, sizes={"L": L, "B": 2}, reshard_after_forward="never", **options)
    assert kept["classes"][0]["memory"]["host"] == L * STASHED
    block = 2 * (PARAMETERS - 2 * V * D - D)
    assert kept["classes"][0]["memory"]["stash"] >= block


def nodes(**options: Any) -> list[Node]:
    builder = JobBuilder(JobOptions(LLAMA, sizes={"L": L, "B": 1}, **options))
    return only_program(builder.lower()).nodes


@pytest.mark.parametrize("what", ["activations", "optimizer"])
def test_copies_are_nodes_on_request_only(what: str) -> None:
    plain_ones = nodes()
    silent, refusal = nodes(offload=what), nodes(offload=what, memory_nodes=True)
    assert [(n.name, n.flops, n.size) for n in silent] == [
        (n.name, n.flops, n.size) for n in plain_ones
    ]
    assert len(refusal) == len(silent) + sum(n.is_copy for n in refusal)
    moved = L * STASHED if what == "activations" else 12 * PARAMETERS
    for kind in ("store", "load"):
        assert sum(n.size for n in refusal if n.kind == kind) == moved
        assert all(n.name.endswith(f".{kind}") for n in refusal if n.kind == kind)


def test_backward_waits_for_the_load_that_waits_for_the_store() -> None:
    refusal = nodes(offload="activations", memory_nodes=True)
    user = next(n for n in refusal if n.kind == "swiglu_grad")
    (back,) = [d for d in user.deps if d.is_copy]
    (out,) = [d for d in back.deps if d.is_copy]
    assert (out.kind, out.phase, back.kind, back.phase) == ("store", "forward", "load", "backward")
    assert [d.kind for d in out.deps] == ["einsum"]


@pytest.mark.parametrize("options", [{}, {"pp": 2, "microbatches": 4, "schedule": "zb-h1"}])
def test_copies_run_beside_computations(options: dict[str, Any]) -> None:
    """A computation waits for what it takes only, a copy for the computation above it and for the
    copy before it in its direction."""
    builder = JobBuilder(
        JobOptions(
            LLAMA, offload=BOTH, memory_nodes=True, sizes={"L": 4, "B": 4, "S": 64}, **options
        )
    )
    for each in rank_classes(builder.lower()):
        refusal = each.program().nodes
        latest: dict[str, Node] = {}
        for node in refusal:
            before = (*node.deps, *node.after)
            if node.is_copy:
                above = latest.get("computation")
                assert above is None or above in before
                assert latest.get(node.to) in (None, *node.after)
                latest[node.to] = node
            elif node.is_computation:
                assert not any(a.is_copy for a in node.after)
                assert all(d.to == "device" for d in node.deps if d.is_copy)
                latest["computation"] = node


def test_copies_are_memory_nodes_of_the_files(tmp_path: Path) -> None:
    """What simulators read of them: the kind, `is_cpu_op` and `tensor_size`."""
    flags = ["--set", "L=2,S=64,B=1", "--offload", BOTH, "--memory-nodes", "--quiet"]
    ran = stagec("compile", LLAMA, *flags, "-o", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert stagec("check", tmp_path / "out").code == 0
    actual = [n for n in read_trace(tmp_path / "out" / "llama3-8b.0.et") if n.kind in MEMORY]
    assert {n.kind for n in actual} == set(MEMORY)
    for node in actual:
        assert node.name.endswith(MEMORY[node.kind])
        assert node.attr_types == {"is_cpu_op": "bool", "tensor_size": "uint64"}
    (entry,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["classes"]
    assert entry["nodes"]["store"] + entry["nodes"]["load"] == len(actual)
    shown = stagec("show", tmp_path / "out" / "llama3-8b.0.et")
    assert re.search(r"mem_store +\d+ +0 +[\d,]+ +0", shown.out)
    analysed = stagec("analyze", LLAMA, *flags[:-1])
    stores, loads = entry["nodes"]["store"], entry["nodes"]["load"]
    assert f"0 receives, {stores} stores, {loads} loads" in analysed.out


HEAD = "stg.module @m {\n  stg.symbols[B]\n  stg.func @f (%x: f32[B], %h: f32[B | mem(host)]) {\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("%y = stg.gelu(%h)", "'stg.gelu' works on the device, but %h is in host memory"),
        ("%y = stg.add(%x, %h)", "'stg.add' works on the device, but %h is in host memory"),
        ("%y = stg.copy[to = host](%h)", "copies to host memory, but %h is already there"),
        ("%y = stg.copy[to = device](%x)", "copies to device memory, but %x is already there"),
    ],
)
def test_only_copies_cross(body: str, message: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        compiled(f"{HEAD}    {body}\n    stg.return(%y)\n  }}\n}}\n", "infer-shapes")
    assert message in str(caught.value)


def test_a_copied_value_says_where_it_is() -> None:
    body = "    %y = stg.copy[to = device](%h)\n    %z = stg.copy[to = host](%x)\n"
    module = compiled(f"{HEAD}{body}    stg.return(%y, %z)\n  }}\n}}\n", "infer-shapes")
    assert [str(v.type) for v in module.main.body.terminator.operands] == [
        "f32[B]",
        "f32[B | mem(host)]",
    ]


@pytest.mark.parametrize(
    ("flags", "message", "code"),
    [
        (["--offload", "gradientz"], "did you mean 'gradients'?", 1),
        (["--memory-nodes"], "--memory-nodes has no effect without --offload", 0),
        (
            ["--offload", "activations", "--recompute", "full", "--recompute-layers", "2"],
            "which only some layers stash, cannot be offloaded",
            1,
        ),
    ],
)
def test_what_cannot_be(flags: list[str], message: str, code: int) -> None:
    ran = stagec("analyze", LLAMA, *flags)
    assert (message in ran.err, ran.code) == (True, code)


# -- pipelines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_the_host_holds_the_stashes_of_all_microbatches_in_flight(schedule: str) -> None:
    """As many as the closed form of the schedule says, and the device none but those of a layer in
    work: both by the expressions of the plan and by the starts and ends of buffers."""
    p, m, layers = 2, 8, 8
    v = SCHEDULES[schedule].default_chunks
    options: dict[str, Any] = {"pp": p, "microbatches": m, "schedule": schedule}
    options |= {"sizes": {"L": layers, "B": m}, "offload": "activations"}
    form = SCHEDULES[schedule].closed_form(p, m, v).in_flight
    actual = analyse(LLAMA, **options)["classes"]
    module = JobBuilder(JobOptions(LLAMA, **options)).lower("plan-memory")
    kept = footprint(module, LLAMA)["classes"]
    assert form is not None
    for stage, (entry, timed) in enumerate(zip(actual, kept, strict=True)):
        assert entry["memory"]["host"] == timed["host"] == form[stage] * (layers // p) * STASHED
        assert entry["memory"]["peak"] == timed["peak"]


def test_copies_of_every_microbatch_are_nodes() -> None:
    options: dict[str, Any] = {"pp": 2, "microbatches": 4, "sizes": {"L": 4, "B": 4}}
    refusal = JobBuilder(JobOptions(LLAMA, offload="activations", memory_nodes=True, **options))
    plain = JobBuilder(JobOptions(LLAMA, **options))
    for with_copies, without in zip(
        rank_classes(refusal.lower()), rank_classes(plain.lower()), strict=True
    ):
        copies = [n for n in with_copies.program().nodes if n.is_copy]
        assert sum(n.size for n in copies) == 2 * 4 * 2 * STASHED  # to and fro
        assert len(with_copies.program()) - len(copies) == len(without.program())
