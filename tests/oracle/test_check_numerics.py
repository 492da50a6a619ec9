"""`--check-numerics` through the command line: silent on every correct pipeline, and it names the
pass that changes what a program computes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import DEEPSEEK, EXHAUSTIVE, GPT, LLAMA, LONG, MIXTRAL, stagec

STRATEGIES = {
    "one device": [],
    "tp": ["--tp", "2"],
    "fsdp": ["--dp", "2", "--zero", "3"],
    "all": ["--dp", "2", "--tp", "2", "--sp", "--zero", "3"],
    "zero1-accumulated": ["--dp", "2", "--zero", "1", "--microbatches", "2"],
    "gathered loss": ["--tp", "2", "--sp", "--no-vocab-parallel", "--tp-inputs", "save-gathered"],
    "offloaded stages": ["--pp", "2", "--schedule", "interleaved", "--offload", "optimizer"],
}
WRONG_PASS = '''
from dataclasses import dataclass
from stagec.api import Module, Pass, Phase, Plugin

@dataclass(frozen=True)
class DoubleScale(Pass):
    """Double the factor of every stg.scale."""
    name = "double-scale"
    needs = Phase.SHAPED
    until = Phase.PARTITIONED

    def run(self, module: Module) -> None:
        for op in module.walk():
            if op.name == "stg.scale":
                op.attrs["by"] = op.expr("by") * 2

@dataclass(frozen=True)
class DropReductions(Pass):
    """Take the sum of the parts for the sum."""
    name = "drop-reductions"
    needs = Phase.PARTITIONED

    def run(self, module: Module) -> None:
        for op in list(module.walk()):
            if op.name == "stg.all_reduce":
                op.attrs["over"] = tuple(a for a in ("dp", "tp") if a not in op.names("over"))

PLUGIN = Plugin(name="wrong", passes=(DoubleScale, DropReductions))
'''
SCALED = """stg.module @m {
  stg.symbols[B, D]
  stg.func @f(%x: f32[B, D]) -> f32[B, D] {
    %y = stg.scale[by = 1/2](%x)
    stg.return(%y)
  }
}
"""
SPLIT = """stg.module @m {
  stg.symbols[B, D, F]
  stg.assume[F % tp == 0, B % dp == 0]
  stg.mesh @pod[dp, tp]
  stg.func @f(%x: f32[B@dp, F@tp], %w: f32[F@tp, D]) -> f32[B@dp, D | rep] {
    %y = stg.einsum["bf,fd->bd"](%x, %w)
    stg.return(%y)
  }
}
"""
#: Correct programs whose inputs and sizes a check has to choose with care.
PACKED = """stg.module @m {
  stg.symbols[B, D, F]
  stg.strategy @s {
    stg.kernels[eager = swiglu]
  }
  stg.func @f(%x: f32[B, D], %n/w_gate_up: f32[D, 2, F | param], %w_gate_up: f32[F, 2, D | param]) {
    %u = stg.einsum["bd,dzf->bzf"](%x, %n/w_gate_up)
    %m = stg.swiglu(%u)
    %v = stg.einsum["bf,fzd->bzd"](%m, %w_gate_up)
    %n = stg.swiglu(%v)
    %l = stg.sum["bd->"](%n)
    stg.return(%l)
  }
}
"""
PADDED = """stg.module @m {
  stg.symbols[B = 12, D = 5]
  stg.mesh @pod[dp = 3]
  stg.strategy @s {
    stg.split[B, over = dp]
    stg.shard_params[over = dp, zero = 3]
    stg.shard_padding[rule = dim0]
  }
  stg.func @f(%x: f32[B, D], %w: f32[D, 5 | param]) -> f32[] {
    %y = stg.einsum["bd,de->be"](%x, %w)
    %l = stg.sum["be->"](%y)
    stg.return(%l)
  }
}
"""
ROWS_BEFORE_COLUMNS = """stg.module @m {
  stg.symbols[A = 2, X = 2]
  stg.mesh @pod[cp = 2, tp = 2]
  stg.func @f(%x: f32[X@cp, X@tp]) -> f32[(X^2)@(cp, tp) | rep] {
    %y = stg.reshape["hw->(hw)"](%x)
    stg.return(%y)
  }
}
"""
FOUR_MICROBATCHES = """stg.module @m {
  stg.symbols[B = 16, D = 2]
  stg.mesh @pod[dp = 2]
  stg.strategy @s {
    stg.split[B, over = dp]
    stg.microbatches[count = 4, split = B]
  }
  stg.func @f(%x: f32[B, D], %w: f32[D | param]) -> f32[] {
    %y = stg.einsum["bd,d->b"](%x, %w)
    %l = stg.sum["b->"](%y)
    stg.return(%l)
  }
}
"""
BUFFERS_OF_STAGES = """stg.module @m {
  stg.symbols[L = 2, B = 4, D = 2]
  stg.mesh @pod[pp = 2]
  stg.strategy @s {
    stg.microbatches[count = 2, split = B]
    stg.pipeline[over = pp, schedule = "1f1b"]
    stg.stage_buffers[received = ahead]
  }
  stg.func @f(%x: f32[B, D], %w: f32[L, D, D | param]) -> f32[] {
    %y = stg.repeat[count = L] (%h: f32[B, D] = %x, %w_i: f32[D, D] = %w) {
      %z = stg.einsum["bd,de->be"](%h, %w_i)
      stg.yield(%z)
    }
    %l = stg.sum["bd->"](%y)
    stg.return(%l)
  }
}
"""
ADAPTERS = """stg.module @m {
  stg.symbols[B = 4, D = 2]
  stg.strategy @s {
    stg.lora[targets = w, rank = 2]
  }
  stg.func @f(%x: f32[B, D], %w: f32[D, D | param]) -> f32[] {
    %y = stg.einsum["bd,de->be"](%x, %w)
    %l = stg.sum["be->"](%y)
    stg.return(%l)
  }
}
"""
#: The buffer of contiguous gradients of DeepSpeed has literally so many elements.
FLAT = """stg.module @m {
  stg.symbols[B = 4, D = 2]
  stg.mesh @pod[dp = 2]
  stg.strategy @s {
    stg.split[B, over = dp]
    stg.shard_params[over = dp, zero = 1]
    stg.gradients[flat = 500000000]
  }
  stg.func @f(%x: f32[B, D], %w: f32[D, D | param]) -> f32[] {
    %y = stg.einsum["bd,de->be"](%x, %w)
    %l = stg.sum["be->"](%y)
    stg.return(%l)
  }
}
"""
STEP = "infer-shapes,apply-strategy,differentiate,add-optimizer,partition"


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A plug-in with passes that break programs."""
    file = tmp_path / "wrong.py"
    file.write_text(WRONG_PASS)
    return file


@LONG
@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (LLAMA, "one device"),
        (LLAMA, "gathered loss"),
        (GPT, "all"),
        (LLAMA, "offloaded stages"),
        pytest.param(LLAMA, "all", marks=EXHAUSTIVE),
        pytest.param(LLAMA, "zero1-accumulated", marks=EXHAUSTIVE),
        pytest.param(MIXTRAL, "fsdp", marks=EXHAUSTIVE),
        pytest.param(MIXTRAL, "all", marks=EXHAUSTIVE),
        pytest.param(LLAMA, "tp", marks=EXHAUSTIVE),
        pytest.param(LLAMA, "fsdp", marks=EXHAUSTIVE),
        pytest.param(GPT, "zero1-accumulated", marks=EXHAUSTIVE),
        pytest.param(DEEPSEEK, "all", marks=EXHAUSTIVE),
    ],
)
def test_a_correct_pipeline_passes(model: str, strategy: str) -> None:
    ran = stagec(
        "compile", model, *STRATEGIES[strategy], "--check-numerics", "--dry-run", "--quiet"
    )
    assert (ran.code, ran.err) == (0, "")


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "m.stg"
    file.write_text(text)
    return file


def test_opt_names_the_pass_that_changes_numbers(tmp_path: Path, plugin: Path) -> None:
    file = write(tmp_path, SCALED)
    passes = "infer-shapes,canonicalize,double-scale"
    ran = stagec("opt", file, "-p", passes, "--plugin", plugin, "--check-numerics")
    assert ran.code == 1
    assert "pass 'double-scale' changes what the program computes" in ran.err
    assert "help:" in ran.err
    assert stagec("opt", file, "-p", passes, "--plugin", plugin).code == 0


def test_only_an_inexact_pass_may_change_numbers(tmp_path: Path, plugin: Path) -> None:
    """The passes around it are compared as before."""
    plain = 'name = "double-scale"\n'
    inexact = tmp_path / "inexact.py"
    inexact.write_text(WRONG_PASS.replace(plain, f"{plain}    exact = False\n"))
    scaled = '%t = stg.scale[by = 1/2](%x)\n    %y = stg.einsum["bf,fd->bd"](%t, %w)'
    file = write(tmp_path, SPLIT.replace('%y = stg.einsum["bf,fd->bd"](%x, %w)', scaled))
    correct = "infer-shapes,double-scale,propagate-sharding,insert-collectives"
    given = ("opt", file, "--check-numerics", "-p")
    assert "'double-scale' changes" in stagec(*given, correct, "--plugin", plugin).err
    assert stagec(*given, correct, "--plugin", inexact).code == 0
    wrong = stagec(*given, f"{correct},drop-reductions", "--plugin", inexact)
    assert (wrong.code, "drop-reductions" in wrong.err) == (1, True)


def test_opt_sees_a_wrong_collective(tmp_path: Path, plugin: Path) -> None:
    file = write(tmp_path, SPLIT)
    passes = "infer-shapes,propagate-sharding,insert-collectives"
    assert stagec("opt", file, "-p", passes, "--check-numerics").code == 0
    broken = f"{passes},drop-reductions"
    ran = stagec("opt", file, "-p", broken, "--plugin", plugin, "--check-numerics")
    assert ran.code == 1
    assert "drop-reductions" in ran.err
    assert "Traceback" not in ran.err


def test_literal_sizes_that_do_not_become_small_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.stg"
    path.write_text(
        "stg.module @big {\n"
        "  stg.func @step(%x: f32[4, 100000], %w: f32[100000, 100000 | param]) -> f32[] {\n"
        '    %l = stg.einsum["bd,de->"](%x, %w)\n'
        "    stg.return(%l)\n"
        "  }\n"
        "}\n"
    )
    actual = stagec("opt", path, "-p", "infer-shapes,canonicalize", "--check-numerics")
    assert actual.code == 1
    assert (
        "big.stg:2:3: error: --check-numerics would compute a tensor of 10,000,000,0" in actual.err
    )
    assert "name the sizes" in actual.err


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        pytest.param(PACKED, "infer-shapes,expand-kernels", id="parameters cut from packed ones"),
        pytest.param(PADDED, STEP, id="parameters padded to equal shards"),
        pytest.param(
            ROWS_BEFORE_COLUMNS, "infer-shapes,partition", id="columns split after all rows"
        ),
        pytest.param(FOUR_MICROBATCHES, STEP, id="more microbatches than tiny sizes have"),
        pytest.param(BUFFERS_OF_STAGES, f"{STEP},stages", id="buffers that stages receive into"),
        pytest.param(ADAPTERS, "infer-shapes,add-lora", id="adapters"),
        pytest.param(FLAT, f"{STEP},hold-flat-buffer", id="a buffer of literal size"),
        pytest.param(
            FLAT.replace("zero = 1", "zero = 3"),
            f"{STEP},hold-flat-buffer,eliminate-dead-code",
            id="a buffer of literal size that stays",
        ),
    ],
)
def test_a_correct_program_has_no_finding(tmp_path: Path, text: str, passes: str) -> None:
    ran = stagec("opt", write(tmp_path, text), "-p", passes, "--check-numerics")
    assert (ran.code, ran.err) == (0, "")
