"""Tables of measured kernels: looking up, reading users' files, reading aiconfigurator's."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.program.kernels import Kernel
from stagec.support.diagnostics import DiagnosticError
from stagec.support.source import FileLoc
from stagec.time.measured import aiconfigurator
from stagec.time.measured.kernel_tables import read_measured
from stagec.time.measured.tables import INTERPOLATED, MATCHED, NOT_FOUND, Measured, Table, consensus


def table(
    kind: str, rows: Iterable[tuple[int, ...]], seconds: Iterable[float], **given: Any
) -> Table:
    where: dict[str, Any] = {"dtype": "bf16", "causal": False, "source": "test", **given}
    return Table(kind, extents=np.array(list(rows)), seconds=np.array(list(seconds)), **where)


def product(*extents: int, dtype: str = "bf16") -> Kernel:
    return Kernel("matmul", dtype, extents, 0, 0)


GRID = [(1, m, n, 512) for m in (64, 128, 512) for n in (256, 1024)]
POWERS = table("matmul", GRID, [1e-9 * m * n**0.5 for _, m, n, _ in GRID])


def test_a_kernel_that_was_measured_has_its_time() -> None:
    seconds, ways = Measured([POWERS]).seconds([product(*GRID[3]), product(*GRID[0])])
    assert seconds.tolist() == pytest.approx([1e-9 * 128 * 32, 1e-9 * 64 * 16])
    assert ways.tolist() == [MATCHED, MATCHED]


@given(m=st.integers(64, 512), n=st.integers(256, 1024))
def test_powers_are_interpolated_without_error(m: int, n: int) -> None:
    """Between neighbours in log space a power law is a straight line."""
    seconds, ways = Measured([POWERS]).seconds([product(1, m, n, 512)])
    assert seconds[0] == pytest.approx(1e-9 * m * n**0.5)
    assert ways[0] == (MATCHED if (1, m, n, 512) in GRID else INTERPOLATED)


@pytest.mark.parametrize(
    "kernel",
    [
        product(1, 63, 256, 512),
        product(1, 513, 256, 512),
        product(1, 64, 256, 500),
        product(2, 64, 256, 512),
        product(0, 64, 256, 512),
        product(1, 64, 256, 512, dtype="f32"),
        Kernel("attention", "bf16", (1, 64, 256, 512), 0, 0),
        Kernel("memory", "", (), 0, 64),
        Kernel("matmul", "bf16", (64, 256, 512), 0, 0),
    ],
)
def test_what_is_outside_of_a_table_is_not_found(kernel: Kernel) -> None:
    seconds, ways = Measured([POWERS]).seconds([kernel])
    assert np.isnan(seconds[0])
    assert ways[0] == NOT_FOUND


def test_neighbours_more_than_two_octaves_apart_say_nothing() -> None:
    rows = [(1, 64, 64, 64), (1, 64 * 5, 64, 64)]
    _, ways = Measured([table("matmul", rows, [1, 2])]).seconds([product(1, 100, 64, 64)])
    assert ways[0] == NOT_FOUND


def test_a_hole_in_the_grid_is_not_filled() -> None:
    holed = table("matmul", GRID[:-1], np.ones(5))
    _, ways = Measured([holed]).seconds([product(1, 300, 300, 512), product(1, 100, 300, 512)])
    assert ways.tolist() == [NOT_FOUND, INTERPOLATED]


def test_extents_that_grow_together_are_one_axis() -> None:
    """A table of prefills has as many keys as queries: a kernel with other keys is not in it."""
    rows = [(1, 8, 8, s, s, 64, 64) for s in (1024, 2048)]
    actual = Measured([table("attention", rows, [1e-3, 4e-3], causal=True)])
    kernels = [
        Kernel("attention", "bf16", (1, 8, 8, q, k, 64, 64), 0, 0, causal=True)
        for q, k in ((1448, 1448), (1448, 1500))
    ]
    seconds, ways = actual.seconds(kernels)
    assert ways.tolist() == [INTERPOLATED, NOT_FOUND]
    assert seconds[0] == pytest.approx(2e-3, rel=1e-3)


def test_memory_is_looked_up_by_bytes_and_op_then_by_bytes() -> None:
    norms = table("memory", [(1024,), (2048,)], [1e-6, 2e-6], dtype="", op="rmsnorm")
    other = table("memory", [(1024,), (2048,)], [3e-6, 6e-6], dtype="")
    kernels = [Kernel("memory", "", (), 0, 2048, op) for op in ("rmsnorm", "softmax")]
    assert Measured([norms, other]).seconds(kernels)[0].tolist() == pytest.approx([2e-6, 6e-6])
    assert Measured([norms]).seconds(kernels)[1].tolist() == [MATCHED, NOT_FOUND]


def test_consensus_is_the_median_of_all_times_of_a_kernel() -> None:
    tables = [table("matmul", GRID[:2], [t, 5.0]) for t in (1.0, 9.0, 2.0)]
    tables.append(table("matmul", [GRID[2], GRID[2]], [1.0, 4.0]))
    (actual,) = consensus(tables)
    assert actual.extents.tolist() == [list(extents) for extents in GRID[:3]]
    assert actual.seconds.tolist() == [2.0, 5.0, 2.5]


CSV = """kind,dtype,extents,causal,op,microseconds
matmul,bf16,1x4096x8192x8192,,,738
attention,bf16,1x32x8x4096x4096x128x128,true,,410
memory,,67108864,,rmsnorm,24.1

all_reduce,,8x536870912,,,2112
"""
KERNELS = [
    product(1, 4096, 8192, 8192),
    Kernel("attention", "bf16", (1, 32, 8, 4096, 4096, 128, 128), 0, 0, causal=True),
    Kernel("memory", "", (), 0, 1 << 26, "rmsnorm"),
    Kernel("all_reduce", "", (8, 1 << 29), 0, 1 << 29),
]


def test_csv_and_json_say_the_same(tmp_path: Path) -> None:
    entries = [
        {"kind": "matmul", "dtype": "bf16", "extents": [1, 4096, 8192, 8192], "microseconds": 738},
        {
            "kind": "attention",
            "dtype": "bf16",
            "causal": True,
            "microseconds": 410,
            "extents": [1, 32, 8, 4096, 4096, 128, 128],
        },
        {"kind": "memory", "extents": [1 << 26], "op": "rmsnorm", "microseconds": 24.1},
        {"kind": "all_reduce", "extents": [8, 1 << 29], "microseconds": 2112},
    ]
    (tmp_path / "a.csv").write_text(CSV)
    (tmp_path / "a.json").write_text(json.dumps(entries))
    for name in ("a.csv", "a.json"):
        seconds, ways = Measured(read_measured(tmp_path / name)).seconds(KERNELS)
        assert (seconds * 1e6).tolist() == pytest.approx([738, 410, 24.1, 2112])
        assert not ways.any()


HEAD = "kind,dtype,extents,microseconds\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "no column 'kind'"),
        (HEAD, 1, "no measurements"),
        ("kind,dtype,extents,milliseconds\n", 1, "unknown column 'milliseconds'"),
        ("kind,kind,extents,microseconds\n", 1, "duplicate column 'kind'"),
        (HEAD + "matmul,bf16,1x2x3x4,5\nmatmul,bf16,1x2", 3, "expects 4 fields"),
        (HEAD + "matmul,bf16,1x2x3,5\n", 2, "extents: expects batchxmxnxk"),
        (HEAD + "matmul,bf16,1x2x3x0,5\n", 2, "extents: expects"),
        (HEAD + "matmul,bf16,1x2x3x9999999999999999999,5\n", 2, "extents: expects"),
        (HEAD + "gemm,bf16,1x2x3x4,5\n", 2, "kind: expects one of matmul"),
        (HEAD + "matmul,bf16,1x2x3x4,-5\n", 2, "microseconds: expects a time"),
        (HEAD + "matmul,bf16,1x2x3x4,nan\n", 2, "microseconds: expects a time"),
        (HEAD + "matmul,bf16,1x2x3x4,1e999\n", 2, "microseconds: expects a time"),
        (HEAD + "matmul,bf16,1x2x3x4,1e-300\n", 2, "microseconds: expects a time"),
        (HEAD + "matmul,bf16,1x2x3x4,1e12\n", 2, "microseconds: expects a time"),
        (HEAD + 'matmul,bf16,"1x2x3x4,5\n', 2, "not CSV"),
        (HEAD + "x" * 5000, 2, "not CSV"),
        ("kind,causal,extents,microseconds\nmatmul,maybe,1x2x3x4,5\n", 2, "causal: expects"),
    ],
)
def test_a_mistake_in_csv_has_its_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(DiagnosticError, match=message) as caught:
        read_measured(path)
    first = caught.value.diagnostics[0]
    assert first.loc == FileLoc(str(path), line, 1)
    assert first.remedy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ('[{"kind": "matmul"', "not JSON"),
        ("{}", "expects a list"),
        ("[1]", "entry 1: expects an object"),
        ('[{"kind": "matmul"}]', "entry 1: no column 'extents'"),
        ('[{"kind": [], "extents": 1, "microseconds": 1}]', "entry 1: kind: expects"),
        ('[{"kind": "memory", "extents": [true], "microseconds": 1}]', "entry 1: extents"),
        ('[{"kind": "memory", "extents": [1.5], "microseconds": 1}]', "entry 1: extents"),
        ('[{"kind": "memory", "extents": 9, "microseconds": true}]', "entry 1: microseconds"),
        ('[{"kind": "memory", "extents": 9, "microseconds": [1]}]', "entry 1: microseconds"),
        ('[{"kind": "memory", "extents": 9, "op": {}, "microseconds": 1}]', "entry 1: op"),
        ('[{"kind": "memory", "extents": 9, "causal": 3, "microseconds": 1}]', "entry 1: causal"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_mistake_in_json_has_its_entry(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(DiagnosticError, match=message):
        read_measured(path)


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEAD + "gemm,,1,1\nmatmul,bf16,1x1x1x1,1\nmemory,,1x2,1\n")
    with pytest.raises(DiagnosticError) as caught:
        read_measured(path)
    assert [d.loc for d in caught.value.diagnostics] == [
        FileLoc(str(path), 2, 1),
        FileLoc(str(path), 4, 1),
    ]


def test_a_file_that_is_no_text_or_not_there_is_reported(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_bytes(HEAD.encode() + b"\xff\xfe\n")
    with pytest.raises(DiagnosticError, match="not UTF-8") as caught:
        read_measured(tmp_path / "b.csv")
    assert caught.value.diagnostics[0].loc == FileLoc(str(tmp_path / "b.csv"), 2, 1)
    with pytest.raises(DiagnosticError, match="No such file"):
        read_measured(tmp_path / "none.csv")


#: As the files of the package have them: ms, names of types, no key and value heads of their own.
GEMM: dict[str, list[Any]] = {
    "gemm_dtype": ["bfloat16", "fp8", "int4_wo"],
    "m": [4096, 1, 1],
    "n": [8192, 8, 8],
    "k": [8192, 8, 8],
    "latency": [0.7, 0.5, 0.1],
}
CONTEXT: dict[str, list[Any]] = {
    "kernel_source": ["vllm_flash_attn_fa3"] * 3 + ["vllm_triton_attn"],
    "attn_dtype": ["bfloat16"] * 4,
    "kv_cache_dtype": ["bfloat16", "fp8", "bfloat16", "bfloat16"],
    "batch_size": [1] * 4,
    "isl": [4096] * 4,
    "num_heads": [32] * 4,
    "step": [0] * 4,
    "num_key_value_heads": [0, 8, 8, 0],
    "head_dim": [128] * 4,
    "window_size": [0, 0, 128, 0],
    "latency": [0.41, 1, 1, 1],
}


class _Column:
    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def to_numpy(self) -> Any:
        return np.array(self.values)


class _Parquet(dict[str, _Column]):
    @property
    def column_names(self) -> list[str]:
        return list(self)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the package with two files, read without pyarrow."""
    data = tmp_path / "systems" / "data" / "h100_sxm"
    files: dict[Path, dict[str, list[Any]]] = {
        data / "gemm" / "vllm" / "0.9.1" / "gemm_perf.parquet": GEMM,
        data / "gemm" / "vllm" / "0.24.0" / "gemm_perf.parquet": {
            **GEMM,
            "latency": [0.738, 0.476, 0.1],
        },
        data / "attention" / "vllm" / "0.24.0" / "context_attention_perf.parquet": CONTEXT,
    }
    for path in files:
        path.parent.mkdir(parents=True)
        path.touch()

    def read_table(path: Path) -> Any:
        return _Parquet({n: _Column(v) for n, v in files[path].items()})

    pyarrow = SimpleNamespace(read_table=read_table)
    monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", pyarrow)
    return tmp_path


def test_the_newest_tables_of_aiconfigurator_are_read(package: Path) -> None:
    actual = Measured(aiconfigurator.read_tables("h100-sxm", package))
    attention = Kernel("attention", "bf16", (1, 32, 32, 4096, 4096, 128, 128), 0, 0, causal=True)
    kernels = [product(1, 4096, 8192, 8192), product(1, 1, 8, 8, dtype="f8e4m3"), attention]
    seconds, ways = actual.seconds(kernels)
    assert (seconds * 1e3).tolist() == pytest.approx([0.738, 0.476, 0.41])
    assert ways.tolist() == [MATCHED] * 3


def test_attention_with_windows_or_another_cache_or_of_triton_is_left_out(package: Path) -> None:
    tables = [t for t in aiconfigurator.read_tables("h100-sxm", package) if t.kind == "attention"]
    assert [len(t.seconds) for t in tables] == [1]


def test_a_package_that_is_not_there_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str) -> None:
        return None

    monkeypatch.setattr("importlib.util.find_spec", nothing)
    with pytest.raises(DiagnosticError) as caught:
        aiconfigurator.read_tables("h100-sxm")
    assert caught.value.diagnostics[0].remedy == "pip install 'stagec[kernels]'"
    with pytest.raises(DiagnosticError, match="no tables for machine 'tpu-v4'"):
        aiconfigurator.read_tables("tpu-v4")
    with pytest.raises(DiagnosticError, match="no such folder"):
        aiconfigurator.read_tables("h100-sxm", tmp_path)
