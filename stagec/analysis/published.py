"""Published figures beside those that come out of compiling the models.

Each row names its source. Ours is counted on the compiled program; a formula of a paper is only
ever the published side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from stagec.analysis.count import Counts
from stagec.ir.expr import Expr, const, evaluate

NARAYANAN = "arXiv 2104.04473, table 1"
FLOP_SOURCE = "arXiv 2104.04473, equation 3"
COUNTS = "published model configuration"
TOKENS = "published TFLOP/s over tokens/s"


@dataclass(frozen=True, slots=True)
class PublishedRow:
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
ACTIVATIONS = "arXiv 2205.05198, table 2"
ACTIVATION_MODELS = ("gpt-22b", "gpt3-175b", "gpt-529.6b", "gpt-1008b")
_TENSOR_PARALLEL = 8
Formula = Callable[[Fraction, Fraction, Fraction], Fraction]
#: technique -> mesh axes, options, bytes per layer from sbh, 5as/h and t
TECHNIQUES: Mapping[str, tuple[tuple[str, ...], dict[str, str | int | bool], Formula]] = {
    "one device": ((), {}, lambda sbh, scores, t: sbh * (34 + scores)),
    "TP": (("tp",), {}, lambda sbh, scores, t: sbh * (10 + 24 / t + scores / t)),
    "TP + SP": (
        ("tp",),
        {"sp": True},
        lambda sbh, scores, t: sbh * (34 / t + scores / t),
    ),
    "TP, selective recompute": (
        ("tp",),
        {"recompute": "selective"},
        lambda sbh, scores, t: sbh * (10 + 24 / t),
    ),
    "TP + SP, selective recompute": (
        ("tp",),
        {"sp": True, "recompute": "selective"},
        lambda sbh, scores, t: sbh * 34 / t,
    ),
    "full recompute": ((), {"recompute": "full"}, lambda sbh, scores, t: sbh * 2),
}
FIGURE = "arXiv 2205.05198, figure 1"


@dataclass(frozen=True, slots=True)
class FirstStage:
    """What the first stage of a model holds, in GiB: parameters with optimizer state; activations
    of tensor parallelism; those with sequence parallelism and selective recompute as well."""

    name: str
    stages: int
    chunks: int
    batch: int
    microbatches: int
    published: tuple[str, str, str]


#: The layers' matrices and activations, without what is outside of the layers.
HELD = (
    FirstStage("gpt-22b", 1, 1, 4, 1, ("45.5625", "59.25", "9.5625")),
    FirstStage("gpt3-175b", 8, 3, 64, 64, ("45.5625", "66.84375", "12.3515625")),
    FirstStage("gpt-529.6b", 35, 3, 280, 280, ("31.640625", "114.0234375", "23.076171875")),
    FirstStage("gpt-1008b", 64, 1, 512, 512, ("32.958984", "131.25", "26.5625")),
)
ZERO = "arXiv 1910.02054, figure 1"
ZERO_GB = ("120.0", "31.4", "16.6", "1.9")
MEGATRON = "Megatron-LM distributed optimizer"
STATE = ("parameters", "gradients", "optimizer")
EXACT = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama2-7b": 6_738_415_616,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
#: With the bias of each expert in the router's choice, which no gradient trains.
EXACT_WITH_BIASES = {"deepseek-v3": 671_026_419_200}
BILLIONS = {
    "gpt3-175b": ("174.6", "arXiv 2005.14165"),
    "deepseek-v2": ("235.7", "arXiv 2405.04434"),
}
GFLOP_PER_TOKEN = {
    "llama3-405b": ("2521", "2525"),
    "llama3-70b": ("448.97", "449.48"),
    "qwen3-30b-a3b": ("22.99", "23.10"),
}


class CountsOf(Protocol):
    """Compiles a library model with all sizes and axes open."""

    def __call__(
        self, name: str, *axes: str, **options: str | int | bool
    ) -> tuple[Counts, Mapping[str, int]]:
        """The counts of the compiled text on a mesh of these axes, and the sizes of the model.

        An axis is open, or has a size: `pp=8`. The counts are those of the first pipeline stage.
        `options` are those of the command line.
        """
        ...


def rows(compiled: CountsOf) -> Iterator[PublishedRow]:
    """All rows, each from the counts of a compiled model."""
    for gpt in GPTS:
        counts, sizes = compiled(gpt.name)
        yield _rounded(gpt, evaluate(counts.parameters, sizes))
    for name, published in EXACT.items():
        counts, sizes = compiled(name)
        ours = evaluate(counts.parameters, sizes)
        yield PublishedRow(
            COUNTS, f"{name} parameters", f"{published:,}", f"{ours:,}", ours == published
        )
    for name, published in EXACT_WITH_BIASES.items():
        counts, sizes = compiled(name)
        ours = evaluate(counts.parameters, sizes) + sizes["L"] * sizes["E"]
        row = f"{name} parameters and router biases"
        yield PublishedRow(COUNTS, row, f"{published:,}", f"{ours:,}", ours == published)
    for name, (billions, source) in BILLIONS.items():
        counts, sizes = compiled(name)
        text = f"{evaluate(counts.parameters, sizes) / 1e9:.1f}"
        yield PublishedRow(
            source, f"{name} parameters (billions)", billions, text, text == billions
        )
    for gpt in GPTS:
        yield _iteration(gpt, *compiled(gpt.name, recompute="full-replay"))
    for name, (low, high) in GFLOP_PER_TOKEN.items():
        yield _per_token(name, low, high, *compiled(name))
    for name in ACTIVATION_MODELS:
        yield from _activations(name, compiled)
    for held in HELD:
        yield from _first_stage(held, compiled)
    yield from _zero(compiled)


def _rounded(gpt: Gpt, ours: int) -> PublishedRow:
    text = f"{ours / 1e9:.1f}"
    return PublishedRow(
        NARAYANAN, f"{gpt.name} parameters (billions)", gpt.billions, text, text == gpt.billions
    )


def _iteration(gpt: Gpt, counts: Counts, sizes: Mapping[str, int]) -> PublishedRow:
    """FLOPs of an iteration whose blocks are all computed again in backward."""
    env = {**sizes, "B": gpt.batch}
    ours = sum(evaluate(counts.matmul[p], env) for p in ("forward", "backward", "recompute"))
    s, h, layers, v = (sizes[n] for n in ("S", "D", "L", "V"))
    published = (
        96
        * Fraction(gpt.batch * s * layers * h * h)
        * (1 + Fraction(s, 6 * h) + Fraction(v, 16 * layers * h))
    )
    return PublishedRow(
        FLOP_SOURCE,
        f"{gpt.name} FLOPs per iteration",
        f"{int(published):,}",
        f"{ours:,}",
        ours == published,
    )


def _per_token(
    name: str, low: str, high: str, counts: Counts, sizes: Mapping[str, int]
) -> PublishedRow:
    """Model FLOPs per token: matmuls with causal attention at half, backward twice forward."""
    env = {**sizes, "B": 1}
    executed: Expr = counts.matmul_executed["forward"]
    gflop = Fraction(3 * evaluate(executed, env), sizes["S"] * 10**9)
    ok = Fraction(low) <= gflop <= Fraction(high)
    return PublishedRow(
        TOKENS,
        f"{name} GFLOP per token, s = {sizes['S']}",
        f"{low} to {high}",
        f"{float(gflop):.2f}",
        ok,
    )


def _activations(name: str, compiled: CountsOf) -> Iterator[PublishedRow]:
    """Bytes stashed per layer, for each technique of table 2: the stash of one layer more."""
    for technique, (axes, options, formula) in TECHNIQUES.items():
        counts, sizes = compiled(name, *axes, **options)
        env = {**sizes, "B": 1, "tp": _TENSOR_PARALLEL}
        stash = counts.memory["stash"]
        ours = evaluate(stash, {**env, "L": env["L"] + 1}) - evaluate(stash, env)
        s, h, a = (Fraction(env[n]) for n in ("S", "D", "H"))
        published = formula(s * h, 5 * a * s / h, Fraction(_TENSOR_PARALLEL))
        row = f"{name} bytes per layer, {technique}"
        yield PublishedRow(ACTIVATIONS, row, f"{int(published):,}", f"{ours:,}", ours == published)


def _first_stage(held: FirstStage, compiled: CountsOf) -> Iterator[PublishedRow]:
    """What the layers of the first stage hold: the bytes that as many layers more would add."""
    axes: tuple[str, ...] = ("tp",)
    options: dict[str, str | int | bool] = {}
    if held.stages > 1:
        axes, options = (f"pp={held.stages}", "tp"), {"microbatches": held.microbatches}
    if held.chunks > 1:
        options |= {"schedule": "interleaved", "chunks": held.chunks}
    state, *stashes = (Fraction(text) for text in held.published)
    techniques = {"TP": stashes[0], "TP + SP, selective recompute": stashes[1]}
    for technique, published in techniques.items():
        counts, sizes = compiled(held.name, *axes, **TECHNIQUES[technique][1], **options)
        env = {**sizes, "B": held.batch, "tp": _TENSOR_PARALLEL}
        if state:
            total = sum((counts.memory[n] for n in STATE), start=const(0))
            yield _gib(f"{held.name} matrices with optimizer, GiB", state, _matrices(total, env))
            state = Fraction(0)
        ours = _more_layers(counts.memory["stash"], env)
        yield _gib(f"{held.name} activations, {technique}, GiB", published, ours)


def _more_layers(size: Expr, env: Mapping[str, int]) -> int:
    return evaluate(size, {**env, "L": 2 * env["L"]}) - evaluate(size, env)


def _matrices(size: Expr, env: Mapping[str, int]) -> int:
    """The part of the layers that grows with both dimensions of a matrix, so no bias or norm."""
    wide = {n: 2 * env[n] for n in ("H", "F")}
    both = {**env, **wide, "D": 2 * env["D"]}
    one, other = {**env, **wide}, {**env, "D": 2 * env["D"]}
    return sum(
        sign * _more_layers(size, e) for sign, e in ((1, both), (-1, one), (-1, other), (1, env))
    )


def _gib(row: str, published: Fraction, ours: int) -> PublishedRow:
    """Equal after rounding to six decimals, as far as the figures of the source are exact."""
    gib = Fraction(ours, 2**30)
    ok = round(gib, 6) == round(published, 6)
    return PublishedRow(FIGURE, row, str(float(published)), str(float(round(gib, 9))), ok)


def _zero(compiled: CountsOf) -> Iterator[PublishedRow]:
    """State of 7.5 billion parameters on 64 ranks, 16-bit gradients, by ZeRO stage, in GB."""
    for stage, published in enumerate(ZERO_GB):
        counts, sizes = compiled(
            "gpt-7.5b", "dp", zero=stage, grad_dtype="bf16", reduce_dtype="bf16"
        )
        env = {**sizes, "B": 64, "dp": 64}
        state = sum(evaluate(counts.memory[n], env) for n in STATE)
        per_parameter = Fraction(state, evaluate(counts.parameters, env))
        ours = f"{float(per_parameter * Fraction(15, 2)):.1f}"
        yield PublishedRow(
            ZERO,
            f"7.5B parameters, 64 ranks, stage {stage}, GB",
            published,
            ours,
            ours == published,
        )
    for stage, ranks, bytes_published in ((0, 8, Fraction(18)), (1, 8, 6 + Fraction(12, 8))):
        counts, sizes = compiled("gpt-7.5b", "dp", zero=stage)
        env = {**sizes, "B": 8, "dp": ranks}
        state = sum(evaluate(counts.memory[n], env) for n in STATE)
        exact = Fraction(state, evaluate(counts.parameters, env))
        row = f"bytes per parameter, fp32 gradients, optimizer over {ranks if stage else 1}"
        yield PublishedRow(
            MEGATRON, row, str(float(bytes_published)), str(float(exact)), exact == bytes_published
        )
