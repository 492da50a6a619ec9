"""`stagec validate --time`: the job that a row of a source is, how far predictions are off, how
errors are reported."""

from __future__ import annotations

import json
import re
from math import prod
from statistics import median
from typing import Any

import numpy as np
import pytest

from stagec.ir.expr import evaluate
from stagec.ir.types import TensorType
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.machines import load_machine
from stagec.time.step import Issued, StepTime, step_time
from stagec.time.streams import BUBBLE, LAUNCH
from stagec.validation.errors import StepError, regret, spearman, summaries
from stagec.validation.sources import validation_sources
from stagec.validation.steps import MeasuredStep, chosen, measured_steps
from tests.support import assert_schema, run_passes, stagec

STEPS = measured_steps()
#: The cells of each source, beside which its steps stand.
CELLS = {s.name: [row.given for row in s.rows()] for s in validation_sources(kind="steps")}
AXES = ("dp", "tp", "pp", "cp")
#: What else rows of a source differ in: the types of gradients of FSDP's modes, jobs with FSDP
#: among those of a distributed optimizer.
OWN: dict[str, set[str]] = {
    "bridge-moe": {"moe_dispatch"},
    "torchtitan": {"async_tp", "overlap_param_gather", "reshard_after_forward"},
    "llm-foundry-a100": {"grad_dtype", "reduce_dtype"},
    "transformers-h200": {"attention", "autocast", "lora"},
    "bridge-dense": {"fuse_gradients", "overlap_param_gather"},
}
#: Of each source how many rows it has, and how many of them are judged.
ROWS = {
    "korthikanti": (8, 8),
    "narayanan": (10, 10),
    "mcore": (4, 4),
    "torchtitan": (6, 6),
    "deepspeed-multi": (41, 41),
    "deepspeed-single": (720, 720),
    "b200": (15, 15),
    "nanotron": (897, 318),
    "llm-foundry-a100": (61, 61),
    "llm-foundry-h100": (35, 35),
    "transformers-h200": (30, 30),
    "dgx-cloud": (16, 16),
    "bridge-dense": (11, 11),
    "bridge-moe": (6, 6),
    "torchtitan-tp": (4, 4),
    "maxtext": (4, 4),
}
#: Sources of which other than every second row is fitted: all, where several sources judge each
#: other, or none.
EVERY = dict.fromkeys((*list(ROWS)[8:14], "maxtext"), 1) | {"torchtitan-tp": 0}
#: Sources of several devices, or with what else their releases differ in.
DEVICES = {"bridge-dense": 3, "bridge-moe": 2}


def parameters(step: MeasuredStep) -> int:
    """The parameters of the model of a step."""
    module = run_passes(JobBuilder(step.options()).module, "inline")
    types = [arg.type for arg in module.main.body.args]
    return sum(
        evaluate(t.elements, module.env)
        for t in types
        if isinstance(t, TensorType) and t.role == "param"
    )


def test_every_row_of_every_source_is_there() -> None:
    actual = {name: (len(rows), sum(r.judged for r in rows)) for name, rows in STEPS.items()}
    assert actual == ROWS


def test_every_second_judged_row_is_fitted() -> None:
    for name, rows in STEPS.items():
        judged, every = [row.fitted for row in rows if row.judged], EVERY.get(name, 2)
        assert judged == [every > 0 and i % every == 0 for i in range(len(judged))]
        assert not any(row.fitted for row in rows if not row.judged)


def test_the_mesh_has_as_many_ranks_as_there_were_gpus() -> None:
    for rows in STEPS.values():
        for row in rows:
            assert prod(row.flags.get(axis, 1) for axis in AXES) == row.ranks, row.row


def test_the_batch_divides_into_microbatches() -> None:
    for rows in STEPS.values():
        for row in rows:
            parts = row.flags["microbatches"] * row.flags.get("dp", 1)
            assert row.sizes["B"] % parts == 0, row.row


def test_one_convention_for_each_source() -> None:
    """Rows of a source differ in mesh, batch and recompute; the rest is the framework's. Runs of
    nanotron differ in what they measured of their nodes, too; torchtitan gathers and reduces in
    another way with a pipeline; recipes of experts say who dispatches tokens."""
    varied = {*AXES, "ep", "microbatches", "schedule", "chunks", "recompute", "recompute_every"}
    varied |= {
        "sp",
        "zero",
        "scatter_gather",
        "stage_layers",
        "ddp_bucket",
        "fp8",
        "fp8_scaling",
        "cp_mode",
        "capacity_factor",
    }
    for name, rows in STEPS.items():
        assert len({row.machine for row in rows}) == DEVICES.get(name, 1), name
        changes = {json.dumps(dict(row.changes)) for row in rows}
        assert len(changes) == (2 if name == "nanotron" else 1), name
        own = varied | OWN.get(name, set())
        flags = {n: v for n, v in rows[0].flags.items() if n not in own}
        for row in rows:
            assert flags == {n: v for n, v in row.flags.items() if n not in own}, row.row


def test_tensor_parallel_ranks_of_megatron_send_a_part_each() -> None:
    """Where each has all of a message between stages: with tp and without sequence parallelism."""
    for name in ("korthikanti", "narayanan", "deepspeed-multi", "deepspeed-single"):
        for row in STEPS[name]:
            whole = row.flags["tp"] > 1 and row.flags["pp"] > 1 and not row.flags.get("sp")
            assert row.flags.get("scatter_gather", False) == whole, row.row


def test_stages_of_nanotron_end_where_the_cost_comes_to_their_part() -> None:
    """The cost of a layer is its weights; that of the head, which comes last, its own."""
    for row in STEPS["nanotron"]:
        sizes, stages = row.sizes, row.flags["pp"]
        if stages == 1:
            assert "stage_layers" not in row.flags
            continue
        layer = 4 * sizes["D"] ** 2 + 3 * sizes["F"] * sizes["D"]
        whole = sizes["L"] * layer + sizes["V"] * sizes["D"]
        layers = row.flags["stage_layers"]
        assert len(layers) == stages
        assert sum(layers) == sizes["L"]
        for stage in range(1, stages):
            before = sum(layers[:stage])
            assert before == sizes["L"] or before * layer * stages >= whole * stage
            assert not layers[stage - 1] or (before - 1) * layer * stages < whole * stage


def test_runs_of_nanotron_are_of_the_kind_that_they_measured() -> None:
    """An all_reduce of 8 ranks tells whether hosts compare calls, and whether messages inside a
    node are off; the number of the job, whether stages look for messages every 0.1 s."""
    for row, cells in zip(STEPS["nanotron"], CELLS["nanotron"], strict=True):
        inside = float(cells["notes"]["all_reduce_inside"])
        assert (cells.get("kind") == "compares") == (inside < 445)
        assert ("efficiency.network.efa.check" in row.changes) == (inside < 445)
        looks = row.flags["pp"] > 1 and (int(cells["notes"]["job"]) < 14_097_000 or inside < 380)
        assert row.judged == (row.ranks <= 64 and not looks)


def test_gradients_of_nanotron_are_reduced_after_backward() -> None:
    for row, cells in zip(STEPS["nanotron"], CELLS["nanotron"], strict=True):
        zero = int(cells["notes"]["zero"])
        many = row.flags["dp"] > 1
        assert row.flags.get("zero") == (zero if many else None)
        assert row.flags.get("ddp_bucket") == (0 if many and zero else None)


def test_stages_of_torchtitan_end_at_its_split_points() -> None:
    """The first has the quotient, those in the middle one more while there are layers over, the
    last what is left."""
    row = next(r for r in STEPS["torchtitan"] if r.row.startswith("405B"))
    assert row.flags["microbatches"] == row.flags["pp"] == 8
    each, over = divmod(row.sizes["L"], row.flags["pp"] * row.flags["chunks"])
    assert row.flags["stage_layers"] == (each, *[each + 1] * over, each)


def test_rows_of_one_node_are_sums_of_layers() -> None:
    """Without stages: microbatches x (layers x layer + edge) + update, with one layer and one edge
    for each width, tp and microbatch, and one update for each width, tp, depth and dp. Steps that
    were timed differ by more than this between one run and the next."""
    actual: dict[tuple[str, ...], list[tuple[dict[tuple[Any, ...], float], float]]] = {}
    for cells in CELLS["deepspeed-single"]:
        sizes, flags = cells["sizes"], cells["flags"]
        if flags["pp"] == "1":
            size, layers, ranks = cells["notes"]["microbatch"], int(sizes["L"]), int(flags["dp"])
            count = int(sizes["B"]) / (int(size) * ranks)
            terms: dict[tuple[Any, ...], float] = {("update", layers, ranks): 1}
            terms |= {("layer", size): count * layers, ("edge", size): count}
            row = (terms, float(cells["measured"]))
            actual.setdefault((sizes["D"], flags["tp"]), []).append(row)
    known = 0
    for rows in actual.values():
        names = sorted({name for terms, _ in rows for name in terms}, key=str)
        matrix = np.array([[terms.get(name, 0.0) for name in names] for terms, _ in rows])
        measured = np.array([ms for _, ms in rows])
        numbers, _, rank, _ = np.linalg.lstsq(matrix, measured, rcond=None)
        np.testing.assert_allclose(matrix @ numbers, measured, rtol=5e-4)
        known += int(rank)
    assert sum(map(len, actual.values())) > 2.5 * known


def test_words_of_one_node_are_not_filled_up() -> None:
    """The part of a rank is a whole number (VIA-Research/vTrain, src/model/gpt_modeling.py)."""
    for row in STEPS["deepspeed-single"]:
        assert row.sizes["V"] == 50257 // row.flags["tp"] * row.flags["tp"]


def checks() -> tuple[float, float]:
    """Seconds of a compared call for each rank of its group, inside a node and beyond."""
    changes = next(r for r in STEPS["nanotron"] if len(r.changes) > 1).changes
    inside, beyond = (changes[f"efficiency.network.{n}.check"] for n in ("nvlink", "efa"))
    return float(inside), float(beyond)


def loop(column: str, ranks: int, rounds: int, *, compare: bool, nodes: int = 0) -> float:
    """Seconds of ten collectives of 1 GiB and a barrier that runs of nanotron measured."""
    rates = [
        float(notes[column])
        for notes in (cells["notes"] for cells in CELLS["nanotron"])
        if (445 if not compare else 380)
        < float(notes["all_reduce_inside"])
        < (445 if compare else 999)
        and nodes in (0, int(notes["nodes"]))
    ]
    return rounds * (ranks - 1) / ranks * 10 * 2**30 / (median(rates) * 1e9)


@pytest.mark.parametrize("nodes", [8, 16, 32, 64])
def test_what_comparing_calls_takes_is_what_the_runs_measured(nodes: int) -> None:
    """Between nodes the hosts take longer than the devices."""
    inside, beyond = checks()
    hosts = 11 * (8 * inside + 8 * (nodes - 1) * beyond)
    assert loop("all_gather", 8 * nodes, 1, compare=True, nodes=nodes) == pytest.approx(hosts, 0.05)


def test_what_comparing_calls_takes_inside_a_node() -> None:
    """The devices take longer; the first call and the barrier come on top."""
    compared, free = (loop("all_reduce_inside", 8, 2, compare=c) for c in (True, False))
    inside, _ = checks()
    assert compared - free == pytest.approx(2 * 8 * inside, rel=0.1)


def test_models_have_the_parameters_that_rows_are_named_after() -> None:
    for source in ("narayanan", "mcore", "korthikanti", "torchtitan"):
        for row in STEPS[source]:
            size = re.match(r"([0-9.]+)(B|T)", row.row)
            assert size, row.row
            expected = float(size[1]) * (1000 if size[2] == "T" else 1)
            # Korthikanti et al. round
            assert parameters(row) / 1e9 == pytest.approx(expected, rel=0.02, abs=0.05), row.row


def test_models_of_sweeps_have_the_published_parameters() -> None:
    sizes = {parameters(r) for r in STEPS["deepspeed-multi"][::20]}
    assert [round(n / 1e9, 1) for n in sorted(sizes)] == [3.6, 18.4]
    wide = next(r for r in STEPS["nanotron"] if r.sizes["D"] == 4096)
    assert parameters(wide) == 8_858_636_288  # 8.86B


# -- errors ----------------------------------------------------------------------------------------

#: A row of each source that is small, and by how much it may be off.
SMALL = {
    "korthikanti": ("22B full", 0.1),
    "narayanan": ("18.4B", 0.1),
    "mcore": ("16B", 0.12),
    "torchtitan": ("8B fsdp8 bs2 compile", 0.1),
    "b200": ("llama3_405b_l4_tp8_pp1_dp1_mbc4", 0.1),
    "llm-foundry-a100": ("125m S512 g8 mbs128 acc2 noac DEFAULT", 0.05),
    "llm-foundry-h100": ("30b S2048 g32 mbs14 acc3 ac DEFAULT", 0.06),
    "transformers-h200": ("Llama 3.2 1B, 4 x 2048", 0.06),
    "dgx-cloud": ("8b bf16 8", 0.03),
    "bridge-dense": ("L3-8B 25.11 8 cs", 0.06),
    "torchtitan-tp": ("8B 64 vanilla", 0.06),
    "maxtext": ("16B 256 chips pdb6 tp1", 0.1),
}
#: The most that the median of a source may be off.
MEDIANS = {
    "korthikanti": 0.06,
    "narayanan": 0.06,
    "mcore": 0.1,
    "torchtitan": 0.06,
    "deepspeed-multi": 0.08,
    "b200": 0.05,
    "nanotron": 0.1,
    "llm-foundry-a100": 0.025,
    "llm-foundry-h100": 0.05,
    "transformers-h200": 0.05,
    "dgx-cloud": 0.04,
    "bridge-dense": 0.05,
    "bridge-moe": 0.08,
    "maxtext": 0.08,
}
#: Rows of a source that are predicted for its median, spread evenly.
MOST_ROWS = 6


@pytest.mark.parametrize("source", SMALL)
def test_a_step_is_predicted(source: str) -> None:
    name, most = SMALL[source]
    step = next(s for s in STEPS[source] if s.row == name)
    assert step.predicted() == pytest.approx(step.seconds, rel=most)


@pytest.mark.long
@pytest.mark.distinct
@pytest.mark.parametrize("source", MEDIANS)
def test_the_median_of_a_source(source: str) -> None:
    steps = [s for s in chosen(source, everything=False) if s.ranks <= 512]
    steps = steps[:: -(-len(steps) // MOST_ROWS)]
    (actual,) = summaries(StepError(s, s.predicted()) for s in steps)
    assert actual.median <= MEDIANS[source]


def step(seconds: float, *, sweep: str = "s", fitted: bool = False) -> MeasuredStep:
    return MeasuredStep("x", "", seconds, 1, "b200", "m", {}, {}, sweep=sweep, fitted=fitted)


def test_spearman_and_regret_of_a_sweep() -> None:
    measured = (1.0, 2.0, 3.0, 4.0)
    same = [StepError(step(s), 2 * s) for s in measured]
    assert spearman(same) == pytest.approx(1)
    assert regret(same) == 0
    turned = [StepError(step(s), 5 - s) for s in measured]
    assert spearman(turned) == pytest.approx(-1)
    assert regret(turned) == 3
    alike = [StepError(step(s), 1.0) for s in measured]
    assert spearman(alike) == 0
    # ranks 1 2 3 4 and 2 1 3 4: 1 - 6 * 2 / (4 * 15)
    swapped = [StepError(step(s), p) for s, p in zip(measured, (2, 1, 3, 4), strict=True)]
    assert spearman(swapped) == pytest.approx(0.8)
    assert regret(swapped) == 1


def test_a_summary_tells_fitted_rows_from_others() -> None:
    rows = [
        StepError(step(1.0, fitted=True), 1.0),
        StepError(step(1.0), 1.1),
        StepError(step(1.0), 0.7),
        StepError(step(1.0), "no such mesh"),
    ]
    (actual,) = summaries(rows)
    assert actual.rows == 3
    assert actual.median == pytest.approx(0.1)
    assert actual.left_out == pytest.approx(0.2)
    assert actual.bias == pytest.approx(0.0)
    assert actual.spearman is None  # three steps are no sweep


# -- the command -----------------------------------------------------------------------------------


def test_validate_prints_rows_and_sources_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = STEPS["torchtitan"][:1]
    where = "stagec.validation.steps.measured_steps"

    def only_these(source: str | None) -> dict[str, list[MeasuredStep]]:
        return {source or "": steps}

    monkeypatch.setattr(where, only_these)
    result = stagec("validate", "--time", "--source", "torchtitan", "--json")
    assert result.code == 0
    actual = json.loads(result.out)
    assert_schema("validate", actual)
    assert [row["row"] for row in actual["rows"]] == [s.row for s in steps]
    for row in actual["rows"]:
        assert row["error"] == pytest.approx(row["predicted_seconds"] / row["measured_seconds"] - 1)
    (source,) = actual["sources"]
    assert source["source"] == "torchtitan"
    assert source["rows"] == 1


def test_mistakes_of_validate() -> None:
    wrong = stagec("validate", "--time", "--source", "mcor")
    assert wrong.code == 1
    assert "did you mean 'mcore'" in wrong.err
    alone = stagec("validate", "--source", "mcore")
    assert alone.code == 1
    assert "add one of --time, --memory, --serve" in alone.err


def test_a_sample_has_fitted_rows_and_others() -> None:
    for source in ("deepspeed-single", "nanotron"):
        rows = chosen(source, everything=False)
        assert len(rows) < len(STEPS[source])
        assert {row.fitted for row in rows} == {True, False}
    assert len(chosen("nanotron", everything=True)) == ROWS["nanotron"][0]


# -- hosts, and devices that have been at work for long --------------------------------------------

TINY = {"B": 8, "S": 64, "L": 2, "D": 64, "H": 4, "G": 4, "K": 16, "F": 128, "V": 256}


def tiny(issue: float, **flags: Any) -> tuple[Issued, StepTime]:
    """A small step on a machine whose hosts take so long for a computation."""
    issued = Issued.of(JobBuilder(JobOptions("llama3-8b", sizes=TINY, **flags)).lower())
    machine = load_machine("h100-sxm").changed({"efficiency.host.issue": issue})
    return issued, step_time(issued, machine)


def test_a_slow_host_takes_its_time_for_every_computation() -> None:
    issued, actual = tiny(1e-3, microbatches=4)
    nodes = [n for n in issued.classes[0].program().nodes if n.is_computation]
    count = sum(n.phase != "optimizer" and n.kind != "accumulate_grad" for n in nodes)
    assert actual.seconds == pytest.approx(count * 1e-3)
    devices = actual.devices[0].parts(actual.devices.end)
    assert actual.parts(actual.slowest) == {
        **devices,
        LAUNCH: devices.get(LAUNCH, 0) + actual.picoseconds - actual.devices.end,
    }


@pytest.mark.parametrize("tp", [2, 4])
def test_hosts_that_compare_calls_wait_for_each_rank_of_a_group(tp: int) -> None:
    issued = Issued.of(JobBuilder(JobOptions("llama3-8b", sizes=TINY, tp=tp, dp=2)).lower())
    hosts = {"efficiency.host.issue": 0.0, "efficiency.network.check": 1e-2}
    actual = step_time(issued, load_machine("h100-sxm").changed(hosts))
    nodes = issued.classes[0].program().nodes
    ranks = sum(node.group.size(issued.mesh) for node in nodes if node.group)
    assert ranks > 2 * tp
    assert actual.seconds == pytest.approx(ranks * 1e-2)
    free = step_time(issued, load_machine("h100-sxm").changed(hosts), communicates=False)
    assert free.seconds < 1e-2


def test_slow_hosts_wait_for_each_other_in_a_pipeline() -> None:
    _, actual = tiny(1e-3, pp=2, microbatches=4)
    parts = actual.parts(actual.slowest)
    assert {LAUNCH, BUBBLE, "matrix products"} <= set(parts)
    assert parts[BUBBLE] == actual.slowest.parts(actual.picoseconds)[BUBBLE]
    assert sum(parts.values()) == actual.picoseconds


def test_a_fast_host_changes_nothing() -> None:
    _, without = tiny(0.0, microbatches=4)
    _, actual = tiny(1e-9, microbatches=4)
    assert actual.picoseconds == without.picoseconds


def test_what_is_sustained_slows_products_that_units_bind() -> None:
    """Those of a training step, and neither what moves bytes nor the products of decode, which wait
    for the weights."""
    sizes = {"L": 2, "B": 1, "S": 4096}
    full, half = sustained(JobOptions("llama3-8b", sizes=sizes))
    assert half["matrix products"] == pytest.approx(2 * full["matrix products"], rel=1e-6)
    assert half["attention"] == pytest.approx(2 * full["attention"], rel=1e-6)
    assert half["element-wise"] == full["element-wise"]
    step = JobOptions("llama3-8b", sizes={"L": 2}, serve="decode", batch=8, context=4000)
    full, half = sustained(step)
    assert half == full


def sustained(options: JobOptions) -> list[dict[str, int]]:
    """The parts of a step whose products keep all of their speed, or half of it."""
    issued = Issued.of(JobBuilder(options).lower())
    machine = load_machine("h100-sxm").changed({"efficiency.host.issue": 0.0})
    parts: list[dict[str, int]] = []
    for share in (1.0, 0.5):
        actual = step_time(issued, machine.changed({"efficiency.sustained.products": share}))
        parts.append(actual.parts(actual.slowest))
    return parts


def test_the_machine_of_a_step_has_what_its_source_states() -> None:
    row = STEPS["deepspeed-multi"][0]
    rates = {level.name: level.bandwidth.value for level in row.on_machine().network}
    assert rates == {"nvlink": 300e9, "infiniband": 12.5e9}
    assert sum(len(m) for m in row.issued().members) == row.ranks
