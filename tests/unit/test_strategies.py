"""The collectives of a training step against closed forms, for a grid of strategies.

The closed forms are written here from the equations of the parallelisms, per rank and step, and
share nothing with the compiler: every row of the analysis must be foreseen, with count and bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import pytest

from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.text.printer import print_module
from tests.support import GPT, LLAMA, analyse, crossed, each_value, pairwise

Key = tuple[str, tuple[str, ...], str, str]
Table = dict[Key, tuple[int, int]]
BYTES = {"f32": 4, "bf16": 2}
LAYERS, BATCH = 2, 16


@dataclass(frozen=True)
class Weights:
    """Parameters of a model: split over tp or whole, in a block or in the root; `rows` are learned
    positions, which sequence parallelism splits.
    """

    block_split: int
    block_whole: int
    root_split: int
    root_whole: int
    rows: int
    width: int
    vocabulary: int
    sequence: int


def llama() -> Weights:
    """Llama 3 8B, with fewer layers."""
    d, h, g, k, f, v, s = 4096, 32, 8, 128, 14336, 128256, 8192
    block = d * h * k + 2 * d * g * k + h * k * d + 3 * d * f
    return Weights(block, 2 * d, 2 * v * d, d, 0, d, v, s)


def gpt() -> Weights:
    """GPT-3, with fewer layers; biases of split outputs are split, the others whole."""
    d, h, k, f, v, s = 12288, 96, 128, 49152, 51200, 2048
    block = 3 * d * h * k + 3 * h * k + h * k * d + 2 * d * f + f
    return Weights(block, 6 * d, v * d, 2 * d, s * d, d, v, s)


MODELS = {LLAMA: llama(), GPT: gpt()}


@dataclass(frozen=True)
class Job:
    """A strategy, by the names of the command line."""

    model: str
    dp: int = 1
    tp: int = 1
    sp: bool = False
    zero: int = 0
    microbatches: int = 1
    no_vocab_parallel: bool = False
    tp_inputs: str = "regather"
    grad_dtype: str = "f32"
    reduce_dtype: str = "f32"
    ddp_bucket: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """As the driver takes them."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        return {**given, "sizes": {"L": LAYERS, "B": BATCH}}

    @property
    def sequence_parallel(self) -> bool:
        """Whether --sp has an effect."""
        return self.sp and self.tp > 1


class Expected:
    """The table of a job, built term by term."""

    def __init__(self, job: Job) -> None:
        self.job, self.w = job, MODELS[job.model]
        self._rows: dict[Key, list[int]] = defaultdict(lambda: [0, 0])
        self.tokens = BATCH // (job.dp * job.microbatches) * self.w.sequence
        if job.tp > 1:
            self._tensor_parallel()
            self._loss()
        self._gradients()
        if job.zero and job.dp > 1:
            self._zero()
        self._clipping()

    @property
    def table(self) -> Table:
        """Count and bytes by collective, axes, phase and dtype."""
        return {k: (count, size) for k, (count, size) in self._rows.items()}

    def add(
        self, op: str, over: Sequence[str], phase: str, dtype: str, count: int, each: int
    ) -> None:
        """`count` more calls with `each` elements in the full buffer."""
        row = self._rows[op, tuple(over), phase, dtype]
        row[0] += count
        row[1] += count * each * BYTES[dtype]

    def _tensor_parallel(self) -> None:
        """Two messages of [b, s, h] a layer and direction; the embedding and the head one each."""
        job, calls = self.job, (2 * LAYERS + 1) * self.job.microbatches
        message = self.tokens * self.w.width
        if not job.sp:
            for phase in ("forward", "backward"):
                self.add("all_reduce", ["tp"], phase, "bf16", calls, message)
            return
        for phase in ("forward", "backward"):
            for op in ("all_gather", "reduce_scatter"):
                self.add(op, ["tp"], phase, "bf16", calls, message)
        if job.tp_inputs == "regather":
            self.add("all_gather", ["tp"], "backward", "bf16", calls, message)

    def _loss(self) -> None:
        if self.job.no_vocab_parallel:
            logits = self.tokens * self.w.vocabulary
            self.add("all_gather", ["tp"], "forward", "bf16", self.job.microbatches, logits)
        else:
            self.add("all_reduce", ["tp"], "forward", "f32", 3 * self.job.microbatches, self.tokens)

    # -- gradients: what a rank holds before sharding over dp

    def _block(self) -> tuple[int, int]:
        """Parameters of a block on a rank: all, and those that are whole over tp."""
        return self.w.block_split // self.job.tp + self.w.block_whole, self.w.block_whole

    def _root(self) -> tuple[int, int]:
        rows = self.w.rows // (self.job.tp if self.job.sequence_parallel else 1)
        whole = self.w.root_whole
        return self.w.root_split // self.job.tp + rows + whole, whole

    def _gradients(self) -> None:
        job = self.job
        block, block_whole = self._block()
        root, root_whole = self._root()
        whole = LAYERS * block_whole + root_whole
        every = LAYERS * block + root
        if job.dp == 1 or job.zero == 0:
            self._all_reduced(every, whole)
            return
        inside = job.zero >= 2
        calls = (LAYERS + 1) * job.microbatches if inside else 1
        times = job.microbatches if inside else 1
        self._once("reduce_scatter", ["dp"], calls, times * every)
        if job.sequence_parallel:
            self._once("all_reduce", ["tp"], calls, times * whole // job.dp)

    def _all_reduced(self, every: int, whole: int) -> None:
        """Without shards: once a step, parts over tp as well where sequences are split."""
        job = self.job
        partial = whole if job.sequence_parallel else 0
        if job.dp > 1:
            self._once("all_reduce", ["dp"], self._buckets(every - partial), every - partial)
        if partial:
            over = ["dp", "tp"] if job.dp > 1 else ["tp"]
            self._once("all_reduce", over, self._buckets(partial), partial)

    def _buckets(self, elements: int) -> int:
        size = elements * BYTES[self.job.reduce_dtype]
        return -(-size // self.job.ddp_bucket) if self.job.ddp_bucket else 1

    def _once(self, op: str, over: Sequence[str], calls: int, elements: int) -> None:
        """`elements` in all, in `calls` calls."""
        row = self._rows[op, tuple(over), "gradient", self.job.reduce_dtype]
        row[0] += calls
        row[1] += elements * BYTES[self.job.reduce_dtype]

    def _zero(self) -> None:
        job = self.job
        block, root = self._block()[0], self._root()[0]
        if job.zero < 3:
            self.add("all_gather", ["dp"], "optimizer", "bf16", 1, LAYERS * block + root)
            return
        for _ in range(job.microbatches):
            self.add("all_gather", ["dp"], "forward", "bf16", LAYERS, block)
            self.add("all_gather", ["dp"], "forward", "bf16", 1, root)
            self.add("all_gather", ["dp"], "backward", "bf16", LAYERS, block)

    def _clipping(self) -> None:
        """One scalar over each axis that holds distinct gradients."""
        if self.job.tp > 1:
            self.add("all_reduce", ["tp"], "optimizer", "f32", 1, 1)
        if self.job.zero and self.job.dp > 1:
            self.add("all_reduce", ["dp"], "optimizer", "f32", 1, 1)


def actual(result: Mapping[str, Any]) -> Table:
    """The collectives of an analysis as a table; keys must not repeat."""
    (entry,) = result["classes"]
    table: Table = {}
    for row in entry["collectives"]:
        key = (row["op"], tuple(row["over"]), row["phase"], row["dtype"])
        assert key not in table
        table[key] = (row["count"], row["bytes"])
    return table


def agree(job: Job) -> None:
    assert actual(analyse(job.model, **job.options)) == Expected(job).table


FACTORS: Mapping[str, Sequence[Any]] = {
    "model": (LLAMA, GPT),
    "mesh": ((1, 1), (1, 2), (2, 1), (2, 4), (8, 1), (1, 8), (4, 2)),
    "sp": (False, True),
    "zero": (0, 1, 2, 3),
    "microbatches": (1, 2),
    "no_vocab_parallel": (False, True),
    "tp_inputs": ("regather", "save-gathered"),
    "dtypes": (("f32", "f32"), ("bf16", "bf16"), ("f32", "bf16")),
}


def grid() -> list[Job]:
    """Every pair of options."""
    jobs: list[Job] = []
    for row in pairwise(FACTORS):
        (dp, tp), (grad, reduce) = row.pop("mesh"), row.pop("dtypes")
        jobs.append(Job(**row, dp=dp, tp=tp, grad_dtype=grad, reduce_dtype=reduce))
    return jobs


def label(row: Mapping[str, Any]) -> str:
    return "-".join(f"{n}={v}" for n, v in row.items())


@pytest.mark.parametrize("row", each_value(map(asdict, grid()), label))
def test_collectives_of_a_step(row: dict[str, Any]) -> None:
    agree(Job(**row))


def per_layer(model: str, **options: Any) -> Table:
    """What one more layer adds."""
    few = actual(analyse(model, sizes={"L": 2, "B": 1}, **options))
    more = actual(analyse(model, sizes={"L": 3, "B": 1}, **options))
    assert few.keys() == more.keys()
    added = {k: (more[k][0] - few[k][0], more[k][1] - few[k][1]) for k in few}
    return {k: v for k, v in added.items() if v != (0, 0)}


def test_a_layer_under_tensor_parallelism() -> None:
    message = 8192 * 4096 * 2
    assert per_layer(LLAMA, tp=4) == {
        ("all_reduce", ("tp",), "forward", "bf16"): (2, 2 * message),
        ("all_reduce", ("tp",), "backward", "bf16"): (2, 2 * message),
    }


@pytest.mark.parametrize(("inputs", "gathers"), [("regather", 4), ("save-gathered", 2)])
def test_a_layer_under_sequence_parallelism(inputs: str, gathers: int) -> None:
    message = 8192 * 4096 * 2
    norms = 2 * 4096 * 4
    assert per_layer(LLAMA, tp=4, sp=True, tp_inputs=inputs) == {
        ("all_gather", ("tp",), "forward", "bf16"): (2, 2 * message),
        ("reduce_scatter", ("tp",), "forward", "bf16"): (2, 2 * message),
        ("all_gather", ("tp",), "backward", "bf16"): (gathers, gathers * message),
        ("reduce_scatter", ("tp",), "backward", "bf16"): (2, 2 * message),
        ("all_reduce", ("tp",), "gradient", "f32"): (0, norms),
    }


def test_fsdp_of_two_layers_over_eight_ranks() -> None:
    result = analyse(
        LLAMA, dp=8, zero=3, grad_dtype="bf16", reduce_dtype="bf16", sizes={"L": 2, "B": 8}
    )
    layer, params = 218112000, result["parameters"]
    assert actual(result) == {
        ("all_gather", ("dp",), "forward", "bf16"): (3, 2 * params),
        ("all_gather", ("dp",), "backward", "bf16"): (2, 2 * 2 * layer),
        ("reduce_scatter", ("dp",), "gradient", "bf16"): (3, 2 * params),
        ("all_reduce", ("dp",), "optimizer", "f32"): (1, 4),
    }


def gradients_of_llama(layers: int) -> list[int]:
    """Elements of the gradients of Llama 3 8B, as backward completes them."""
    width, inner, heads, groups, head, rows = 4096, 14336, 32, 8, 128, 128256
    block = [inner * width, 2 * inner * width, width, heads * head * width]
    block += [groups * head * width, groups * head * width, heads * head * width, width]
    return [width * rows, width, *(block * layers), rows * width]


def calls_of_ddp(sizes: Sequence[int], full: int) -> list[int]:
    """Bytes of each call: a gradient that fills a bucket closes it (PyTorch's DDP)."""
    calls, kept = list[int](), 0
    for size in sizes:
        kept += size
        if kept >= full:
            calls.append(kept)
            kept = 0
    return calls + [kept] * (kept > 0)


@crossed(dtype=["f32", "bf16"], bucket=[25 << 20, 160 << 20, 1 << 40, 0], microbatches=[1, 4])
def test_ddp_reduces_every_gradient_once_a_step(dtype: str, bucket: int, microbatches: int) -> None:
    result = analyse(
        LLAMA,
        dp=4,
        ddp_bucket=bucket,
        microbatches=microbatches,
        grad_dtype=dtype,
        reduce_dtype=dtype,
        sizes={"L": 2, "B": 16},
    )
    calls = calls_of_ddp([n * BYTES[dtype] for n in gradients_of_llama(2)], bucket or 1 << 60)
    assert actual(result) == {("all_reduce", ("dp",), "gradient", dtype): (len(calls), sum(calls))}


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_of_data_parallelism_leave_in_buckets_unless_reported_otherwise(
    zero: int,
) -> None:
    """25 MiB, the `bucket_cap_mb` of PyTorch."""
    result = actual(analyse(LLAMA, dp=4, zero=zero, sizes={"L": 5, "B": 4}))
    op = "reduce_scatter" if zero else "all_reduce"
    calls = calls_of_ddp([4 * n for n in gradients_of_llama(5)], 25 << 20)
    assert result[op, ("dp",), "gradient", "f32"] == (len(calls), sum(calls))


@crossed(often=[(0, 1), (1, 1), (1, 2), (2, 1), (3, 1)], dtypes=[("f32", "bf16"), ("bf16", "f32")])
def test_gradients_travel_in_the_reduce_dtype(
    often: tuple[int, int], dtypes: tuple[str, str]
) -> None:
    (zero, microbatches), (grad, reduce) = often, dtypes
    job = Job(
        LLAMA, dp=2, zero=zero, microbatches=microbatches, grad_dtype=grad, reduce_dtype=reduce
    )
    table = actual(analyse(LLAMA, **job.options))
    sent = {dtype for _, _, phase, dtype in table if phase == "gradient"}
    assert sent == {reduce}
    assert table == Expected(job).table


@pytest.mark.parametrize(("zero", "elements"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_zero_moves_what_its_paper_says(zero: int, elements: int) -> None:
    """In units of the parameters on a ring of many ranks (arXiv 1910.02054): 2, 2, 2, 3.

    The root unit stays gathered after forward, so it saves stage 3 one gather.
    """
    d = 64
    result = analyse(
        LLAMA, dp=d, zero=zero, grad_dtype="bf16", reduce_dtype="bf16", sizes={"L": 80, "B": d}
    )
    sent = sum(r["wire_bytes"] for r in result["classes"][0]["collectives"] if r["bytes"] > 4)
    root = 2 * 128256 * 4096 + 4096
    saved = root if zero == 3 else 0
    assert sent == (elements * result["parameters"] - saved) * 2 * (d - 1) // d


@pytest.mark.parametrize(
    ("unit", "plain"),
    [
        ({"mesh": {"dp": 1, "tp": 4}}, {"tp": 4}),
        ({"mesh": {"pp": 1, "dp": 4, "cp": 1, "tp": 1}, "zero": 3}, {"dp": 4, "zero": 3}),
        ({"mesh": {"dp": 1, "tp": 1}, "zero": 3, "sp": True}, {}),
        ({"dp": 2, "sp": True}, {"dp": 2}),
        ({"tp": 2, "zero": 3}, {"tp": 2}),
    ],
)
def test_axes_of_size_one_leave_no_trace(unit: dict[str, Any], plain: dict[str, Any]) -> None:
    sizes = {"L": 2, "B": 4}
    left, right = (analyse(LLAMA, sizes=sizes, **o) for o in (unit, plain))
    assert left == right


def test_axes_of_size_one_are_not_in_the_lowered_text() -> None:
    builder = JobBuilder(JobOptions(LLAMA, mesh={"dp": 1, "tp": 4}, zero=3, sp=True))
    text = print_module(builder.lower())
    assert "tp" in text
    assert "dp" not in text


def test_a_ring_sends_what_the_buffer_says() -> None:
    """2(n-1)/n of the buffer for an all_reduce, (n-1)/n for the others, rounded up to a byte."""
    result = analyse(LLAMA, dp=2, tp=4, sp=True, zero=1, sizes={"L": 2, "B": 2})
    for row in result["classes"][0]["collectives"]:
        n = {"dp": 2, "tp": 4}[row["over"][0]] if len(row["over"]) == 1 else 8
        assert row["group_size"] == n
        steps = (2 if row["op"] == "all_reduce" else 1) * (n - 1)
        assert row["wire_bytes"] == -(-row["bytes"] * steps // n)
