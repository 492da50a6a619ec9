"""Tables of measured kernels as files: what is written is read again, mistakes have a place, and a
product is found by its transposed one too."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from stagec.program.kernels import Kernel
from stagec.support.diagnostics import DiagnosticError
from stagec.support.source import file_loc
from stagec.time.measured.kernel_tables import ROWS, Key, read_measured, table_text
from stagec.time.measured.tables import INTERPOLATED, MATCHED, NOT_FOUND, Measured

HEAD = "kind,dtype,extents,causal,op,microseconds,count\n"


def some_rows() -> list[tuple[Key, float, int]]:
    choose = random.Random(5)
    rows: dict[Key, tuple[float, int]] = {}
    for kind, names in ROWS.items():
        for _ in range(20):
            extents = tuple(choose.choice((2, 3, 64, 12345)) for _ in names)
            causal = kind.startswith("attention") and choose.random() < 0.5
            op = choose.choice(("", "softmax", "rmsnorm+mul")) if kind == "memory" else ""
            dtype = "bf16" if kind in ("matmul", "attention", "attention_backward") else ""
            seconds = round(choose.uniform(1, 1e5), 1) * 1e-6
            rows[Key(kind, dtype, extents, causal, op)] = seconds, choose.randint(1, 99)
    return [(key, *rest) for key, rest in rows.items()]


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_what_is_written_is_read(tmp_path: Path, suffix: str) -> None:
    rows = some_rows()
    path = tmp_path / f"table.{suffix}"
    path.write_text(table_text(rows, as_json=suffix == "json"))
    actual = {
        Key(t.kind, t.dtype, tuple(e), t.causal, t.op): s
        for t in read_measured(path)
        for e, s in zip(t.extents.tolist(), t.seconds.tolist(), strict=True)
    }
    assert actual == pytest.approx({key: seconds for key, seconds, _ in rows})


def test_the_order_of_rows_is_that_of_kinds_and_numbers() -> None:
    rows = some_rows()
    text = table_text(rows)
    assert text == table_text(reversed(rows))
    assert text.startswith(HEAD)
    kinds = [line.partition(",")[0] for line in text.splitlines()[1:]]
    assert list(dict.fromkeys(kinds)) == list(ROWS)


def test_remarks_may_stand_first_and_lines_still_count(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("# a device\n# a day\n" + HEAD + "memory,,64,,,1,1\nmemory,,x,,,1,1\n")
    with pytest.raises(DiagnosticError) as caught:
        read_measured(path)
    place = file_loc(caught.value.diagnostics[0].loc)
    assert place is not None
    assert place.line == 5
    path.write_text("# a device\n" + HEAD + "memory,,64,,,2,1\n")
    (table,) = read_measured(path)
    assert table.seconds.tolist() == [2e-6]


@pytest.mark.parametrize("count", ["many", "-1", "1.5"])
def test_a_count_is_a_whole_number(tmp_path: Path, count: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(HEAD + f"memory,,64,,,2,{count}\n")
    with pytest.raises(DiagnosticError, match="count: expects a whole number"):
        read_measured(path)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("matmul,bfloat16,1x2x3x4,,,2,1", "dtype: unknown element type 'bfloat16'"),
        ("matmul,,1x2x3x4,,,2,1", "dtype: unknown element type ''"),
        ("matmul,bf16,1x2x3x4,true,,2,1", "causal: expects nothing in a row of matmul"),
        ("matmul,bf16,1x2x3x4,,gelu,2,1", "op: expects nothing in a row of matmul, found 'gelu'"),
        ("memory,bf16,64,,,2,1", "dtype: expects nothing in a row of memory, found 'bf16'"),
        ("all_gather,bf16,2x64,,,2,1", "dtype: expects nothing in a row of all_gather"),
    ],
)
def test_a_row_that_no_kernel_would_be_found_in_is_refused(
    tmp_path: Path, row: str, expected: str
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"{HEAD}{row}\n")
    with pytest.raises(DiagnosticError, match=expected):
        read_measured(path)


def product(m: int, n: int, k: int = 64) -> Kernel:
    return Kernel("matmul", "bf16", (1, m, n, k), 2 * m * n * k, 2 * (m * n + m * k + n * k))


def test_a_product_is_found_by_the_transposed_one(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    rows = ["matmul,bf16,1x128x512x64,,,7,1", "matmul,bf16,1x512x256x64,,,9,1"]
    path.write_text(HEAD + "\n".join([*rows, "matmul,bf16,1x256x512x64,,,8,1"]) + "\n")
    measured = Measured(read_measured(path))
    kernels = [product(128, 512), product(512, 128), product(512, 256), product(192, 512)]
    seconds, ways = measured.seconds([*kernels, product(4096, 128)])
    assert ways.tolist() == [MATCHED, MATCHED, MATCHED, INTERPOLATED, NOT_FOUND]
    # the transposed one counts only where the product itself was not measured
    assert seconds[:3].tolist() == pytest.approx([7e-6, 7e-6, 9e-6])
    assert 7e-6 < seconds[3] < 8e-6
    assert math.isnan(seconds[4])
