"""Stacks: what software makes of a program, below what flags and strategies say."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import stagec as library
from stagec.ir_spec.strategy.statement import Statement
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.flags import FLAGS
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.jobs.stack import read_stack, stack_flags
from stagec.models import library_text, stacks
from stagec.pipeline.plugins import load_plugins
from stagec.support.diagnostics import DiagnosticError
from stagec.validation.answer import validate_memory
from tests.support import stagec

#: Two layers of Llama 3.1 8B at 8,192 tokens in bf16, transformers 5.23.0, PyTorch 2.15, fused
#: AdamW: bytes by PyTorch's own tracker, the same as `torch.distributed._tools.MemTracker`.
MEASURED = {
    "after_forward": {"parameters": 2_973_802_496, "optimizer": 5_947_605_076},
    "after_update": {
        "parameters": 2_973_802_496,
        "gradients": 2_973_802_496,
        "optimizer": 5_947_605_076,
    },
}
#: One step counter of 4 bytes for each of the 21 tensors of parameters.
STEPS = 84
SIZES = ("--set", "L=2,B=1")
#: A file with what it says, a page, a paper, or measured steps.
SOURCE = re.compile(
    r"\]  // .*(\.(py|yaml|cu|cuh|cpp): |openxla\.org|arXiv \d|(fitted|measured)( on|:) \w)"
)


def moments(*flags: str) -> dict[str, dict[str, Any]]:
    """The moments of two layers of an 8B."""
    said = json.loads(stagec("memory", "llama3-8b", *SIZES, *flags, "--json").out)
    actual: dict[str, dict[str, Any]] = said["classes"][0]["memory"]
    return actual


@pytest.mark.parametrize("when", MEASURED)
def test_state_is_what_pytorch_has(when: str) -> None:
    by = moments("--stack", "huggingface")[when]["by"]
    for kind in ("parameters", "gradients", "optimizer"):
        expected = MEASURED[when].get(kind, 0) - (STEPS if kind == "optimizer" else 0)
        assert by[kind] == expected


def test_backward_has_three_copies_of_the_logits() -> None:
    """What a fused loss needs, and one more tensor of fp32 logits, less what that keeps of rows."""
    fused, stock = (moments("--loss", form)["peak"]["total"] for form in ("fused", "stock"))
    assert 0 <= 4 * 8192 * 128_256 - (stock - fused) <= 4 * 8192 + 4


#: The logits of 8,192 tokens in fp32.
LOGITS = 4 * 8192 * 128_256


@pytest.mark.distinct
@pytest.mark.parametrize(
    ("flags", "copies"),
    [
        (("--loss", "stock", "--tp", "4"), 1.0),  # four, each over the ranks
        (("--loss", "fused"), 2.0),
        (("--loss", "in-place"), 1.5),  # one, and the gradient in bf16 beside
        (("--loss", "chunked"), 1.5 + 2 / 8),
        (("--loss", "chunked", "--loss-chunks", "16"), 1.5 + 2 / 16),
    ],
    ids=str,
)
def test_tensors_of_the_size_of_the_logits(flags: tuple[str, ...], copies: float) -> None:
    """At the peak in fp32, beside what a layer's forward has left."""
    actual = moments("--grads", "freed", *flags)
    forward, peak = (actual[when]["total"] for when in ("after_forward", "peak"))
    kept = LOGITS // 4 if "--tp" in flags else LOGITS
    assert abs(peak - (forward - kept) - copies * LOGITS) <= 8 * 8192


def test_a_compiled_loss_keeps_logits_in_16_bits() -> None:
    """With a split vocabulary it keeps the log-softmax in fp32, as the fused one does logits and a
    number for each."""
    for flags, less in (((), LOGITS // 2), (("--tp", "4"), 4 * 8192)):
        fused, compiled = (
            moments("--loss", form, *flags)["after_forward"]["total"]
            for form in ("fused", "compiled")
        )
        assert fused - compiled == less


def test_a_linear_loss_has_logits_of_a_chunk() -> None:
    """V / D = 32 parts, and the gradients of head and input in forward."""
    one, many = (moments("--loss", "linear", "--loss-chunks", n)["after_forward"] for n in "12")
    assert one["total"] == many["total"]
    assert (
        one["total"] - moments()["after_forward"]["total"]
        == 2 * 4096 * (128_256 + 8192) - (LOGITS + 4 * 8192) - 2 * 8192 * 4096
    )


def test_freed_gradients_are_not_there_in_forward() -> None:
    before, after = moments(), moments("--grads", "freed")
    gradients = before["after_update"]["by"]["gradients"]
    assert gradients == after["after_update"]["by"]["gradients"] > 0
    assert before["after_forward"]["by"]["gradients"] == gradients
    assert after["after_forward"]["by"]["gradients"] == 0
    assert before["peak"]["total"] - after["peak"]["total"] == gradients


@pytest.mark.parametrize(("stack", "repeated"), [("ideal", 0), ("torchtitan-compiled", 32 - 8)])
def test_a_compiled_layer_keeps_what_aotautograd_keeps(stack: str, repeated: int) -> None:
    """1,141,964,824 bytes of a layer of Llama 3 8B at 8,192 tokens, of which 65,560 are statistics
    of norms and attention that the fused kernels of a stack compute again. torchtitan repeats keys
    and values for heads that share them."""
    job = ("--dp", "2", "--zero", "3", "--recompute", "none", "--stack", stack)
    kept = [
        moments(*job, "--set", f"B=2,S=8192,L={layers}")["after_forward"]["by"]["activations"]
        for layers in (3, 4)
    ]
    copies = 2 * 2 * 8192 * repeated * 128
    assert kept[1] - kept[0] == 1_141_964_824 - 65_560 + copies


def test_a_compiled_kernel_writes_gradients_over_gate_and_up() -> None:
    """Of two halves it cannot overwrite one while it runs; where these were computed again, none,
    and their product is there as well."""
    sizes, feed = "B=2,S=8192,L=2,V=256", 2 * 2 * 8192 * 14336

    def peak(*flags: str) -> int:
        return int(moments("--set", sizes, "--grads", "freed", *flags)["peak"]["total"])

    assert peak() - peak("--eager", "gate_in_place") == feed
    again = ("--recompute", "full")
    assert peak("--eager", "gate_in_place", *again) - peak(*again) == feed


def test_gradients_of_several_microbatches_are_sums() -> None:
    flags = ("--set", "B=2", "--microbatches", "2")
    assert moments(*flags) == moments(*flags, "--grads", "freed")


def test_the_first_layer_saves_nothing_for_a_frozen_embedding() -> None:
    """The input of its first norm in fp32: 4 bytes a token and width, not with checkpoints, and
    not where the embedding is trained."""
    flags = ("--stack", "huggingface", "--first-saved")
    lora, checkpoints = ("--lora", "wq"), ("--lora", "wq", "--recompute", "full")
    cases = ((lora, 8192 * 4096 * 4), (checkpoints, 0), ((), 0))
    for given, less in cases:
        every, needed = (moments(*flags, how, *given)["after_forward"] for how in ("all", "needed"))
        assert every["total"] - needed["total"] == less


def test_the_first_layer_keeps_its_gathered_parameters() -> None:
    """They stay for backward whether or not its input has a gradient."""
    flags = ("--stack", "huggingface", "--lora", "wo", "--dp", "2", "--set", "B=2", "--zero", "3")
    kept = ("--reshard-after-forward", "never", "--first-saved")
    every, needed = (moments(*flags, *kept, how)["after_forward"] for how in ("all", "needed"))
    assert every["by"]["buffers"] == needed["by"]["buffers"]
    assert every["total"] > needed["total"]


def test_tokens_and_tables_count() -> None:
    """8 bytes a token, once or for labels too; a table has 4 bytes per position and element,
    one of cosines and sines twice as many."""
    kinds = {
        (tokens, tables): moments("--token-buffers", tokens, "--rotation-tables", tables)
        for tokens, tables in (
            ("none", "none"),
            ("shared", "made"),
            ("each", "buffer"),
            ("none", "cos-sin"),
        )
    }
    none, shared, each, halves = kinds.values()
    table = 8192 * 128 * 4
    assert moments() == none
    for when in none:
        assert shared[when]["by"]["buffers"] == 8192 * 8
        assert each[when]["by"]["buffers"] == 2 * 8192 * 8 + table
        assert halves[when]["by"]["buffers"] == 2 * table
        made = shared[when]["by"]["activations"] - none[when]["by"]["activations"]
        assert made == (0 if when == "after_update" else table)
        assert each[when]["by"]["activations"] == none[when]["by"]["activations"]


@pytest.mark.parametrize(("reduced", "calls"), [("each", 16), ("once", 4), ("staged", 16)])
def test_whole_gradients_are_reduced_once(reduced: str, calls: int) -> None:
    """Two layers, the embedding, and the norm with the output: four calls, in each of four
    microbatches or behind the last one."""
    job = ("llama3-8b", "--set", "L=2,S=512,B=16", "--dp", "4", "--zero", "3")
    flags = ("--microbatches", "4", "--stack", "torchtitan", "--grad-reduction", reduced)
    (ranks,) = json.loads(stagec("analyze", *job, *flags, "--json").out)["classes"]
    (actual,) = (c for c in ranks["collectives"] if c["phase"] == "gradient")
    assert (actual["op"], actual["count"]) == ("reduce_scatter", calls)
    assert actual["bytes"] == calls // 4 * 4 * 1_486_901_248


def test_whole_gradients_are_there_until_they_are_reduced() -> None:
    flags = ("--set", "B=8", "--dp", "4", "--zero", "3", "--microbatches", "2")
    each, once = (
        moments("--stack", "huggingface", *flags, "--grad-reduction", how)
        for how in ("each", "once")
    )
    gradients = {when: once[when]["by"]["gradients"] for when in once}
    assert gradients["after_forward"] == 4 * gradients["after_update"]
    assert gradients["after_update"] == each["after_update"]["by"]["gradients"]
    assert each["after_forward"]["by"]["gradients"] == gradients["after_update"]


@pytest.mark.parametrize("command", ["memory", "analyze", "compile"])
def test_ideal_changes_nothing(command: str, tmp_path: Path) -> None:
    """Not even what a manifest says of the command."""
    outs = [("-o", str(tmp_path / "out"), "--quiet") if command == "compile" else ("--json",)] * 2
    texts = list[str]()
    for flags, out in zip(((), ("--stack", "ideal")), outs, strict=True):
        texts.append(stagec(command, "llama3-8b", *SIZES, *flags, *out).out)
        if command == "compile":
            manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
            texts[-1] += json.dumps({k: v for k, v in manifest.items() if k != "created"})
    assert texts[0] == texts[1]


def test_a_job_file_and_python_take_a_stack(tmp_path: Path) -> None:
    said = library.job("llama3-8b", sizes="L=2,B=1", stack="huggingface").memory()
    words = ("llama3-8b", *SIZES, "--stack", "huggingface")
    job = tmp_path / "job.toml"
    job.write_text(stagec("memory", *words, "--print-job").out, encoding="utf-8")
    assert 'stack = "huggingface"' in job.read_text(encoding="utf-8")
    expected = json.loads(stagec("memory", *words, "--json").out)
    assert json.loads(stagec("memory", str(job), "--json").out) == expected == said.as_json()
    assert expected["stack"] == "huggingface"


def test_a_stack_of_a_job_file_stands_beside_it(tmp_path: Path) -> None:
    (tmp_path / "own.stg").write_text("stg.stack @own {\n  stg.loss[form = stock]\n}\n")
    (tmp_path / "job.toml").write_text('model = "llama3-8b"\nstack = "own.stg"\n')
    assert "own (own.stg:2)" in stagec("memory", str(tmp_path / "job.toml"), "--print-strategy").out


@pytest.mark.parametrize("name", stacks())
def test_each_line_of_a_stack_has_its_source(name: str) -> None:
    lines = library_text(f"stacks/{name}.stg").splitlines()
    stated = [line for line in lines if line.startswith("  ")]
    assert all(SOURCE.search(line) for line in stated)


@pytest.mark.parametrize("name", stacks())
def test_the_merged_text_is_a_strategy(name: str, tmp_path: Path) -> None:
    """What is printed, given as a strategy, is the same job."""
    options = JobOptions("llama3-8b", sizes={"L": 2}, stack=name, tp=2, explicit=frozenset({"tp"}))
    builder = JobBuilder(options, Session())
    text = tmp_path / "merged.stg"
    text.write_text(builder.strategy(), encoding="utf-8")
    again = JobBuilder(JobOptions("llama3-8b", strategy=str(text), sizes={"L": 2}), Session())
    assert [op.attrs for op in again.module.ops("stg.strategy")[0].body.ops] == [
        op.attrs for op in builder.module.ops("stg.strategy")[0].body.ops
    ]


def test_a_stack_is_the_program_of_the_flags_that_it_stands_for() -> None:
    """Megatron-DeepSpeed: types, one call behind backward, collectives and hosts that wait."""
    types = dict.fromkeys(("param_dtype", "grad_dtype", "reduce_dtype"), "f16")
    runs = {"ddp_bucket": 0, "async_tp": False, "fusion": "pointwise", "attention": "math"}
    holds = {"loss": "in-place", "saved_tensors": "node"}
    hosts = {"host_issue": "140 us", "host_issue_backward": "60 us", "host_waits": "phases"}
    hosts |= {"host_microbatch": "1 ms"}
    asked: tuple[dict[str, Any], ...] = (
        {"stack": "megatron-deepspeed"},
        {**types, **runs, **holds, **hosts},
        {"stack": "megatron-deepspeed", "async_tp": True, "ddp_bucket": 25 << 20},
    )
    bare, flags, overlaps = (
        library.job("llama3-8b", sizes="L=2,B=2,S=512", dp=2, tp=2, **given) for given in asked
    )
    assert bare.memory().as_json()["classes"] == flags.memory().as_json()["classes"]
    steps = [job.time("a100-80g").as_json()["step_seconds"] for job in (bare, flags, overlaps)]
    assert steps[0] == steps[1] > steps[2]


@pytest.mark.parametrize("name", [name for name in stacks() if "@" in name])
def test_an_earlier_release_is_slower_on_hopper_alone(name: str) -> None:
    """With the same loss and attention it says of other devices what that of today says."""
    today = name.partition("@")[0]
    jobs = [
        library.job("llama3-8b", sizes="L=1,B=1", stack=s, loss="in-place", attention="flash-2")
        for s in (name, today)
    ]
    h100, b200 = (
        [job.time(machine).as_json()["step_seconds"] for job in jobs]
        for machine in ("h100-sxm", "b200")
    )
    assert h100[0] > 1.05 * h100[1]
    assert b200[0] == b200[1]


def test_a_base_states_what_a_stack_does_not_repeat(tmp_path: Path) -> None:
    """One line for each axis and dimension; of one that both name the stack's own parameters."""
    (tmp_path / "base.stg").write_text(
        "stg.stack @base {\n  stg.blocking[over = (tp, dp)]\n"
        "  stg.pad_dimensions[(F, M), multiple = 32]\n}\n"
    )
    own = tmp_path / "own.stg"
    own.write_text(
        'stg.stack @own[extends = "base.stg"] {\n  stg.pad_dimensions[M, multiple = 64]\n}\n'
    )
    lines = read_stack(str(own), Session(), load_plugins(()).registry)
    said = [(n.op.name, n.about, n.stack, str(n.op.attrs.get("multiple"))) for n in lines]
    assert said == [
        ("stg.blocking", "tp", "base", "None"),
        ("stg.blocking", "dp", "base", "None"),
        ("stg.pad_dimensions", "F", "base", "32"),
        ("stg.pad_dimensions", "M", "own", "64"),
    ]


def test_each_parameter_has_the_origin_that_says_it(tmp_path: Path) -> None:
    """Also through two stacks, one of which states the same statement and one of which does not,
    and where flags state the rest of the statement."""
    (tmp_path / "base.stg").write_text(
        'stg.stack @base[extends = "torchtitan"] {\n'
        "  stg.dtypes[moment = bf16]\n  stg.shard_units[loss = inside]\n}\n"
    )
    own = tmp_path / "own.stg"
    own.write_text('stg.stack @own[extends = "base.stg"] {\n  stg.dtypes[reduce = bf16]\n}\n')
    flags = ("--dp", "2", "--zero", "3", "--grad-dtype", "f32", "--print-strategy")
    shown = stagec("memory", "llama3-8b", "--stack", str(own), *flags).out
    assert (
        "// reduce: own (own.stg:2); moment: base (base.stg:2); "
        "param, compute, master: torchtitan 0.2.0 (torchtitan.stg:3)\n"
    ) in shown
    assert "loss: base (base.stg:3); outer, copies: torchtitan 0.2.0" in shown


#: Jobs that have what statements are about: shards, ranks of experts, of stages and of parts of
#: sequences, layers to compute again, states on the host, adapters beside weights in 4 bits, steps
#: of a server.
JOBS: Sequence[dict[str, Any]] = (
    {},
    {"zero": 3},
    {"ep": 2},
    {"pp": 2},
    {"cp": 2},
    {"recompute": "selective"},
    {"offload": "optimizer"},
    {"lora": "wq", "weight_dtype": "mxfp4"},
    {"serve": "decode", "batch": 8, "context": 8},
)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--stack torchtitan --recompute-every 3", "stg.recompute[full, every = 3]"),
        ("--stack torchtitan --recompute-layers 1", "stg.recompute[full, layers = 1]"),
        (
            "--stack trtllm --serve decode --batch 2 --context 5 --tp 2 --all-reduce-below 1000",
            "stg.collectives[norms, statistics, all_reduce = one_shot, below = 1000]",
        ),
        (
            "--stack huggingface --host-microbatch 2ms",
            'stg.hosts[issue = "37 us", waits = phases, microbatch = "2ms"]',
        ),
    ],
)
def test_a_flag_may_be_about_what_the_stack_says(flags: str, expected: str) -> None:
    ran = stagec("analyze", "llama3-8b", *flags.split(), "--print-strategy")
    assert ran.code == 0
    assert "has no effect" not in ran.err
    assert expected in ran.out


def test_what_a_stack_says_alone_is_no_flag_without_effect() -> None:
    """It has the time of a host before a microbatch, and no hosts that wait."""
    ran = stagec("analyze", "llama3-8b", "--stack", "megatron-deepspeed-bf16", "--print-strategy")
    assert 'microbatch = "1 ms"' in ran.out
    assert "has no effect" not in ran.err


@pytest.mark.parametrize("name", stacks())
def test_flags_say_what_a_stack_says(name: str) -> None:
    """The flags that a search writes into its jobs in place of a stack are the same strategy."""
    session = Session()
    lines = read_stack(name, session, load_plugins(()).registry)
    flags = stack_flags(lines, ())
    assert flags.keys() == {n for line in lines for n in line.definition.flags_of(line.op)}
    assert all(FLAGS[n].kind != "names" or isinstance(v, str) for n, v in flags.items())
    for line in lines:
        casts = line.op.name == "stg.autocast"
        mine, said = line.definition.flags_of(line.op), line.definition.read(line.op)
        names = line.op.attrs.keys() & line.definition.flag_names.keys()
        actual = [_record(line.definition, mine, autocast=casts, **more) for more in JOBS]
        assert any(r and all(getattr(said, n) == getattr(r, n) for n in names) for r in actual)


def _record(statement: Statement, flags: dict[str, Any], **more: Any) -> Any:
    """What a statement says in the strategy of flags; None for flags that do not go together."""
    try:
        module = JobBuilder(JobOptions("mixtral-8x7b", dp=2, tp=2, **{**flags, **more})).module
    except DiagnosticError:
        return None
    ops = [op for op in module.walk() if op.name == statement.name]
    return statement.read(ops[0]) if ops else statement.record()


@pytest.mark.long
def test_recorded_steps_are_met_by_category_and_moment() -> None:
    """Of all rows of `validation/torch-memory`; what is missing are row statistics of norms
    and step counters."""
    actual = validate_memory("torch-memory", Session()).errors
    assert len(actual) == 5 * 3 * 6
    judged = [each for each in actual if each.error is not None]
    assert max(abs(each.error or 0) for each in judged) < 0.001
    assert max(abs(each.error or 0) for each in judged if each.category == "total") < 0.0005
    exact = ("parameters", "gradients")
    assert all(each.measured == each.ours for each in actual if each.category in exact)


@pytest.mark.long
def test_data_parallel_steps_are_met() -> None:
    """Of all rows of `validation/torch-data-parallel`: parameters and states but for step counters
    are exact, peaks are met within and without checkpoints and inside of blocks."""
    actual = validate_memory("torch-data-parallel", Session()).errors
    assert len({each.row for each in actual}) >= 19
    assert all(e.measured == e.ours for e in actual if e.category == "parameters")
    counters = {e.measured - e.ours for e in actual if e.category == "optimizer"}
    assert counters == {4 * (9 * layers + 3) for layers in (2, 4, 8)}
    for each in actual:
        if each.category == "total" and each.moment == "peak":
            assert abs(each.error or 0) < 0.001
        if each.category == "activations":
            assert abs(each.error or 0) < 0.006
        if each.category == "gradients" and each.moment != "after_forward":
            assert abs(each.ours - each.measured) <= 16 * 4096


@pytest.mark.long
def test_tensor_parallel_steps_are_met() -> None:
    """Of all rows of `validation/torch-tensor-parallel`: activations, after forward and at the
    peak, and gradients after the update, with those of all rows of the embedding, of which the plan
    has one more where ranks do not divide the vocabulary."""
    actual = validate_memory("torch-tensor-parallel", Session()).errors
    judged = [e for e in actual if e.category == "activations" and e.error is not None]
    assert len(judged) == 18 * 2
    assert max(abs(each.error or 0) for each in judged) < 0.001
    updated = [e for e in actual if e.category == "gradients" and e.moment == "after_update"]
    assert all(each.ours == each.measured for each in updated if "1,001" not in each.row)


@pytest.mark.long
def test_steps_of_adapters_are_met() -> None:
    """Of all rows of `validation/torch-adapters`; what is missing are counters, the
    scales of NF4, inputs of checkpoints, and under autocast those of a module in fp32."""
    actual = validate_memory("torch-adapters", Session()).errors
    assert len({each.row for each in actual}) == 25
    for each in actual:
        small = 0.052 if "autocast, checkpoints" in each.row else 0.006
        assert abs(each.error or 0) < (small if "checkpoints" in each.row else 0.001)
    exact = [e for e in actual if e.category == "gradients"]
    assert all(each.measured == each.ours for each in exact)


@pytest.mark.long
def test_steps_of_experts_are_met() -> None:
    """Of all rows of `validation/torch-experts`; what is missing are rows that fill up those of
    experts, indices in 64 bits and scores of routers, at the peak of checkpoints their input."""
    actual = validate_memory("torch-experts", Session()).errors
    assert len({each.row for each in actual}) == 16
    for each in actual:
        if each.category == "total":
            assert abs(each.error or 0) < 0.015
        if each.category == "gradients":
            assert each.measured == each.ours
        if each.category == "activations" and "Mixtral, one rank, checkpoints" not in each.row:
            assert each.error is None or abs(each.error) < 0.02


@pytest.mark.long
def test_steps_of_pipeline_stages_are_met() -> None:
    """Of all rows of `validation/torch-pipeline`; what is missing are tokens on ranks that do
    not take them. Of a split backward activations are 2.2% off, and with checkpoints, part of which
    the last block of a chunk drops early, 3.7% at the peak."""
    actual = validate_memory("torch-pipeline", Session()).errors
    assert len({each.row for each in actual}) == 24
    for each in actual:
        if each.category in ("parameters", "gradients"):
            assert each.measured == each.ours
        split = "zero bubble" in each.row
        again = split and "checkpoints" in each.row
        if each.category == "activations" and (each.moment == "peak" or not again):
            assert abs(each.error or 0) < (0.037 if again else 0.022 if split else 0.004)
        if each.category == "total":
            assert abs(each.error or 0) < (0.025 if again else 0.01 if split else 0.0028)


@pytest.mark.long
def test_steps_of_context_parallel_ranks_are_met() -> None:
    """Of all rows of `validation/torch-context`, at the loss and in attention backward."""
    actual = validate_memory("torch-context", Session()).errors
    assert len({each.row for each in actual}) == 8
    for each in actual:
        if each.category == "activations":
            assert abs(each.error or 0) < 0.0006
        if each.category in ("parameters", "gradients"):
            assert abs(each.measured - each.ours) <= 4096
        if each.category == "total" and each.moment == "peak":
            assert abs(each.error or 0) < 0.002


def test_stages_receive_ahead() -> None:
    """A buffer for each of 8 microbatches, for inputs and for gradients of results."""
    flags = ("--set", "L=4,B=8", "--pp", "2", "--microbatches", "8", "--zero", "0")
    arrive, ahead = (moments(*flags, "--stage-receives", which) for which in ("arrive", "ahead"))
    more = ahead["after_update"]["by"]["buffers"] - arrive["after_update"]["by"]["buffers"]
    assert more == 8 * 2 * 8192 * 4096


def test_the_last_gather_is_there_beside_the_loss() -> None:
    """436,224,000 bytes of a block in bf16 (PyTorch 2.15, FSDP2 of 8), where the loss is inside."""
    flags = ("--set", "L=2,B=8", "--dp", "8", "--zero", "3", "--stack", "huggingface")
    inside, outside = (moments(*flags, "--shard-loss", where) for where in ("inside", "outside"))
    assert inside["peak"]["total"] - outside["peak"]["total"] == 436_224_000
    assert inside["after_forward"] == outside["after_forward"]


def test_the_embedding_is_a_unit_of_its_own() -> None:
    flags = ("--set", "L=2,B=8", "--dp", "8", "--zero", "3", "--shard-units")
    root, ends = (moments(*flags, which)["after_forward"]["by"] for which in ("root", "ends"))
    assert root["buffers"] - ends["buffers"] == 2 * 128_256 * 4096


def test_shards_have_no_copy_in_bf16() -> None:
    flags = ("--set", "L=2,B=8", "--dp", "8", "--zero", "3", "--stack", "huggingface")
    narrow, wide = (moments(*flags, "--param-dtype", dtype) for dtype in ("bf16", "f32"))
    for when in ("after_forward", "peak"):
        assert wide[when]["by"]["parameters"] == 2 * narrow[when]["by"]["parameters"]
        assert wide[when]["by"]["buffers"] == narrow[when]["by"]["buffers"]
        assert wide[when]["by"]["activations"] == narrow[when]["by"]["activations"]


def test_casts_of_a_unit_are_one_operation() -> None:
    """Where the peak is the cast of what the root has reduced, all of it counts as activations, as
    recorded: tables and logits in fp32."""
    flags = ("--dp", "2", "--zero", "3", "--param-dtype", "f32", "--recompute", "none")
    sizes = ("--set", "B=10,S=128")
    by = moments("--stack", "huggingface", *flags, *sizes)["peak"]["by"]
    assert by["gradients"] == 4_024_475_648
    assert by["activations"] == pytest.approx(2_101_354_504, rel=1e-4)


def test_ranks_of_transformers_have_all_logits() -> None:
    """Two layers of Llama 3.1 8B at 4,096 tokens with the plan of transformers for 4 ranks, as
    recorded: tables are split, their gradients and the logits are not."""
    tokens = ("--set", "S=4096")
    at = moments("--stack", "huggingface", "--tp", "4", *tokens)
    assert at["after_forward"]["by"]["activations"] == pytest.approx(3_051_733_008, rel=1e-4)
    assert at["peak"]["by"]["activations"] == pytest.approx(7_254_392_840, rel=1e-4)
    assert at["after_update"]["by"]["gradients"] == 1_531_486_208


def test_buckets_hold_one_more_copy_of_the_gradients() -> None:
    flags = ("--set", "L=2,B=8", "--dp", "8", "--stack", "huggingface")
    actual = moments(*flags)
    tokens = 8192 * 8
    assert {each["by"]["buffers"] for each in actual.values()} == {2_973_802_496 + tokens}


def test_autocast_of_a_model_in_16_bits() -> None:
    """Parameters are fp32 under autocast, unless the job states their type."""
    flags = ("--stack", "huggingface", "--autocast")
    wide, narrow = (
        moments(*flags, *given)["after_forward"]["by"]["parameters"]
        for given in ((), ("--param-dtype", "bf16"))
    )
    assert (wide, narrow) == (2 * narrow, MEASURED["after_forward"]["parameters"])


def test_each_product_of_autocast_keeps_a_copy_of_its_input() -> None:
    """Of a block q, k, v, gate and up take 16-bit copies of fp32 inputs: 5 times 2 bytes; each of
    two norms keeps its input and the normalized one in fp32: 16 in place of 12. Queries and keys
    are f32, and so is what attention gives, which the output's product casts."""
    actual = [
        moments("--set", f"L={layers},B=1", "--stack", "huggingface", "--autocast")
        for layers in (2, 3)
    ]
    two, three = (each["after_forward"]["by"]["activations"] for each in actual)
    width, inner, keys = 4096, 14_336, 1024
    floats = 16 * width + 4 * (2 * width + keys) + 4 * 32
    halves = 2 * (5 * width + width + keys + 4 * inner)
    weights = 2 * (2 * width * width + 2 * width * keys + 3 * width * inner)
    assert three - two == 8192 * (floats + halves) + weights


@pytest.mark.parametrize("name", ["megatron-core", "nemo", "nanotron", "megatron-deepspeed"])
def test_ranks_that_divide_no_parameter_share_their_states(name: str) -> None:
    """Six ranks of data parallelism, beside tensor parallelism: each has a sixth of the states."""
    sizes = ("--set", "L=2,B=6", "--dp", "6", "--tp", "2", "--zero", "1", "--stack", name)
    said = json.loads(stagec("memory", "llama3-8b", *sizes, "--json").out)
    by = said["classes"][0]["memory"]["after_update"]["by"]
    assert by["optimizer"] == pytest.approx(by["parameters"] / 2 * 12 / 6, rel=1e-3)


@pytest.mark.parametrize("name", ["nemo", "maxtext"])
def test_sums_of_experts_that_a_layer_hands_over_may_run_beside_their_product(name: str) -> None:
    words = ("mixtral-8x7b", *SIZES, "--tp", "2", "--sp", "--stack", name, "--machine", "h100-sxm")
    ran = stagec("time", *words, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["step_seconds"] > 0


@pytest.mark.parametrize(
    "flags", [("--dp", "2", "--zero", "3"), ("--tp", "2", "--sp", "--autocast")]
)
def test_parameters_in_32_bits_multiply_in_8_where_a_recipe_says_so(flags: tuple[str, ...]) -> None:
    """torchtitan has fp32 shards, which FSDP or autocast turn to bf16, and those to 8 bits."""
    words = ("llama3-8b", "--set", "L=2,B=2,S=4096", *flags, "--stack", "torchtitan")
    plain, eight = (
        json.loads(stagec("time", *words, *more, "--machine", "h100-sxm", "--json").out)
        for more in ((), ("--fp8", "e4m3"))
    )
    assert eight["step_seconds"] < 0.95 * plain["step_seconds"]


def test_a_job_that_states_autocast_has_it_with_split_parameters(tmp_path: Path) -> None:
    """torchtitan leaves out its own autocast under tensor parallelism, not that of a job."""

    def line(*words: str) -> str:
        ran = stagec("memory", "llama3-8b", *words, "--stack", "torchtitan", "--print-strategy")
        return next(n.strip() for n in ran.out.splitlines() if "stg.autocast" in n)

    alone = "stg.autocast[on, sharded = left, split = left, experts = cast]"
    assert line("--tp", "4").startswith(alone)
    assert line("--tp", "4", "--autocast").startswith(alone.replace(" split = left,", ""))
    given = ("--tp", "4", "--autocast-attention", "cast")
    assert "split = left" in line(*given)
    text = tmp_path / "s.stg"
    text.write_text("stg.strategy @s {\n  stg.autocast[on]\n}\n", encoding="utf-8")
    assert line(str(text)).startswith("stg.autocast[on, sharded = left, experts = cast]")


def test_experts_in_nested_repeats_are_planned(tmp_path: Path) -> None:
    """What a node of the graph saves belongs to the inner repeat."""
    text = library_text("mixtral.stg")
    inner = "%y = stg.repeat @layers[count = L, carry = 1] (%h = %x)"
    before, found, after = text.partition(inner)
    assert found
    body, end, rest = after.partition("      stg.yield(%r2)\n    }\n")
    nested = inner.replace("%y", "%yi").replace("%x", "%h0")
    outer = "%y = stg.repeat @outer[count = 2, carry = 1] (%h0 = %x) {"
    file = tmp_path / "nested.stg"
    file.write_text(
        f"{before}{outer}\n{nested}{body}{end}stg.yield(%yi)\n    }}\n{rest}", encoding="utf-8"
    )
    words = ("--set", "L=1,B=1,S=64,D=64,H=4,G=4,M=64", "--stack", "huggingface")
    ran = stagec("memory", file, *words)
    assert ran.code == 0, ran.err


def test_copies_of_parameters_that_stay_are_there_when_a_block_runs_again() -> None:
    words = ("--set", "L=1,B=4,S=64", "--fp8", "hybrid", "--fp8-weights", "once", "--dp", "1")
    block = ("--recompute", "full", "--microbatches", "4")
    ran = stagec(
        "compile", "llama3-8b", *words, *block, "--print-after", "differentiate", "--dry-run"
    )
    again = [n for n in ran.err.splitlines() if "stg.cast[f8e4m3" in n and "recompute" in n]
    assert again, ran.err[:200]
    assert not any("once" in line for line in again)
    assert any("kept" in line for line in again)


ENGINES = ("vllm", "sglang", "trtllm")
TRAINERS = (
    "torchtitan",
    "huggingface",
    "megatron-core",
    "nemo",
    "deepspeed",
    "nanotron",
    "maxtext",
)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_that_serves_and_an_engine_that_trains_are_warned_about(name: str) -> None:
    """Over batches and over time; each where it belongs has no such warning."""
    served = "--prompt", "64", "--output-tokens", "8", "--machine", "h100-sxm", "--stack"
    for load in (("--batches", "1"), ("--concurrency", "1", "--count", "2")):
        text = stagec("serve", "llama3.2-1b", *load, *served, name).err
        assert text.count("is that of a trainer") == 1, load
    assert "is that of" not in stagec("analyze", "llama3.2-1b", "--stack", name).err


def test_an_engine_is_that_of_servers(tmp_path: Path) -> None:
    for name in ENGINES:
        served = stagec("analyze", "llama3.2-1b", "--serve", "decode", "--stack", name).err
        assert "is that of" not in served
        trained = stagec("analyze", "llama3.2-1b", "--stack", name).err
        assert trained.count("is that of an engine") == 1
    mine = tmp_path / "mine.stg"
    mine.write_text('stg.stack @mine[version = "1"] { stg.hosts[graphs] }\n')
    for step in ((), ("--serve", "decode")):
        assert "is that of" not in stagec("analyze", "llama3.2-1b", *step, "--stack", mine).err
