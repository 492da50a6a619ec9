"""SCALE-Sim's GEMM topology: the distinct matrix products of a job, and how often each one runs.

Source of the format: scalesim 3.0.0, topology_utils.py (`load_arrays_gemm`): a header, then rows of
`name,M,N,K,` for products of M x K by K x N; it ignores the text after the last comma. There are no
batches, so a batched product counts once per element of the batch; counts are in a separate table.
Fused attention is the products inside it, one per head.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from stagec.formats.base import JobFile, JobFormat, Layout, Need, TraceJob, all_ranks, check_choice
from stagec.ir.kernel import MEMORY
from stagec.program.kernels import Kernel
from stagec.program.nodes import Ints, Program, numbered
from stagec.support.diagnostics import error
from stagec.support.texts import package_text

DATAFLOWS = ("ws", "os", "is")


class Product(NamedTuple):
    """A product of a matrix of m x k by one of k x n."""

    m: int
    n: int
    k: int


@dataclass(frozen=True)
class ScaleSimFormat(JobFormat):
    """`NAME.csv` with the products of all ranks, `NAME.counts.csv` with how often a rank of each
    class runs them in a step (with several pods, classes are named `encoder/stage0`), and
    SCALE-Sim's configuration of an array of `rows` x `columns`."""

    rows: int = 128
    columns: int = 128
    dataflow: str = "ws"
    name: ClassVar[str] = "scale-sim"
    pods: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({"model"})

    def check(self, job: TraceJob) -> None:
        """Raises `DiagnosticError` for an invalid array."""
        if min(self.rows, self.columns) < 1:
            raise error(
                f"rows={self.rows}, columns={self.columns}: expected positive numbers",
                remedy="for example scale-sim{rows=128,columns=128}",
            )
        remedy = "ws keeps weights in the array, os results, is inputs"
        check_choice(self, "dataflow", DATAFLOWS, remedy)

    def drops(self, program: Program, layout: Layout) -> Sequence[str]:
        lost = ["all but matrix products: order, communication, what memory bounds, element types"]
        if any(k.causal for n in program.prototypes for k in n.kernels):
            lost.append("causal masks: products of attention have all pairs")
        return lost

    def companions(self, job: TraceJob) -> Mapping[str, bytes]:
        # the options that `scalesim.scale_config` requires, with memories as in its examples
        text = package_text("formats/scale_sim.cfg").format(
            name=job.name, rows=self.rows, columns=self.columns, dataflow=self.dataflow
        )
        return {"scale.cfg": text.encode(), "layout.csv": b"Layer,none,\n"}

    def files(self, job: TraceJob, ranks: Ints | None) -> Iterator[JobFile]:
        all_ranks(self, ranks)
        names: dict[Product, str] = {}
        counts = [products_of(job.program(i), names) for i in range(len(job.members))]
        rows = [(name, *product) for product, name in names.items()]
        yield f"{job.name}.csv", _table(["Layer", "M", "N", "K"], rows, ",")
        classes = (f"{m.pod}/{c.name}".lstrip("/") for m in job.models for c in m.classes)
        head = ["Layer", "M", "N", "K", *classes]
        counted = [(*row, *(c[Product(*row[1:])] for c in counts)) for row in rows]
        yield f"{job.name}.counts.csv", _table(head, counted)


def _table(
    head: Sequence[object], rows: Iterable[Sequence[object]], end: str = ""
) -> Iterator[bytes]:
    for row in (head, *rows):
        yield (",".join(map(str, row)) + end + "\n").encode()


def products_of(program: Program, names: dict[Product, str]) -> Counter[Product]:
    """How often a rank runs each product. New products are added to `names`, with the name of the
    first node that has them."""
    products: Counter[Product] = Counter()
    for node, count in zip(program.prototypes, program.counts.tolist(), strict=True):
        for kernel in node.kernels if count else ():
            for product, times in products_in(kernel):
                products[product] += count * times
                names.setdefault(product, _named(node.name, names.values()))
    return products


def products_in(kernel: Kernel) -> list[tuple[Product, int]]:
    """The products of one launch, and how often it runs each.

    Fused attention has q k^T and p v. Backward computes q k^T again, and has do v^T, p^T do, and
    ds k and ds^T q (arXiv 2205.14135, algorithm 4).
    """
    if kernel.kind == MEMORY:
        return []
    if kernel.kind == "matmul":
        batch, m, n, k = kernel.extents
        return [(Product(m, n, k), batch)]
    batch, heads, _, queries, keys, qk, v = kernel.extents
    scores, values = Product(queries, keys, qk), Product(queries, v, keys)
    products = [scores, values]
    if kernel.kind == "attention_backward":
        grads = Product(queries, keys, v), Product(keys, v, queries)
        products = [scores, *grads, Product(queries, qk, keys), Product(keys, qk, queries)]
    return [(product, batch * heads) for product in products]


def _named(name: str, taken: Iterable[str]) -> str:
    """A unique name for a row, without commas and slashes."""
    plain = numbered(name, 0).replace("/", "_").replace(",", "_") or "product"
    others = set(taken)
    names = (plain, *(f"{plain}_{i}" for i in range(1, len(others) + 1)))
    return next(each for each in names if each not in others)


SCALE_SIM = ScaleSimFormat()
