"""Options that do not go together are refused before any work, with choices that do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stagec.jobs.request.combine import RULES, divisors, nearest
from tests.support import GPT, LLAMA, stagec


def mesh(*arguments: str | Path) -> str:
    """The ranks of a job as its first line tells them."""
    ran = stagec("analyze", LLAMA, *arguments)
    assert ran.code == 0, ran.err
    actual = re.search(r"parameters, (.*)$", ran.out, re.M)
    assert actual is not None
    return actual[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--ranks", "64", "--tp", "8"], "64 ranks (dp 8 x tp 8)"),
        (["--ranks", "8"], "8 ranks (dp 8)"),
        (["--ranks", "8", "--tp", "8"], "8 ranks (tp 8)"),
        (["--ranks", "1"], "1 rank (one device)"),
        (["--ranks", "64", "--dp", "8", "--tp", "8"], "64 ranks (dp 8 x tp 8)"),
        (["--ranks", "64", "--cp", "2", "--cp-mode", "ulysses"], "64 ranks (dp 32 x cp 2)"),
        (["--ranks", "64", "--dp-shard", "8"], "64 ranks (dp_replicate 8 x dp_shard 8)"),
        (["--ranks", "64", "--dp-replicate", "4"], "64 ranks (dp_replicate 4 x dp_shard 16)"),
        (["--ranks", "64", "--mesh", "dp,tp=4"], "64 ranks (dp 16 x tp 4)"),
        (["--ranks", "64", "--mesh", "tp=4,dp"], "64 ranks (tp 4 x dp 16)"),
        (["--ranks", "64", "--tp", "16"], "64 ranks (dp 4 x tp 8 x tpr 2)"),
    ],
)
def test_the_axis_left_open_is_filled_in(arguments: list[str], expected: str) -> None:
    assert mesh(*arguments) == expected


TEXT = """stg.module @m {{
  stg.mesh @pod[{axes}]
  stg.strategy @s[mesh = @pod] {{
    stg.split[B, over = dp]
    stg.split[(H, G, F, V), over = tp]
  }}
}}
"""


@pytest.mark.parametrize(
    ("axes", "expected"),
    [("dp, tp = 4", "32 ranks (dp 8 x tp 4)"), ("dp = 8, tp = 4", "32 ranks (dp 8 x tp 4)")],
)
def test_the_mesh_of_a_text_is_filled_in_too(axes: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "s.stg"
    path.write_text(TEXT.format(axes=axes))
    assert mesh(path, "--ranks", "32") == expected


def test_the_mesh_of_a_text_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "s.stg"
    path.write_text(TEXT.format(axes="dp = 4, tp = 4"))
    ran = stagec("analyze", LLAMA, path, "--ranks", "32")
    assert ran.code == 1
    assert "--ranks 32 differs from the mesh dp 4 x tp 4, which has 16 ranks" in ran.err
    assert "choose dp = 8 or tp = 8" in ran.err


REFUSED = {
    "axis 'dp' gets no size": (
        ["--ranks", "100", "--tp", "8"],
        "--ranks 100 is not a multiple of tp 8, so axis 'dp' gets",
        "choose --ranks among 96, 104 or --tp among 4, 5, 10",
    ),
    "too few ranks": (
        ["--ranks", "2", "--tp", "16"],
        "is not a multiple of tp 16",
        "--tp among 1, 2",
    ),
    "two axes too many": (
        ["--ranks", "64", "--cp", "3", "--tp", "8", "--cp-mode", "all-gather"],
        "cp 3 x tp 8 = 24",
        "--cp among 1, 2, 4",
    ),
    "another product": (
        ["--ranks", "64", "--tp", "8", "--dp", "4"],
        "differs from the mesh dp 4 x tp 8, which has 32 ranks",
        "choose dp = 8 or tp = 16",
    ),
    "a mesh of another product": (
        ["--ranks", "48", "--mesh", "dp=4,tp=8"],
        "differs from the mesh dp 4 x tp 8, which has 32 ranks",
        "choose dp = 6 or tp = 12",
    ),
    "a mesh with two open axes": (
        ["--ranks", "48", "--mesh", "dp,tp"],
        "--ranks 48 gives the size of one axis, but dp and tp have no size",
        "give sizes to all of them but one",
    ),
    "two data axes": (
        ["--dp", "2", "--dp-shard", "2"],
        "cannot be used with --dp-replicate",
        "R*N ranks",
    ),
    "two meshes": (
        ["--mesh", "dp=2", "--tp", "2"],
        "--mesh and --tp cannot be used together",
        "give all axes in --mesh",
    ),
    "too many for the heads": (
        ["--tp", "64"],
        "H = 32 does not divide over tp = 64",
        "choose --tp among 8, 16, 32",
    ),
    "ulysses beyond the KV heads": (
        ["--cp", "8", "--tp", "2", "--cp-mode", "ulysses"],
        "G = 8 does not divide over tp*cp = 16",
        "choose --cp among 1, 2, 4, or --cp-mode all-gather",
    ),
    "kept without shards": (
        ["--dp", "2", "--zero", "1", "--reshard-after-forward", "last"],
        "--reshard-after-forward last needs --zero 3, found --zero 1",
        "choose --zero 3",
    ),
    "prefetch without shards": (
        ["--dp", "2", "--fsdp-prefetch", "2"],
        "--fsdp-prefetch 2 needs --zero 3, found --zero 0",
        "choose --zero 3",
    ),
    "a switch without shards": (
        ["--dp", "2", "--zero", "1", "--shard-copies"],
        "--shard-copies needs --zero 3, found --zero 1",
        "choose --zero 3",
    ),
    "neither a policy nor an op": (
        ["--recompute", "ops=silu"],
        "--recompute ops=silu: 'ops=silu' is neither a policy nor an op",
        "choose none, selective, full, full_replay, or ops of the model",
    ),
    "chunks of a zigzag": (
        ["--dp", "2", "--cp", "4", "--set", "S=8196"],
        "S = 8196 does not divide over 2*cp = 8",
        "choose cp among 2, 3, 6, or another S",
    ),
    "parts of a sequence": (
        ["--dp", "2", "--cp", "3"],
        "S = 8192 does not divide over cp = 3",
        "choose cp among 1, 2, 4, or another S",
    ),
    "more layers than there are": (
        ["--recompute", "full", "--recompute-layers", "40"],
        "--recompute-layers 40, but the model has L = 32 layers",
        "from 1 to 32",
    ),
    "parts of a loss that has none": (
        ["--loss", "stock", "--loss-chunks", "2"],
        "--loss-chunks 2 needs a loss in parts, found stock",
        "add --loss chunked or --loss linear, or leave it out",
    ),
    "parts of the loss of a stack": (
        ["--stack", "torchtitan", "--loss-chunks", "2"],
        "--loss-chunks 2 needs a loss in parts, found stock",
        "add --loss chunked or --loss linear, or leave it out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("command", ["analyze", "compile"])
def test_what_does_not_go_together(name: str, command: str, tmp_path: Path) -> None:
    arguments, message, remedy = REFUSED[name]
    out = tmp_path / "out"
    more = ["-o", str(out)] if command == "compile" else []
    ran = stagec(command, LLAMA, *arguments, *more)
    assert ran.code == 1
    assert message in ran.err
    assert f"help: {remedy}" in ran.err or remedy in ran.err.split("help:")[1]
    assert not out.exists()


def test_all_that_is_wrong_is_reported_at_once() -> None:
    ran = stagec("analyze", LLAMA, "--tp", "64", "--fsdp-prefetch", "2", "--dp", "2")
    assert ran.err.count("error:") == 2


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--zero", "3"], "--zero has no effect without --dp"),
        (["--sp"], "--sp has no effect without --tp"),
        (["--no-vocab-parallel"], "--no-vocab-parallel has no effect without --tp"),
        (["--tp-inputs", "save-gathered"], "--tp-inputs has no effect without --tp"),
        (["--no-async-tp"], "--no-async-tp has no effect without --tp"),
        (["--cp-mode", "ulysses"], "--cp-mode has no effect without --cp"),
        (["--cp-order", "plain"], "--cp-order has no effect without --cp"),
        (["--schedule", "zbv"], "--schedule has no effect without --pp"),
        (["--stage-layers", "16,16"], "--stage-layers has no effect without --pp"),
        (["--memory-nodes"], "--memory-nodes has no effect without --offload"),
        (["--recompute-every", "2"], "--recompute-every has no effect without --recompute"),
        (["--dp", "2", "--zero", "3", "--ddp-bucket", "9"], "--ddp-bucket has no effect"),
        (["--dp", "2", "--zero", "2", "--ddp-copies"], "--ddp-copies has no effect with --zero 2"),
        (["--dp", "2", "--ddp-views", "--ddp-copies"], "no effect with --ddp-views"),
        (["--dp", "2", "--ddp-views", "--ddp-bucket", "0"], "no effect with --ddp-bucket 0"),
        (["--dp", "2", "--ddp-copies", "--ddp-bucket", "0"], "no effect with --ddp-bucket 0"),
        (["--tp", "2", "--ddp-bucket", "9"], "--ddp-bucket has no effect without --dp"),
        (["--prompt-steps", "alone"], "--prompt-steps has no effect without --serve"),
        (["--host-step", "1 ms"], "--host-step has no effect without --serve"),
        (["--host-microbatch", "2 ms"], "--host-microbatch has no effect without --host-waits"),
        (["--expanding-kernel", "marlin"], "has no effect without --weight-dtype"),
        (["--block-kernel", "flashinfer"], "has no effect without --weight-dtype"),
        (["--expert-kernel", "triton-blocks"], "has no effect without --weight-dtype"),
        (["--expert-kernel", "cutlass"], "has no effect without --weight-dtype"),
        (["--all-reduce", "one-shot"], "--all-reduce has no effect without --tp"),
        (["--cp", "2"], "each rank of cp has the whole optimizer state"),
        (["--recompute", "selective"], "'stg.recompute' changes nothing"),
        (
            ["--dp", "2", "--pp", "2", "--zero", "3", "--shard-reuse", "9"],
            "'stg.shard_units' changes nothing in stages",
        ),
        (
            ["--dp", "2", "--pp", "2", "--zero", "3", "--shard-reuse", "9", "--shard-copies"],
            "'reuse' of 'stg.shard_units' changes nothing in stages",
        ),
    ],
)
def test_what_has_no_effect_is_reported(arguments: list[str], refusal: str) -> None:
    ran = stagec("analyze", LLAMA, *arguments)
    assert (ran.code, refusal in ran.err) == (0, True)


def test_a_flag_about_sent_tokens_says_that_ranks_of_tp_send_none() -> None:
    step = ("--serve", "decode", "--batch", "3", "--context", "100", "--set", "L=2")
    ran = stagec("analyze", "mixtral-8x7b", *step, "--ep", "2", "--tp", "2", "--two-batch-overlap")
    assert ran.code == 0
    assert "--two-batch-overlap has no effect: the ranks of --ep 2 are those of tp" in ran.err


@pytest.mark.parametrize(("weights", "idle"), [("fp8", True), ("nvfp4", False)])
def test_a_kernel_of_experts_in_other_weights_is_reported(weights: str, idle: bool) -> None:
    step = ("--serve", "decode", "--batch", "3", "--context", "100", "--set", "L=2")
    kernel = ("--weight-dtype", weights, "--expert-kernel", "cutlass")
    ran = stagec("analyze", "mixtral-8x7b", *step, *kernel)
    warning = "--expert-kernel cutlass has no effect with --weight-dtype fp8"
    assert (ran.code, warning in ran.err) == (0, idle)


def test_models_without_key_value_heads_have_no_such_limit() -> None:
    ran = stagec("analyze", GPT, "--tp", "32", "--set", "B=1,L=1")
    assert (ran.code, ran.err) == (0, "")


def test_every_rule_has_a_place() -> None:
    assert len(RULES) == len(set(RULES))


@pytest.mark.parametrize(
    ("number", "expected"), [(1, [1]), (12, [1, 2, 3, 4, 6, 12]), (49, [1, 7, 49])]
)
def test_divisors(number: int, expected: list[int]) -> None:
    assert divisors(number) == expected


def test_nearest_choices() -> None:
    assert nearest(7, [1, 2, 4, 8, 16]) == "among 2, 4, 8"
    assert nearest(3, []) == "none"
    assert nearest(3, [1]) == "1"
