"""Bytes that hardware counters saw beside ours: communication of a step of published runs.

Conventions: bytes of one rank of the first stage, which is the one that was measured; an all_gather
counts the rank's shard, a reduce_scatter and an all_reduce the full buffer; MB are 10^6 bytes.
`blocks` leaves out embedding and head: it is what as many layers more would add. Element types are
named in the row: losses, norms and their gradients are reduced in f32. The table hides the shapes
of its jobs; these are the ones that make its numbers fit.

Not here: GPT-3 175B sends of an interleaved schedule, its tied embedding, FSDP on 8 ranks. Their
jobs are not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from stagec.analysis.count import Counts, group_size
from stagec.analysis.published import CountsOf, PublishedRow
from stagec.ir.expr import ZERO, Expr, evaluate

STAGE = "STAGE (ISCA'26), table VII, within 1%"
#: What counters see beside the job's own bytes.
_TOLERANCE = Fraction(1, 100)


@dataclass(frozen=True, slots=True)
class CountedRun:
    """A run as rows name it: model, sizes of its text, axes of its mesh, options."""

    title: str
    name: str
    sizes: Mapping[str, int]
    axes: tuple[str, ...]
    options: Mapping[str, str | int | bool]


@dataclass(frozen=True, slots=True)
class RunCounts:
    """What was counted of a run, in MB as printed.

    `kinds` are added up, over the axis `over`; `send` are messages. Of all element types without a
    `dtype`.
    """

    job: CountedRun
    kinds: tuple[str, ...]
    measured: str
    over: str = "tp"
    dtype: str = "bf16"
    blocks: bool = False

    @property
    def label(self) -> str:
        """What is compared."""
        shown = {"all_gather": "all_gather (shard)", "send": "send"}
        kinds = " + ".join(shown.get(kind, f"{kind} (full)") for kind in self.kinds)
        where = " of blocks" if self.blocks else ""
        return f"{self.job.title}: {kinds}{where}, {self.dtype or 'all types'}, MB"


_5B = {"S": 1024, "B": 128}
_TP8 = CountedRun("GPT 5B, tp 8 sp", "gpt3-5b", _5B, ("tp=8",), {"sp": True, "microbatches": 128})
_PP8 = CountedRun("GPT 5B, pp 8", "gpt3-5b", _5B, ("pp=8",), {"microbatches": 128})
_175B = CountedRun(
    "GPT-3 175B, tp 4 dp 2 pp 8 sp",
    "gpt3-175b",
    _5B,
    ("pp=8", "dp=2", "tp=4"),
    {"sp": True, "microbatches": 64},
)
_WIDE = CountedRun(
    "GPT-3 175B, 24 layers, tp 32 sp",
    "gpt3-175b",
    {"L": 24, **_5B},
    ("tp=32",),
    {"sp": True, "microbatches": 128},
)
_70B = {"L": 32, "S": 2048, "B": 128}
_PP2 = CountedRun(
    "Llama width 8192, tp 4 pp 2 sp",
    "llama3-70b",
    _70B,
    ("pp=2", "tp=4"),
    {"sp": True, "microbatches": 128},
)
_LLAMA = CountedRun("Llama width 8192, tp 8", "llama3-70b", _70B, ("tp=8",), {"microbatches": 128})
_DP2 = CountedRun(
    "Llama width 8192, tp 4 dp 2 pp 2",
    "llama3-70b",
    _70B,
    ("pp=2", "dp=2", "tp=4"),
    {"microbatches": 64},
)
COUNTED = (
    RunCounts(_TP8, ("all_gather",), "19730.0"),
    RunCounts(_TP8, ("reduce_scatter", "all_reduce"), "105228.1", dtype=""),
    RunCounts(_PP8, ("send",), "1073.7"),
    RunCounts(_175B, ("all_gather",), "29393.7"),
    RunCounts(_175B, ("reduce_scatter",), "77309.4", blocks=True),
    RunCounts(_WIDE, ("all_gather",), "14571.0", blocks=True),
    RunCounts(_WIDE, ("reduce_scatter",), "310043.0", blocks=True),
    RunCounts(_PP2, ("all_gather",), "104153.0"),
    RunCounts(_PP2, ("reduce_scatter",), "279172.9"),
    RunCounts(_PP2, ("send",), "1073.7"),
    RunCounts(_LLAMA, ("all_reduce",), "558315.3"),
    RunCounts(_DP2, ("all_reduce",), "139552.9"),
    RunCounts(_DP2, ("send",), "2147.5"),
)


def counter_rows(compiled: CountsOf) -> Iterator[PublishedRow]:
    """All rows, each from the counts of a compiled model."""
    for counted in COUNTED:
        job = counted.job
        counts, sizes = compiled(job.name, *job.axes, **job.options)
        axes = {axis: int(size) for axis, _, size in (a.partition("=") for a in job.axes)}
        env = {**sizes, **job.sizes, **axes}
        found = evaluate(_bytes(counted, counts), env)
        if counted.blocks:
            more = {**env, "L": 2 * env["L"]}
            found = evaluate(_bytes(counted, counts), more) - found
        megabytes, measured = Fraction(found, 10**6), Fraction(counted.measured)
        off = megabytes / measured - 1
        percent = round(float(100 * off), 2) + 0.0  # no negative zero
        yield PublishedRow(
            STAGE,
            counted.label,
            counted.measured,
            f"{float(megabytes):.1f} ({percent:+.2f}%)",
            abs(off) <= _TOLERANCE,
        )


def _bytes(counted: RunCounts, counts: Counts) -> Expr:
    """Bytes of a rank, by the conventions above."""
    found = ZERO
    for key, collective in counts.collectives.items():
        if (
            key.op in counted.kinds
            and key.over.words == [counted.over]
            and counted.dtype in ("", key.dtype)
        ):
            shard = group_size(key.over) if key.op == "all_gather" else 1
            found += collective.bytes / shard
    for way, message in counts.messages.items():
        if way.dir in counted.kinds and counted.dtype in ("", way.dtype):
            found += message.bytes
    return found
