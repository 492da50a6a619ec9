"""Jobs as TOML files: what is printed reads back as the same job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stagec
import stagec.models
from tests.support import stagec as command

SIZES = "L=2,S=256,D=256,F=512,V=1024,H=8,G=4,K=32,B=16"
JOBS = {
    "flags": f"llama3-8b --set {SIZES} --tp 2 --dp 2 --sp --zero 3 --recompute full",
    "mesh": f"llama3-8b --set {SIZES} --mesh dp=2,tp=2 --no-async-tp",
    "pipeline": f"llama3-8b --set {SIZES} --pp 2 --microbatches 4 --stage-layers 1*2",
    "loads": "mixtral-8x7b --set L=2,S=256,B=8 --ep 2 --dp 2 --expert-load [3,1,1,1,1,1,1,1]",
    "decode": "llama3-8b --set L=2 --serve decode --batch 8 --context 64 --kv-dtype fp8",
    "draft": "llama3-8b --set L=2 --serve decode --batch 8 --context 64 --speculative 2 "
    "--draft llama3-8b[L=1]:tp=1",
    "shared": "llama3-8b --set L=2 --serve decode --batch 8 --context 64 --speculative 2 --tp 2 "
    "--draft llama3-8b[L=1]:tp=1,on=model",
    "parts": "whisper-large-v3 --set B=8,L=1,L_dec=1 --dp 2 --part encoder=e:dp=1",
    "preset": "--preset llama3-405b-decode",
    "capacity": "mixtral-8x7b --set L=1,S=64,B=4 --capacity-factor 5/4 --dp 2 --ep 2",
}


def analyzed(*words: object) -> object:
    ran = command("analyze", *map(str, words), "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


@pytest.mark.parametrize("name", JOBS)
def test_a_printed_job_reads_back_as_the_same(name: str, tmp_path: Path) -> None:
    words = JOBS[name].split()
    text = command("analyze", *words, "--print-job")
    assert text.code == 0, text.err
    file = tmp_path / "job.toml"
    file.write_text(text.out)
    assert analyzed(file) == analyzed(*words)
    assert command("analyze", file, "--print-job").out == text.out


def test_what_is_given_beside_it_wins(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('model = "llama3-8b"\n[sizes]\nL = 2\nS = 256\n[strategy]\ntp = 2\ndp = 2\n')
    assert analyzed(file, "--tp", "4", "--set", "S=128") == analyzed(
        *["llama3-8b", "--set", "L=2,S=128", "--tp", "4", "--dp", "2"]
    )


def test_the_machine_of_a_job_is_that_of_commands(tmp_path: Path) -> None:
    words = ("llama3-8b", "--set", SIZES, "--tp", "2")
    about = ("--machine", "gb200", "--used-ranks", "nvlink=36")
    file = tmp_path / "job.toml"
    file.write_text(command("time", *words, *about, "--print-job").out)
    assert 'name = "gb200"' in file.read_text()
    assert command("time", file, "--json").out == command("time", *words, *about, "--json").out
    other = command("time", file, "--machine", "h100-sxm", "--json")
    assert json.loads(other.out)["machine"] == "h100-sxm"


def test_files_are_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    strategy = command("analyze", "llama3-8b", "--tp", "2", "--print-strategy").out
    (tmp_path / "here" / "two.stg").write_text(strategy)
    file = tmp_path / "here" / "job.toml"
    file.write_text('model = "llama3-8b"\nstrategy_file = "two.stg"\n')
    monkeypatch.chdir(tmp_path)
    assert analyzed("here/job.toml") == analyzed("llama3-8b", "here/two.stg")


def test_a_strategy_file_with_flags_beside_it_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    strategy = command("analyze", "llama3-8b", "--tp", "2", "--print-strategy").out
    Path("two.stg").write_text(strategy)
    words = ("llama3-8b", "two.stg", "--tp", "4", "--set", "L=2")
    Path("job.toml").write_text(command("analyze", *words, "--print-job").out)
    assert analyzed("job.toml") == analyzed(*words)


def test_the_folder_of_a_configuration_is_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = Path(stagec.models.__file__).parent / "configs" / "gpt2.json"
    (tmp_path / "there" / "gpt").mkdir(parents=True)
    (tmp_path / "there" / "gpt" / "config.json").write_text(configuration.read_text())
    (tmp_path / "there" / "job.toml").write_text('model = "gpt"\n')
    monkeypatch.chdir(tmp_path)
    assert analyzed("there/job.toml") == analyzed("there/gpt")


def test_python_takes_and_gives_them(tmp_path: Path) -> None:
    job = stagec.job("llama3-8b", tp=2, sizes={"L": 2, "S": 256})
    file = tmp_path / "job.toml"
    file.write_text(job.print_job("h100-sxm"))
    again = stagec.job(file)
    assert again.analyze().as_json() == job.analyze().as_json()
    assert again.print_job("h100-sxm") == file.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = ", "job.toml:1:9: error: not TOML: Invalid value"),
        ("[[[[", "job.toml:1:3: error: not TOML"),
        ('model = """\n\n', "job.toml:3:1: error: not TOML: Unterminated string"),
        ('model = "llama3-8b"\n[strategy]\ntpp = 2\n', "job.toml:3:1: error: unknown key 'tpp'"),
        ('model = "llama3-8b"\n[strategy]\ntpp = 2\n', "did you mean 'tp'"),
        (
            'model = "llama3-8b"\n[strategy]\ndp = 2\nfsdp-prefetch = "x"\n',
            "job.toml:4:1: error: fsdp_prefetch: 'x' is not a valid integer",
        ),
        ("colour = 1\n", "job.toml:1:1: error: unknown key 'colour' in a job"),
        ("[colours]\nred = 1\n", "unknown key 'colours' in a job"),
        ("[strategi]\ntp = 1\n", "did you mean 'strategy'?"),
        ("tp = 1\n", "write it in [strategy]"),
        ("[strategy]\nnum_gpus = 8\n", "here it is --ranks N"),
        ('model = "llama3-8b"\n[strategy]\ntp = "many"\n', "tp: 'many' is not a valid integer"),
        ('model = "llama3-8b"\nmachine = 3\n', "expected a table with name and used_ranks"),
        (
            'model = "llama3-8b"\n[machine]\nname = "h100"\nprice = 2\n',
            "job.toml:4:1: error: unknown key 'price' in [machine]",
        ),
        ('model = "llama3-8b"\n[sizes]\nL = -1\n', "error"),
        ('model = "llama3-8b"\n[passes]\nplugin = 3\n', "error"),
        ("model = [1]\n", "error"),
        ("", "job.toml:1:1: error: no model is given"),
        ("[strategy]\ntp = 2\n", "job.toml:1:1: error: no model is given"),
        ('stack = "megatron-core"\nmodel = "llama3-8c"\n', "job.toml:2:1: error: no model 'llama3"),
        ("# text\n" * 160_000, "help: leave out what is no option"),
    ],
)
def test_a_wrong_file_is_said(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    ran = command("analyze", file)
    assert ran.code == 1
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_a_file_that_is_not_there() -> None:
    ran = command("analyze", "nowhere.toml")
    assert ran.code == 1
    assert "nowhere.toml" in ran.err
