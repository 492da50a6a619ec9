"""RUN lines of lit tests: parsing and running them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from stagec.testing import runner
from stagec.testing.runner import CRASHED, LitTest, describe_failure
from stagec.testing.syntax import (
    Stage,
    UnsupportedSyntaxError,
    as_shell,
    find_tests,
    parse_line,
    run_lines,
)


def fake_stagec(argv: Sequence[str]) -> int:
    """`cat`, `echo WORDS`, `fail`, `exit`, `crash`: stands in for the compiler."""
    match argv:
        case ["cat"]:
            print(sys.stdin.read(), end="")
        case ["echo", *words]:
            print(*words)
        case ["bytes"]:
            sys.stdout.buffer.write(b"raw\n")
        case ["fail"]:
            print("out")
            print("err", file=sys.stderr)
            return 1
        case ["exit"]:
            raise SystemExit("gone")
        case _:
            raise RuntimeError("crashed")
    return 0


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    table = {**runner.BUILTINS, "%stagec": fake_stagec}
    monkeypatch.setattr(runner, "BUILTINS", table)


def make(directory: Path, *lines: str, rest: str = "") -> LitTest:
    path = directory / "x.stg"
    path.write_text("".join(f"// RUN: {line}\n" for line in lines) + rest)
    return LitTest(path, directory / "temp")


def codes(directory: Path, *lines: str, rest: str = "") -> list[int]:
    return [outcome.code for outcome in make(directory, *lines, rest=rest).run()]


def output(directory: Path, *lines: str) -> str:
    return make(directory, *lines).run()[-1].stdout.decode()


def test_run_lines_are_joined_at_a_backslash() -> None:
    text = "// RUN: a | \\\n// RUN: b\n# RUN: c\nRUN: no\n"
    assert run_lines(text) == ["a | b", "c"]


def test_parse_line() -> None:
    assert parse_line("not %stagec opt 'a b' 2>&1 | cat > x && d<y 2> z") == [
        [Stage(("%stagec", "opt", "a b"), negated=True, merge=True), Stage(("cat",), stdout="x")],
        [Stage(("d",), stdin="y", stderr="z")],
    ]


@pytest.mark.parametrize("text", ["fuse{max-bytes=4096}", "'a|b'", "'$x'", '"a*b"', "--set=B=64"])
def test_plain_words_need_no_shell(text: str) -> None:
    assert parse_line(f"x {text}") == [[Stage(("x", text.strip("'\"")))]]


@pytest.mark.parametrize(
    "line",
    [
        *("a || b", "a; b", "(a)", "a &", "X=1 a", "a >", ""),
        *("echo $x", 'echo "$x"', "echo *.stg", 'echo "a\\" b"', "echo 'a"),
    ],
)
def test_other_syntax_is_left_to_a_shell(line: str) -> None:
    with pytest.raises(UnsupportedSyntaxError):
        parse_line(line)


def test_find_tests_skips_inputs_goldens_and_environments(tmp_path: Path) -> None:
    names = ["a.stg", "b.test", "c.txt", "Inputs/d.stg", "x.golden/e.stg", ".git/f.stg", "z/g.stg"]
    for name in [*names, "env/pyvenv.cfg", "env/lib/h.stg"]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    assert [p.relative_to(tmp_path).as_posix() for p in find_tests(tmp_path)] == [
        "a.stg",
        "b.test",
        "z/g.stg",
    ]


def test_as_shell_substitutes_paths_inside_tools(tmp_path: Path) -> None:
    line = as_shell("%golden --dir %t %S/x.golden # 100%%", tmp_path / "x.stg", tmp_path / "temp")
    assert f"golden {tmp_path}/x.stg --dir {tmp_path}/temp/x.stg.tmp {tmp_path}/x.golden" in line
    assert line.endswith("100%")


def test_text_flows_through_a_pipe(tmp_path: Path) -> None:
    assert output(tmp_path, "%stagec echo a 'b  c' | %stagec cat | cat") == "a b  c\n"


def test_bytes_can_be_written(tmp_path: Path) -> None:
    assert output(tmp_path, "%stagec bytes | cat") == "raw\n"


def test_redirections_and_their_paths(tmp_path: Path) -> None:
    lines = ["%stagec echo a > %t", "%stagec echo b >> %t", "%stagec cat < %t"]
    assert output(tmp_path, *lines) == "a\nb\n"


def test_stderr_joins_the_pipe_only_when_asked(tmp_path: Path) -> None:
    assert output(tmp_path, "not %stagec fail | cat") == "out\n"
    assert output(tmp_path, "not %stagec fail 2>&1 | cat") == "out\nerr\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [("%stagec fail", 1), ("not %stagec fail", 0), ("not %stagec echo", 1), ("%stagec exit", 1)],
)
def test_exit_codes(tmp_path: Path, command: str, code: int) -> None:
    assert codes(tmp_path, command) == [code]


def test_not_does_not_accept_a_crash(tmp_path: Path) -> None:
    assert codes(tmp_path, "%stagec crash") == [CRASHED]
    assert codes(tmp_path, "not %stagec crash") == [1]


def test_a_failing_stage_fails_the_line_and_stops_the_test(tmp_path: Path) -> None:
    assert codes(tmp_path, "%stagec fail | cat && cat", "cat") == [1, 0]


def test_filecheck_runs_in_process(tmp_path: Path) -> None:
    line = "%stagec echo foo | %filecheck %s"
    assert codes(tmp_path, line, rest="// CHECK: foo\n") == [0, 0]
    assert codes(tmp_path, line, rest="// CHECK: bar\n") == [0, 1]


def test_golden_runs_in_process(tmp_path: Path) -> None:
    line = "%stagec echo foo | %golden"
    assert codes(tmp_path, line, rest="// GOLDEN:\n// foo\n") == [0, 0]
    assert codes(tmp_path, line, rest="// GOLDEN:\n// bar\n") == [0, 1]


def test_golden_neither_compares_nor_accepts_what_a_failed_command_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEC_BLESS", "1")
    assert codes(tmp_path, "%stagec fail | %golden", rest="// GOLDEN:\n// foo\n") == [1]
    assert (tmp_path / "x.stg").read_text().endswith("// GOLDEN:\n// foo\n")


def test_a_test_runs_in_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.txt").write_text("beside\n")
    assert output(tmp_path, "cat beside.txt") == "beside\n"
    assert output(tmp_path, "%stagec cat < beside.txt") == "beside\n"
    assert output(tmp_path, 'cat "$(ls beside.txt)"') == "beside\n"


def test_other_commands_run_as_processes(tmp_path: Path) -> None:
    assert codes(tmp_path, "echo x | grep -q x", "not test -e %t") == [0, 0, 0]
    assert codes(tmp_path, "no-such-command-at-all") == [127]


def test_other_syntax_runs_in_bash(tmp_path: Path) -> None:
    assert output(tmp_path, 'for x in a b; do echo "$x"; done') == "a\nb\n"
    assert codes(tmp_path, "not false; true") == [0]
    assert codes(tmp_path, "false | true; exit $?") == [1]


def test_a_failure_report_shows_everything(tmp_path: Path) -> None:
    test = make(tmp_path, "%stagec fail")
    report = describe_failure(test, test.run())
    for part in ("RUN: %stagec fail", "exit code 1", "out", "err", "by hand:", "stagec"):
        assert part in report


def test_a_failed_golden_shows_little_of_what_it_compares(tmp_path: Path) -> None:
    """The difference says what matters; other failures show all output."""
    report = {}
    for command in ("%golden", "false"):
        test = make(tmp_path, f"seq 1 100 | {command}")
        report[command] = describe_failure(test, test.run())
    assert "... (92 more lines)" in report["%golden"]
    assert "    100\n" in report["false"]


def test_stock_lit_agrees(tmp_path: Path) -> None:
    """The stock runner takes the same lines, with the configuration of tests/lit."""
    config = Path(__file__).resolve().parents[1] / "lit" / "lit.cfg.py"
    (tmp_path / "lit.cfg.py").write_text(
        f"lit_config.load_config(config, {str(config)!r})\n"
        f"config.test_source_root = {str(tmp_path)!r}\n"
        f"config.test_exec_root = {str(tmp_path / 'out')!r}\n"
    )
    (tmp_path / "a.stg").write_text(
        "// RUN: echo foo > %t && %filecheck %s < %t\n// RUN: echo foo | %golden\n"
        "// RUN: not %filecheck %s < /dev/null 2>&1 | cat\n// CHECK: foo\n\n// GOLDEN:\n// foo\n"
    )
    lit = Path(sys.executable).with_name("lit")
    done = subprocess.run([str(lit), "-v", str(tmp_path)], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
