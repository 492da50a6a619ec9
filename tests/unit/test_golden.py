"""Golden texts: comparing, showing the difference, and blessing."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.testing import golden

HEAD = "// RUN: %stagec opt %s | %golden\nstg.module\n"
LINES = st.lists(st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" "), max_size=9))


@pytest.fixture
def test_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(golden.BLESS, raising=False)
    path = tmp_path / "a.stg"
    path.write_text(f"{HEAD}\n// GOLDEN:\n// one\n//\n//   three\n")
    return path


def check(path: Path, actual: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(actual))
    return golden.main([str(path)])


def test_equal_text_passes_in_silence(
    test_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(test_file, "one\n\n  three\n", monkeypatch) == 0
    assert capsys.readouterr() == ("", "")


def test_a_difference_shows_the_diff_and_how_to_accept_it(
    test_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(test_file, "one\n\n  four\n", monkeypatch) == 1
    shown = capsys.readouterr().err
    assert "-  three\n+  four\n" in shown
    assert f"stagec test {test_file} --bless" in shown


def test_blessing_rewrites_only_the_golden_section(
    test_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(golden.BLESS, "1")
    assert check(test_file, "four\n", monkeypatch) == 0
    assert test_file.read_text() == f"{HEAD}\n// GOLDEN:\n// four\n"


def test_blessing_appends_a_missing_section(
    test_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_file.write_text(HEAD)
    assert check(test_file, "four\n", monkeypatch) == 1
    monkeypatch.setenv(golden.BLESS, "1")
    assert check(test_file, "four\n", monkeypatch) == 0
    assert check(test_file, "four\n", monkeypatch) == 0
    assert test_file.read_text() == f"{HEAD}\n// GOLDEN:\n// four\n"


def test_a_golden_does_not_depend_on_the_directory(
    test_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_file.write_text(f"{HEAD}// GOLDEN:\n// a.stg:1:2: error\n// wrote %t/x and ../y\n")
    actual = f"{test_file}:1:2: error\nwrote {test_file.parent}/out/a.stg.tmp/x and ../y\n"
    assert check(test_file, actual, monkeypatch) == 0


def test_a_missing_test_file_is_a_usage_error(tmp_path: Path) -> None:
    assert golden.main([str(tmp_path / "none.stg")]) == 2


@given(LINES)
def test_any_lines_survive_a_round_trip(lines: list[str]) -> None:
    assert golden.split_golden(golden.join_golden(HEAD, lines)) == (HEAD, lines)


@pytest.fixture
def dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.delenv(golden.BLESS, raising=False)
    actual, expected = tmp_path / "actual", tmp_path / "x.golden"
    for directory, names in ((actual, "ab"), (expected, "ac")):
        (directory / "sub").mkdir(parents=True)
        for name in names:
            (directory / "sub" / name).write_text(f"{name}\n")
    (expected / "sub" / "a").write_text("other\n")
    return actual, expected


def check_dirs(actual: Path, expected: Path) -> int:
    return golden.main(["--dir", str(actual), str(expected)])


def test_directories_differ_by_missing_extra_and_different(
    dirs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_dirs(*dirs) == 1
    shown = capsys.readouterr().err
    assert "missing: sub/c" in shown
    assert "extra: sub/b" in shown
    assert "different: sub/a" in shown
    assert "-other\n+a\n" in shown


def test_of_many_files_that_differ_the_first_are_shown(
    dirs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is named: a fault in an early pass changes every dump after it."""
    for number in range(6):
        for folder, text in zip(dirs, ("new", "old"), strict=True):
            (folder / f"{number}.stg").write_text(f"{text} {number}\n")
    assert check_dirs(*dirs) == 1
    shown = capsys.readouterr().err
    assert all(f"different: {number}.stg" in shown for number in range(6))
    assert [f"+new {number}" in shown for number in range(6)] == [True] * 3 + [False] * 3
    assert "the differences of the first 3 files are shown, of 7" in shown


def test_blessing_a_directory_makes_it_equal(
    dirs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(golden.BLESS, "1")
    assert check_dirs(*dirs) == 0
    monkeypatch.delenv(golden.BLESS)
    assert check_dirs(*dirs) == 0
    assert set(golden.files_below(dirs[1])) == {"sub/a", "sub/b"}


def test_an_empty_actual_directory_never_wipes_the_expected_one(
    dirs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(golden.BLESS, "1")
    assert check_dirs(tmp_path / "none", dirs[1]) == 1
    assert set(golden.files_below(dirs[1])) == {"sub/a", "sub/c"}


def test_only_directories_named_golden_are_compared(dirs: tuple[Path, Path]) -> None:
    assert check_dirs(dirs[0], dirs[0]) == 1


def test_traces_are_compared_by_bytes(
    dirs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = dirs[0] / "sub" / "a.et"
    trace.write_bytes(b"\xd8\x00")
    monkeypatch.setenv(golden.BLESS, "1")
    assert check_dirs(*dirs) == 0
    monkeypatch.delenv(golden.BLESS)
    assert check_dirs(*dirs) == 0
    trace.write_bytes(b"\xd8\x00\x01")
    assert check_dirs(*dirs) == 1
    assert "sub/a.et: 2 bytes are expected, 3 were written" in capsys.readouterr().err
