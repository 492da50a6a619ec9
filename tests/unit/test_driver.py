"""The command line as others see it: exit codes, streams, start-up, what a crash leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from stagec.driver import cli
from stagec.driver.cli import COMMANDS
from stagec.driver.shell.run import run_safely
from stagec.driver.shell.session import ShellSession
from stagec.support.limits import MAX_BYTES
from tests.support import stagec

MODULE = "stg.module @m {\n  stg.func @f (%x: bf16[]) {\n    stg.return(%x)\n  }\n}\n"
CRASHING = '''"""A pass with a bug."""
from dataclasses import dataclass
from stagec.api import Module, Pass, Phase, Plugin

@dataclass(frozen=True)
class Crash(Pass):
    """Crash."""
    name = "crash"
    needs = Phase.SHAPED
    def run(self, module: Module) -> None:
        raise RuntimeError("boom")

PLUGIN = Plugin(name="crashing", passes=(Crash,))
'''


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "m.stg"
    path.write_text(MODULE, encoding="utf-8")
    return path


@pytest.fixture
def crashing(tmp_path: Path) -> Path:
    path = tmp_path / "crashing.py"
    path.write_text(CRASHING, encoding="utf-8")
    return path


def process(
    *argv: str | Path, stdin: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`stagec ARGV` in a process of its own."""
    words = [sys.executable, "-m", "stagec", *map(str, argv)]
    surroundings = {**os.environ, **(env or {})}
    return subprocess.run(
        words, input=stdin, capture_output=True, text=True, check=False, env=surroundings
    )


# -- exit codes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["opt", "--help"], 0),
        (["passes"], 0),
        ([], 2),
        (["no-such-command"], 2),
        (["opt", "--no-such-option"], 2),
        (["opt", "a", "b"], 2),
        (["opt", "no-such-file.stg"], 1),
        (["ops", "no-such-op"], 1),
        (["passes", "no-such-pass"], 1),
    ],
)
def test_exit_codes(argv: Sequence[str], code: int) -> None:
    outcome = stagec(*argv)
    assert outcome.code == code
    assert "Traceback" not in outcome.err
    assert code == 0 or outcome.err


def test_results_go_to_stdout_and_the_rest_to_stderr(module: Path) -> None:
    outcome = stagec("opt", module, "-p", "infer-shapes", "--print-after=all", "--time-passes")
    assert outcome.code == 0
    assert outcome.out == MODULE.replace("@m {", "@m[phase = shaped] {")
    assert "after infer-shapes" in outcome.err
    assert "time per pass" in outcome.err


def test_good_parts_are_printed_though_others_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "m.stg"
    path.write_text(f"{MODULE}// -----\nstg.modul @n {{}}\n// -----\n{MODULE}", encoding="utf-8")
    outcome = stagec("opt", path, "--split-input-file")
    assert outcome.code == 1
    assert outcome.out == f"{MODULE}// -----\n{MODULE}"
    assert f"{path}:7:1: error: " in outcome.err


def test_interrupt_and_closed_pipe() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def closed() -> None:
        raise BrokenPipeError

    assert run_safely(interrupted, ShellSession()) == 130
    assert run_safely(closed, ShellSession()) == 141


def test_an_interrupt_of_the_first_imports_is_quiet() -> None:
    interrupt = (
        "import runpy, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'click':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "runpy.run_module('stagec', run_name='__main__')\n"
    )
    ran = subprocess.run([sys.executable, "-c", interrupt], capture_output=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, b"", b"")


@pytest.mark.parametrize(
    "words",
    [
        "memory llama3-8b --html FILE.svg",
        "analyze llama3-8b --json --format csv",
        "memory llama3-8b --json --format csv",
        "time llama3-8b --machine h100-sxm --json --format csv",
        "serve llama3-8b --machine h100-sxm --prompt 8 --json --format csv",
        "search llama3-8b --ranks 8 --machine h100-sxm --csv --format json",
        "validate --time --json --format csv",
        "diff a b --json --format csv",
        "check a --json --format csv",
        "import llama3-8b -o FOLDER/a.stg",
        "schedule 1f1b --stages 4 --microbatches 8 --svg FOLDER/a.svg",
        "opt FILE -p train -o FOLDER/a.stg",
        "time llama3-8b --machine h100-sxm --html FOLDER/a.html",
        "time llama3-8b --machine h100-sxm --perfetto FOLDER/a.gz",
        "memory llama3-8b --snapshot FOLDER/a.pickle",
        "compile llama3-8b -o FILE",
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def works(*_: object, **__: object) -> None:
        raise AssertionError("it works")

    monkeypatch.setattr("stagec.pipeline.manager.PassManager.run", works)
    (tmp_path / "file").write_text("stg.module @m {}\n", encoding="utf-8")
    for name, path in {"FOLDER": tmp_path / "no", "FILE": tmp_path / "file"}.items():
        words = words.replace(name, str(path))
    outcome = stagec(*words.split())
    assert outcome.code in (1, 2)
    assert not outcome.out
    said = (words.split()[-1], "cannot be used together", "is a plot of many configurations")
    assert any(text in outcome.err for text in said)


# -- the system fails ------------------------------------------------------------------------------


def test_a_missing_folder_and_a_folder_in_place_of_a_file(module: Path, tmp_path: Path) -> None:
    for target in (tmp_path / "no" / "such" / "x.stg", tmp_path):
        outcome = stagec("opt", module, "-o", target)
        assert outcome.code == 1
        assert outcome.err.startswith(f"error: {target}: ")
        assert "  help: " in outcome.err


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(module: Path) -> None:
    outcome = stagec("opt", module, "-o", "/dev/full")
    assert outcome.code == 1
    assert "No space left" in outcome.err
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "stagec", "opt", str(module)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith("error: cannot write the output: No space left")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.long
def test_a_reader_that_leaves_early(tmp_path: Path) -> None:
    path = tmp_path / "big.stg"
    path.write_text("".join(f"{MODULE}// -----\n" for _ in range(1200)) + MODULE, encoding="utf-8")
    script = f"{sys.executable} -m stagec opt {path} --split-input-file | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == MODULE.splitlines()[0] + "\n"
    assert done.stderr == ""


def test_a_text_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "long.stg"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    outcome = stagec("opt", path)
    assert outcome.code == 1
    assert "is longer than 1 MiB" in outcome.err


# -- bugs ------------------------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the compiler crashes."""

    def crash(_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("stagec.passes.shapes.infer_shapes.infer_module", crash)


@pytest.mark.usefixtures("broken")
def test_a_crash_is_reported_in_short(module: Path) -> None:
    outcome = stagec("opt", module, "-p", "infer-shapes")
    assert outcome.code == 70
    assert "internal error: RuntimeError: boom" in outcome.err
    assert "--reproducer" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.usefixtures("broken")
def test_a_crash_with_its_traceback(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEC_DEBUG", "1")
    outcome = stagec("opt", module, "-p", "infer-shapes")
    assert outcome.code == 70
    assert "Traceback" in outcome.err


def test_a_reproducer_crashes_again(module: Path, crashing: Path, tmp_path: Path) -> None:
    file = tmp_path / "crash.stg"
    pipeline = "infer-shapes,verify,crash,verify"
    first = stagec("opt", module, "--plugin", crashing, "-p", pipeline, "--reproducer", file)
    assert first.code == 1
    assert str(file) in first.err
    assert file.read_text(encoding="utf-8").startswith(
        "// RUN: %stagec opt %s -p 'crash,verify'\nstg.module @m[phase = shaped] {"
    )
    again = stagec("opt", file, "--plugin", crashing, "--run-reproducer")
    assert again.code == 1
    assert "RuntimeError: boom" in again.err


def test_no_reproducer(module: Path) -> None:
    outcome = stagec("opt", module, "--run-reproducer")
    assert outcome.code == 1
    assert "is not a reproducer" in outcome.err


# -- start-up --------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_compile_loads_what_it_uses(tmp_path: Path) -> None:
    """No machine, no clock, no reader of configurations, no other format."""
    argv = f"compile llama3-8b --tp 2 --set L=1 --quiet -o {tmp_path}/out".split()
    rooms = "stagec.machines stagec.time stagec.importers.families stagec.serving.simulate pydantic"
    script = (
        f"import sys; from stagec.driver.cli import main; main({argv});"
        f"print([m for m in {rooms.split()} if m in sys.modules]);"
        "print(sorted({m.split('.')[2] for m in sys.modules if m.startswith('stagec.formats.')}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", "['base', 'chakra', 'registry']"]


def test_every_command_of_the_table_is_there() -> None:
    for name, (module, line) in COMMANDS.items():
        outcome = stagec(name, "--help")
        assert outcome.code == 0, (name, outcome.err)
        assert module.startswith((".commands.", "stagec.testing.", "stagec.answers."))
        assert line.endswith(".")
        assert line in stagec("--help").out


@pytest.mark.long
def test_module_and_script_are_the_same(module: Path) -> None:
    done = process("opt", "-", stdin=MODULE)
    assert (done.returncode, done.stdout, done.stderr) == (0, MODULE, "")
    assert process("opt", "no-such-file").returncode == 1
    assert cli.main(["opt", str(module)]) == 0
