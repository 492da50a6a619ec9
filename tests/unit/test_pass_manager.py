"""The pass manager and its instruments: order, phases, hooks, dumps, timing, reproducers."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from stagec.ir.module import Module
from stagec.ir.verified import VerifiedCache
from stagec.ir_spec.phases import Phase
from stagec.pipeline.instrument import (
    DumpDir,
    Hooks,
    PrintAfter,
    Reproducer,
    Timing,
    reproducer_pipeline,
)
from stagec.pipeline.manager import PassManager
from stagec.pipeline.passes import Pass
from stagec.support.diagnostics import DiagnosticError
from stagec.text.printer import print_module
from tests.support import loaded, parse


@pytest.fixture(autouse=True)
def verified_once() -> None:
    """Each pass is verified, also in a quick run."""


TEXT = """stg.module @m {
  stg.symbols[B, D]
  stg.assume[D % tp == 0]
  stg.mesh @pod[tp]
  stg.func @f(%x: bf16[B, D@tp], %w: bf16[D@tp]) {
    %y = stg.einsum["bd,d->b"](%x, %w)
    %z = stg.gelu(%y)
    stg.return(%z)
  }
}
"""


@dataclass(frozen=True)
class Crash(Pass):
    """A pass with a bug."""

    name: ClassVar[str] = "crash"
    needs: ClassVar[Phase] = Phase.PARSED
    until: ClassVar[Phase | None] = Phase.LOWERED
    message: str = "boom"

    def run(self, module: Module) -> None:
        raise ZeroDivisionError(self.message)


@dataclass(frozen=True)
class Corrupt(Pass):
    """A pass that leaves a module that no verifier lets through."""

    name: ClassVar[str] = "corrupt"
    needs: ClassVar[Phase] = Phase.PARSED

    def run(self, module: Module) -> None:
        module.main.body.ops.reverse()


@dataclass(frozen=True)
class Idle(Corrupt):
    """The same, where nothing asks for it."""

    def applies(self, module: Module) -> bool:
        return module.phase != "parsed"


@dataclass(frozen=True)
class OnlyPhase(Idle):
    """A pass with nothing to do that says the module is shaped, which it is not."""

    gives: ClassVar[Phase | None] = Phase.SHAPED


@dataclass
class Recorder(Hooks):
    """Notes every call."""

    calls: list[str] = field(default_factory=list[str])

    def start(self, module: Module) -> None:
        self.calls.append(f"start {module.phase}")

    def before_pass(self, pass_: Pass, module: Module) -> None:
        self.calls.append(f"before {pass_.name} {module.phase}")

    def after_pass(self, pass_: Pass, module: Module) -> None:
        self.calls.append(f"after {pass_.name} {module.phase}")

    def on_error(self, pass_: Pass, module: Module, problem: Exception) -> None:
        self.calls.append(f"error {pass_.name} {type(problem).__name__}")

    def finish(self, module: Module) -> None:
        self.calls.append("finish")


def passes(text: str) -> tuple[Pass, ...]:
    return loaded().pipeline(text).passes


def test_hooks_see_phases_move() -> None:
    recorder = Recorder()
    PassManager(passes("infer-shapes,verify"), [recorder]).run(parse(TEXT))
    assert recorder.calls == [
        "start parsed",
        "before infer-shapes parsed",
        "after infer-shapes shaped",
        "before verify shaped",
        "after verify shaped",
        "finish",
    ]


def test_an_idle_pass_does_not_run_and_nothing_is_verified_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def verify_module(module: Module, sound: VerifiedCache) -> None:
        seen.append(module.phase)

    monkeypatch.setattr("stagec.pipeline.instrument.verify_module", verify_module)
    module, recorder = parse(TEXT), Recorder()
    before = print_module(module)
    PassManager([Idle()], [recorder]).run(module)
    assert print_module(module) == before
    assert recorder.calls[1:-1] == ["before corrupt parsed", "after corrupt parsed"]
    assert seen == ["parsed"]  # at the start
    PassManager([Corrupt()], [recorder]).run(module)
    assert seen == ["parsed"] * 3


def test_a_phase_is_verified_though_its_pass_was_idle() -> None:
    with pytest.raises(DiagnosticError, match="has no type, but the module is shaped"):
        PassManager([OnlyPhase()]).run(parse(TEXT))


def test_errors_reach_the_hooks_and_go_on() -> None:
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError, match="boom"):
        PassManager([Crash()], [recorder]).run(parse(TEXT))
    assert recorder.calls[-1] == "error crash ZeroDivisionError"


def test_two_methods_make_an_instrument() -> None:
    class Minimal:
        seen = 0

        def before_pass(self, pass_: Pass, module: Module) -> None:
            self.seen += 1

        def after_pass(self, pass_: Pass, module: Module) -> None:
            self.seen += 10

    minimal = Minimal()
    PassManager(passes("infer-shapes,verify"), [minimal]).run(parse(TEXT))
    assert minimal.seen == 22


# -- order -----------------------------------------------------------------------------------------


def test_impossible_order_is_refused_before_anything_runs() -> None:
    recorder = Recorder()
    pipeline = loaded().pipeline("verify,insert-collectives")
    with pytest.raises(DiagnosticError, match="needs a module that is sharded") as caught:
        PassManager(pipeline, [recorder], known=loaded().passes.values()).run(parse(TEXT))
    assert recorder.calls == []
    (item,) = caught.value.diagnostics
    assert item.remedy is not None
    before, _, _ = item.remedy.partition("' before it; 'stagec passes' lists the pipelines")
    way = loaded().pipeline(before.removeprefix("run '") + ",insert-collectives")
    assert PassManager(way).check_order(Phase.PARSED) is Phase.PARTITIONED


@pytest.mark.parametrize(
    ("pipeline", "end"),
    [
        ("", Phase.PARSED),
        ("infer-shapes", Phase.SHAPED),
        ("place", Phase.PARTITIONED),
        ("verify,infer-shapes,clean,verify", Phase.SHAPED),
    ],
)
def test_phases_are_computed_ahead(pipeline: str, end: Phase) -> None:
    assert PassManager(passes(pipeline)).check_order(Phase.PARSED) is end


def test_unknown_phase() -> None:
    with pytest.raises(DiagnosticError, match="unknown phase 'shard'"):
        PassManager([]).run(parse("stg.module @m[phase = shard] {\n}"))


# -- instruments -----------------------------------------------------------------------------------


def test_verification_names_the_pass() -> None:
    with pytest.raises(DiagnosticError) as caught:
        PassManager([Corrupt()]).run(parse(TEXT))
    notes = [n.message for d in caught.value.diagnostics for n in d.notes]
    assert "found after pass 'corrupt'" in notes
    PassManager([Corrupt()], verify=False).run(parse(TEXT))


def test_dumps_can_be_read_back(tmp_path: Path) -> None:
    module = parse(TEXT)
    PassManager(passes("place"), [DumpDir(tmp_path / "dumps")]).run(module)
    files = sorted((tmp_path / "dumps").iterdir())
    assert [f.name for f in files] == [
        "00-input.stg",
        "01-infer-shapes.stg",
        "02-propagate-sharding.stg",
        "03-insert-collectives.stg",
    ]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert print_module(parse(text)) == text
    assert files[-1].read_text(encoding="utf-8") == print_module(module)


def test_print_after() -> None:
    for names, expected in (
        (["all"], ["infer-shapes", "verify"]),
        (["verify"], ["verify"]),
        (["change"], ["infer-shapes"]),
    ):
        stream = io.StringIO()
        PassManager(passes("infer-shapes,verify"), [PrintAfter(names, stream)]).run(parse(TEXT))
        lines = stream.getvalue().splitlines()
        heads = [line.removeprefix("// -- after ") for line in lines if line.startswith("// --")]
        assert heads == expected


def test_timing_counts_every_pass() -> None:
    stream = io.StringIO()
    timing = Timing(stream)
    PassManager(passes("infer-shapes,verify"), [timing]).run(parse(TEXT))
    assert [name for name, _ in timing.seconds] == ["infer-shapes", "verify"]
    assert all(seconds >= 0 for _, seconds in timing.seconds)
    assert "infer-shapes" in stream.getvalue()


def test_reproducer_holds_the_text_before_and_the_passes_left(tmp_path: Path) -> None:
    file = tmp_path / "crash.stg"
    todo = [*passes("infer-shapes"), Crash("it's {bad}"), *passes("verify")]
    reproducer = Reproducer(file, todo)
    with pytest.raises(ZeroDivisionError):
        PassManager(todo, [reproducer]).run(parse(TEXT))
    text = file.read_text(encoding="utf-8")
    assert reproducer.written
    assert text.startswith("// RUN: %stagec opt %s -p 'crash{")
    assert parse(text).phase == "shaped"
    assert reproducer_pipeline(text) == 'crash{message="it\'s {bad}"},verify'


def test_diagnostics_are_no_crash(tmp_path: Path) -> None:
    file = tmp_path / "crash.stg"
    todo = passes("infer-shapes")
    wrong = parse(TEXT.replace("bd,d->b", "bd,b->d"))
    with pytest.raises(DiagnosticError):
        PassManager(todo, [Reproducer(file, todo)]).run(wrong)
    assert not file.exists()


def test_texts_without_a_pipeline_are_no_reproducers() -> None:
    assert reproducer_pipeline(TEXT) is None
    assert reproducer_pipeline("") is None
    assert reproducer_pipeline("// RUN: %stagec opt %s\n") is None
