"""Published traffic and idle time beside ours: collectives per layer, bubbles of schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from stagec.analysis.count import Counts
from stagec.analysis.published import CountsOf, PublishedRow
from stagec.ir.expr import ZERO, Expr, evaluate
from stagec.schedule.registry import find_schedule
from stagec.schedule.report import run_schedule

LAYER = "arXiv 2405.07719, table 1"
BUBBLE = "arXiv 2104.04473, section 2.2; arXiv 2401.10241"
_MODEL, _RANKS = "llama2-7b", 8  # as many key/value heads as heads


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls of collectives per layer, forward and backward, and the part of b*s*d that each moves
    (of the layer's parameters under ZeRO)."""

    technique: str
    axis: str
    options: Mapping[str, str | int | bool]
    calls: Mapping[str, int]
    share: Fraction
    parameters: bool = False


_N = Fraction(1, _RANKS)
PER_LAYER = (
    Traffic("TP", "tp", {}, {"all_reduce": 4}, Fraction(1)),
    Traffic("TP + SP", "tp", {"sp": True}, {"all_gather": 6, "reduce_scatter": 4}, Fraction(1)),
    Traffic("Ulysses", "cp", {"cp_mode": "ulysses"}, {"all_to_all": 8}, _N),
    Traffic(
        "ZeRO-3",
        "dp",
        {"zero": 3, "reduce_dtype": "bf16", "grad_dtype": "bf16"},
        {"all_gather": 2, "reduce_scatter": 1},
        Fraction(1),
        parameters=True,
    ),
)
#: schedule, chunks, units of idle time with F = 1, B = 2, W = 1, 16 stages and 64 microbatches
BUBBLES = (
    ("gpipe", 1, "45"),
    ("1f1b", 1, "45"),
    ("interleaved", 2, "45/2"),
    ("interleaved", 4, "45/4"),
    ("zb-h1", 1, "15"),
)


def traffic_rows(compiled: CountsOf) -> Iterator[PublishedRow]:
    """All rows, each from the counts of a compiled model or the replay of a schedule."""
    for technique in PER_LAYER:
        counts, sizes = compiled(_MODEL, technique.axis, **technique.options)
        for op, calls in technique.calls.items():
            yield _per_layer(technique, op, calls, counts, sizes)
    for name, chunks, published in BUBBLES:
        run = run_schedule(find_schedule(name), 16, 64, chunks)
        ours = str(run.bubble)
        row = f"{name}, 16 stages, 64 microbatches, {chunks} chunks: bubble"
        yield PublishedRow(BUBBLE, row, published, ours, ours == published)


def _per_layer(
    technique: Traffic, op: str, calls: int, counts: Counts, sizes: Mapping[str, int]
) -> PublishedRow:
    """What one layer more adds: calls of the collective over the axis, and their bytes."""
    env = {**sizes, "B": _RANKS, technique.axis: _RANKS}
    found = [
        f for k, f in counts.collectives.items() if k.op == op and k.over.axes == (technique.axis,)
    ]
    called = _added(sum((f.count for f in found), ZERO), env)
    moved = _added(sum((f.bytes for f in found), ZERO), env)
    batch = 1 if technique.axis == "dp" else _RANKS
    whole = _added(counts.parameters, env) if technique.parameters else batch * env["S"] * env["D"]
    expected = calls * technique.share * whole * 2  # bytes of a bf16
    unit = "parameters" if technique.parameters else "b*s*d"
    share = "" if technique.share == 1 else f"/{technique.share.denominator}"
    return PublishedRow(
        LAYER,
        f"{_MODEL} per layer, {technique.technique}: {op} of {unit}{share}",
        str(calls),
        str(called) if moved == expected else f"{called} of {moved:,} bytes",
        called == calls and moved == expected,
    )


def _added(value: Expr, env: Mapping[str, int]) -> int:
    """What one layer more adds to a count."""
    return evaluate(value, {**env, "L": env["L"] + 1}) - evaluate(value, env)
