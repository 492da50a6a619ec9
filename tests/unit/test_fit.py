"""`stagec fit`: constants that made a table are found again, rows that are left out decide nothing,
what has few rows stays, and the text is the machine that was fitted."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagec.machines import Machine, load_machine, machines
from stagec.machines.efficiency import Protocol
from stagec.machines.writing import kernel_section, quoted, with_sections
from stagec.time.fit.constants import EACH, Fit, FitPart, fit_tables
from stagec.time.fit.network import Constants
from stagec.time.fit.search import Floats, least_squares, simplex
from stagec.time.measured.kernel_tables import Key, table_text
from stagec.time.measured.tables import Table
from tests.support import EXHAUSTIVE, assert_schema, stagec
from tests.unit.fit_tables import BYTES, PRODUCTS, a_table, attention, collectives, memory, products

BASE = machines()["h100-sxm"]
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MATMUL: dict[str, Any] = {
    "rate": {"bf16": 0.7, "f8e4m3": 0.6},
    "bandwidth": 0.8,
    "overlap": 0.5,
    "start": 4e-6,
    "step": 1.2e-7,
    "tile": 2e-6,
    "reduction": 3e-6,
}
ATTENTION: dict[str, Any] = {
    "rate": {"bf16": 0.7},
    "overlap": 0.5,
    "uneven": 0.7,
    "start": 4e-6,
    "tile": 1e-6,
    "backward": 0.6,
}
MEMORY = {"bandwidth": 0.75, "start": 4e-6}


def machine(**kinds: dict[str, Any]) -> Machine:
    """The base with other constants: `memory={"start": 1e-6}`."""
    old = BASE.efficiency
    new = {kind: getattr(old, kind).model_copy(update=actual) for kind, actual in kinds.items()}
    return BASE.model_copy(update={"efficiency": old.model_copy(update=new)})


def with_links(level: str) -> Machine:
    """The base with slower protocols on a level."""

    def one(p: Protocol) -> Protocol:
        slower = {"start": 1.5 * p.start, "hops": 1.2 * p.hops, "share": 0.7 * p.share}
        return p.model_copy(update={**slower, "copy_": p.copy_ + 0.1})

    old = BASE.efficiency
    had = old.network[level]
    groups = {
        "protocols": {n: one(p) for n, p in had.protocols.items()},
        "pairs": {n: one(p) for n, p in had.pairs.items()},
        "multicast": one(had.multicast),
    }
    network = {**old.network, level: had.model_copy(update=groups)}
    return BASE.model_copy(update={"efficiency": old.model_copy(update={"network": network})})


TRUE = machine(matmul=MATMUL, attention=ATTENTION, memory=MEMORY)
KERNELS = [
    products(TRUE),
    products(TRUE, "f8e4m3", PRODUCTS[::3]),
    attention(TRUE),
    attention(TRUE, causal=False),
    attention(TRUE, "attention_backward"),
    memory(TRUE),
]


def part(actual: Fit, kind: str, dtype: str = "") -> FitPart:
    return next(p for p in actual.parts if p.kind == kind and dtype in ("", p.dtype))


def medians(actual: FitPart) -> tuple[float, float]:
    """Errors of the rows that were left out, before and after."""
    before, after = actual.before[1], actual.after[1]
    assert before is not None
    assert after is not None
    return before.median, after.median


def constants(actual: Fit) -> dict[str, Any]:
    """Of the fitted machine, without the records."""
    return without_records(actual.machine)


def without_records(actual: Machine) -> dict[str, Any]:
    def kept(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {n: kept(v) for n, v in value.items() if n != "fitted"}  # pyright: ignore[reportUnknownVariableType]

    result: dict[str, Any] = kept(actual.efficiency.model_dump())
    return result


# -- what is fitted --------------------------------------------------------------------------------


@pytest.mark.long
def test_constants_of_kernels_are_found_again() -> None:
    actual = fit_tables(KERNELS, BASE, "test")
    assert [p.kind for p in actual.parts] == [
        *("matmul", "matmul", "attention", "attention_backward", "memory")
    ]
    for each in actual.parts:
        before, after = medians(each)
        assert before > 0.05
        assert after < 0.002
        assert each.rows[0] - each.rows[1] in (0, 1)
    fitted = actual.machine.efficiency
    assert fitted.matmul.rate["bf16"] == pytest.approx(0.7, rel=0.01)
    assert fitted.matmul.rate["f8e4m3"] == pytest.approx(0.6, rel=0.01)
    assert fitted.attention.backward == pytest.approx(0.6, rel=0.01)
    for kind, given in (("matmul", MATMUL), ("attention", ATTENTION), ("memory", MEMORY)):
        for name in given.keys() - {"rate"}:
            assert getattr(getattr(fitted, kind), name) == pytest.approx(given[name], rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize(("level", "ranks"), [("nvlink", (2, 4, 8)), ("infiniband", (16, 64))])
def test_constants_of_a_level_are_found_again(level: str, ranks: tuple[int, ...]) -> None:
    true = with_links(level)
    tables = [collectives(true, kind, ranks) for kind in COLLECTIVES]
    actual = fit_tables(tables, BASE, "test")
    assert {p.level for p in actual.parts} == {level}
    for each in actual.parts:
        before, after = medians(each)
        assert before > 0.1
        assert after < 0.01
    old, new = BASE.efficiency.network, actual.machine.efficiency.network
    assert [name for name in new if new[name] != old[name]] == [level]


@pytest.mark.long
def test_a_fit_is_the_same_in_every_run() -> None:
    some = products(TRUE, rows=PRODUCTS[:28])
    tables = [memory(TRUE), some, collectives(TRUE, COLLECTIVES[0], (8,))]
    assert fit_tables(tables, BASE, "x").sections == fit_tables(tables, BASE, "x").sections


def times(table: Table, factor: float, first: int) -> Table:
    """Every second row by size from the first (0) or the second (1) on lasts so many times as
    long; rows of collectives by their ranks."""

    def key(i: int) -> tuple[float, ...]:
        e = table.extents[i].tolist()
        if table.kind == "attention":
            return (prod(e[:2]) * e[3] * e[4] * (e[5] + e[6]), *e)
        return (e[0], e[1]) if table.kind in COLLECTIVES else (prod(e), *e)

    groups: dict[int, list[int]] = {}
    for i in sorted(range(len(table.seconds)), key=key):
        group = int(table.extents[i, 0]) if table.kind in COLLECTIVES else 0
        groups.setdefault(group, []).append(i)
    seconds = table.seconds.copy()
    for rows in groups.values():
        seconds[rows[first::2]] *= factor
    return replace(table, seconds=seconds)


@pytest.mark.long
@pytest.mark.parametrize(
    "table",
    [products(TRUE), attention(TRUE), memory(TRUE), collectives(TRUE, "all_gather")],
    ids=lambda table: table.kind,
)
def test_rows_that_are_left_out_decide_nothing(table: Table) -> None:
    actual = constants(fit_tables([table], BASE, "test"))
    assert constants(fit_tables([times(table, 7, 1)], BASE, "test")) == actual
    assert constants(fit_tables([times(table, 7, 0)], BASE, "test")) != actual


def test_rows_of_two_ops_are_split_apart() -> None:
    """Each of two ops with the same bytes is fitted and left out."""
    one, two = (replace(memory(TRUE), op=op) for op in ("softmax", "adamw"))
    slow = replace(two, seconds=two.seconds * 3)
    actual = part(fit_tables([one, slow], BASE, "test"), "memory")
    fitted, left = actual.before
    assert fitted is not None
    assert left is not None
    assert left.p90 == pytest.approx(fitted.p90, rel=0.1)
    assert actual.rows == (len(BYTES), len(BYTES))


def test_a_kernel_that_is_twice_counts_once() -> None:
    """Else the same row would be fitted and left out."""
    once, twice = ([memory(TRUE)] * n for n in (1, 2))
    actual = fit_tables(twice, BASE, "test")
    assert constants(actual) == constants(fit_tables(once, BASE, "test"))
    assert sum(part(actual, "memory").rows) == len(BYTES)


# -- what stays ------------------------------------------------------------------------------------


@pytest.mark.long
def test_what_no_row_tells_stays_as_in_the_base() -> None:
    """Products that fill the device are not split along k; sums alone say little of copies."""
    whole = [e for e in PRODUCTS if e[1] == 4096 and e[2] > 1000]
    whole += [(b, *e[1:]) for e in whole for b in (2, 3, 5, 7)]
    actual = fit_tables([products(TRUE, rows=whole)], BASE, "test")
    assert part(actual, "matmul").constants != ("rate",)
    assert actual.machine.efficiency.matmul.reduction == pytest.approx(
        BASE.efficiency.matmul.reduction, rel=0.03
    )
    sums = fit_tables([collectives(with_links("nvlink"), "all_reduce")], BASE, "x")
    old, new = (m.efficiency.network["nvlink"] for m in (BASE, sums.machine))
    assert new.protocols["simple"].copy_ == old.protocols["simple"].copy_
    assert new.pairs == old.pairs
    assert new.protocols["simple"].share != old.protocols["simple"].share


@pytest.mark.parametrize(("rows", "fitted"), [(3, 0), (4, 1), (27, 1), (28, 7)])
def test_few_rows_keep_the_constants_of_the_base(rows: int, fitted: int) -> None:
    assert EACH == 4
    largest = sorted(PRODUCTS, key=prod, reverse=True)  # small ones do not tell the rate
    actual = fit_tables([products(TRUE, rows=largest[:rows])], BASE, "test")
    (each,) = actual.parts
    assert len(each.constants) == fitted
    old, new = BASE.efficiency.matmul, actual.machine.efficiency.matmul
    assert (new.start != old.start) == (fitted == 7)
    assert (new.rate != old.rate) == (fitted > 0)
    assert bool(actual.sections) == (fitted > 0)
    notes = {0: "as in the base: 3 rows, rate need 4", 1: f"the rate alone: {rows} rows", 7: ""}
    assert each.note.startswith(notes[fitted])


def test_levels_with_few_rows_keep_their_constants() -> None:
    few = [collectives(TRUE, "all_gather", (8,)), collectives(TRUE, "all_to_all", (4, 8))]
    base = BASE.changed({"efficiency.network.nvlink.protocols.ll.start": 4.56789e-6})
    actual = fit_tables(few, base, "test")
    old, new = (m.efficiency.network["nvlink"] for m in (base, actual.machine))
    assert part(actual, "all_gather").note == "protocols as in the base: 17 rows, they need 28"
    assert part(actual, "all_gather").rows == (0, 17)
    assert new.protocols == old.protocols
    assert part(actual, "all_to_all").constants == ("pairs",)
    assert 'll = { start = "4.56789 us"' in actual.sections["efficiency.network.nvlink"]
    sums = fit_tables([collectives(TRUE, "all_reduce", (8,))], BASE, "test")
    assert part(sums, "all_reduce").note == "protocols as in the base: 17 rows, they need 24"
    assert part(sums, "all_reduce").constants == ("multicast",)


def test_short_kernels_of_memory_tell_the_start_alone() -> None:
    short = replace(
        memory(TRUE), extents=memory(TRUE).extents[:12], seconds=memory(TRUE).seconds[:12]
    )
    actual = fit_tables([short], BASE, "test")
    assert part(actual, "memory").constants == ("start",)
    assert actual.machine.efficiency.memory.bandwidth == BASE.efficiency.memory.bandwidth
    assert actual.machine.efficiency.memory.start != BASE.efficiency.memory.start


def test_rows_without_a_model_are_reported() -> None:
    tables = [
        replace(products(TRUE), dtype="f64"),
        a_table("message", "", [(2, 1024)], [1e-5]),
        a_table("all_reduce", "", [(1, 1024), (2**52, 1024)], [1e-5, 1e-5]),
    ]
    actual = fit_tables(tables, BASE, "test")
    assert not actual.sections
    assert {p.note for p in actual.parts} == {
        "the base computes no products of f64",
        "a table does not say over which level its messages go",
        "1 ranks: the base joins 2 to 1,048,576",
        f"{2**52} ranks: the base joins 2 to 1,048,576",
    }
    roofline = BASE.model_copy(
        update={"efficiency": BASE.efficiency.model_copy(update={"kernels": "roofline"})}
    )
    (each,) = fit_tables([memory(TRUE)], roofline, "test").parts
    assert "roofline" in each.note


# -- the command -----------------------------------------------------------------------------------


def written(tmp_path: Path, tables: list[Table], name: str = "h100.csv") -> Path:
    rows = [
        (Key(t.kind, t.dtype, tuple(e), t.causal, t.op), s, 1)
        for t in tables
        for e, s in zip(t.extents.tolist(), t.seconds.tolist(), strict=True)
    ]
    path = tmp_path / name
    path.write_text(table_text(rows))
    return path


@pytest.mark.long
@pytest.mark.parametrize("base", [pytest.param("h100", marks=EXHAUSTIVE), "own/base.toml"])
def test_the_text_is_the_machine_that_was_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "base.toml").write_text('base = "h100-sxm"\ntitle = "Mine"\n')
    tables = [*KERNELS[:1], memory(TRUE), *(collectives(TRUE, kind, (8,)) for kind in COLLECTIVES)]
    table = written(tmp_path, tables)
    (tmp_path / "results").mkdir()
    actual = stagec("fit", "--measured", table, "--machine", base, "-o", "results/mine.toml")
    assert (actual.code, actual.err) == (0, "")
    loaded, text = load_machine("results/mine.toml"), Path("results/mine.toml").read_text()
    expected = fit_tables(_read(table), load_machine(base), "h100.csv")
    assert without_records(loaded) == constants(expected)
    assert loaded.title == load_machine(base).title
    assert loaded.compute == BASE.compute
    assert loaded.network == BASE.network
    assert loaded.efficiency.attention == BASE.efficiency.attention
    assert set(tomllib.loads(text)) == {"base", "efficiency"}
    assert set(tomllib.loads(text)["efficiency"]) == {"matmul", "memory", "network"}
    assert "h100.csv, every second row by size; memory: median 0.0%, p90" in text
    assert stagec("machines", "results/mine.toml").code == 0


def _read(path: Path) -> list[Table]:
    from stagec.time.measured.kernel_tables import read_measured

    return read_measured(path)


def test_without_an_output_there_is_a_table_only(tmp_path: Path) -> None:
    table = written(tmp_path, [memory(TRUE)])
    actual = stagec("fit", "--measured", table, "--machine", "h100")
    assert actual.code == 0
    assert "bandwidth, start" in actual.out
    assert [p.name for p in tmp_path.iterdir()] == ["h100.csv"]
    actual = stagec("fit", "--measured", table, "--machine", "h100", "-o", "-")
    assert actual.out.startswith('base = "h100-sxm"\n\n[efficiency.memory]\n')


def test_json_has_the_errors_of_both_halves(tmp_path: Path) -> None:
    table = written(tmp_path, [memory(TRUE)])
    actual = json.loads(stagec("fit", "--measured", table, "--machine", "h100", "--json").out)
    assert_schema("fit", actual)
    (each,) = actual["parts"]
    assert actual["base"] == "h100-sxm"
    assert each["constants"] == ["bandwidth", "start"]
    assert each["left_out"]["rows"] == 8
    assert each["left_out"]["after"]["median"] < 0.01 < each["left_out"]["before"]["median"]
    assert each["fitted"]["after"]["p90"] < 0.01 < each["fitted"]["before"]["p90"]


@pytest.mark.long
def test_several_tables_are_one(tmp_path: Path) -> None:
    """Halves of a table, which would each be too small."""
    whole = products(TRUE)
    halves = [
        replace(whole, extents=whole.extents[i::2], seconds=whole.seconds[i::2]) for i in (0, 1)
    ]
    paths = [written(tmp_path, [t], f"{i}.csv") for i, t in enumerate(halves)]
    given = [arg for path in paths for arg in ("--measured", path)]
    actual = stagec("fit", *given, "--machine", "h100", "-o", tmp_path / "mine.toml")
    assert "all 7" in actual.out
    assert "0.csv and 1.csv" in (tmp_path / "mine.toml").read_text()


def refused(*argv: str | Path) -> str:
    actual = stagec("fit", *argv)
    assert actual.code == 1, actual.err
    assert "error:" in actual.err
    assert "help:" in actual.err
    assert "Traceback" not in actual.err
    return actual.err


def test_mistakes_are_reported_and_leave_no_output(tmp_path: Path) -> None:
    table, output = written(tmp_path, [products(TRUE, rows=PRODUCTS[:3])]), tmp_path / "mine.toml"
    output.write_text("before")
    ask = ("--measured", table, "-o", output, "--machine")
    assert "no machine 'h10'" in refused(*ask, "h10")
    assert "nowhere.toml: No such file" in refused(*ask, tmp_path / "nowhere.toml")
    assert "no kind of kernel has enough rows" in refused(*ask, "h100")
    assert "as in the base: 3 rows, rate need 4" in stagec("fit", *ask, "h100").out
    output.write_text('base = "h100-sxm"\n')
    assert "is the file of the base machine itself" in refused(*ask, output)
    assert "give -o NAME.toml" in refused(*ask[:3], tmp_path / "mine", "--machine", "h100")
    table.write_text("kind,dtype,extents,microseconds\nmatmul,bf16,1x2x3,5\n")
    assert "h100.csv:2:1: error: extents: expects batchxmxnxk" in refused(*ask, "h100")
    assert "No such file" in refused("--measured", tmp_path / "none.csv", "--machine", "h100")
    lost = ("--measured", tmp_path / "none.csv", "-o", tmp_path / "none" / "mine.toml")
    assert "none/mine.toml: No such file" in refused(*lost, "--machine", "h100")
    assert output.read_text() == 'base = "h100-sxm"\n'
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h100.csv", "mine.toml"]
    assert stagec("fit", "--machine", "h100").code == 2


# -- searches and texts ----------------------------------------------------------------------------


def test_a_simplex_finds_the_end_of_a_valley() -> None:
    """The function of Rosenbrock, the least of which is at 1, 1."""

    def valley(p: Floats) -> float:
        return float(100 * (p[1] - p[0] ** 2) ** 2 + (1 - p[0]) ** 2)

    actual = simplex(valley, np.array([[-1.2, 1.0], [-1.0, 1.0], [-1.2, 1.2]]), 500, flat=1e-12)
    assert actual == pytest.approx([1, 1], abs=1e-3)


def test_least_squares_do_not_follow_an_outlier() -> None:
    x = np.linspace(0, 1, 21)
    y = 0.5 + 2 * x
    y[4] += 50
    _, actual = least_squares(lambda p: p[0] + p[1] * x - y, np.zeros(2))
    assert actual == pytest.approx([0.5, 2], abs=0.05)


@pytest.mark.parametrize("name", machines())
def test_coordinates_of_a_level_are_its_constants(name: str) -> None:
    for level in machines()[name].efficiency.network.values():
        actual = Constants(level)
        again = actual.at(actual.point())
        assert Constants(again).point() == pytest.approx(actual.point())
        for n, protocol in again.protocols.items():
            assert protocol.start == pytest.approx(level.protocols[n].start)
            assert protocol.share == pytest.approx(level.protocols[n].share, rel=0.003)


@pytest.mark.parametrize("text", ["plain", 'a "b" \\ c', "\x7f\n\t\x01", "é中😀"])
def test_quoted_texts_are_read_back(text: str) -> None:
    assert tomllib.loads(f"a = {quoted(text)}")["a"] == text


def test_times_are_written_without_exponents() -> None:
    for seconds, text in ((1e-5, "10 us"), (2.7e-6, "2.7 us"), (0.0, "0 us"), (4e-8, "0.04 us")):
        section = kernel_section("memory", {"start": seconds}, {}, "test")
        assert tomllib.loads(section)["efficiency"]["memory"]["start"] == text


def test_sections_replace_those_of_their_titles() -> None:
    text = 'base = "x"\n\n[a.b]\nc = 1\n\n[a.b.d]\ne = 2\n\n[a.bc]\nf = 3\n'
    actual = with_sections(text, {"a.b": "[a.b]\nc = 4\n"})
    assert tomllib.loads(actual) == {"base": "x", "a": {"b": {"c": 4}, "bc": {"f": 3}}}
    assert actual.index("[a.b]") < actual.index("[a.bc]")
    assert with_sections(actual, {"a.b": "[a.b]\nc = 4\n"}) == actual
