"""What the software of a job says of its seconds: kernels of attention, hosts, shares, sums of
split products, exchanges of tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.formats.chakra.record_files import read_trace
from stagec.ir.expr import const
from stagec.ir_spec.strategy.hosts import HostsRule
from stagec.ir_spec.strategy.kernels import UNFUSED, KernelsRule
from stagec.ir_spec.strategy.moe import DEEPEP, MoeRule
from stagec.ir_spec.strategy.sustained import FAMILIES, SustainedRule
from stagec.machines import load_machine
from stagec.time.cautions import of_software
from stagec.time.costs.kernels import attention_seconds
from stagec.time.costs.network import all_to_all, once_a_node, spans
from stagec.time.costs.software import Software
from tests.support import LONG, stagec

H100, B200 = load_machine("h100-sxm"), load_machine("b200")
#: TFLOP/s on H100, 16,384 tokens, width 2,048, by the length of a sequence from 512 to 16,384, with
#: the elements of a head, whether a mask is causal, and of which pass: arXiv 2407.08608, figures 5
#: and 6.
PUBLISHED: dict[str, list[tuple[int, bool, bool, list[int]]]] = {
    "flash_2": [
        (64, False, False, [282, 306, 318, 321, 322, 324]),
        (128, False, False, [309, 350, 362, 368, 370, 370]),
        (128, True, False, [191, 260, 298, 319, 333, 335]),
        (64, False, True, [198, 238, 264, 279, 287, 291]),
        (128, False, True, [214, 260, 291, 310, 318, 322]),
    ],
    "cudnn": [
        (64, False, False, [335, 373, 395, 408, 412, 413]),
        (128, False, False, [497, 574, 617, 609, 600, 595]),
        (128, True, False, [315, 410, 484, 518, 529, 539]),
        (64, False, True, [266, 348, 395, 417, 432, 433]),
        (128, False, True, [305, 408, 465, 499, 518, 516]),
    ],
}
STEP = (
    "time",
    "llama3-8b",
    "--set",
    "L=2,B=8",
    "--dp",
    "8",
    "--zero",
    "3",
    "--no-levers",
    "--json",
)


def step(*flags: str, machine: str = "h100-sxm") -> dict[str, Any]:
    """The answer of `stagec time`."""
    ran = stagec(*STEP, "--machine", machine, *flags)
    assert ran.code == 0, ran.err
    actual: dict[str, Any] = json.loads(ran.out)
    return actual


@pytest.mark.parametrize(("kernel", "median"), [("flash_2", 0.045), ("cudnn", 0.065)])
def test_kernels_of_attention_are_near_published_rates(kernel: str, median: float) -> None:
    lengths = 512 * 2 ** np.arange(6)
    errors: list[Any] = []
    for width, causal, backward, rates in PUBLISHED[kernel]:
        batch, heads = 16384 // lengths, 2048 // width
        flops = 4 * batch * heads * lengths**2 * width / (1 + causal) * (2.5 if backward else 1)
        size = 2 * 16384 * 2048 * (8 if backward else 4)
        extents = (batch, heads, heads, lengths, lengths, width, width, size)
        how: dict[str, Any] = {"causal": np.full(6, causal), "backward": backward, "form": kernel}
        ours = flops / attention_seconds(H100, "bf16", *extents, **how) / 1e12
        errors.append(np.abs(ours / np.array(rates) - 1))
    assert np.median(errors) < median


def test_the_kernel_of_attention_is_named_and_counts() -> None:
    own, second = step(), step("--attention", "flash-2")
    assert "attention" not in own
    assert second["attention"] == "flash-2"
    assert second["breakdown"]["attention"] > 1.5 * own["breakdown"]["attention"]
    assert not second["cautions"]


@pytest.mark.parametrize(
    ("machine", "kernel"), [("h100-sxm", "cudnn"), ("a100-80g", "flash-2"), ("b200", "sdpa")]
)
def test_sdpa_is_what_pytorch_chooses_for_a_device(machine: str, kernel: str) -> None:
    """A device without constants of kernels uses its own."""
    chosen, same = (step("--attention", k, machine=machine) for k in ("sdpa", kernel))
    assert chosen["attention"] == kernel
    assert chosen["step_seconds"] == same["step_seconds"]


def test_a_machine_without_the_kernel_says_so() -> None:
    """And takes its own, as long as before."""
    own, named = (step(*flags, machine="b200") for flags in ((), ("--attention", "flash-2")))
    assert named["step_seconds"] == own["step_seconds"]
    (caution,) = set(named["cautions"]) - set(own["cautions"])
    assert "b200 has no constants for the attention kernel flash-2" in caution
    assert B200.efficiency.attention.of_kernel("flash_2") == B200.efficiency.attention


def test_a_machine_without_the_kernel_of_products_says_so() -> None:
    """One that has it does not."""
    lacks = [
        list(of_software(load_machine(name), (), ("flashinfer", "device")))
        for name in ("h200", "b200")
    ]
    assert lacks[1] == []
    assert "h200 has no constants for the kernel of products flashinfer" in lacks[0][0]


def test_math_has_all_scores_in_memory() -> None:
    """In fewer bytes there is no attention, and its products are products."""
    actual = step("--attention", "math", "--set", "S=1024")
    assert "attention" not in actual["breakdown"]
    assert actual["attention"] == "math"


@pytest.mark.parametrize("form", UNFUSED)
def test_attention_in_parts_computes_the_same(form: str, tmp_path: Path) -> None:
    text = tmp_path / "f.stg"
    text.write_text(
        "stg.module @m {\n  stg.symbols[B = 2, S = 6, H = 4, G = 2, K = 3]\n"
        "  stg.assume[H % G == 0]\n  stg.strategy @s {\n    stg.kernels"
        f"[attention = {form}]\n  }}\n"
        "  stg.func @f(%q: f32[B, S, H, K], %k: f32[B, S, G, K], %v: f32[B, S, G, K]) {\n"
        "    %a = stg.attention[causal](%q, %k, %v)\n    stg.return(%a)\n  }\n}\n"
    )
    ran = stagec("opt", str(text), "-p", "infer-shapes,apply-strategy", "--check-numerics")
    assert ran.code == 0, ran.err
    assert "stg.softmax[causal" in ran.out


def test_a_share_is_that_of_the_family() -> None:
    """Products and attention take longer by it; a machine without a family keeps its own."""
    rule = SustainedRule(hopper=const(1) / const(2), experts=const(3) / const(4))
    software = Software(sustained=rule)
    assert software.on(H100).efficiency.sustained.products == 0.5
    assert software.on(H100).efficiency.sustained.experts == 0.75
    limited = load_machine("h100-500w")
    kept = limited.efficiency.sustained.products
    assert software.on(limited).efficiency.sustained.products == kept
    assert Software().on(H100) is H100
    everywhere = Software(sustained=replace(rule, products=const(1)))
    assert everywhere.on(limited).efficiency.sustained.products == 1


@pytest.mark.parametrize(
    ("name", "watts", "peak"),
    [("gb200-nvl72", 1200, 2.5), ("b300", 1100, 2.25), ("gb300-nvl72", 1400, 2.5)],
)
def test_a_device_with_more_power_sustains_more(name: str, watts: int, peak: float) -> None:
    """Clocks follow the 2/3 power of watts, shares are those of B200 with 1,000 W and 2.25 PFLOP/s;
    none is above 1, and what a flag says holds anywhere."""
    machine = load_machine(name)
    power = (watts / 1000) ** (2 / 3) * 2.25 / peak
    assert machine.efficiency.sustained.power == pytest.approx(power, abs=1e-3)
    for share, expected in ((const(4) / const(5), 0.8 * power), (const(1), 1)):
        of_family = Software(sustained=SustainedRule(blackwell=share))
        assert of_family.on(machine).efficiency.sustained.products == pytest.approx(
            expected, abs=1e-3
        )
    anywhere = Software(sustained=SustainedRule(products=const(4) / const(5)))
    assert anywhere.on(machine).efficiency.sustained.products == 0.8


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_a_machine(family: str) -> None:
    names = {"ampere": "a100", "hopper": "h200", "blackwell": "gb300", "tpu": "tpu-v5p"}
    assert load_machine(names[family]).family == family


def test_products_keep_a_share() -> None:
    part = "matrix products"
    all_of, half = (step("--sustained", share)["breakdown"][part] for share in ("1", "1/2"))
    assert half == pytest.approx(2 * all_of, rel=0.01)


def test_products_of_experts_keep_a_share_of_that() -> None:
    """Of several experts of a rank; a single one has a plain product."""

    def of(share: str, ranks: int) -> dict[str, float]:
        job = ("time", "mixtral-8x7b", "--set", "L=2,B=8", "--dp", "8", "--ep", str(ranks))
        how = ("--sustained-experts", share, "--machine", "h100", "--no-levers", "--json")
        actual: dict[str, float] = json.loads(stagec(*job, *how).out)["breakdown"]
        return actual

    before, after = of("1", 4), of("1/2", 4)
    assert (
        1.5 * before["matrix products"] < after["matrix products"] < 2 * before["matrix products"]
    )
    assert before["attention"] == after["attention"]
    assert of("1", 8) == of("1/2", 8)


def test_hosts_issue_and_graphs() -> None:
    """A slow host holds the step up, unless it launches a graph."""
    own, slow = step("--host-issue", "1 us"), step("--host-issue", "5 ms")
    assert slow["step_seconds"] > 2 * own["step_seconds"]
    graphs = step("--host-issue", "5 ms", "--host-graphs")
    assert graphs["step_seconds"] == own["step_seconds"]
    assert Software(hosts=HostsRule(issue="9 us")).on(H100).efficiency.host.issue == 9e-6
    assert Software(kernels=KernelsRule(attention="flash_2")).attention_on(H100) == "flash-2"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--host-issue", "9"), "expects a text such as '3 us', found '9'"),
        (("--sustained", "3/2"), "expects 'products' to be more than 0 and at most 1, found 3/2"),
        (("--sustained", "0"), "expects 'products' to be more than 0 and at most 1, found 0"),
    ],
)
def test_mistakes_are_reported(flags: tuple[str, ...], words: str) -> None:
    ran = stagec(*STEP, "--machine", "h100-sxm", *flags)
    assert ran.code == 1
    assert words in ran.err


def test_sums_hide_beside_products() -> None:
    job = ("time", "llama3-70b", "--set", "L=2,B=2", "--tp", "8", "--sp", "--no-levers", "--json")
    whole, steps = (
        json.loads(stagec(*job, "--machine", "h100", "--tp-outputs", how).out)
        for how in ("whole", "in-steps")
    )
    part = "exposed tp reduce_scatter"
    assert steps["breakdown"].get(part, 0) < 0.8 * whole["breakdown"][part]
    assert steps["executed_flops"] == whole["executed_flops"]


def test_tokens_go_to_a_node_once() -> None:
    """Eight experts in four groups, spread over eight nodes: 3.6 nodes have some of a token, so
    0.45 of what an all-to-all moves crosses between them. Within a node each rank gets it once."""
    over = spans(H100, np.arange(64))
    size = 1 << 30
    every, once = (
        all_to_all(H100, "", np.array(float(size)), over),
        once_a_node(H100, size, over, 8, 4),
    )
    faster = 0.92 / 0.9  # the shares of the link that messages of both kinds take
    assert once == pytest.approx(0.45 * faster * every, rel=0.02)
    assert once_a_node(H100, size, over, 8, 0) == pytest.approx(0.656 * faster * every, rel=0.02)
    inside = spans(H100, np.arange(8))
    reached = 1 - (7 / 8) ** 8  # of eight ranks, one of the eight experts each
    assert once_a_node(H100, size, inside, 8, 4) == pytest.approx(
        all_to_all(H100, "", np.array(reached * size), inside)
    )


#: Microseconds of dispatch and combine of 128 tokens with 8 experts by ranks: deepseek-ai/DeepEP,
#: README, low-latency kernels on H800. Constants were fitted on 16, 64 and 256 ranks.
LOW_LATENCY = {16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}


@pytest.mark.parametrize(("ranks", "seconds"), LOW_LATENCY.items())
def test_messages_of_low_latency_take_what_was_published(
    ranks: int, seconds: tuple[int, int]
) -> None:
    """Tokens in fp8 with scales go to experts, results in bf16 go back. A peer costs nothing: 256
    ranks take at most 5% longer than 128."""
    machine, copies = load_machine("h800"), 128 * 8
    over = spans(machine, np.arange(ranks))
    ours = [once_a_node(machine, copies * each, over, 1, 0) * 1e6 for each in (7392, 14336)]
    assert ours == pytest.approx(seconds, rel=0.09)


def test_kernels_of_deepep_take_processors_in_prefill() -> None:
    """20 of 132, which two half batches leave to them; those that decode take none."""
    both = MoeRule(dispatch=DEEPEP, two_batches=True)
    kept = H100.efficiency.sustained.products
    for software, share in (
        (Software(moe=both, serving="prefill"), 112 / 132),
        (Software(moe=both, serving="decode"), 1),
        (Software(moe=MoeRule(two_batches=True), serving="prefill"), 1),
        (Software(moe=MoeRule(dispatch=DEEPEP), serving="prefill"), 1),
    ):
        assert software.on(H100).efficiency.sustained.products == pytest.approx(share * kept)


@LONG
def test_deepep_shortens_a_step_over_nodes() -> None:
    job = ("time", "deepseek-v3", "--set", "L=4,B=64", "--dp", "64", "--ep", "64", "--no-levers")
    each = {
        how: json.loads(stagec(*job, "--machine", "h800", "--json", "--moe-dispatch", how).out)
        for how in ("all-to-all", "deepep")
    }
    part = "exposed ep all_to_all"
    assert each["deepep"]["breakdown"][part] < 0.6 * each["all-to-all"]["breakdown"][part]


def test_traces_have_the_durations_of_the_software(tmp_path: Path) -> None:
    """A product takes twice as long where it keeps half of its speed."""
    each: dict[str, int] = {}
    for name, share in (("all", "1"), ("half", "1/2")):
        job = ("compile", "llama3-8b", "-o", str(tmp_path / name), "--set", "L=1,B=1", "--quiet")
        assert stagec(*job, "--machine", "h100-sxm", "--sustained", share).code == 0
        (trace,) = (tmp_path / name).glob("*.et")
        each[name] = max(node.duration_micros for node in read_trace(trace))
    assert each["half"] == pytest.approx(2 * each["all"], rel=0.01)
