"""Small jobs as traces, right and wrong, and what the checker says of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from stagec.check.findings import Finding
from stagec.check.traces import CheckReport, check_directory
from stagec.formats.chakra.nodes import AttrValue, NodeKind, TraceNode, encode_metadata, encode_node

Ranks = dict[int, list[TraceNode]]
Groups = dict[str, list[int]]


def comp(number: int, *deps: int, **attrs: AttrValue) -> TraceNode:
    common: dict[str, AttrValue] = {"is_cpu_op": False, "num_ops": 8, "tensor_size": 4}
    return TraceNode(number, f"comp{number}", NodeKind.COMP, deps, attrs=common | attrs)


def coll(number: int, group: str, *deps: int, size: int = 64, kind: int = 0) -> TraceNode:
    attrs: dict[str, AttrValue] = {
        "is_cpu_op": False,
        "comm_type": kind,
        "comm_size": size,
        "pg_name": group,
    }
    return TraceNode(number, f"coll{number}", NodeKind.COLL, ctrl_deps=deps, attrs=attrs)


def message(
    kind: NodeKind, number: int, peer: int, deps: tuple[int, ...], tag: int, size: int
) -> TraceNode:
    link = "comm_dst" if kind == NodeKind.SEND else "comm_src"
    attrs: dict[str, AttrValue] = {
        "is_cpu_op": False,
        "comm_size": size,
        "comm_tag": tag,
        link: peer,
    }
    return TraceNode(number, f"{kind.label}{number}", kind, deps, attrs=attrs)


def send(number: int, peer: int, *deps: int, tag: int = 0, size: int = 32) -> TraceNode:
    return message(NodeKind.SEND, number, peer, deps, tag, size)


def recv(number: int, peer: int, *deps: int, tag: int = 0, size: int = 32) -> TraceNode:
    return message(NodeKind.RECV, number, peer, deps, tag, size)


def sound() -> tuple[Ranks, Groups]:
    """Two pipeline stages of two tensor-parallel ranks, all reducing over rows and columns."""
    groups = {"1": [0, 1], "2": [2, 3], "3": [0, 2], "4": [1, 3]}
    ranks: Ranks = {}
    for rank in range(4):
        row, column = str(1 + rank // 2), str(3 + rank % 2)
        hop = send(12, rank + 2, 11) if rank < 2 else recv(12, rank - 2)
        ranks[rank] = [
            comp(10),
            coll(11, row, 10),
            hop,
            comp(13, 12, 11),
            coll(14, column, 13, 11, kind=7, size=128),
        ]
    return ranks, groups


def write(directory: Path, ranks: Mapping[int, Iterable[TraceNode]], groups: object) -> Path:
    directory.mkdir(exist_ok=True)
    for rank, nodes in ranks.items():
        data = encode_metadata("1") + b"".join(map(encode_node, nodes))
        (directory / f"job.{rank}.et").write_bytes(data)
    if groups is not None:
        (directory / "job.json").write_text(json.dumps(groups))
    return directory


def check(directory: Path, ranks: Ranks, groups: object) -> CheckReport:
    return check_directory(write(directory, ranks, groups))


def codes(findings: Iterable[Finding]) -> set[str]:
    return {finding.code for finding in findings}


def only(findings: list[Finding], code: str) -> Finding:
    """The only finding there is, which is complete."""
    assert [finding.code for finding in findings] == [code], [str(f) for f in findings]
    assert findings[0].remedy
    return findings[0]


def edited(rank: int, number: int, change: Callable[[TraceNode], TraceNode]) -> Ranks:
    """The sound job with one node changed."""
    ranks, _ = sound()
    ranks[rank] = [change(node) if node.id == number else node for node in ranks[rank]]
    return ranks


def with_attr(name: str, value: AttrValue, kind: str = "") -> Callable[[TraceNode], TraceNode]:
    def change(node: TraceNode) -> TraceNode:
        types = {name: kind} if kind else {}
        return replace(node, attrs={**node.attrs, name: value}, attr_types=types)

    return change


def without_attr(name: str) -> Callable[[TraceNode], TraceNode]:
    return lambda node: replace(node, attrs={k: v for k, v in node.attrs.items() if k != name})


#: Two ranks with one collective.
PAIR: Ranks = {rank: [coll(1, "1")] for rank in range(2)}
