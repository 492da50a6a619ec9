"""Ring attention in numbers: messages, work and memory of a rank, from formulas written here.

B sequences of S tokens on c ranks of a ring; H query heads and G key/value heads of K.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from stagec.analysis.report import analysis
from stagec.ir.expr import ZERO, Expr, evaluate, maximum
from stagec.jobs.builder import JobBuilder
from stagec.program.classes import rank_classes
from tests.support import LLAMA, analyse, compiled, operations, parse_expr, stagec, tiny_options

SIZES = {"L": 3, "B": 2, "S": 4096}
B, S, L, H, G, K = 2, 4096, 3, 32, 8, 128
CP = 4
LOCAL = B * S // CP  # tokens of a rank


def one_class(**options: Any) -> dict[str, Any]:
    (entry,) = analyse(LLAMA, **{"sizes": SIZES, **options})["classes"]
    return cast("dict[str, Any]", entry)


def messages(entry: dict[str, Any], direction: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes by phase and element type."""
    rows = [r for r in entry["p2p"] if r["dir"] == direction]
    assert all(r["over"] == "cp" and r["peer"] == (1 if direction == "send" else -1) for r in rows)
    return {(r["phase"], r["dtype"]): (r["count"], r["bytes"]) for r in rows}


def transfers() -> dict[tuple[str, str], tuple[int, int]]:
    """K and V in c-1 messages each way; their gradients in fp32 in c, the last one home."""
    kv = 2 * LOCAL * G * K
    return {
        ("forward", "bf16"): (L * (CP - 1), L * (CP - 1) * kv * 2),
        ("backward", "bf16"): (L * (CP - 1), L * (CP - 1) * kv * 2),
        ("backward", "f32"): (L * CP, L * CP * kv * 4),
    }


@pytest.mark.parametrize("order", ["zigzag", "plain"])
def test_messages_of_a_layer(order: str) -> None:
    for entry in analyse(LLAMA, sizes=SIZES, cp=CP, cp_order=order)["classes"]:
        assert messages(entry, "send") == messages(entry, "recv") == transfers()
        assert (entry["nodes"]["send"], entry["nodes"]["recv"]) == (
            L * (3 * CP - 2),
            L * (3 * CP - 2),
        )


def test_four_activations_a_layer() -> None:
    """Ring: 4 bs·d elements a layer (arXiv 2405.07719), of MHA: K and V forward and their gradients
    backward. Of the former c-1 of c parts move. Backward sends K and V again."""
    sent = messages(one_class(cp=CP, sizes={**SIZES, "G": H}), "send")
    whole = L * B * S * H * K
    assert sent["forward", "bf16"][1] // 2 == 2 * whole * (CP - 1) // CP
    assert sent["backward", "f32"][1] // 4 == 2 * whole
    assert sent["backward", "bf16"] == sent["forward", "bf16"]


def test_tensor_parallel_ranks_send_their_heads() -> None:
    half = {k: (count, size // 2) for k, (count, size) in transfers().items()}
    assert messages(one_class(cp=CP, tp=2, sp=True), "send") == half


def test_recomputed_attention_goes_round_again() -> None:
    actual = messages(one_class(cp=CP, recompute="full-replay"), "send")
    assert actual == {**transfers(), ("recompute", "bf16"): transfers()["forward", "bf16"]}
    actual = messages(one_class(cp=CP, microbatches=2), "send")
    assert actual == {k: (2 * count, size) for k, (count, size) in transfers().items()}


MERGES = 3 * (CP - 1) * L * LOCAL * H * K  # two products and a sum an element
SUMS = (CP - 1) * L * LOCAL * K * (H + 2 * G)


def test_zigzag_order_halves_the_work_of_every_rank() -> None:
    """All ranks are one class: each does 1/c of what one device does, and merges."""
    alone, entry = one_class(), one_class(cp=CP)
    assert entry["count"] == CP
    assert entry["flops"]["forward"] == alone["flops"]["forward"] // CP + MERGES
    assert entry["flops"]["backward"] == alone["flops"]["backward"] // CP + SUMS
    for phase in ("forward", "backward"):  # c blocks, of which (c+1)/2 are computed
        linear = alone["matmul_flops"][phase] - attention(phase) * CP**2
        computed = attention(phase) * (CP + 1) // 2
        assert entry["matmul_flops"][phase] == linear // CP + computed


def test_counts_of_an_open_number_of_ranks() -> None:
    """Nothing is unrolled: the number of ranks may be a symbol."""
    (entry,) = analyse(LLAMA, mesh={"cp": None}, symbolic=True)["classes"]
    scores = [t for t in entry["flops"]["forward"].split(" + ") if "S^2" in t]
    assert scores == ["2*B*H*K*L*S^2/cp"]
    sent = {(r["phase"], r["dtype"]): r["bytes"] for r in entry["p2p"] if r["dir"] == "send"}
    assert sent["forward", "bf16"] == "4*B*G*K*L*S - 4*B*G*K*L*S/cp"
    assert sent["backward", "f32"] == "8*B*G*K*L*S"


def attention(phase: str) -> int:
    """FLOPs of one whole block of a layer: all its queries with all its keys."""
    return (4 if phase == "forward" else 10) * L * B * (S // CP) ** 2 * H * K


def test_plain_order_gives_later_ranks_more() -> None:
    """Rank i computes i whole blocks and half of one."""
    alone = one_class()
    classes = analyse(LLAMA, sizes=SIZES, cp=CP, cp_order="plain")["classes"]
    assert [entry["coords"] for entry in classes] == [{"cp": i} for i in range(CP)]
    for phase, extra in (("forward", MERGES), ("backward", SUMS)):
        rest = alone["flops"][phase] - attention(phase) * CP**2 // 2
        for i, entry in enumerate(classes):
            blocks = attention(phase) * (2 * i + 1) // 2
            assert entry["flops"][phase] == rest // CP + blocks + extra * i // (CP - 1)


def test_without_a_mask_all_blocks_are_computed() -> None:
    text = """stg.module @m[phase = sharded] {
      stg.symbols[B, S, H, K]
      stg.assume[S % cp == 0]
      stg.mesh @pod[cp]
      stg.func @f(%q: bf16[B, S@cp, H, K], %k: bf16[B, S@cp, H, K]) {
        %a = stg.attention[ring = ORDER](%q, %k, %k) : bf16[B, S@cp, H, K]
        stg.return(%a)
      }
    }"""
    module = compiled(
        text.replace("ORDER", "plain"), "insert-collectives,plan-memory,lower-to-trace"
    )
    first, later = (o for o in operations(module, "et.comp") if "block" in o.text("kind"))
    assert first.expr("flops") == later.expr("flops") == parse_expr("4*B*H*K*S^2/cp^2")


RING = """stg.module @m[phase = sharded] {
  stg.symbols[B, S, H, G, K]
  stg.assume[S % (2*cp) == 0]
  stg.mesh @pod[cp]
  stg.zigzag[S, over = cp]
  stg.func @f(%q: bf16[B, S@cp, H, K], %k: bf16[B, S@cp, G, K], %v: bf16[B, S@cp, G, K],
              %dy: bf16[B, S@cp, H, K], %y: bf16[B, S@cp, H, K], %l: f32[B, H, S@cp]) {
    BODY
  }
}"""
FORWARD = """%a = stg.attention[causal, ring = zigzag](%q, %k, %v) : bf16[B, S@cp, H, K]
    stg.return(%a)"""
BACKWARD = """%dq, %dk, %dv = stg.attention_grad[causal, ring = zigzag](%dy, %y, %l, %q, %k, %v)
      : (bf16[B, S@cp, H, K], bf16[B, S@cp, G, K], bf16[B, S@cp, G, K])
    stg.return(%dq, %dk, %dv)"""


# -- what kernels compute, position by position


def kernel(rows: Sequence[int], columns: Sequence[int]) -> int:
    """Scores that a kernel computes: of the rows that see a key with the keys that a row sees."""
    seen = np.asarray(rows)[:, None] >= np.asarray(columns)
    return int(seen.any(1).sum() * seen.any(0).sum())


def pieces(order: str, ranks: int, sequence: int) -> list[list[int]]:
    """The positions that each rank has."""
    size = sequence // (2 * ranks)
    chunks = [list(range(i * size, (i + 1) * size)) for i in range(2 * ranks)]
    if order == "zigzag":
        return [chunks[i] + chunks[-1 - i] for i in range(ranks)]
    return [chunks[2 * i] + chunks[2 * i + 1] for i in range(ranks)]


def attention_text(phase: str, mode: str, ranks: int, sequence: int) -> str:
    """A module with attention, or its gradient, over a sequence that is split."""
    ring = "" if mode == "all-gather" else f", ring = {mode}"
    kv, dkv = "S@cp, G, K", "S@cp, G, K"
    if mode == "all-gather":
        kv, dkv = "S, G, K | rep", "S, G, K | sum(cp)"
    results, op = "%y", "attention"
    operands, types = "%q, %k, %v", "bf16[B, S@cp, H, K]"
    if phase == "backward":
        results, op, operands = "%dq, %dk, %dv", "attention_grad", "%dy, %y, %l, %q, %k, %v"
        types = f"(bf16[B, S@cp, H, K], bf16[B, {dkv}], bf16[B, {dkv}])"
    return f"""stg.module @m[phase = sharded] {{
      stg.symbols[B = 2, S = {sequence}, H = 4, G = 2, K = 3]
      stg.mesh @pod[cp = {ranks}]
      {"stg.zigzag[S, over = cp]" if mode == "zigzag" else ""}
      stg.func @f(%q: bf16[B, S@cp, H, K], %k: bf16[B, {kv}], %v: bf16[B, {kv}],
                  %dy: bf16[B, S@cp, H, K], %y: bf16[B, S@cp, H, K], %l: f32[B, H, S@cp]) {{
        {results.replace("%y", "%a")} = stg.{op}[causal{ring}]({operands}) : {types}
        stg.return({results.replace("%y", "%a")})
      }}
    }}"""


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("mode", ["zigzag", "plain", "all-gather"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_kernels_leave_out_what_the_mask_hides(mode: str, ranks: int, phase: str) -> None:
    """Matrix products, over all ranks: 4 FLOPs a score and element of a head forward, 10 backward.
    A step of a ring, or attention to what was gathered, is one kernel."""
    sequence = 6 * ranks
    mine = pieces(mode, ranks, sequence)
    others = [list(range(sequence))] if mode == "all-gather" else mine
    scores = sum(kernel(rows, columns) for rows in mine for columns in others)
    text = attention_text(phase, mode, ranks, sequence)
    module = compiled(text, "insert-collectives,plan-memory,lower-to-trace")
    classes = analysis(module, "m")["classes"]
    actual = sum(c["count"] * c["matmul_flops"]["forward"] for c in classes)
    assert actual == (4 if phase == "forward" else 10) * 2 * 4 * 3 * scores


def test_recomputed_attention_leaves_out_the_same() -> None:
    """A block that is replayed computes what forward did, but embedding and head."""
    actual = {
        mode: one_class(cp=CP, cp_mode=mode, recompute="full-replay")["matmul_flops"]["recompute"]
        for mode in ("ring", "all-gather", "ulysses")
    }
    skipped = attention("forward") * (CP - 1) // 2
    assert actual["ring"] == actual["all-gather"] == actual["ulysses"] - skipped


def transient(body: str) -> Expr:
    """What lives at the worst moment beside the arguments; the result is one of them."""
    module = compiled(RING.replace("BODY", body), "insert-collectives,plan-memory")
    (memory,) = operations(module, "stg.memory")
    return memory.expr("transient")


def local(*terms: str) -> Expr:
    """The sum of these bytes a token, on a rank."""
    return sum((parse_expr(f"{t}*B*S/cp") for t in terms), ZERO)


def test_memory_of_a_step_forward() -> None:
    """The sum in fp32, and either two buffers of keys and values, or one and a result."""
    exchange = local("8*G*K", "4*H*K", "4*H")
    merge = local("4*G*K", "4*H*K", "4*H", "2*H*K", "4*H")
    assert transient(FORWARD) in (maximum([exchange, merge]), maximum([merge, exchange]))


def test_memory_of_a_step_backward() -> None:
    """Keys and values, three sums in fp32, and either two sums that come in, or three results."""
    exchange = local("4*G*K", "4*H*K", "8*G*K", "8*G*K")
    computed = local("4*G*K", "4*H*K", "8*G*K", "2*H*K", "4*G*K")
    assert transient(BACKWARD) == maximum([exchange, computed])


#: Tensors in bf16 of the size of K that PyTorch 2.14.1 has at the most beside the arguments of
#: `_templated_ring_attention_backward`, on the first of so many ranks, with as many query heads and
#: with four times as many; without the copy of log-sum-exps.
BESIDE: dict[str, dict[int, tuple[Fraction | int, int]]] = {
    "gathered": {2: (Fraction(51, 2), 38), 3: (29, 40), 4: (31, 42)},
    "passed": {2: (Fraction(47, 2), 36), 3: (Fraction(51, 2), 38), 4: (Fraction(51, 2), 38)},
}


@pytest.mark.parametrize("steps", ["gathered", "passed"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_memory_of_eager_steps_backward(steps: str, ranks: int) -> None:
    """Two ranks have no third step, to which keys and values would be sent."""
    needed = transient(BACKWARD.replace("zigzag", f"zigzag, steps = {steps}"))
    for heads, tensors in zip((1, 4), BESIDE[steps][ranks], strict=True):
        sizes = {"B": 1, "S": 32 * ranks, "H": 2 * heads, "G": 2, "K": 8, "cp": ranks}
        assert evaluate(needed, sizes) == tensors * 2 * 32 * 2 * 8


def test_the_stash_is_split() -> None:
    alone, entry = one_class()["memory"], one_class(cp=CP)["memory"]
    assert entry["stash"] * CP == alone["stash"]


@pytest.mark.parametrize("order", ["zigzag", "plain"])
def test_a_message_overlaps_one_step(order: str) -> None:
    """It waits for the computation before that step, so that two buffers are enough."""
    options = tiny_options(LLAMA, cp=4, cp_order=order, sizes={"S": 16})
    for rank_class in rank_classes(JobBuilder(options).lower()):
        nodes = rank_class.program().nodes
        computed = [n for n in nodes if not (n.is_collective or n.is_message)]
        steps = [i for i, n in enumerate(computed) if n.kind.startswith("attention_block")]
        assert len(steps) == 2 * 2 * (4 if order == "zigzag" else 1 + rank_class.coords["cp"])
        for node in (n for n in nodes if n.is_message):
            earlier = [i for i in steps if computed[i].id < node.id]
            before = computed[earlier[-1] - 1]
            assert before in (*node.after, *node.deps)


@pytest.mark.parametrize(
    "options",
    [
        ["--cp", "4"],
        ["--cp", "4", "--cp-order", "plain"],
        ["--cp", "2", "--tp", "2", "--sp", "--recompute", "full"],
        ["--dp", "2", "--cp", "2", "--zero", "3", "--microbatches", "2"],
    ],
)
def test_traces_are_free_of_deadlock(options: list[str], tmp_path: Path) -> None:
    ran = stagec("compile", LLAMA, "--set", "L=2,S=1024", *options, "-o", tmp_path)
    assert ran.code == 0, ran.err
    checked = stagec("check", tmp_path)
    assert checked.code == 0, checked.out
    assert "0 errors, 0 warnings" in checked.out
