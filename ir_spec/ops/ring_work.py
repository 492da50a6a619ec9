"""How far keys and values go round a ring, and the pairs that a mask leaves in each step of it.

Each of n ranks has s = S/n queries; in zigzag order they are two blocks of c = s/2. The pairs that
a mask leaves of a rank's queries with its own keys, `own`, are exact: `pairs(s)` in plain order,
`2 pairs(c)` in zigzag order. The other pairs:

| mask                 | order  | steps after the first       | pairs of one of them              |
|----------------------|--------|-----------------------------|-----------------------------------|
| none                 | both   | n - 1                       | s^2                               |
| causal               | plain  | n - 1, rank i works in i    | s^2                               |
| causal               | zigzag | n - 1                       | s^2 / 2, in the first s(s+1)/2    |
| causal, window of W  | plain  | h = min(n-1, ceil((W-1)/s)) | the mean of those but the last    |
| causal, blocks of C  | plain  | min(n, ceil(C/s)) - 1       | s^2                               |
| any other            | both   | n - 1; 0 if blocks of C lie | the mean over ranks and steps, in |
|                      |        | in those of a rank          | zigzag order with the first one   |

Means are rounded up. In plain order a window of W hides all but the last h ranks, so rank i works
in the first min(i, h) steps; the last of the h steps, with some keys of a block only, is exact
(`ring_edge.py`), and where h is 1, the usual case, there is no other. Blocks of C must divide,
or be divided by, the positions that lie together on a rank (`alignment`).
"""

from stagec.ir.core import Operation
from stagec.ir.expr import ONE, ZERO, Expr, call, const, expand
from stagec.ir.facts import Relation
from stagec.ir.types import Dim, axis_index, axis_size
from stagec.ir_spec.ops.masks import is_plain, pairs


def hops(op: Operation, size: Expr, ranks: Expr, order: str) -> Expr:
    """The number of steps after the first, for a sequence of `size` tokens over `ranks` ranks."""
    part = size / ranks if order == "plain" else size / ranks / 2
    if "chunk" in op.attrs:
        blocks = call("ceildiv", [op.expr("chunk"), part])
        if order == "plain" and op.flag("causal"):
            return call("min", [ranks, blocks]) - 1
        return call("min", [ranks - 1, (blocks - 1) * (ranks - 1)])
    if "window" in op.attrs and op.flag("causal") and order == "plain":
        return call("min", [ranks - 1, call("ceildiv", [op.expr("window") - 1, part])])
    return ranks - 1


def whole_hops(op: Operation, size: Expr, ranks: Expr, order: str) -> Expr:
    """The number of steps after the first in which whole blocks travel: all but the last one if
    that step sees only some keys of a block (`stagec/ir_spec/ops/ring_edge.py`)."""
    steps = hops(op, size, ranks, order)
    return call("max", [steps - 1, ZERO]) if has_edge(op, order) else steps


def has_edge(op: Operation, order: str) -> bool:
    """Whether the last step of a ring sees only some keys of a block: under a causal window in
    plain order. Packed keys and values (rank 5) always travel whole."""
    packed = any(v.tensor.rank == 5 for v in op.operands)
    return "window" in op.attrs and op.flag("causal") and order == "plain" and not packed


def edge_rows(op: Operation, size: Expr, ranks: Expr) -> Expr:
    """The number of keys of the last block that are sent, at least 1: if no key is visible, the
    step itself runs 0 times."""
    part, window = size / ranks, op.expr("window")
    whole = whole_hops(op, size, ranks, "plain")
    return call("min", [part, call("max", [window - 1 - whole * part, ONE])])


def active(op: Operation, rows: Dim) -> Expr | None:
    """In how many of the steps after the first a rank works (None: in all of them). In plain order
    a causal mask hides all keys of later ranks, so rank i works in at most i steps."""
    if not op.flag("causal") or op.text("order") == "zigzag" or "prefix" in op.attrs:
        return None
    index = axis_index(op.names("over"))
    if is_plain(op):
        return index
    if "chunk" in op.attrs:
        part = rows.size / axis_size(op.names("over"))
        return index % call("ceildiv", [op.expr("chunk"), part])
    return call("min", [index, whole_hops(op, rows.size, axis_size(op.names("over")), "plain")])


def alignment(op: Operation, size: Expr, ranks: Expr, order: str) -> Relation | None:
    """What a mask of blocks assumes about sizes: that the size of a block divides the number of
    consecutive positions on a rank, or is divided by it. Returns None without such a mask."""
    if "chunk" not in op.attrs:
        return None
    part = size / ranks if order == "plain" else size / ranks / 2
    both = [op.expr("chunk"), part]
    return Relation(call("max", both), "==", ZERO, call("min", both))


def computed_pairs(op: Operation, everything: Expr) -> Expr:
    """The pairs that kernels compute in a step, of `everything`. In zigzag order a causal mask
    hides half of the keys, or all keys from half of the queries, in every step but the first;
    kernels leave that half out. They compute all other masked pairs."""
    halved = not op.flag("home") and op.text("order") == "zigzag" and op.flag("causal")
    return everything / 2 if halved else everything


def seen_pairs(op: Operation, s: Expr) -> Expr:
    """The pairs that the mask leaves in a step of a rank with `s` queries, as in the table
    above."""
    home, zigzag = op.flag("home"), op.text("order") == "zigzag"
    if is_plain(op):
        return s * (s + 1) / 2 if home and op.flag("causal") else computed_pairs(op, s * s)
    n = axis_size(op.names("over"))
    part = s / 2 if zigzag else s
    alone = part * (part + 1) / 2 if "prefix" in op.attrs else pairs(op, part, part)
    own = alone * (2 if zigzag else 1)
    if zigzag:
        rest = call("ceildiv", [expand(pairs(op, s * n, s * n) - own * n), n * n])
        return own + rest if home else rest
    if home:
        return own
    if "chunk" in op.attrs and op.flag("causal"):
        return s * s
    if "window" in op.attrs and op.flag("causal"):
        index = axis_index(op.names("over"))
        hops = call("min", [index, whole_hops(op, s * n, n, "plain")])
        rows = pairs(op, s * (hops + 1), s * (hops + 1)) - pairs(op, s * hops, s * hops)
        return call("ceildiv", [expand(rows - own), call("max", [hops, const(1)])])
    return call("ceildiv", [expand(pairs(op, s * n, s * n) - own * n), n * (n - 1)])
