"""Standard streams that are closed, full, or read by nobody: an exit code, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stagec.driver.shell.run import CLOSED_PIPE, OK, WRONG_INPUT, WRONG_USAGE
from tests.support import crossed

ROOT = Path(__file__).parents[2]
WRONG, USAGE, CLOSED = WRONG_INPUT, WRONG_USAGE, CLOSED_PIPE
#: A result, a wrong input, wrong usage, and help: what each gives where nothing is closed.
COMMANDS = {"models": OK, "models nope": WRONG, "nosuch": USAGE, "compile --help": OK}
#: Where streams go, and what a command gives that would have had a result.
STREAMS = {
    ">&-": CLOSED,
    "2>&-": OK,
    ">&- 2>&-": CLOSED,
    "<&- >&- 2>&-": CLOSED,
    "| true": CLOSED,
    "2>&1 | true": CLOSED,
    "2>/dev/full": OK,
    ">/dev/full": WRONG,
    ">/dev/full 2>/dev/full": WRONG,
}


def run(command: str, streams: str) -> subprocess.CompletedProcess[str]:
    script = f"set -o pipefail; {sys.executable} -m stagec {command} {streams}"
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, cwd=ROOT
    )


@crossed(command=COMMANDS, streams=STREAMS)
def test_a_stream_that_takes_nothing(command: str, streams: str) -> None:
    if "full" in streams and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    ran = run(command, streams)
    assert ran.returncode == (STREAMS[streams] if COMMANDS[command] == OK else COMMANDS[command])
    for sign in ("Traceback", "internal error", "Exception ignored"):
        assert sign not in ran.stderr


def test_a_closed_stdin_is_an_empty_text() -> None:
    ran = run("opt -", "<&-")
    assert ran.returncode == WRONG
    assert "the text is empty" in ran.stderr


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """What is meant for stderr is not written into a result."""
    text, out = tmp_path / "in.stg", tmp_path / "x.stg"
    text.write_text("stg.module @m {\n}\n", encoding="utf-8")
    ran = run(f"opt {text} --time-passes -p inline,infer-shapes -o {out}", ">&- 2>&-")
    assert ran.returncode == OK
    assert out.read_text(encoding="utf-8").startswith("stg.module @")
    assert "seconds" not in out.read_text(encoding="utf-8")
