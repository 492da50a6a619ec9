"""SCALE-Sim's topologies: read by the rules of its reader, and summed up.

With SCALESIM=PYTHON in the environment (an interpreter that has scalesim 3.0.0) the real one runs.
"""

from __future__ import annotations

import csv
import os
import subprocess
from collections import Counter
from configparser import ConfigParser
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from stagec.formats.scale_sim import SCALE_SIM, Product, products_in
from stagec.program.kernels import Kernel
from tests.exported import Tried, made, tried, written
from tests.support import GPT, LLAMA, MIXTRAL, stagec

Row = tuple[str, Product]


def topology(path: Path) -> list[Row]:
    """The products, as SCALE-Sim reads them: the header and what is behind the last comma go."""
    _, *lines = path.read_text().splitlines()
    rows = [line.strip().split(",")[:-1] for line in lines]
    assert all(len(row) > 3 for row in rows)
    return [(row[0], Product(*map(int, row[1:4]))) for row in rows]


def counts(path: Path) -> list[dict[str, str]]:
    """The table beside."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@tried(Tried(LLAMA, "1f1b"), Tried(MIXTRAL, "ep"), Tried(GPT, "tp"))
def test_flops_are_those_of_analyze(tried_job: Tried, tmp_path: Path) -> None:
    """2 M N K of all products, as often as a rank runs them: matrix products, masks ignored."""
    job, about = made(tried_job)
    folder = written(replace(job, format=SCALE_SIM), tmp_path / "job")
    rows = topology(folder / "job.csv")
    assert len({name for name, _ in rows}) == len({p for _, p in rows}) == len(rows)
    table = counts(folder / "job.counts.csv")
    assert [r["Layer"] for r in table] == [name for name, _ in rows]
    for each in about["classes"]:
        flops = sum(
            2 * p.m * p.n * p.k * int(r[each["name"]])
            for (_, p), r in zip(rows, table, strict=True)
        )
        assert flops == sum(each["matmul_flops"].values())


def test_fused_attention_is_the_products_inside() -> None:
    """Forward two, backward five; one for each head and sequence."""
    sizes = 3, 8, 2, 16, 32, 4, 6  # batch, heads, KV heads, queries, keys, qk, v
    forward = Counter(dict(products_in(Kernel("attention", "bf16", sizes, 0, 0))))
    assert forward == {Product(16, 32, 4): 24, Product(16, 6, 32): 24}
    backward = Counter(dict(products_in(Kernel("attention_backward", "bf16", sizes, 0, 0))))
    assert backward == {
        Product(16, 32, 4): 24,
        Product(16, 32, 6): 24,
        Product(32, 6, 16): 24,
        Product(16, 4, 32): 24,
        Product(32, 4, 16): 24,
    }
    assert products_in(Kernel("memory", "", (), 5, 5)) == []


def test_merged_nodes_keep_their_products(tmp_path: Path) -> None:
    words = ("compile", LLAMA, "--tp", "2", "--set", "L=2", "--format", "scale-sim", "-o")
    done = [
        stagec(*words, tmp_path / g, "--granularity", g, "--quiet").code for g in ("op", "layer")
    ]
    assert done == [0, 0]
    actual = [
        {tuple(row.values())[1:] for row in counts(tmp_path / g / "llama3-8b.counts.csv")}
        for g in ("op", "layer")
    ]
    assert actual[0] == actual[1]


def test_the_configuration_is_whole(tmp_path: Path) -> None:
    """SCALE-Sim reads every section; options choose the array."""
    job, _ = made(Tried(LLAMA, "one"))
    given = replace(SCALE_SIM, rows=32, columns=16, dataflow="os")
    folder = written(replace(job, format=given), tmp_path / "job")
    config = ConfigParser()
    config.read(folder / "scale.cfg")
    assert config.sections() == [
        *("general", "architecture_presets", "layout", "sparsity", "run_presets")
    ]
    preset = config["architecture_presets"]
    assert (preset["ArrayHeight"], preset["ArrayWidth"], preset["Dataflow"]) == ("32", "16", "os")
    assert (folder / "layout.csv").read_text().count(",") == 2


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("rows=0", "rows=0, columns=128: expected positive numbers"),
        ("dataflow=rs", "expects ws, os, is, found 'rs'"),
        ("rows=a", "option 'rows' of format 'scale-sim' expects an integer, found 'a'"),
    ],
)
def test_arrays_are_checked(option: str, problem: str, tmp_path: Path) -> None:
    words = ("compile", LLAMA, "--set", "L=1", "--format", f"scale-sim{{{option}}}")
    done = stagec(*words, "-o", tmp_path / "j")
    assert done.code == 1
    assert problem in done.err


@pytest.mark.skipif("SCALESIM" not in os.environ, reason="SCALESIM names no interpreter")
def test_as_the_simulator_has_it(tmp_path: Path) -> None:
    """Cycles of a product in an array of R x C that keeps weights: each of ceil(K/R) ceil(N/C)
    parts takes 2R + C + M - 2; the report has the number of the last one, from 0."""
    job, _ = made(Tried(LLAMA, "tp"))
    given = replace(SCALE_SIM, rows=8, columns=4)
    folder = written(replace(job, format=given), tmp_path / "job")
    words = ["-c", "scale.cfg", "-t", "job.csv", "-l", "layout.csv", "-p", "out", "-i", "gemm"]
    run = [os.environ["SCALESIM"], "-m", "scalesim.scale", *words]
    subprocess.run(run, cwd=folder, check=True, capture_output=True)
    (report,) = (folder / "out").glob("*/COMPUTE_REPORT.csv")
    with report.open(newline="") as file:
        cycles = [int(row[2]) for row in list(csv.reader(file))[1:]]
    products = [p for _, p in topology(folder / "job.csv")]
    assert cycles == [ceil(p.k / 8) * ceil(p.n / 4) * (18 + p.m) - 1 for p in products]
