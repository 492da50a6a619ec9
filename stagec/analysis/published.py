"""Published figures beside those that come out of compiling the models.

Each row names its source. Ours is counted on the compiled program; a formula of a paper is only
ever the published side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from stagec.analysis.count import Counts
from stagec.ir.expr import Expr, evaluate

NARAYANAN = "arXiv 2104.04473, table 1"
FLOP_SOURCE = "arXiv 2104.04473, equation 3"
COUNTS = "published model configuration"
TOKENS = "published TFLOP/s over tokens/s"


@dataclass(frozen=True, slots=True)
class Row:
    """A published figure and ours, as they are compared."""

    source: str
    row: str
    published: str
    ours: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Gpt:
    """A row of the table of Narayanan et al.: size in billions (as printed) and global batch."""

    name: str
    billions: str
    batch: int


GPTS = (
    Gpt("gpt-1.7b", "1.7", 512),
    Gpt("gpt-3.6b", "3.6", 512),
    Gpt("gpt-7.5b", "7.5", 512),
    Gpt("gpt-18.4b", "18.4", 1024),
    Gpt("gpt-39.1b", "39.1", 1536),
    Gpt("gpt-76.1b", "76.1", 1792),
    Gpt("gpt-145.6b", "145.6", 2304),
    Gpt("gpt-310.1b", "310.1", 2160),
    Gpt("gpt-529.6b", "529.6", 2520),
    Gpt("gpt-1008b", "1008.0", 3072),
)
EXACT = {"llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama2-7b": 6_738_415_616}
GFLOP_PER_TOKEN = {"llama3-405b": ("2521", "2525"), "llama3-70b": ("448.97", "449.48")}


class Compiled(Protocol):
    """Compiles a library model with all sizes open."""

    def __call__(self, name: str, recompute: str = "none") -> tuple[Counts, Mapping[str, int]]:
        """The counts of the compiled text, and the sizes of the model."""
        ...


def rows(compiled: Compiled) -> Iterator[Row]:
    """All rows, each from the counts of a compiled model."""
    for gpt in GPTS:
        counts, sizes = compiled(gpt.name)
        yield _rounded(gpt, evaluate(counts.parameters, sizes))
    for name, published in EXACT.items():
        counts, sizes = compiled(name)
        ours = evaluate(counts.parameters, sizes)
        yield Row(COUNTS, f"{name} parameters", f"{published:,}", f"{ours:,}", ours == published)
    counts, sizes = compiled("gpt3-175b")
    billions = Fraction(evaluate(counts.parameters, sizes), 10**9)
    yield Row(
        "arXiv 2005.14165",
        "gpt3-175b parameters (billions)",
        "174.6",
        f"{float(billions):.1f}",
        f"{float(billions):.1f}" == "174.6",
    )
    for gpt in GPTS:
        yield _iteration(gpt, *compiled(gpt.name, recompute="full-replay"))
    for name, (low, high) in GFLOP_PER_TOKEN.items():
        yield _per_token(name, low, high, *compiled(name))


def _rounded(gpt: Gpt, ours: int) -> Row:
    text = f"{ours / 1e9:.1f}"
    return Row(
        NARAYANAN, f"{gpt.name} parameters (billions)", gpt.billions, text, text == gpt.billions
    )


def _iteration(gpt: Gpt, counts: Counts, sizes: Mapping[str, int]) -> Row:
    """FLOPs of an iteration whose blocks are all computed again in backward."""
    env = {**sizes, "B": gpt.batch}
    ours = sum(evaluate(counts.matmul[p], env) for p in ("forward", "backward", "recompute"))
    s, h, layers, v = (sizes[n] for n in ("S", "D", "L", "V"))
    published = (
        96
        * Fraction(gpt.batch * s * layers * h * h)
        * (1 + Fraction(s, 6 * h) + Fraction(v, 16 * layers * h))
    )
    return Row(
        FLOP_SOURCE,
        f"{gpt.name} FLOPs per iteration",
        f"{int(published):,}",
        f"{ours:,}",
        ours == published,
    )


def _per_token(name: str, low: str, high: str, counts: Counts, sizes: Mapping[str, int]) -> Row:
    """Model FLOPs per token: matmuls with causal attention at half, backward twice forward."""
    env = {**sizes, "B": 1}
    executed: Expr = counts.matmul_executed["forward"]
    gflop = Fraction(3 * evaluate(executed, env), sizes["S"] * 10**9)
    ok = Fraction(low) <= gflop <= Fraction(high)
    return Row(
        TOKENS,
        f"{name} GFLOP per token, s = {sizes['S']}",
        f"{low} to {high}",
        f"{float(gflop):.2f}",
        ok,
    )
