"""Parts of a model in pods of their own: all pods together compute what the step computes on one
device, under any strategies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from stagec.interp.machine import DisagreementError
from stagec.jobs.request.configurations import import_configuration
from stagec.jobs.session import Session
from stagec.support.diagnostics import DiagnosticError
from tests.oracle.test_images import SMALL
from tests.parts import assert_parts_train, pods_of, run_pods, whole_step
from tests.support import EXHAUSTIVE, LONG, STEP
from tests.towers import tower

GRADIENTS = STEP.replace("add-optimizer,", "")
#: The value that ends the part of each model.
ENDS: Mapping[str, Sequence[str]] = {
    "whisper": ["encoder=e"],
    "t5": ["encoder=e"],
    "bart": ["encoder=e"],
    "clip": ["vision=i", "text=w"],
    "qwen2_5_vl": ["tower=image"],
    "mllama": ["tower=images"],
}
#: A mesh for the parts, and the options of main.
ROWS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("dp=4", {"dp": 2, "tp": 2, "microbatches": 2}),
    ("dp=2,tp=2", {"tp": 2, "dp": 4, "sp": True, "microbatches": 2}),
    ("tp=4,sp", {"dp": 2, "zero": 3}),
    ("", {"tp": 2, "recompute": "full", "microbatches": 4}),
    ("dp=2,zero=3,recompute=full", {"dp": 2, "tp": 2, "recompute": "selective"}),
    ("dp=2,tp=2,zero=1", {"dp_replicate": 2, "dp_shard": 2, "zero": 2, "microbatches": 2}),
)


@cache
def path(name: str) -> str:
    """The file of a model."""
    folder = Path(mkdtemp())
    given = SMALL[name][0] if name in SMALL else tower(name)
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"model_type": name, **given}))
    if name not in SMALL:
        return str(file)
    text = folder / f"{name}.stg"
    text.write_text(import_configuration(str(file), Session(), images=True).text)
    return str(text)


def cases() -> list[Any]:
    """Every model with its first strategies; for `make test-all` with every other one."""
    actual: list[Any] = []
    for name in ENDS:
        for number, (part, said) in enumerate(ROWS):
            unfit = {"microbatches"} if name == "clip" else set[str]()  # its loss is of all pairs
            options = {n: v for n, v in said.items() if n not in unfit}
            if name == "clip" and (options.get("sp") or "sp" in part):
                continue
            few = number == 0 and name in ("whisper", "t5", "clip", "qwen2_5_vl")
            marks = () if few else EXHAUSTIVE
            actual.append(pytest.param(name, part, options, id=f"{name}-{number}", marks=marks))
    return actual


@LONG
@pytest.mark.parametrize(("name", "part", "options"), cases())
def test_pods_train_what_one_device_trains(
    name: str, part: str, options: Mapping[str, Any]
) -> None:
    parts = [f"{end}: {part}" for end in ENDS[name]]
    sizes = SMALL[name][1] if name in SMALL else dict[str, int]()
    assert_parts_train(path(name), parts, sizes=sizes, **options)


#: Strategies of the parts and of main with pipeline stages.
STAGED: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("dp=2", {"pp": 2, "tp": 2, "dp": 2, "microbatches": 4}),
    ("pp=2,dp=2,schedule=gpipe", {"tp": 2, "sp": True, "microbatches": 4}),
    ("dp=2", {"pp": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 2}),
    ("tp=2", {"pp": 2, "microbatches": 4, "schedule": "zb-h1"}),
    ("", {"pp": 2, "microbatches": 4, "schedule": "zbv"}),
    ("dp=2", {"pp": 2, "microbatches": 4, "schedule": "dualpipev"}),
    ("dp=2,zero=1", {"pp": 4, "microbatches": 4, "schedule": "gpipe", "dp": 2, "zero": 1}),
    ("pp=2,tp=2,schedule=gpipe", {"pp": 4, "tp": 2, "microbatches": 4}),
)


@LONG
@pytest.mark.parametrize(
    ("name", "part", "options"),
    [
        pytest.param(name, *row, id=f"{name}-{i}", marks=EXHAUSTIVE if i not in (0, 1, 5) else [])
        for name in ("whisper", "qwen2_5_vl")
        for i, row in enumerate(STAGED)
        if name == "whisper" or i != 1
    ],
)
def test_pods_with_stages_train(name: str, part: str, options: Mapping[str, Any]) -> None:
    parts = [f"{end}: {part}" for end in ENDS[name]]
    assert_parts_train(path(name), parts, **options)


_TWO_LAYERS = """
stg.module @layers {
  stg.symbols[B, D = 8, F = 8]
  stg.func @train(%x: bf16[B, D], %y: bf16[B, D], %w: bf16[D, F | W], %v: bf16[F, D | V]) -> f32[] {
    %h = stg.einsum["bd,df->bf"](%x, %w)
    %e = stg.gelu(%h)
    %z = stg.einsum["bf,fd->bd"](%e, %v)
    %q = stg.mul(%z, %y)
    %s = stg.sum["bd->"](%q)
    %loss = stg.cast[f32](%s)
    stg.return(%loss)
  }
}
"""


@pytest.mark.parametrize(
    ("encoder", "main", "back"),
    [("param", "param", True), ("frozen", "param", False), ("param", "frozen", True)],
)
def test_a_frozen_part_trains_nothing(encoder: str, main: str, back: bool, tmp_path: Path) -> None:
    """Gradients come back to a part that trains, also through one that does not."""
    text = _TWO_LAYERS.replace("| W]", f"| {encoder}]").replace("| V]", f"| {main}]")
    file = tmp_path / "layers.stg"
    file.write_text(text)
    options = {"dp": 2, "microbatches": 2}
    assert_parts_train(str(file), ["encoder=e: dp=4"], **options)
    pods, _ = pods_of(str(file), ["encoder=e: dp=4"], **options)
    sent = [op.name for op in pods["main"].walk() if op.name == "stg.hand_over"]
    assert bool(sent) == back


@LONG
def test_adapters_of_parts_train() -> None:
    options = {"dp": 2, "tp": 2, "microbatches": 2, "lora": "wq"}
    assert_parts_train(path("whisper"), ["encoder=e: dp=4"], **options)


def test_gradients_are_long_enough_to_be_clipped() -> None:
    """Else a share of the norm that does not cross would go unseen."""
    _, results = whole_step(path("whisper"), (), passes=GRADIENTS)
    grads = list(results.values())[1:]
    assert np.sqrt(sum(float((g * g).sum()) for g in grads)) > 1


def test_a_pod_that_waits_for_nothing_that_comes_is_found() -> None:
    """The harness tells a deadlock from a result: here one pod has no partner."""
    inputs, _ = whole_step(path("whisper"), ())
    pods, far = pods_of(path("whisper"), ["encoder=e"])
    with pytest.raises(DisagreementError, match="all pods wait"):
        run_pods({"main": pods["main"]}, far, inputs)


@pytest.mark.parametrize(
    ("part", "options", "message"),
    [
        ("encoder=e: microbatches=2", {}, "has 1 microbatches but 'encoder' has 2"),
        ("encoder=e: dp=3", {"dp": 2, "sizes": {"B": 12}}, "2 parts, and 3"),
        ("encoder=e: pp=2,microbatches=4", {"microbatches": 4}, "expected gpipe"),
        (
            "encoder=e",
            {"pp": 2, "microbatches": 4, "schedule": "dualpipe"},
            "would go to two stages",
        ),
        ("main=e", {}, "the part 'main' is the rest of the model"),
        ("encoder=nothing", {}, "no value '%nothing'"),
        ("encoder=r1", {}, "made inside of layers"),
        ("encoder=mel", {}, "an argument"),
        ("encoder=e: part=x=y", {}, "--part inside of a --part"),
    ],
)
def test_parts_that_do_not_fit_are_reported(
    part: str, options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(DiagnosticError) as actual:
        pods_of(path("whisper"), [part], **options)
    assert message in str(actual.value)


@pytest.mark.parametrize(
    ("name", "part", "options", "message"),
    [
        ("t5", "dp=2", {"pp": 2}, "need values of each other in forward"),
        ("t5", "pp=2,schedule=gpipe", {}, "need values of each other in forward"),
        ("mllama", "dp=2", {"pp": 2}, "waits for the gradient of each microbatch"),
    ],
)
def test_stages_that_would_wait_for_each_other_are_reported(
    name: str, part: str, options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(DiagnosticError) as actual:
        pods_of(path(name), [f"{ENDS[name][0]}: {part}"], microbatches=4, **options)
    assert message in str(actual.value)
