"""`import stagec`: every verb gives what its command prints, says what it says, and no more."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TextIO, cast

import pytest

import stagec
from stagec.answers import questions
from stagec.answers.analyze import JobAnalysis
from stagec.answers.questions import JobQuestion
from stagec.driver import cli
from stagec.jobs.request.option import CommandOption, Whole
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.machines import Machine
from stagec.output.report import Report
from stagec.searches.answer import SearchAnswer
from stagec.support.diagnostics import DiagnosticError
from tests.support import LONG
from tests.support import stagec as command

MACHINE = "h100-sxm"
SIZES = {"L": 2, "S": 256, "D": 256, "F": 512, "V": 1024, "H": 8, "G": 4, "K": 32, "B": 16}
WORDS = ("llama3-8b", "--set", ",".join(f"{n}={v}" for n, v in SIZES.items()))
DECODE = {"serve": "decode", "batch": 8, "context": 64}
DECODE_WORDS = ("--serve", "decode", "--batch", "8", "--context", "64")
PODS = {"serve": "disaggregated", "batch": 4, "prompt": 32, "prefill": "tp=2", "decode": "tp=2"}
PODS_WORDS = (
    *("--serve", "disaggregated", "--batch", "4", "--prompt", "32"),
    *("--prefill", "tp=2", "--decode", "tp=2"),
)


#: Steps of serving have sequences and a batch of their own.
SERVED = {name: size for name, size in SIZES.items() if name not in ("S", "B")}


def made(**flags: Any) -> stagec.Job:
    serves = "serve" in flags or "prompt" in flags
    return stagec.job("llama3-8b", sizes=SERVED if serves else SIZES, **flags)


def words_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """Model, sizes, and these words."""
    sizes = SERVED if {"--serve", "--prompt"} & set(words) else SIZES
    return "llama3-8b", "--set", ",".join(f"{n}={v}" for n, v in sizes.items()), *words


def printed(*words: str | Path) -> Any:
    ran = command(*words, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def plain(report: Report) -> Any:
    return json.loads(json.dumps(report.as_json()))


# -- the same as the command -----------------------------------------------------------------------


@LONG
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"tp": 2, "dp": 2, "zero": 3, "sp": True},
            ("--tp", "2", "--dp", "2", "--zero", "3", "--sp"),
        ),
        (DECODE, DECODE_WORDS),
        (PODS, PODS_WORDS),
    ],
)
def test_analysis_and_memory(flags: dict[str, Any], words: tuple[str, ...]) -> None:
    job = made(**flags)
    assert plain(job.analyze()) == printed("analyze", *words_of(tuple(words)))
    assert plain(job.memory()) == printed("memory", *words_of(tuple(words)))


@LONG
def test_an_analysis_in_symbols_and_one_of_a_machine() -> None:
    symbolic = made(tp=2).analyze(symbolic=True)
    assert plain(symbolic) == printed("analyze", *WORDS, "--tp", "2", "--symbolic")
    assert isinstance(symbolic, JobAnalysis)
    assert symbolic.ranks == "tp"
    actual = made(**DECODE).analyze(machine=MACHINE, limit="h100")
    words = (*DECODE_WORDS, "--machine", MACHINE, "--limit", "h100")
    assert plain(actual) == printed("analyze", *words_of(tuple(words)))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"pp": 2, "microbatches": 4}, ("--pp", "2", "--microbatches", "4")),
        (DECODE, DECODE_WORDS),
        (PODS, PODS_WORDS),
        (
            {**DECODE, "speculative": 2, "draft": "llama3-8b[L=1,V=1024]: tp=1"},
            (*DECODE_WORDS, "--speculative", "2", "--draft", "llama3-8b[L=1,V=1024]: tp=1"),
        ),
        ({"pad_vocab": 1000}, ("--pad-vocab", "1000")),
        ({**DECODE, "pad_widths": 384}, (*DECODE_WORDS, "--pad-widths", "384")),
    ],
)
def test_time(flags: dict[str, Any], words: tuple[str, ...]) -> None:
    actual = made(**flags).time(MACHINE)
    expected = printed("time", *words_of(words), "--machine", MACHINE, "--no-levers")
    assert plain(actual) == expected


def test_serve() -> None:
    actual = made(tp=2, prompt=64).serve(MACHINE, output_tokens=16, batches=[4, 1], tpot=0.01)
    words = ("--tp", "2", "--prompt", "64", "--output-tokens", "16", "--batches", "1,4")
    limits = ("--machine", MACHINE, "--tpot", "10ms")
    assert plain(actual) == printed("serve", *words_of(words), *limits)
    assert actual.best is not None
    assert [row["batch"] for row in actual.rows()] == [1, 4]


def test_sweep() -> None:
    over = {"tp": [1, 2], "S": "128..256", "machine.memory.bandwidth": ["x1", "x2"]}
    actual = stagec.sweep("llama3-8b", over, sizes=SIZES, dp=2, machine=MACHINE, jobs=1)
    words = "--dp 2 --sweep tp=1,2 --sweep S=128..256 --sweep machine.memory.bandwidth=x1,x2"
    assert plain(actual) == printed("time", *WORDS, *shlex.split(words), "--machine", MACHINE)
    assert len(actual.rows()) == 8
    for row in actual.rows():
        parts = row["time"]["breakdown"]
        assert sum(parts.values()) == pytest.approx(row["time"]["step_seconds"])
    header, *lines = actual.as_csv().splitlines()
    assert len(lines) == 8
    assert {"launch_gaps_seconds", "step_seconds"} <= set(header.split(","))


def searched(model: str, **flags: Any) -> SearchAnswer:
    answer: SearchAnswer = cast("Any", stagec.search)(model, **flags)
    return answer


@pytest.mark.long
def test_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    how: dict[str, Any] = {
        "ranks": 4,
        "pp": 1,
        "cp": 1,
        "zero": [0, 1],
        "tp": "1..2",
        "jobs": 1,
        "cache": False,
        "levers": False,
    }
    actual = searched("llama3-8b", machine=MACHINE, sizes=SIZES, **how)
    words = "--ranks 4 --pp 1 --cp 1 --zero 0,1 --tp 1..2 --jobs 1 --no-cache --no-levers"
    expected = printed("search", *WORDS, *shlex.split(words), "--machine", MACHINE)
    best = plain(actual)["best"]
    assert best == expected["best"]
    assert actual.best[0].step_seconds == best[0]["step_seconds"]
    assert actual.best[0].command.startswith("stagec compile llama3-8b")
    assert actual.proven


class _Size(Report):
    """How many ranks a job has, times a number: a question that a test asks."""

    def __init__(self, ranks: int, machine: str) -> None:
        self._data = {"model": "of a test", "ranks": ranks, "machine": machine}

    def as_json(self) -> Any:
        return self._data

    def print(self, stream: TextIO) -> None:
        stream.write(f"{self._data['ranks']} ranks\n")


def _size(
    options: JobOptions, machine: Machine | None, given: Mapping[str, Any], session: Session
) -> _Size:
    """Tell how many ranks a job has.

    They are counted several times.
    """
    session.remark("counted")
    return _Size(options.tp * given["times"], questions.needed(machine).name)


QUESTION = JobQuestion(
    "size", _size, (CommandOption("times", Whole(1), "How often.", 1),), "The machine."
)


def test_a_question_is_a_command_and_a_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record and a line in a table give `stagec size` and `job.ask("size")`, with options, help,
    `--json`, `-o` and `--html`; what is wrong is reported in both."""
    line = "Tell how many ranks a job has."
    monkeypatch.setitem(cast("Any", questions.QUESTIONS), "size", (__name__, line))
    monkeypatch.setitem(cast("Any", cli.COMMANDS), "size", (__name__, line))
    job = ("size", "llama3-8b", "--tp", "2")
    answer = made(tp=2).ask("size", MACHINE, times=3)
    assert plain(answer) == printed(*job, "--times", "3", "--machine", MACHINE)
    assert plain(answer)["ranks"] == 6
    page = tmp_path / "page.html"
    ran = command(*job, "--machine", MACHINE, "--html", page)
    assert (ran.code, ran.out, ran.err) == (0, "2 ranks\n", "remark: counted\n")
    assert "2 ranks" in page.read_text(encoding="utf-8")
    help_ = command("size", "--help").out
    assert "They are counted several times." in help_
    assert "How often." in help_
    assert command(*job, "--times", "0", "--machine", MACHINE).code == 2
    ran = command(*job)
    assert ran.code == 1
    assert "no machine is given" in ran.err
    with pytest.raises(DiagnosticError, match="times: 0 is not in the range"):
        made(tp=2).ask("size", MACHINE, times=0)
    with pytest.raises(DiagnosticError, match="unknown question 'sizes'"):
        made(tp=2).ask("sizes")


@pytest.mark.long
def test_search_of_several_pods() -> None:
    how: dict[str, Any] = {"ranks": 2, "tp": "1..2", "pp": 1, "jobs": 1, "cache": False}
    how["levers"] = False
    drafts: dict[str, Any] = {**DECODE, "speculative": 2, "draft": "llama3-8b[L=1,V=1024]: tp=1"}
    actual = searched("llama3-8b", machine=MACHINE, sizes=SERVED, **how, **drafts)
    words = "--ranks 2 --tp 1..2 --pp 1 --jobs 1 --no-cache --no-levers --speculative 2"
    pods = ("--draft", "llama3-8b[L=1,V=1024]: tp=1", "--machine", MACHINE)
    expected = printed("search", *words_of((*DECODE_WORDS, *shlex.split(words), *pods)))
    assert plain(actual)["best"] == expected["best"]
    trained: dict[str, Any] = {
        "sizes": {"B": 8, "L": 1, "L_dec": 1},
        "zero": 0,
        "cp": 1,
        "recompute": "none",
    }
    how |= {**trained, "microbatch_size": 4, "part": ["encoder=e: dp=2"]}
    actual = searched("whisper-large-v3", machine=MACHINE, **how)
    words = (
        "--ranks 2 --tp 1..2 --pp 1 --zero 0 --cp 1 --recompute none --microbatch-size 4 "
        "--jobs 1 --no-cache --no-levers"
    )
    how_words = ("--part", "encoder=e: dp=2", "--machine", MACHINE)
    sizes = ("whisper-large-v3", "--set", "B=8,L=1,L_dec=1")
    expected = printed("search", *sizes, *shlex.split(words), *how_words)
    assert plain(actual)["best"] == expected["best"]
    assert "--part 'encoder=e: dp=2'" in actual.best[0].command


def test_compile_and_check(tmp_path: Path) -> None:
    written = made(tp=2).compile(tmp_path / "one", names="short")
    ran = command(
        "compile", *WORDS, "--tp", "2", "-o", tmp_path / "two", "--names", "short", "--quiet"
    )
    assert ran.code == 0
    assert sorted(written.files) == sorted(p.name for p in (tmp_path / "two").iterdir())
    for trace in (tmp_path / "one").glob("*.et"):
        assert trace.read_bytes() == (tmp_path / "two" / trace.name).read_bytes()
    checked = stagec.check_traces(tmp_path / "one")
    assert checked.ok
    assert checked.errors == []
    assert checked.as_json() == json.loads(command("check", tmp_path / "one", "--json").out)


def test_a_compile_without_a_folder_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert made(tp=2).compile().files == []
    assert list(tmp_path.iterdir()) == []


@LONG
def test_strategies_and_dumps(tmp_path: Path) -> None:
    job = made(tp=2, dp=2)
    words = (*WORDS, "--tp", "2", "--dp", "2")
    assert job.print_strategy() == command("analyze", *words, "--print-strategy").out
    assert command("analyze", *words, "--dump-dir", tmp_path / "dumps").code == 0
    files = {path.stem: path.read_text() for path in (tmp_path / "dumps").iterdir()}
    assert job.dumps() == files
    pods = ("--serve", "disaggregated", "--batch", "8", "--prompt", "16", "--set", "L=2")
    assert command("analyze", "llama3-8b", *pods, "--dump-dir", tmp_path / "pods").code == 0
    dumps = [*(tmp_path / "pods").glob("*/*.stg")]
    texts = {f"{path.parent.name}/{path.stem}": path.read_text() for path in dumps}
    served = stagec.job("llama3-8b", serve="disaggregated", batch=8, prompt=16, sizes={"L": 2})
    assert served.dumps() == texts
    assert {name.partition("/")[0] for name in texts} == {"prefill", "decode"}


def test_a_configuration_and_a_machine() -> None:
    import stagec.models

    config = Path(stagec.models.__file__).parent / "configs" / "gpt2.json"
    assert stagec.import_config(config) == command("import", config).out
    assert stagec.machine("h100").name == MACHINE
    used = stagec.machine("gb200", used_ranks={"nvlink": 64})
    assert used != stagec.machine("gb200")


# -- pages -----------------------------------------------------------------------------------------


def drawn(tmp_path: Path, *words: str, code: int = 0) -> str:
    """The page that a command writes."""
    page = tmp_path / "page.html"
    ran = command(*words, "--html", page)
    assert ran.code == code, ran.err
    return page.read_text("utf-8")


@LONG
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"pp": 2, "microbatches": 4}, ("--pp", "2", "--microbatches", "4")),
        (DECODE, DECODE_WORDS),
        (PODS, PODS_WORDS),
    ],
)
def test_pages_of_a_job(flags: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    job = made(**flags)
    on = "--machine", MACHINE, "--no-levers"
    assert job.analyze().page() == drawn(tmp_path, "analyze", *words_of(words))
    assert job.memory().page() == drawn(tmp_path, "memory", *words_of(words))
    assert job.time(MACHINE).page() == drawn(tmp_path, "time", *words_of(words), *on)


@LONG
def test_a_page_has_the_limit_and_the_levers(tmp_path: Path) -> None:
    job = made(tp=2)
    words = *WORDS, "--tp", "2"
    limited = drawn(tmp_path, "memory", *words, "--limit", "1MiB", code=1)
    assert job.memory(limit="1MiB").page() == limited != job.memory().page()
    on = "--machine", MACHINE, "--no-overlap", "--levers"
    expected = job.time(MACHINE, overlap=False, levers=True).page()
    assert expected == drawn(tmp_path, "time", *words, *on)


@LONG
def test_pages_of_many_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    served = made(tp=2, prompt=64).serve(MACHINE, output_tokens=16, batches=[1, 4])
    words = "serve", *words_of(("--tp", "2", "--prompt", "64", "--output-tokens", "16"))
    assert served.page() == drawn(tmp_path, *words, "--batches", "1,4", "--machine", MACHINE)
    assert served.plot().startswith("<svg")
    swept = made(dp=2).sweep({"tp": [1, 2, 3]}, machine=MACHINE, jobs=1)
    words = "time", *WORDS, "--dp", "2", "--sweep", "tp=1,2,3", "--machine", MACHINE
    assert swept.page() == drawn(tmp_path, *words)
    points = re.findall(r"<title>(.*?)</title>", swept.plot(), re.DOTALL)
    assert all(point in swept.page() for point in points)
    how: dict[str, Any] = {"ranks": 2, "pp": 1, "cp": 1, "zero": 1, "jobs": 1, "cache": False}
    actual = searched("llama3-8b", machine=MACHINE, sizes=SIZES, **how)
    words = "search", *WORDS, *shlex.split("--ranks 2 --pp 1 --cp 1 --zero 1 --jobs 1 --no-cache")
    assert actual.page() == drawn(tmp_path, *words, "--machine", MACHINE)


def test_sweeps_without_a_job_have_a_page_with_the_reasons(tmp_path: Path) -> None:
    page = drawn(tmp_path, "analyze", *WORDS, "--sweep", "tp=3", code=1)
    assert "not divide over tp = 3" in page
    assert "<figure" not in page


@pytest.mark.parametrize("flags", [{"tp": 2}, PODS])
def test_other_answers_have_a_page_with_their_rows(flags: dict[str, Any], tmp_path: Path) -> None:
    job = made(**flags)
    written = job.compile(tmp_path / "traces")
    answers: list[Report] = [written, stagec.check_traces(tmp_path / "traces")]
    for answer in answers:
        page = answer.page()
        assert f"<title>{answer.title}</title>" in page
        assert "://" not in page
        assert escape(str(answer)) in page
        names = {f">{name}</th>" for row in answer.rows() for name in row if row[name] == 1}
        assert all(name in page for name in names)
        with pytest.raises(stagec.DiagnosticError, match="has no plot"):
            answer.plot()


# -- what is shown ---------------------------------------------------------------------------------


@LONG
def test_texts_are_those_of_commands() -> None:
    job = made(tp=2)
    assert str(job.analyze()) == command("analyze", *WORDS, "--tp", "2").out
    assert str(job.memory()) == command("memory", *WORDS, "--tp", "2").out


def test_rows_have_the_same_keys() -> None:
    job = made(pp=2, microbatches=4)
    for report in (job.analyze(), job.memory(), job.time(MACHINE)):
        assert len(report.rows()) == 2


def test_without_pandas_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(stagec.DiagnosticError, match="pandas is not installed"):
        made(tp=2).analyze().to_pandas()


@LONG
def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    job = made(tp=2, fusion="elementwise")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.analyze()
        job.memory(limit="1MiB")
        job.time("mi300x")
        job.compile()
        stagec.sweep("llama3-8b", {"tp": [1, 3]}, sizes=SIZES, jobs=1)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_warnings_are_those_of_python() -> None:
    with pytest.warns(UserWarning, match="--sp has no effect without --tp") as expected:
        made(sp=True).analyze()
    assert expected[0].filename == __file__


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message", "remedy"),
    [
        ({"tpp": 2}, "no flag 'tpp'", "tp"),
        ({"tp": "many"}, "tp: 'many' is not a valid integer", "command line"),
        ({"tp": True}, "tp: expects an integer, found True", "command line"),
        ({"print_strategy": True}, "no flag 'print_strategy'", "dashes"),
        ({"zero": 7}, "zero: 7 is not in the range", "command line"),
    ],
)
def test_flags_that_are_none(flags: dict[str, Any], message: str, remedy: str) -> None:
    with pytest.raises(stagec.DiagnosticError) as expected:
        made(**flags)
    assert message in str(expected.value)
    assert remedy in "".join(expected.value.__notes__)


def test_an_error_has_the_line_and_the_remedy(tmp_path: Path) -> None:
    model = tmp_path / "model.stg"
    model.write_text("stg.module @m {\n  stg.nothing\n}\n")
    with pytest.raises(stagec.DiagnosticError) as expected:
        stagec.job(model).analyze()
    (note,) = expected.value.__notes__
    assert f"{model}:2:3: error" in note
    assert "^^^" in note


def test_a_command_is_quoted_for_a_shell() -> None:
    job = made(**DECODE, speculative=2, draft="llama3-8b[L=1]: tp=1")
    assert "--draft 'llama3-8b[L=1]: tp=1'" in job.command


@pytest.mark.parametrize("flag", ["output", "html", "as_csv", "print_space"])
def test_a_search_does_not_write(flag: str) -> None:
    given: dict[str, Any] = {flag: "file"}
    with pytest.raises(stagec.DiagnosticError, match=f"no flag '{flag}'"):
        stagec.search("llama3-8b", ranks=2, machine=MACHINE, **given)


def test_a_machine_that_is_not_there() -> None:
    for call in (made().time, stagec.machine, made(prompt=8).serve):
        with pytest.raises(stagec.DiagnosticError) as expected:
            call("nowhere.toml")
        assert "nowhere.toml" in str(expected.value)
        with pytest.raises(stagec.DiagnosticError) as expected:
            call("h100-smx")
        assert "h100-sxm" in "".join(expected.value.__notes__)


def test_an_interrupt_before_an_answer_is_one(capfd: pytest.CaptureFixture[str]) -> None:
    def stop(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stagec.search(
            "llama3-8b", ranks=2, machine=MACHINE, sizes=SIZES, jobs=1, cache=False, progress=stop
        )
    assert capfd.readouterr().err == ""


def test_sizes_that_do_not_divide_and_files_that_are_not_there() -> None:
    with pytest.raises(stagec.DiagnosticError):
        made(tp=3).analyze()
    with pytest.raises(stagec.DiagnosticError, match="nowhere"):
        stagec.job("nowhere.stg").analyze()
    with pytest.raises(stagec.DiagnosticError, match="expects a size"):
        made().memory(limit="-1")
    with pytest.raises(stagec.DiagnosticError, match="--output and --archive"):
        made().compile("folder", archive="file")


# -- jobs ------------------------------------------------------------------------------------------


def test_a_job_with_other_flags_keeps_the_rest() -> None:
    job = made(tp=2)
    other = job.with_(dp=2, sizes={"S": 128})
    assert other.command == made(tp=2, dp=2).with_(sizes={"S": 128}).command
    assert (
        other.analyze().as_json()
        == stagec.job("llama3-8b", tp=2, dp=2, sizes={**SIZES, "S": 128}).analyze().as_json()
    )
    assert job.analyze().as_json()["ranks"] == 2


def test_jobs_with_the_same_options_are_equal() -> None:
    job = made(tp=2, dp=2)
    assert {job, made(tp=2).with_(dp=2), made(tp=2)} == {job, made(tp=2)}
    assert job != job.command


@pytest.mark.parametrize("ask", [stagec.job, partial(stagec.sweep, over={}), stagec.search])
def test_a_model_is_a_name_or_a_file(ask: Any) -> None:
    with pytest.raises(stagec.DiagnosticError, match="model: expects a name or a file"):
        ask(made())


def test_errors_of_answers_have_remedies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for ask in (made().analyze().to_pandas, made().analyze().plot):
        with pytest.raises(stagec.DiagnosticError) as expected:
            ask()
        assert "\n  help: " in "".join(expected.value.__notes__)


def test_two_threads_do_not_mix() -> None:
    def of(tp: int) -> list[str]:
        with pytest.raises(stagec.DiagnosticError) as expected:
            made(tp=tp).analyze()
        return list(expected.value.__notes__)

    degrees = [3, 5, 7, 6] * 2
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(of, degrees))
    assert actual == [of(tp) for tp in degrees]


def test_importing_it_imports_next_to_nothing() -> None:
    code = "import stagec, sys; print([n for n in ('sympy', 'click', 'numpy') if n in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_other_names_are_no_attributes() -> None:
    name = "simulate"
    assert name not in dir(stagec)
    assert {"job", "search", "DiagnosticError"} <= set(dir(stagec))
    with pytest.raises(AttributeError, match="no attribute 'simulate'"):
        getattr(stagec, name)


SERVER: dict[str, Any] = {"sizes": SERVED, "prompt": 64}


@pytest.mark.parametrize(
    ("verb", "given", "flags", "says"),
    [
        ("time", [None], {}, "machine: expects a name"),
        ("analyze", [], {"machine": 3}, "machine: expects a name"),
        ("memory", [], {"fit": "bogus"}, "fit: 'bogus' is not one of"),
        ("memory", [], {"limit": b"8"}, "limit: expects a text or a number"),
        ("serve", [MACHINE], {"batches": -2}, "batches: expects batches"),
        ("serve", [MACHINE], {"output_tokens": 0}, "output_tokens: 0 is not in the range"),
        ("time", [MACHINE], {"accepted": "x"}, "accepted: 'x' is not a valid float"),
        ("sweep", [["tp"]], {}, "over: expected a dictionary"),
        ("sweep", [{"tp": [1]}], {"jobs": "x"}, "jobs: 'x' is not a valid integer"),
        ("compile", [], {"machine": stagec.machine(MACHINE)}, "machine: 'compile' takes"),
        ("time", [MACHINE], {"kernels_from": "nowhere"}, "kernels_from: 'nowhere' is not one of"),
        ("serve", [MACHINE], {"ttft": "soon"}, "ttft: expects a time such as 30ms or 0.5s"),
        ("sweep", [{"tp": [b"1"]}], {}, "expects a text or a number"),
        ("time", [MACHINE], {"overlap": "no way"}, "overlap: 'no way' is not a valid boolean"),
        ("time", [MACHINE], {"progress": 3}, "progress: expects a function"),
        ("analyze", [], {"symbolic": []}, "symbolic: expects True or False"),
        ("ask", [list[str]()], {}, "unknown question '[]'"),
        ("sweep", [{"tp": [1]}], {"sort": True}, "sort: expects a text, found True"),
        ("sweep", [{"tp": [1]}], {"plot": b"x"}, "plot: expects a text or a number"),
        ("with_", [], {"sizes": []}, "sizes: expects a dictionary"),
        ("with_", [], {"tp": b"8"}, "tp: expects a text or a number"),
        ("with_", [], {"sp": "maybe"}, "sp: 'maybe' is not a valid boolean"),
        ("serve", [MACHINE], {"ttft": float("nan")}, "ttft: nan is not in the range"),
        ("time", [MACHINE], {"accepted": float("nan")}, "accepted: nan is not in the range"),
    ],
)
def test_wrong_values_are_errors_with_a_remedy(
    verb: str, given: list[Any], flags: dict[str, Any], says: str
) -> None:
    job = stagec.job("llama3-8b", tp=2, **SERVER)
    with pytest.raises(stagec.DiagnosticError) as problem:
        getattr(job, verb)(*given, **flags)
    assert says in problem.value.diagnostics[0].message
    assert problem.value.diagnostics[0].remedy


def test_wrong_names_and_ranks_are_errors_with_a_remedy() -> None:
    ranks: Any = "nvlink"
    with pytest.raises(stagec.DiagnosticError, match="expects LEVEL=N"):
        stagec.machine(MACHINE, ranks)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x\0y", "contains a NUL character"),
        ("a\ud800b", "contains a character that is not text"),
        ("x" * 5000, "File name too long"),
    ],
)
def test_names_that_no_file_has_are_errors_with_a_remedy(name: str, says: str) -> None:
    for call in (
        lambda: stagec.job(name).analyze(),
        lambda: stagec.job("llama3-8b", name).analyze(),
        lambda: stagec.import_config(name),
        lambda: made().time(MACHINE, measured=name),
        lambda: made().compile(name),
        lambda: made().compile(archive=name),
    ):
        with pytest.raises(stagec.DiagnosticError, match=says) as problem:
            call()
        assert "help:" in "".join(problem.value.__notes__)


def test_an_empty_name_is_not_a_name() -> None:
    """As where a variable of a shell is not set."""
    with pytest.raises(stagec.DiagnosticError, match="no stack ''"):
        stagec.job("llama3-8b", stack="").analyze()
    with pytest.raises(stagec.DiagnosticError, match="the name of a file is empty"):
        stagec.job("llama3-8b", "").analyze()


def test_arrays_are_lists_and_arrays_without_axes_are_numbers() -> None:
    numpy: Any = pytest.importorskip("numpy")
    array = numpy.array
    assert made(tp=array(2)).command == made(tp=2).command
    table = made().sweep({"tp": array([1, 2]), "S": array(128)}, jobs=1)
    assert table == made().sweep({"tp": [1, 2], "S": 128}, jobs=1)
    served = made(prompt=64).serve(MACHINE, batches=array(4), output_tokens=2)
    assert [point["batch"] for point in served.rows()] == [4]


def test_a_key_to_ignore_may_be_one_text(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama", "funny_key": 1}')
    assert stagec.import_config(file, ignore="funny_key")
    with pytest.raises(stagec.DiagnosticError, match="funny_key"):
        stagec.import_config(file, ignore="a_funny_key_more")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "expected a dictionary of figures"),
        ({1: 2}, "no figure '1'"),
        ({"memory.bandwidth": None}, "'memory.bandwidth' cannot be None"),
        ({"memory.bandwidth": True}, "'memory.bandwidth' cannot be True"),
    ],
)
def test_wrong_figures_of_a_machine_are_errors(given: Any, says: str) -> None:
    with pytest.raises(stagec.DiagnosticError, match=says) as problem:
        stagec.machine(MACHINE).changed(given)
    assert "help:" in problem.value.__notes__[0]


def test_switches_take_what_the_command_line_takes() -> None:
    """What is off by default is turned off by a value: a stack may have it on."""
    assert stagec.job("llama3-8b", tp=8, sp=False).command == "llama3-8b --tp 8 --sp off"
    words = stagec.job("llama3-8b", tp=8, sp=True, async_tp=False).command
    assert words == "llama3-8b --tp 8 --sp --no-async-tp"
    off: Any = {"async_tp": "off", "sp": "on"}
    assert stagec.job("llama3-8b", tp=8, **off).command == words


def test_a_job_takes_a_preset_with_its_step() -> None:
    given = stagec.job().with_(preset="llama3-405b-decode")
    assert given.command == stagec.job(preset="llama3-405b-decode").command


@LONG
def test_a_search_without_a_batch_has_a_sequence_for_each_rank() -> None:
    how: dict[str, Any] = {"tp": [1, 2], "pp": 1, "zero": 1, "recompute": "none", "jobs": 1}
    how["levers"] = False
    one = searched("llama3-8b", ranks=2, machine=MACHINE, sizes={"L": 1, "S": 512}, **how)
    sizes = {"L": 1, "S": 512, "B": 2}
    other = searched("llama3-8b", ranks=2, machine=MACHINE, sizes=sizes, **how)
    assert one.best[0].step_seconds == other.best[0].step_seconds


def test_an_error_of_a_pod_shows_the_line_of_that_pod() -> None:
    given: dict[str, Any] = {"serve": "disaggregated", "batch": 8, "prompt": 64}
    job = stagec.job("llama3-8b", prefill="tp=3", decode="tp=4,dp=2", **given)
    with pytest.raises(stagec.DiagnosticError) as problem:
        job.analyze()
    (note, *_) = problem.value.__notes__
    assert "<strategy of the pod 'prefill'>:2:3" in note
    assert "stg.split[(H, G, F, V), over = tp]" in note


def test_the_machine_of_a_job_file_is_for_those_who_ask_for_one(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(stagec.job("llama3-8b", tp=2, sizes=SIZES).print_job(Path("h100-sxm")))
    assert command("analyze", file).code == 0


def test_a_search_shows_lines_of_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{\n  "model_type": "llama",\n  "funny_key": 1\n}\n')
    ran = command("search", file, "--ranks", "8", "--machine", "h100-sxm", "--batch", "8")
    assert ran.code == 1
    assert '  "model_type"' in ran.err or '"funny_key": 1' in ran.err


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda: made(tp=2).analyze(), "<stagec JobAnalysis: llama3-8b>"),
        (lambda: made(tp=2).time(MACHINE), "<stagec StepAnswer: llama3-8b on h100-sxm>"),
        (lambda: stagec.machine("h100"), "<stagec machine: h100-sxm, NVIDIA H100 SXM 80 GB>"),
    ],
)
def test_a_prompt_shows_an_answer_in_a_line(value: Any, expected: str) -> None:
    assert repr(value()) == expected
