"""Attention and feed-forward apart: what each stage holds, what crosses, and how long a step is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import Outcome, analyse, stagec
from tests.unit.test_memory_page import drawn

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, WIDE, WORDS = 32, 4096, 32, 8, 128, 14336, 128_256
BATCH, CONTEXT = 16, 1000


def decode(**options: Any) -> list[dict[str, Any]]:
    """The stages of a step of decode of Llama 3 8B."""
    step = {"serve": "decode", "batch": BATCH, "context": CONTEXT, "pp": 2, "microbatches": 2}
    return list(analyse("llama3-8b", **step, afd=True, **options)["classes"])


@pytest.mark.parametrize("tp", [1, 2])
def test_one_stage_has_attention_and_the_other_one_the_rest(tp: int) -> None:
    """Parameters and caches in bf16; norms of each half are with it, the embedding with attention
    and the head with feed-forward."""
    attention, rest = (stage["memory"] for stage in decode(tp=tp))
    heads = WIDTH * HEAD * (2 * HEADS + 2 * KV_HEADS) // tp
    assert attention["parameters"] == 2 * (LAYERS * (heads + WIDTH) + WORDS * WIDTH // tp)
    wide = 3 * WIDTH * WIDE // tp
    assert rest["parameters"] == 2 * (LAYERS * (wide + WIDTH) + WORDS * WIDTH // tp + WIDTH)
    assert attention["caches"] == 2 * 2 * LAYERS * BATCH * (CONTEXT + 1) * KV_HEADS * HEAD // tp
    assert not rest.get("caches")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dp", [1, 2])
def test_each_layer_hands_its_tokens_to_and_fro(tp: int, dp: int) -> None:
    """A rank sends the width of each of its tokens to the rank in its place, layer by layer and
    microbatch by microbatch, and gets as much back, but behind the last layer."""
    attention, rest = decode(tp=tp, dp=dp)
    tokens = BATCH // dp
    for stage, sent, back in ((attention, "send", "recv"), (rest, "recv", "send")):
        messages = {each["dir"]: (each["count"], each["bytes"]) for each in stage["p2p"]}
        assert messages[sent] == (2 * LAYERS, 2 * LAYERS * tokens * WIDTH)
        assert messages[back] == (2 * (LAYERS - 1), 2 * (LAYERS - 1) * tokens * WIDTH)


def timed(*flags: str, machine: str = "h100-sxm") -> dict[str, Any]:
    words = ("mixtral-8x7b", "--serve", "decode", "--machine", machine)
    ran = stagec("time", *words, *flags, "--no-levers", "--json")
    assert ran.code == 0, ran.err
    return dict(json.loads(ran.out))


def test_two_microbatches_take_turns() -> None:
    """With one in flight on each stage a layer lasts as long as the slower stage works on both; the
    faster one waits for what is left (MegaScale-Infer, section 4.1)."""
    report = timed("--batch", "64", "--context", "4000", "--pp", "2", "--afd", "--tp", "2")
    busy = [
        sum(v for name, v in stage["breakdown"].items() if name not in ("bubble",))
        for stage in report["classes"]
    ]
    assert report["step_seconds"] == pytest.approx(max(busy), rel=0.03)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--pp", "4", "--afd"), "attention and feed-forward are on two stages, but pp has 4"),
        (("--pp", "2", "--afd", "--microbatches", "3"), "needs a multiple of 2 microbatches"),
    ],
)
def test_what_does_not_go_is_refused(flags: tuple[str, ...], text: str) -> None:
    step = ("--serve", "decode", "--batch", "24", "--context", "100")
    ran = stagec("analyze", "llama3-8b", *step, *flags)
    assert ran.code == 1
    assert text in ran.err
    assert "help: " in ran.err


def test_training_has_no_caches_to_keep_apart() -> None:
    ran = stagec("analyze", "llama3-8b", "--pp", "2", "--afd", "--set", "B=4,S=128")
    assert ran.code == 1
    assert "--afd needs a step of serving" in ran.err


@pytest.mark.parametrize("pods", [(), ("--serve", "disaggregated", "--prefill", "tp=2")])
def test_servers_decode_so(pods: tuple[str, ...]) -> None:
    """Their step of decode is that of two microbatches, by itself and in a pod."""
    words = ("mixtral-8x7b", "--prompt", "1000", "--output-tokens", "100", "--batches", "64")
    apart = ("--decode", "pp=2,tp=2,afd") if pods else ("--pp", "2", "--tp", "2", "--afd")
    ran = stagec("serve", *words, *pods, *apart, "--machine", "h100-sxm", "--json")
    assert ran.code == 0, ran.err
    (point,) = json.loads(ran.out)["points"]
    step = timed("--batch", "64", "--context", "1050", "--pp", "2", "--afd", "--tp", "2")
    assert point["tpot"] >= step["step_seconds"] * (1 - 1e-9)
    assert not pods or point["tpot"] == pytest.approx(step["step_seconds"])


def test_a_step_of_prompts_has_room_beside_the_caches() -> None:
    """Attention has the caches of all sequences while it computes prompts, and feed-forward only
    what prompts need, on ranks that are not split by sequences too."""
    model = ("llama3-8b", "--set", "L=2", "--part", "x=feed-forward: tp=2")
    load = ("--prompt", "16000", "--output-tokens", "2", "--batches", "4")
    ran = stagec("serve", *model, *load, "--machine", "h100-sxm", "--json")
    answer = json.loads(ran.out)
    assert answer["machine"] == "h100-sxm"
    (point,) = answer["points"]
    peaks: dict[str, dict[str, int]] = {}
    caches = 0
    steps = ("decode", "4", "--context", "16001"), ("prefill", "2", "--prompt", "16000")
    for step, *asked in steps:
        counted = stagec("memory", *model, "--serve", step, "--batch", *asked, "--json")
        pods = json.loads(counted.out)["pods"]
        peaks[step] = {n: each["classes"][0]["peak"] for n, each in pods.items()}
        if step == "prefill":
            (caches,) = (c["caches"] for c in [pods["main"]["classes"][0]["categories"]])
    held = 4 * (16001 + 1) * 2 * 2 * 2 * KV_HEADS * HEAD
    main = max(peaks["decode"]["main"], peaks["prefill"]["main"] - caches + held)
    assert point["memory_peak"] == pytest.approx(max(main, *peaks["prefill"].values()), rel=1e-3)
    assert point["memory_peak"] > 1.05 * peaks["decode"]["main"]


def test_requests_over_time_take_steps_of_both_pods() -> None:
    """Prompts that arrive together are computed in one step, and the one that decodes is that of
    `stagec time`; all tokens come out, and each rank counts."""
    model = ("llama3-8b", "--set", "L=2", "--dp", "2", "--machine", "h100-sxm")
    part = ("--part", "x=feed-forward: tp=2,on-machine=h200")
    load = ("--batch-of", "8", "--lengths", "prompt=512,output=2", "--step-grid", "exact")
    ran = json.loads(stagec("serve", *model, *part, *load, "--json").out)
    assert ran["machine"] == "h100-sxm and h200"
    step = ("--batch", "8", "--no-levers", "--json")
    times = {
        name: json.loads(stagec("time", *model, *part, "--serve", name, *more, *step).out)
        for name, *more in (("decode", "--context", "512"), ("prefill", "--prompt", "512"))
    }
    assert ran["times"]["tpot"]["p50"] == pytest.approx(times["decode"]["step_seconds"])
    assert ran["times"]["ttft"]["p50"] == pytest.approx(times["prefill"]["step_seconds"], rel=0.01)
    given = stagec("serve", *model, *part, *load, "--cache-blocks", "300", "--json")
    assert json.loads(given.out)["pools"]["server"]["blocks"] == 300 * 2  # of two groups of ranks
    server = ran["pools"]["server"]
    assert (server["ranks"], server["computed"], server["decoded"]) == (4, 8 * 512, 8)
    refused = stagec("serve", *model, "--part", "x=y: tp=2", *load)
    assert refused.code == 1
    assert "but for feed-forward" in refused.err
    assert "help: " in refused.err


def pods(apart: str, dp: int) -> list[dict[str, Any]]:
    """The pods of a step of decode of Llama 3 8B with feed-forward on other ranks."""
    step = ("--serve", "decode", "--batch", str(BATCH), "--context", str(CONTEXT))
    part = ("--dp", str(dp), "--part", f"apart=feed-forward: {apart}", "--json")
    return list(json.loads(stagec("analyze", "llama3-8b", *step, *part).out)["pods"].values())


@pytest.mark.parametrize(("dp", "apart", "tp"), [(4, "tp=2", 2), (2, "tp=8", 8), (8, "", 1)])
def test_unequal_groups_send_each_token_to_all_ranks_that_need_it(
    dp: int, apart: str, tp: int
) -> None:
    """Weights of feed-forward are with its own ranks. All of them need each token, and give back as
    much as comes to the ranks with attention."""
    attention, rest = (pod["classes"][0] for pod in pods(apart, dp))
    heads = WIDTH * HEAD * (2 * HEADS + 2 * KV_HEADS)
    whole = 2 * (LAYERS * (heads + WIDTH) + 2 * WORDS * WIDTH + WIDTH)
    assert attention["memory"]["parameters"] == whole
    assert rest["memory"]["parameters"] == 2 * LAYERS * (3 * WIDTH * WIDE // tp + WIDTH)
    assert not rest["memory"].get("caches")
    tokens = 2 * LAYERS * BATCH * WIDTH
    moved = [_bytes(each) for each in (attention, rest)]
    assert moved == [
        {"send": tp * tokens // dp, "recv": tokens // dp},
        {"recv": tokens, "send": tokens // tp},
    ]


def _bytes(each: dict[str, Any]) -> dict[str, int]:
    moved = {"send": 0, "recv": 0}
    for messages in each["p2p"]:
        moved[messages["dir"]] += messages["bytes"]
    return moved


def test_two_pods_of_equal_groups_take_as_long_as_two_stages() -> None:
    step = ("--batch", "64", "--context", "4000", "--tp", "2")
    stages = timed(*step, "--pp", "2", "--afd")
    apart = timed(*step, "--part", "apart=feed-forward: tp=2")
    assert apart["step_seconds"] == pytest.approx(stages["step_seconds"], rel=0.01)


def test_taking_turns_hides_the_shorter_half() -> None:
    """With one part of the batch each pod waits for the other one."""
    part = ("--dp", "4", "--part", "x=feed-forward: ep=2,dp=2")
    step = ("--batch", "512", "--context", "4000", *part)
    alone = timed(*step, "--part-batches", "1")
    turns = timed(*step, "--part-batches", "2")
    busy = [sum(v for n, v in c["breakdown"].items() if n != "bubble") for c in turns["classes"]]
    assert turns["step_seconds"] == pytest.approx(max(busy), rel=0.03)
    assert turns["step_seconds"] < 0.8 * alone["step_seconds"]


def test_three_groups_of_attention_may_share_two_ranks() -> None:
    """Whose ranks take all tokens, in widths or as whole experts."""
    step = ("--batch", "24", "--context", "100", "--set", "L=2", "--dp", "3", "--part")
    busy = [timed(*step, f"x=feed-forward: {axes}") for axes in ("tp=2", "tp=2,ep=2")]
    assert [each["ranks"] for each in busy] == [5, 5]


def test_each_part_runs_on_its_own_machine() -> None:
    """Each pod takes as long, has as much room and computes as fast as where both have its
    machine."""
    step = ("--batch", "1024", "--context", "1000", "--dp", "4", "--part")
    part = "x=feed-forward: ep=2,dp=2"
    whole = {name: timed(*step, part, machine=name) for name in ("h20", "h100-sxm")}
    unlike = timed(*step, f"{part},on-machine=h100-sxm", machine="h20")
    alone = unlike["alone_seconds"]
    assert alone["main"] == pytest.approx(whole["h20"]["alone_seconds"]["main"], rel=1e-9)
    assert alone["x"] == pytest.approx(whole["h100-sxm"]["alone_seconds"]["x"], rel=1e-9)
    assert max(alone.values()) <= unlike["step_seconds"] < whole["h20"]["step_seconds"]
    assert unlike["fit"]["room"] == whole["h100-sxm"]["fit"]["room"]  # where experts are
    assert unlike["peak_flops"] == pytest.approx((4 * 148e12 + 2 * 989e12) / 6)
    assert unlike["machine"] == "h20 and h100-sxm"


def test_each_part_fits_its_own_machine(tmp_path: Path) -> None:
    """Every command that knows the machine has the verdict of the part that does not fit, although
    its peak would fit the machine of the other one."""
    experts = "experts=feed-forward: dp=1,on-machine=a100-40g"
    words = ("mixtral-8x22b", "--set", "L=9", "--part", experts, "--machine", "h20")
    step = (*words, "--serve", "decode", "--batch", "256", "--context", "4000")
    page, job = tmp_path / "time.html", (*step, "--dp", "4")
    ran = stagec("time", *job, "--no-levers", "--json", "--html", page)
    fit = json.loads(ran.out)["fit"]
    assert fit["room"] < fit["peak"] < 90 * 2**30
    names = ("NVIDIA H20 SXM 96 GB", "NVIDIA A100 SXM 40 GB")
    data = drawn(page)
    assert all(name in data["about"][0] for name in names)
    assert data["rooms"][0] > 2 * data["rooms"][1] == 2 * fit["room"]
    swept = stagec("time", *job, "--sweep", "fusion=none", "--limit", "machine", "--json")
    (row,) = json.loads(swept.out)
    assert (row["fits"], row["fit"]) == (False, fit)
    space = ("--ranks", "4", "--tp", "1", "--pp", "1", "--ep", "1", "--no-cache", "--jobs", "1")
    few = stagec("search", *step, *space)
    assert few.code == 1
    assert "but one of h20 and a100-40g has 39.46 GiB for it" in few.err
    server = ("--prompt", "2000", "--output-tokens", "200", "--dp", "4")
    alone = stagec("serve", *words, *server)
    assert alone.code == 1
    assert "per rank, but one of h20 and a100-40g has 39.46 GiB" in alone.err


def test_messages_between_machines_pass_the_slower_link(tmp_path: Path) -> None:
    """Whichever side has it."""
    slow = tmp_path / "slow.toml"
    link = 'bandwidth = { value = "5 GB/s", source = "test" }'
    slow.write_text(f'base = "h100-sxm"\n[[network]]\nname = "infiniband"\n{link}\n')
    part = "x=feed-forward: ep=2,dp=2"
    step = ("--batch", "2048", "--context", "100", "--dp", "4", "--part")
    both = timed(*step, part, machine=str(slow))
    one = timed(*step, f"{part},on-machine={slow}")
    other = timed(*step, f"{part},on-machine=h100-sxm", machine=str(slow))
    seconds = [each["step_seconds"] for each in (both, one, other)]
    assert seconds == pytest.approx([seconds[0]] * 3, rel=1e-3)
    assert seconds[0] > 1.2 * timed(*step, part)["step_seconds"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--on-machine", "h20"), "--on-machine is the machine of a part"),
        (("--part", "x=feed-forward: on-machine=h2"), "no machine 'h2'"),
        (("--part", "x=feed-forward: on-machine=h20", "--levers"), "has several machines"),
    ],
)
def test_what_several_machines_do_not_take_is_refused(flags: tuple[str, ...], text: str) -> None:
    step = ("--serve", "decode", "--batch", "24", "--context", "100", "--machine", "h100-sxm")
    ran = stagec("time", "llama3-8b", *step, *flags)
    assert ran.code == 1
    assert text in ran.err
    assert "help: " in ran.err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--pp", "2"), "a part with feed-forward cannot be used with pipeline stages"),
        (("--lora", "wq"), "adapters cannot be used with the part 'x'"),
        (("--dp", "3"), "neither of which divides the other"),
        (("--dp", "24"), "B = 24 does not divide over 2*dp"),
    ],
)
def test_what_unequal_groups_do_not_take_is_refused(flags: tuple[str, ...], text: str) -> None:
    step = ("--serve", "decode", "--batch", "24", "--context", "100")
    ran = stagec("analyze", "llama3-8b", *step, *flags, "--part", "x=feed-forward: dp=2")
    assert ran.code == 1
    assert text in ran.err
    assert "help: " in ran.err


def test_no_part_of_a_batch_is_lost() -> None:
    """FLOPs of both pods are those of the batch in one part, for as many parts as there are
    names."""
    step = ("--serve", "decode", "--batch", "52", "--context", "100", "--set", "L=2")

    def run(count: int) -> Outcome:
        part = ("--part", "x=feed-forward:", "--part-batches", str(count))
        return stagec("analyze", "llama3-8b", *step, *part, "--json")

    def flops(count: int) -> list[int]:
        pods = json.loads(run(count).out)["pods"]
        return [pods[name]["classes"][0]["flops"]["forward"] for name in ("main", "x")]

    assert flops(1) == flops(2) == flops(26)
    assert "27 is not in the range" in run(27).err
