"""Bad input through the command line: each has its exit code, a place, a remedy, no traceback, and
nothing is written. Hostile input is refused in seconds.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stagec.driver.cli import COMMANDS
from tests.support import LLAMA, Outcome, stagec, tries

ROOT = Path(__file__).parents[2]
#: Of processor time, far above what any needs: what grows out of bounds takes hours.
SECONDS = 120.0

FUNCTION = """stg.module @m {
  stg.symbols[B = 4, D = 8]
  stg.mesh @pod[dp = 2, tp = 2]
  stg.func @f(%x: f32[B, D], %p: f32[B@dp, D]) -> f32[B, D] {
    BODY
    stg.return(%y)
  }
}
"""


def body(text: str) -> str:
    """A function around some lines; they start on line 5, in column 5."""
    return FUNCTION.replace("BODY", text)


@dataclass(frozen=True)
class Bad:
    """A text, the passes it goes through, and what the message must hold."""

    text: str
    place: str
    message: str
    passes: str = "infer-shapes,propagate-sharding"


TEXTS = {
    "syntax": Bad(body("%y = stg.gelu(%x"), "6:5", "syntax error"),
    "syntax-in-brackets": Bad(body("%y = stg.scale[by = ](%x)"), "5:25", "syntax error"),
    "unclosed": Bad("stg.module @m {\n  stg.symbols[B]\n", "2:17", "syntax error"),
    "stray-character": Bad(body("%y = stg.gelu(%x) $"), "5:23", "unexpected '$'"),
    "unknown-op": Bad(body("%y = stg.gleu(%x)"), "5:10", "unknown op 'stg.gleu'"),
    "unknown-parameter": Bad(body("%y = stg.scale[bye = 2](%x)"), "5:20", "no parameter 'bye'"),
    "missing-parameter": Bad(body("%y = stg.cast(%x)"), "5:10", "expects parameter 'to'"),
    "too-few-operands": Bad(body("%y = stg.mul(%x)"), "5:10", "expects 2 operands"),
    "wrong-rank": Bad(
        body('%y = stg.einsum["abc,bc->ac"](%x, %x)'), "5:10", "to have 3 dimensions"
    ),
    "wrong-size": Bad(body('%y = stg.einsum["ab,bc->ac"](%x, %x)'), "5:10", "same size"),
    "wrong-dtype": Bad(
        body("%z = stg.cast[bf16](%x)\n    %y = stg.add(%x, %z)"), "6:10", "element types"
    ),
    "written-type": Bad(body("%y = stg.gelu(%x) : f32[B]"), "5:5", "it is written as"),
    "unknown-dtype": Bad(body("%y = stg.gelu(%x) : f33[B, D]"), "5:25", "element type 'f33'"),
    "undefined": Bad(body("%y = stg.gelu(%xx)"), "5:19", "undefined value '%xx'"),
    "cyclic": Bad(
        body("%y = stg.add(%x, %z)\n    %z = stg.gelu(%y)"), "5:22", "undefined value '%z'"
    ),
    "doubly-used": Bad(
        body("%y = stg.gelu(%x)\n    %y = stg.gelu(%x)"), "6:5", "redefinition of '%y'"
    ),
    "undeclared-symbol": Bad(body("%y = stg.gelu(%x) : f32[B, Q]"), "5:5", "'Q'"),
    "axis-twice": Bad(
        body("%y = stg.sharding_constraint(%x) : f32[B@dp, D@dp]"), "5:5", "axis 'dp'"
    ),
    "unknown-axis": Bad(body("%y = stg.sharding_constraint(%x) : f32[B@cp, D]"), "5:5", "'cp'"),
    "contradictory-pins": Bad(
        body("%y = stg.gelu(%p) : f32[B@tp, D]"), "5:5", "contradictory placements"
    ),
    "does-not-divide": Bad(
        body("%y = stg.sharding_constraint(%x) : f32[B, D]")
        .replace("D = 8", "D = 7")
        .replace("%p: f32[B@dp, D]", "%p: f32[B, D@dp]"),
        "4:30",
        "does not divide",
    ),
    "zero-symbol": Bad("stg.module @m {\n  stg.symbols[B = 0]\n}", "2:3", "positive"),
    "negative-symbol": Bad("stg.module @m {\n  stg.symbols[B = -3]\n}", "2:3", "positive"),
    "zero-axis": Bad("stg.module @m {\n  stg.mesh @p[dp = 0]\n}", "2:3", "positive"),
    "zero-dimension": Bad(
        body("%y = stg.gelu(%x)").replace("%x: f32[B, D]", "%x: f32[0, D]"), "4:15", "positive"
    ),
    "huge-integer": Bad(
        f"stg.module @m {{\n  stg.symbols[B = {'9' * 23}]\n}}", "2:19", "too large"
    ),
    "division-by-zero": Bad(
        "stg.module @m {\n  stg.symbols[B]\n  stg.assume[B % 0 == 0]\n}", "3:14", "zero"
    ),
    "two-meshes": Bad(
        "stg.module @m {\n  stg.mesh @p[a = 2]\n  stg.mesh @q[b = 2]\n}", "3:3", "two meshes"
    ),
    "broken-assumption": Bad(
        "stg.module @m {\n  stg.symbols[B = 3]\n  stg.assume[B % 2 == 0]\n}", "3:3", "B = 3"
    ),
    "no-module": Bad("stg.mesh @p[dp = 2]", "1:1", "stg.module"),
    "empty": Bad("", "1:1", "empty"),
    "only-blanks": Bad("\n\n  // nothing\n", "3:13", "end of the text"),
    "nul-bytes": Bad("stg.module @m {\n  stg.sym\0bols[B]\n}", "2:10", "NUL"),
    "wrong-order": Bad(body("%y = stg.gelu(%x)"), "1:1", "needs a module", "insert-collectives"),
}


def assert_reported(ran: Outcome, code: int = 1) -> None:
    """An error with a remedy, and nothing that a user should not see."""
    assert ran.code == code, ran.err
    assert ran.out == ""
    assert "error: " in ran.err
    assert "  help: " in ran.err, f"no remedy: {ran.err}"
    assert "Traceback" not in ran.err
    assert "internal error" not in ran.err


@pytest.mark.parametrize("name", TEXTS)
def test_a_wrong_text(name: str, tmp_path: Path) -> None:
    case, file = TEXTS[name], tmp_path / "bad.stg"
    file.write_text(case.text)
    ran = stagec("opt", file, "-p", case.passes)
    where = "<pipeline>" if name == "wrong-order" else str(file)
    first = ran.err.splitlines()[0]
    assert first.startswith(f"{where}:{case.place}: error: "), first
    assert case.message in first
    assert_reported(ran)


def test_several_errors_are_reported_in_one_run(tmp_path: Path) -> None:
    file = tmp_path / "bad.stg"
    file.write_text(body("%a = stg.gleu(%x)\n    %b = stg.gelu(%q)\n    %y = stg.cast(%x)"))
    ran = stagec("opt", file)
    assert ran.err.count(": error: ") == 3


# -- jobs

COMPILE = ["compile", LLAMA]
JOBS: dict[str, tuple[list[str], str]] = {
    "heads over five": (
        ["--tp", "5"],
        "V = 128256, H = 32, G = 8 and F = 14336 do not divide over tp = 5",
    ),
    "batch": (["--dp", "4", "--set", "B=6"], "B = 6 does not divide over dp = 4"),
    "batch and microbatches": (
        ["--dp", "4", "--microbatches", "4", "--set", "B=8"],
        "B = 8 does not divide",
    ),
    "sequence": (["--tp", "8", "--sp", "--set", "S=9"], "S = 9 does not divide over tp = 8"),
    "unknown symbol": (["--set", "Q=3"], "no symbol 'Q'"),
    "mesh twice": (["--mesh", "dp=2", "--dp", "2"], "--mesh and --dp"),
    "axis named as a symbol": (["--mesh", "S=2"], "'S'"),
    "open axis": (
        ["--mesh", "dp,tp=2"],
        "<mesh of the command line>:1:1: error: no value for dp\n  stg.mesh @pod[dp, tp = 2]",
    ),
    "pipeline": (["--pp", "2", "--schedule", "1f2b"], "no schedule"),
    "context": (["--cp-mode", "ulysses", "--cp-order", "plain"], "needs --cp-mode ring"),
    "experts": (["--ep", "2"], "no experts"),
    "too many layers": (["--set", "L=9000000000000000000"], ""),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_wrong_job(name: str, tmp_path: Path) -> None:
    more, message = JOBS[name]
    ran = stagec(*COMPILE, *more, "-o", tmp_path / "out")
    assert_reported(ran)
    assert message in ran.err
    assert list(tmp_path.iterdir()) == []


USAGE = {
    "zero size": ["--set", "L=0"],
    "negative size": ["--set", "L=-1"],
    "huge size": ["--set", "L=99999999999999999999"],
    "no number": ["--set", "L=many"],
    "given twice": ["--set", "L=1,L=2"],
    "zero ranks": ["--dp", "0"],
    "zero axis": ["--mesh", "dp=0"],
    "no such option": ["--tensor", "2"],
    "no such stage": ["--zero", "4"],
    "no such dtype": ["--grad-dtype", "f64"],
    "no number of microbatches": ["--microbatches", "two"],
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage(name: str, tmp_path: Path) -> None:
    ran = stagec(*COMPILE, *USAGE[name], "-o", tmp_path / "out")
    assert ran.code == 2, ran.err
    assert "Error: " in ran.err
    assert "Traceback" not in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rates", [("nan", "1"), ("1", "inf"), ("1e-300", "1e-300")])
def test_no_rates(rates: tuple[str, str], tmp_path: Path) -> None:
    given: list[str | Path] = [
        "--peak-tflops",
        rates[0],
        "--memory-gbps",
        rates[1],
        "-o",
        tmp_path / "out",
    ]
    ran = stagec(*COMPILE, *given)
    assert_reported(ran)
    assert "expected rates from 1e-06 to 1e+09" in ran.err


@pytest.mark.parametrize("folder", ["", ".", "..", "/"])
def test_the_working_directory_is_not_written_to(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = stagec(*COMPILE, "-o", folder)
    assert_reported(ran)
    assert "is or contains the working directory" in ran.err


def test_sizes_of_several_flags_add_up() -> None:
    once = stagec("analyze", "llama3-8b", "--set", "L=2,V=512,S=256")
    repeated = stagec("analyze", "llama3-8b", "--set", "L=2,V=8", "--set", "V=512,S=256")
    assert repeated == once


def test_compile_needs_a_folder() -> None:
    ran = stagec(*COMPILE)
    assert ran.code == 1
    assert "-o DIR" in ran.err


def test_commands_and_models_have_suggestions() -> None:
    assert "'compile'" in stagec("compil").err
    assert "'llama3-70b'" in stagec("compile", "llama3-7b", "-o", "x").err


STRATEGIES = {
    "axis that the mesh lacks": ("stg.split[(H, F), over = tp]", "2:3", "'tp'"),
    "dimension that the model lacks": ("stg.split[Q, over = dp]", "2:3", "Q"),
    "axis twice": ("stg.split[B, over = (dp, dp)]", "2:3", "dp"),
    "no such stage": ("stg.shard_params[over = dp, zero = 7]", "2:3", "7"),
    "no microbatches": ("stg.microbatches[count = 0]", "2:3", "0"),
    "no statement": ("stg.func @f(%x: f32[]) {\n    stg.return(%x)\n  }", "2:3", "stg.func"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_wrong_strategy(name: str, tmp_path: Path) -> None:
    statement, place, message = STRATEGIES[name]
    file, out = tmp_path / "wrong.stg", tmp_path / "out"
    file.write_text(f"stg.strategy @s[mesh = @pod] {{\n  {statement}\n}}\n")
    ran = stagec(*COMPILE, file, "--dp", "2", "-o", out, "--quiet")
    assert_reported(ran)
    first = ran.err.splitlines()[0]
    assert first.startswith(f"{file}:{place}: error: ")
    assert message in first
    assert not out.exists()


#: Values as users write them, and the end of what is said of them.
HABITS = {
    "memory llama3-8b --set S=128k": "found '128k'; write 128000 or 131072",
    "memory llama3-8b --set S=1e6": "found '1e6'; write 1000000",
    "memory llama3-8b --set S=131,072": "'072' is not NAME=VALUE; write numbers without commas",
    "memory llama3-8b --microbatches 1k": "'1k' is not a valid integer; write 1000 or 1024.",
    "search llama3-8b --ranks 1,024 --machine h100": "write 24, and large numbers without commas.",
    "memory llama3-8b --optimizer AdamW": "did you mean 'adamw'?",
    "memory llama3-8b --param-dtype bfloat16": "did you mean 'bf16'?",
    "memory llama3-8b --limit 80gb": "did you mean 80GB?",
    "memory llama3-8b --stack Megatron-Core": "did you mean 'megatron-core'?",
    "memory Llama_3_8B": "did you mean 'llama3-8b'?",
    "memory Qwen/Qwen3-30B-A3B": "did you mean 'qwen3-30b-a3b'? Nothing is downloaded: give the "
    "path of its config.json",
    "time gpt2 --machine 'NVIDIA H100 80GB HBM3'": "did you mean 'h100'?",
    "time gpt2 --machine ''": "error: the name of a machine is empty",
    "time gpt2 --machine h100 --sweep S=4,096": "found '096'; write 96, and large numbers without",
    "memory llama3-8b --set S=007": "found '007'; write 7, and large numbers without commas",
    "memory gpt2 --limit 'NVIDIA H100 80GB HBM3'": "did you mean 'h100'?",
    "search gpt2 --ranks 2 --machine h100 --sp off,maybe": "'maybe' is not a valid boolean",
    "time gpt2 --machine h100 --within 1ms --print-strategy": "--within is for one step of one job",
    "memory gpt2 gpt2": "STRATEGY is a .stg file with a stg.strategy; flags such as --tp 8",
    "memory gpt2 --html a.png": "give --html a.html",
    "import meta-llama/Llama-3.1-70B": "nothing is downloaded: give the path of a model's config",
    "memory job.yaml": "write jobs in TOML, as --print-job does",
    "time gpt2 --machine h100 --sweep foo=1": "nor a symbol; such as tp=1,2",
}


@pytest.mark.parametrize("line", HABITS)
def test_habits_of_other_tools_have_a_remedy(line: str) -> None:
    ran = stagec(*shlex.split(line))
    assert ran.code in (1, 2)
    assert HABITS[line] in ran.err


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("adapter_config.json", '{"base_model_name_or_path": "a/b"}', "adapter_config.json names"),
        ("model.safetensors.index.json", "{}", "help: give a model's config.json, or the folder"),
        ("other.json", "{}", "help: give the file itself: other.json"),
    ],
)
def test_a_folder_without_the_configuration_of_a_model(
    name: str, text: str, expected: str, tmp_path: Path
) -> None:
    """What stands beside a configuration is not proposed in its place."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert expected in stagec("memory", str(tmp_path)).err


def test_an_adapter_names_its_model(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text('{"base_model_name_or_path": "a/b"}', encoding="utf-8")
    assert "give the config.json of 'a/b', and --lora" in stagec("import", str(path)).err


def test_a_dump_is_no_model(tmp_path: Path) -> None:
    """It says which command goes on with it."""
    dump = tmp_path / "shaped.stg"
    text = "stg.module @m[phase = shaped] { stg.symbols[B = 4] stg.func @f(%x: bf16[B]) {\n"
    dump.write_text(f"{text}%y = stg.gelu(%x) : bf16[B]\nstg.return(%y) }} }}", encoding="utf-8")
    problem = stagec("time", dump, "--machine", "h100").err
    assert f"{dump}:1:1: error: the module is shaped: a model is a text before" in problem
    assert "run further passes with 'stagec opt FILE -p PASSES'" in problem


def test_a_block_that_is_not_imported(tmp_path: Path) -> None:
    """The remedy is the line that the text lacks."""
    text = "stg.module @m { stg.symbols[B, S, D, F] stg.func @f(%x: bf16[B, S, D]) {\n"
    path = tmp_path / "m.stg"
    path.write_text(f"{text}%y = stg.call @swiglu(%x)\nstg.return(%y) }} }}", encoding="utf-8")
    assert 'help: add stg.import["blocks/swiglu.stg"]' in stagec("analyze", str(path)).err


def test_a_strategy_for_another_mesh(tmp_path: Path) -> None:
    file, out = tmp_path / "wrong.stg", tmp_path / "out"
    file.write_text("stg.strategy @s[mesh = @other] {\n  stg.split[B, over = dp]\n}\n")
    ran = stagec(*COMPILE, file, "--dp", "2", "-o", out)
    assert_reported(ran)
    assert f"{file}:1:1: error: " in ran.err
    assert "@other" in ran.err
    assert not out.exists()


def test_a_model_in_the_place_of_a_strategy(tmp_path: Path) -> None:
    file = tmp_path / "model.stg"
    file.write_text(body("%y = stg.gelu(%x)"))
    assert_reported(stagec(*COMPILE, file, "-o", tmp_path / "out"))


def test_a_missing_set(tmp_path: Path) -> None:
    """The message names the symbol and how to give it."""
    file, out = tmp_path / "open.stg", tmp_path / "out"
    file.write_text(
        "stg.module @m {\n  stg.symbols[B = 4, Width]\n"
        "  stg.func @f(%x: f32[B, Width], %w: f32[B, Width | param]) -> f32[] {\n"
        '    %y = stg.einsum["bd,bd->"](%x, %w)\n    stg.return(%y)\n  }\n}\n'
    )
    for command in (["analyze", str(file)], ["compile", str(file), "-o", str(out), "--quiet"]):
        ran = stagec(*command)
        assert_reported(ran)
        assert "no value for Width" in ran.err
        assert "--set Width=" in ran.err
        assert f"{file}:" in ran.err
        assert not out.exists()
        assert stagec(*command, "--set", "Width=6").code == 0


def test_an_einsum_that_sums_one_operand_alone(tmp_path: Path) -> None:
    """Whether it can be differentiated or not, it is no bug of the compiler that the user sees."""
    file = tmp_path / "sum.stg"
    file.write_text(
        "stg.module @m {\n  stg.symbols[B = 4, D = 2]\n"
        "  stg.func @f(%x: f32[B, D], %w: f32[D | param]) -> f32[] {\n"
        '    %y = stg.einsum["bd,d->"](%x, %w)\n    stg.return(%y)\n  }\n}\n'
    )
    ran = stagec("analyze", file)
    assert ran.code in (0, 1), ran.err
    assert "internal error" not in ran.err


# -- files


def test_a_file_of_50_megabytes(tmp_path: Path) -> None:
    file = tmp_path / "large.stg"
    with file.open("wb") as stream:
        stream.truncate(50 << 20)
    for command in (["opt", str(file)], ["compile", str(file), "-o", str(tmp_path / "out")]):
        ran = quickly(*command)
        assert_reported(ran)
        assert f"{file}" in ran.err
        assert "1 MiB" in ran.err


def test_a_folder_where_a_file_is_due(tmp_path: Path) -> None:
    for command in ("opt", "compile", "analyze"):
        more = ["-o", str(tmp_path / "o")] if command == "compile" else list[str]()
        ran = stagec(command, tmp_path, *more)
        assert_reported(ran)
        assert str(tmp_path) in ran.err
    assert_reported(stagec("show", tmp_path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    ran = stagec("opt", tmp_path / "none.stg")
    assert_reported(ran)
    assert "none.stg" in ran.err
    assert_reported(stagec("check", tmp_path / "none"))
    assert_reported(stagec("show", tmp_path / "none.et"))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(bytes(range(1, 256)) * 40, id="bytes"),
        pytest.param(b"\x7fELF\x02\x01\x01" + b"\0" * 99, id="program"),
        pytest.param(b"\xff\xfes\0t\0g\0", id="utf-16"),
    ],
)
def test_a_file_that_is_no_text(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "bad.stg"
    file.write_bytes(data)
    ran = stagec("opt", file)
    assert_reported(ran)
    assert ran.err.splitlines()[0].startswith(f"{file}:"), "no place"


def test_an_empty_trace(tmp_path: Path) -> None:
    file = tmp_path / "x.0.et"
    file.write_bytes(b"")
    assert_reported(stagec("show", file))
    assert stagec("check", tmp_path).code == 1


@pytest.mark.parametrize("target", ["/dev/full", "/proc/out.stg"])
def test_a_result_that_cannot_be_written(target: str, tmp_path: Path) -> None:
    if target == "/dev/full" and not Path(target).exists():
        pytest.skip("no /dev/full here")
    file = tmp_path / "ok.stg"
    file.write_text(body("%y = stg.gelu(%x)"))
    assert_reported(stagec("opt", file, "-o", target))


@pytest.mark.parametrize("option", ["--html", "-o"])
@pytest.mark.parametrize("command", ["analyze", "memory", "time", "serve", "search"])
def test_a_folder_that_is_not_there_is_reported_before_any_work(
    command: str, option: str, tmp_path: Path
) -> None:
    """Before the model is read, which these have not."""
    expected = stagec(command, "no-model", option, tmp_path / "none" / "x.html")
    assert expected.code == 1
    assert expected.err.startswith(f"error: {tmp_path}/none/x.html: No such file or directory")


@pytest.mark.parametrize(
    ("command", "first", "second"),
    [
        ("time", "--html", "--perfetto"),
        ("analyze", "--html", "--output"),
        ("memory", "--html", "--snapshot"),
        ("opt", "--html", "--output"),
        ("machines", "--html", "--output"),
    ],
)
def test_two_results_have_two_files(
    command: str, first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = stagec(command, "no-model", second, tmp_path / "x.html", first, "x.html")
    assert ran.code == 1
    assert f"{second} and {first} write the same file 'x.html'\n  help: " in ran.err
    ran = stagec(command, "no-model", first, "/dev/null", second, "/dev/null")
    assert "the same file" not in ran.err


@pytest.mark.parametrize(
    ("command", "option"), [("analyze", "--html"), ("time", "--perfetto"), ("memory", "--snapshot")]
)
def test_only_a_text_goes_to_stdout_by_its_name(command: str, option: str) -> None:
    ran = stagec(command, "no-model", option, "-")
    assert (ran.code, ran.out) == (2, "")
    assert f"Invalid value for '{option}': '-' is not the name of a file" in ran.err


@pytest.mark.parametrize("command", ["analyze", "memory"])
def test_a_plot_takes_several_configurations(command: str, tmp_path: Path) -> None:
    expected = stagec(command, "llama3-8b", "--set", "L=1", "--html", tmp_path / "x.svg")
    assert expected.code == 1
    assert expected.err.startswith(
        "error: --html FILE.svg is a plot of many configurations, and needs --sweep"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".json", ".svg", ".HTML"])
@pytest.mark.parametrize("command", ["search", "memory"])
def test_a_page_is_named_as_one(command: str, suffix: str, tmp_path: Path) -> None:
    """A plot is of what several configurations are, which a search is not."""
    file = tmp_path / f"x{suffix}"
    words = ["--ranks", "2", "--machine", "h100-sxm"] if command == "search" else []
    expected = stagec(command, "no-model", *words, "--html", file)
    named = (suffix, command) in ((".HTML", command), (".svg", "memory"))
    assert expected.code == 1
    assert (
        f"'{file}' does not end in .html\n  help: give --html {tmp_path}/x.html" in expected.err
    ) != named


def test_a_strategy_file_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "s.stg").write_text("")
    expected = stagec("analyze", "llama3-8b", tmp_path / "s.stg")
    assert expected.code == 1
    assert "s.stg:1:1: error: the text is empty, expected a 'stg.strategy'" in expected.err


def test_print_after_names_a_pass() -> None:
    expected = stagec("analyze", "llama3-8b", "--set", "L=1", "--print-after", "infer-shape")
    assert expected.code == 1
    assert expected.err.startswith("error: --print-after: no pass or pipeline 'infer-shape'")
    assert "did you mean 'infer-shapes'?" in expected.err
    expected = stagec("analyze", "llama3-8b", "--set", "L=1", "--print-after", "to-serving")
    assert expected.code == 0
    assert expected.err == "warning: --print-after to-serving: the pipeline does not run it\n"


@pytest.mark.long
def test_a_full_disk_on_stdout() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    command = [sys.executable, "-m", "stagec", "models", "--json"]
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, cwd=ROOT)
    assert ran.returncode == 1
    assert b"No space left" in ran.stderr
    assert b"Traceback" not in ran.stderr


def test_a_dump_folder_that_cannot_be_made() -> None:
    assert_reported(stagec(*COMPILE, "--dry-run", "--quiet", "--dump-dir", "/proc/dumps"))


# -- hostile input


def quickly(*argv: str | Path) -> Outcome:
    """The command, which must come to an end."""
    begin = time.process_time()
    ran = stagec(*argv)
    seconds = time.process_time() - begin
    assert seconds < SECONDS, f"took {seconds:.1f} s"
    return ran


def sized(expression: str) -> str:
    """A module with a dimension of that size."""
    return (
        "stg.module @m {\n  stg.symbols[x = 2]\n  stg.func @f(%a: f32["
        f"{expression}]) {{\n    stg.return(%a)\n  }}\n}}\n"
    )


HOSTILE = {
    "nested parentheses": sized("(" * 100_000 + "x" + ")" * 100_000),
    "open parentheses": sized("(" * 100_000),
    "nested regions": "stg.module @m {\n" * 10_000,
    "power of a power": sized("x^64^64"),
    "powers of powers": sized("((((x^64)^8)^8)^8)^8*y"),
    "power of a sum": sized("((x+1)^8)^8"),
    "power of a number": sized("9223372036854775807^8"),
    "large exponent": sized("x^999999999"),
    "product of sums": sized("*".join(f"(x+{i})" for i in range(60))),
    "sum of 200,000 symbols": sized("+".join(f"x{i}" for i in range(200_000))),
    "5,000 digits": sized("9" * 5000),
    "many signs": sized("-" * 50_000 + "x"),
    "chain of moduli": sized("%".join(["x"] * 20_000)),
    "chain of divisions": sized("/".join(["x"] * 5_000) + "/x0"),
    "maximum of 20,000": sized("max(" + ",".join(f"x{i}" for i in range(20_000)) + ")"),
    "5,000 unknown ops": "stg.module @m {\n" + "  a.b()\n" * 5000 + "}\n",
    "5,000 undefined values": body("\n".join(f"%a{i} = stg.gelu(%b)" for i in range(5000))),
    "a long line": "stg.module @m {" + " " * 1_000_000 + "$}",
    "a long name": "stg.module @m {\n  stg." + "a" * 1_000_000 + "()\n}\n",
    "a long string": body(f'%y = stg.einsum["{"a" * 200_000}->a"](%x, %x)'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text(name: str, tmp_path: Path) -> None:
    file = tmp_path / "hostile.stg"
    file.write_text(HOSTILE[name])
    ran = quickly("opt", file, "-p", "infer-shapes")
    assert_reported(ran)
    assert len(ran.err) < 100_000, "nobody reads that"


@pytest.mark.long
@pytest.mark.parametrize("sign", ["+", "*"])
def test_a_long_chain_of_one_symbol(sign: str, tmp_path: Path) -> None:
    """It means something small; it may be refused, but must not take long."""
    file = tmp_path / "chain.stg"
    file.write_text(sized(sign.join(["x"] * tries(60_000))))
    ran = quickly("opt", file)
    assert ran.code in (0, 1)
    assert "internal error" not in ran.err


def in_time(*argv: str | Path) -> Iterator[bytes]:
    """What a command says on stderr, in a process of its own that is stopped when it takes long."""
    command = [sys.executable, "-m", "stagec", *map(str, argv)]
    try:
        ran = subprocess.run(command, capture_output=True, timeout=300, check=False, cwd=ROOT)
    except subprocess.TimeoutExpired:
        pytest.fail("takes longer than 300 s")
    assert ran.returncode == 1
    yield ran.stderr


@pytest.mark.long
def test_a_million_operations(tmp_path: Path) -> None:
    file = tmp_path / "million.stg"
    file.write_text("stg.module @m {\n" + "a.b()\n" * 1_000_000 + "}\n")
    for expected in in_time("opt", file):
        assert b"error: " in expected
        assert b"help: " in expected
        assert len(expected) < 100_000


# -- start-up

LAZY = """
import sys
from stagec.driver.cli import main
code = main({argv!r})
heavy = [m for m in ("sympy", "lark", "numpy", "google.protobuf", "rich") if m in sys.modules]
sys.exit(f"imported {{heavy}}" if heavy else code)
"""


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["nonsense"], []])
def test_start_up_imports_nothing_heavy(argv: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LAZY.format(argv=argv)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert "imported" not in ran.stderr
    assert ran.returncode == (0 if argv and argv[0].startswith("--") else 2), ran.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str) -> None:
    ran = stagec(command, "--help")
    assert ran.code == 0
    assert ran.out.startswith("Usage: stagec ")
    assert len(max(ran.out.splitlines(), key=len)) <= 100


@pytest.mark.parametrize(
    ("more", "how", "remedy"),
    [
        ((), "is not a multiple of 16", "choose B as a multiple of 16"),
        (("--dp", "2"), "does not divide over 16*dp = 32", "choose B as a multiple of 32"),
    ],
)
def test_a_number_of_microbatches_is_no_name_to_choose(
    more: tuple[str, ...], how: str, remedy: str
) -> None:
    ran = stagec("analyze", LLAMA, "--set", "L=2,B=8", "--microbatches", "16", *more)
    assert ran.code == 1
    assert f"B = 8 {how}\n" in ran.err
    assert f"help: {remedy}\n" in ran.err


@pytest.mark.parametrize(
    "size", ["9/(x - 2)", "9 % (x - 2)", "ceildiv(9, x - 2)", "fullest(9, 1, x - 2, 2, 2)"]
)
def test_a_size_that_divides_by_zero(size: str, tmp_path: Path) -> None:
    file = tmp_path / "zero.stg"
    step = "    %y = stg.silu(%a)\n    stg.return(%y)"
    file.write_text(sized(size).replace("    stg.return(%a)", step))
    ran = quickly("analyze", file)
    assert_reported(ran)
    assert "divides by zero, expected a whole number" in ran.err
