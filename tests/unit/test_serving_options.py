"""Options of a step of serving: what they make, what is refused and what is said of it; traces of
steps, and that caches are held once."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import LONG, stagec

SMALL = "L=4,D=64,F=64,V=64,H=8,G=4,K=8,theta=100"
DECODE = ("llama3-8b", "--set", SMALL, "--serve", "decode", "--batch", "8", "--context", "31")
PREFILL = ("llama3-8b", "--set", SMALL, "--serve", "prefill", "--batch", "8", "--prompt", "32")
MIXED = ("llama3-8b", "--set", SMALL, "--serve", "mixed", "--step", "decode=4x8,prefill=1x4+0")
REFUSED = [
    ("--zero 1 --dp 2", "--zero cannot be used with --serve"),
    ("--recompute full", "--recompute cannot be used with --serve"),
    ("--offload activations", "--offload cannot be used with --serve"),
    ("--lora wq --lora-dtype f32", "--lora-dtype cannot be used with --serve"),
    ("--lora wqk", "the model has no parameter '%wqk'"),
    ("--grad-dtype bf16", "--grad-dtype cannot be used with --serve"),
    ("--moment-dtype bf16", "--moment-dtype cannot be used with --serve: there is no optimizer"),
    ("--pp 2 --schedule zbv", "--schedule zbv cannot be used with --serve"),
    ("--tp 2 --sp", "--dp-attention"),
    ("--tp 3", "choose tp among"),
    ("--chunk 2", "--chunk needs --serve prefill"),
    ("--prompt 2", "--prompt needs --serve prefill"),
    ("--set S=4", "--set S cannot be used with --serve"),
    ("--set B=4", "--set B cannot be used with --serve"),
    ("--limit 1KiB", "--batch 8 does not fit 1KiB: no batch does"),
]


@pytest.mark.parametrize(("flags", "text"), REFUSED, ids=[f for f, _ in REFUSED])
def test_what_makes_no_step_is_refused(flags: str, text: str) -> None:
    ran = stagec("analyze", *DECODE, *flags.split())
    assert ran.code == 1
    assert text in ran.err
    assert "help: " in ran.err


@pytest.mark.parametrize(
    ("model", "flags", "offered"),
    [
        ("qwen3-235b-a22b", "--tp 8", True),
        ("qwen3-235b-a22b", "--tp 8 --dp 2", False),  # those would take the experts
        ("glm-4.5", "--tp 8", False),  # nor do its shared experts divide
    ],
)
def test_whole_experts_where_blocks_of_their_widths_do_not_divide(
    model: str, flags: str, offered: bool
) -> None:
    job = (model, "--serve", "decode", "--batch", "16", "--context", "31", "--weight-dtype", "fp8")
    ran = stagec("analyze", *job, *flags.split())
    assert (ran.code, "--pad-widths 128" in ran.err) == (1, True)
    assert ("or --ep 8 for whole experts" in ran.err) == offered
    assert not offered or stagec("analyze", *job, *flags.split(), "--ep", "8").code == 0


def test_shared_experts_whole_on_each_rank() -> None:
    """Two matrices up and one down, of 1536 columns and of all layers with experts, in bf16."""
    job = ("analyze", "glm-4.5", "--serve", "decode", "--batch", "16", "--context", "31", "--json")
    split, whole = (
        json.loads(stagec(*job, *words).out)["classes"][0]
        for words in (("--tp", "4"), ("--tp", "4", "--whole-shared-experts"))
    )
    more = whole["memory"]["parameters"] - split["memory"]["parameters"]
    assert more == 2 * 89 * 3 * 5120 * 1536 * 3 // 4
    assert whole["collectives"] == split["collectives"]
    refused = stagec(*job, "--tp", "8", "--ep", "8", "--weight-dtype", "fp8")
    assert "or --whole-shared-experts" in refused.err
    alone = stagec("analyze", "glm-4.5", "--whole-shared-experts")
    assert "--whole-shared-experts has no effect without --tp" in alone.err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("llama3-8b", "--context", "4"), "--context needs a step of serving"),
        (("llama3-8b", "--page", "4"), "--page needs a step of serving"),
        (("llama3-8b", "--kv-dtype", "fp8"), "--kv-dtype needs a step of serving"),
        (("llama3-8b", "--prefill", "tp=2"), "add --serve disaggregated"),
        ((*DECODE, "--decode", "tp=2"), "--decode needs --serve disaggregated"),
        ((*MIXED, "--cp", "2"), "give --cp-mode all-gather"),
        (
            ("t5-base", "--serve", "mixed", "--step", "prefill=4x9+0,prefill=2x8+0"),
            "let one class begin its sequences",
        ),
        ((*MIXED, "--cp", "8", "--cp-mode", "all-gather"), "as a multiple of 32\n"),
        (("llama3-8b", "--tp", "2", "--dp-attention"), "--dp-attention needs a step of serving"),
        (("llama3-8b", "--serve", "decode"), "--serve decode needs --context"),
        (("llama3-8b", "--serve", "decode", "--context", "0", "--cp", "2"), "caches none"),
        (("llama3-8b", "--lora", "wq", "--max-loras", "2"), "training trains one adapter"),
        (("dlrm", "--serve", "prefill"), "a model of token sequences"),
        (("bert-base", "--serve", "prefill"), "without a causal mask"),
        (("--preset", "deepseek-v3", "--serve", "prefill"), "cannot be used in a step of serving"),
        ((*PREFILL, "--context", "32", "--cp", "2"), "does not support past"),
        ((*PREFILL, "--chunk", "64"), "--chunk 64 is larger than --prompt 32"),
        (
            (*MIXED[:-2], "--batch", "4", "--context", "8", "--prompt", "4", "--chunk", "8"),
            "is larger than",
        ),
    ],
)
def test_other_jobs_are_refused(argv: tuple[str, ...], text: str) -> None:
    ran = stagec("analyze", *argv)
    assert ran.code == 1
    assert text in ran.err


@pytest.mark.parametrize(
    ("model", "positions"),
    [("llama3-8b", 8192), ("gpt3-5b", 2048), ("qwen2.5-7b", 131_072), ("mixtral-8x7b", 32_768)],
)
def test_positions_beyond_those_of_the_model_are_a_warning(model: str, positions: int) -> None:
    """Those of the library's table, of a table of positions, and of a configuration; not those that
    a training step has."""
    words = ("analyze", model, "--set", "L=1", "--serve", "decode", "--context")
    ran = stagec(*words, str(positions))
    assert ran.code == 0
    assert f"reaches position {positions + 1:,}, beyond the {positions:,} of the model" in ran.err
    assert "beyond" not in stagec(*words, str(positions - 1)).err


@pytest.mark.parametrize("step", ["prefill=10x300+0", "decode=2000x100", "chunk=9x300+100"])
def test_a_step_has_more_tokens_than_a_sequence_has_positions(step: str) -> None:
    """The positions of a table, here 1,024, are those of each sequence of a mixed step."""
    ran = stagec("analyze", "gpt2", "--set", "L=1", "--serve", "mixed", "--step", step)
    assert ran.code == 0, ran.err
    assert not ran.err


def test_a_sequence_of_a_step_has_no_more_positions_than_the_model() -> None:
    words = ("analyze", "gpt2", "--set", "L=1", "--serve", "mixed", "--step")
    ran = stagec(*words, "decode=4x100,prefill=1x3000+0")
    assert ran.code == 1
    assert "the assumption P >= new1 does not hold for P = 1024, new1 = 3000" in ran.err


def test_a_model_without_a_last_position_has_no_warning() -> None:
    ran = stagec(
        "analyze", "mamba-2.8b", "--set", "L=1", "--serve", "decode", "--context", "9999999"
    )
    assert ran.code == 0
    assert not ran.err


def test_the_largest_batch_fits_and_no_larger_one() -> None:
    actual = stagec("analyze", *DECODE[:-4], "--context", "31", "--dp", "2", "--limit", "2MiB")
    shown = next(line for line in actual.out.splitlines() if "largest batch" in line)
    most = int(shown.split()[-1].replace(",", ""))
    assert most % 2 == 0
    for batch, fits in ((most, True), (most + 2, False)):
        job = (*DECODE[:-4], "--batch", str(batch), "--context", "31", "--dp", "2")
        assert (stagec("memory", *job, "--limit", "2MiB").code == 0) is fits


@pytest.mark.parametrize("flags", ["", "--cp 2 --page 3"])
def test_the_longest_context_fits_and_no_longer_one(flags: str) -> None:
    job = ("llama3-8b", "--set", SMALL, "--serve", "decode", "--batch", "4", *flags.split())
    actual = stagec("analyze", *job, "--context", "31", "--limit", "2MiB", "--json")
    most = json.loads(actual.out)["serving"]["max_context"]
    for context, fits in ((most, True), (most + 1, False)):
        ran = stagec("memory", *job, "--context", str(context), "--limit", "2MiB")
        assert (ran.code == 0) is fits


JOBS = ["", "--tp 4", "--tp 8", "--pp 2", "--pp 2 --tp 2 --dp 2", "--cp 4", "--tp 2 --dp-attention"]


@pytest.mark.parametrize("flags", JOBS)
def test_traces_of_steps_pass_the_checker(flags: str, tmp_path: Path) -> None:
    for number, job in enumerate((DECODE, PREFILL)):
        out = tmp_path / str(number)
        made = stagec("compile", *job, *flags.split(), "-o", out)
        assert made.code == 0, made.err
        assert "0 errors, 0 warnings" in stagec("check", out).out


@pytest.mark.parametrize("flags", JOBS)
def test_caches_are_held_once(flags: str) -> None:
    """2*L*G*K bytes of keys and as many of values for each token, and nothing as large beside."""
    text = stagec("memory", *DECODE, *flags.split(), "--json")
    assert text.code == 0, text.err
    ranks = json.loads(text.out)["classes"]
    ways = {"": 1, "--tp 4": 4, "--tp 8": 4, "--pp 2": 2, "--pp 2 --tp 2 --dp 2": 8, "--cp 4": 4}
    kept = 2 * 2 * 4 * 4 * 8 * 32 * 8 // ways.get(flags, 2)
    for rank in ranks:
        actual = rank["categories"]
        assert actual["caches"] == kept
        assert actual["gradients"] == actual["optimizer"] == actual["stash"] == 0
        assert rank["peak"] - actual["parameters"] < 2 * kept


@LONG
@pytest.mark.parametrize("flags", ["--tp 2", "--pp 2 --cp 2"])
def test_passes_after_it_keep_what_a_step_computes(flags: str) -> None:
    tiny = ("--set", "L=2,D=8,F=8,V=8,H=4,G=2,K=2,theta=100", "--check-numerics")
    for job in (DECODE, PREFILL):
        ran = stagec("analyze", job[0], *job[3:], *tiny, *flags.split())
        assert ran.code == 0, ran.err


MOE = ("mixtral-8x7b", "--set", "L=1,D=64,M=64,V=64,H=8,G=4,K=8,theta=100")
AT_DECODE = ("--serve", "decode", "--batch", "48", "--context", "31")
AT_MIXED = ("--serve", "mixed", "--step", "decode=4x8")
AT_PREFILL = ("--serve", "prefill", "--batch", "48", "--prompt", "32")


@pytest.mark.parametrize(
    "flags",
    [
        *(
            (*at, *["--tp", "4", "--dp", "2", "--ep", "8", "--etp", "1"])
            for at in (AT_DECODE, AT_MIXED, AT_PREFILL)
        ),
        (*AT_DECODE, *["--dp", "12", "--ep", "12"]),
        (*AT_DECODE, *["--dp", "12", "--ep", "12", "--redundant-experts", "2"]),
        (*AT_DECODE, *["--dp", "12", "--ep", "8"]),
        (*AT_DECODE, *["--dp", "48", "--ep", "48"]),
        ("--dp", "12", "--ep", "12"),
    ],
    ids=" ".join,
)
def test_the_remedy_for_experts_makes_a_job(flags: tuple[str, ...]) -> None:
    """Each flag that the remedy names, with each number that it offers, ends the error."""
    refused = stagec("analyze", *MOE, *flags)
    assert refused.code == 1
    remedy = refused.err.partition("help: ")[2]
    offered = [
        (option, number)
        for option, numbers in re.findall(r"(?:add|give|choose) (--[a-z-]+)([^-\n]*)", remedy)
        for number in re.findall(r"[0-9]+", numbers) or [""]
    ]
    assert offered
    for option, number in offered:
        ran = stagec("analyze", *MOE, *flags, option, *filter(None, [number]))
        assert ran.code == 0, (option, number, ran.err)


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("--tp 2 --stack vllm", 128),
        ("--stack sglang", 128),
        ("--tp 2 --stack trtllm", 66),
        ("--tp 2 --pad-vocab 4", 72),
        ("--tp 2 --pad-vocab 64 --stack vllm", 128),
    ],
)
@pytest.mark.parametrize("step", [DECODE, MIXED])
def test_engines_pad_a_vocabulary_that_ranks_do_not_divide(
    flags: str, size: int, step: Sequence[str]
) -> None:
    ran = stagec(
        "analyze", *step, "--set", "V=65", *flags.split(), "--print-after", "pad-vocabulary"
    )
    assert ran.code == 0, ran.err
    assert f"V = {size}," in ran.err + ran.out


def test_a_vocabulary_that_ranks_do_not_divide_is_refused_without_padding() -> None:
    ran = stagec("analyze", *DECODE, "--set", "V=65", "--tp", "2")
    assert (ran.code, "V = 65 does not divide over tp = 2" in ran.err) == (1, True)
    remedy = "choose tp among 1, or another V, or --pad-vocab 1 to pad the vocabulary"
    assert remedy in ran.err
    assert stagec("analyze", *DECODE, "--set", "V=65", "--tp", "2", "--pad-vocab", "1").code == 0


LATENT = ("deepseek-v3", "--set", "L=2,L_dense=1", "--serve", "decode", "--batch", "8")


@pytest.mark.parametrize("dcp", [2, 4, 8])
def test_ranks_of_tp_split_caches(dcp: int) -> None:
    """With latent attention each rank of tp has all cached rows, or the parts of as many ranks."""
    words = (*LATENT, "--context", "4095", "--tp", "8", "--ep", "8", "--json")
    whole, split = (
        json.loads(stagec("analyze", *words, *more).out)["serving"]
        for more in ((), ("--dcp", str(dcp)))
    )
    assert split["cache_bytes_per_token"] == whole["cache_bytes_per_token"] // dcp
    assert split["cache_bytes"] == 4096 * whole["cache_bytes"] // 4095 // dcp
    assert split["weight_bytes"] == whole["weight_bytes"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("deepseek-v3 --tp 8 --dcp 3", "--dcp 3 does not divide the 8 ranks of tp with one key"),
        ("llama3-8b --tp 8 --dcp 2", "of which each rank has heads of its own"),
        ("llama3-8b --tp 16 --dcp 4", "of which 2 ranks have the same ones"),
        ("llama3-8b --tp 16 --cp 2 --dcp 2", "--cp and --dcp both split cached tokens"),
        ("deepseek-v3 --tp 8 --ep 8 --dp-attention --dcp 8", "--dp-attention gives each its own"),
    ],
)
def test_caches_that_ranks_of_tp_cannot_split(flags: str, why: str) -> None:
    ran = stagec("analyze", *flags.split(), *AT_DECODE)
    assert ran.code == 1
    assert why in ran.err
    assert "help: " in ran.err


def test_a_server_of_groups_says_why_it_is_refused() -> None:
    """Steps of fewer sequences than groups of ranks are tried first; theirs is another reason."""
    words = ("--tp", "4", "--dp", "2", "--weight-dtype", "fp8", "--prompt", "64")
    ran = stagec("serve", "gpt-oss-20b", *words, "--machine", "b200")
    assert ran.code == 1
    assert "M = 2880 does not divide over 64*tp = 256" in ran.err
    assert "dp = 2" not in ran.err
