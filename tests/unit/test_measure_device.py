"""The tool that times a device: its steps are jobs of stagec with as many parameters, and, where
PyTorch is installed, it runs and writes a table that is read."""

from __future__ import annotations

import csv
import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagec.time.measured.kernel_tables import read_measured
from tests.support import stagec
from tools.device_steps import Step, Trainer, parameters, steps

ROOT = Path(__file__).resolve().parents[2]
QUICK = steps(quick=True, fp8=True)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize(
    "step",
    [
        *QUICK,
        *(pytest.param(s, marks=pytest.mark.exhaustive) for s in steps(quick=False, fp8=True)),
    ],
    ids=str,
)
def test_a_step_is_a_job_with_as_many_parameters(step: Step) -> None:
    actual = stagec("analyze", step.model, "--set", step.size_text, *step.flags.split(), "--json")
    assert actual.code == 0, actual.err
    assert json.loads(actual.out)["parameters"] == parameters(step)


def test_the_tool_writes_a_table_that_is_read(torch: Any, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "tools.measure_device", "--device", "cpu", "--quick")
    subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, check=True)
    kinds = {(t.kind, t.op) for t in read_measured(tmp_path / "kernels.csv")}
    for kind in ("matmul", "attention", "attention_backward", "memory"):
        assert (kind, "") in kinds
    assert {"rmsnorm", "rmsnorm_grad", "softmax"} <= {op for _, op in kinds}
    lines = (tmp_path / "steps.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [(r["model"], r["flags"]) for r in rows] == [(s.model, s.flags) for s in QUICK]
    assert [int(r["parameters"]) for r in rows] == [parameters(s) for s in QUICK]
    assert all(float(r["seconds"]) > 0 for r in rows)


@pytest.mark.parametrize("step", [QUICK[0], QUICK[-2]], ids=str)
def test_recompute_changes_nothing_and_training_learns(torch: Any, step: Step) -> None:
    losses = [
        [float(trainer.run()) for _ in range(8)]
        for trainer in (Trainer(step, "cpu"), Trainer(replace(step, recompute=True), "cpu"))
    ]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_eight_bit_products_give_nearly_the_same_gradients(torch: Any) -> None:
    (step,) = [s for s in QUICK if s.fp8]
    product = importlib.import_module("tools.device_steps").fp8_product(torch)
    torch.manual_seed(3)
    x, w = torch.randn(64, 32), torch.randn(48, 32)
    dy = torch.randn(64, 48).bfloat16()
    exact = (x @ w.t(), dy.float() @ w, dy.float().t() @ x)
    x, w = (t.bfloat16().requires_grad_() for t in (x, w))
    y = product.apply(x, w)
    actual = (y, *torch.autograd.grad(y, (x, w), dy))
    for one, other in zip(actual, exact, strict=True):
        assert float((one.float() - other).norm() / other.norm()) < 0.1
    assert float(Trainer(step, "cpu").run()) == pytest.approx(
        float(Trainer(replace(step, fp8=False), "cpu").run()), rel=0.01
    )
