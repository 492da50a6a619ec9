"""Mistakes of plug-ins: reported with the plug-in, the part of it, file and line, never as a bug
of stagec. What can be seen when a plug-in is loaded is refused then."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stagec.pipeline.plugins import load_plugins
from stagec.support.diagnostics import DiagnosticError
from tests.support import Outcome, stagec

HEAD = """from dataclasses import dataclass
from typing import ClassVar
from stagec.api import *

"""
MODULE = """stg.module @m {
  stg.symbols[B, D]
  stg.func @f(%x: f32[B, D]) -> f32[B, D] {
    %y = OP(%x)
    stg.return(%y)
  }
}
"""
PASS = """
def helper(number):
    return 1 // number  # here

@dataclass(frozen=True)
class Halve(Pass):
    name: ClassVar[str] = "halve"
    needs: ClassVar[Phase] = Phase.PARSED
    until: ClassVar[Phase] = Phase.LOWERED

    def run(self, module):
        BODY

PLUGIN = Plugin(name="mine", passes=(Halve,))
"""
OP = """
class Twice(OpDef):  # class
    name = "my.twice"
    operands = ("x",)

    def rule(self, op):
        return make_rule("bd->bd")

    METHOD

PLUGIN = Plugin(name="mine", ops=(Twice(),))
"""


def run(folder: Path, plugin: str, op: str, passes: str) -> Outcome:
    """A plug-in in a file, and a module that goes through passes."""
    (folder / "mine.py").write_text(HEAD + plugin)
    (folder / "m.stg").write_text(MODULE.replace("OP", op))
    return stagec("opt", folder / "m.stg", "--plugin", folder / "mine.py", "-p", passes)


def line_of(folder: Path, marker: str) -> int:
    lines = (folder / "mine.py").read_text().splitlines()
    return next(i for i, line in enumerate(lines, start=1) if marker in line)


def assert_blamed(ran: Outcome, folder: Path, marker: str, part: str, message: str) -> None:
    """Told at the line with the marker; the message is a pattern."""
    assert ran.code == 1, ran.err
    place = rf"{re.escape(str(folder / 'mine.py'))}:{line_of(folder, marker)}:\d+"
    expected = rf"{place}: error: a mistake in plug-in 'mine', {part}: {message}"
    first = next(line for line in ran.err.splitlines() if "error: " in line)
    assert re.fullmatch(expected, first), first
    assert marker in ran.err, "the line is shown"
    assert "  help: correct the plug-in" in ran.err
    assert "bug in stagec" not in ran.err
    assert "Traceback" not in ran.err


def test_a_pass_that_raises(tmp_path: Path) -> None:
    ran = run(tmp_path, PASS.replace("BODY", "helper(0)  # there"), "stg.gelu", "halve")
    message = "ZeroDivisionError: integer division or modulo by zero"
    assert_blamed(ran, tmp_path, "# here", "pass 'halve'", message)
    notes = re.findall(r"mine.py:(\d+):\d+: note: in (\w+)", ran.err)
    expected = [("# there", "run"), ("# here", "helper")]
    assert notes == [(str(line_of(tmp_path, mark)), name) for mark, name in expected]


def test_a_pass_that_calls_the_compiler_with_rubbish(tmp_path: Path) -> None:
    body = "module.main.body.insert('x', None)  # there"
    ran = run(tmp_path, PASS.replace("BODY", body), "stg.gelu", "halve")
    assert ran.code == 1
    line = line_of(tmp_path, "# there")
    assert f"mine.py:{line}:9: error: a mistake in plug-in 'mine', pass 'halve': " in ran.err
    assert re.search(r"core\.py:\d+:\d+: note: in insert\n +self\.ops", ran.err), (
        "the way from there on"
    )


METHODS = {
    "raises": ("def dtypes(self, op):\n        return None + 1  # here", "# here", "TypeError"),
    "gives what is none": ("def dtypes(self, op):\n        return 7", "# class", "TypeError"),
    "has no such name": (
        "def verify(self, op):\n        yield undefined  # here",
        "# here",
        "NameError",
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_an_op_with_a_mistake(name: str, tmp_path: Path) -> None:
    method, marker, kind = METHODS[name]
    ran = run(tmp_path, OP.replace("METHOD", method), "my.twice", "infer-shapes")
    assert_blamed(ran, tmp_path, marker, "op 'my.twice'", f"{kind}: .*")


def test_flops_that_are_no_expression(tmp_path: Path) -> None:
    """They are reported of the op that gives them, not of the pass that writes them down."""
    method = "def flops(self, op, n):\n        return 1.5"
    ran = run(tmp_path, OP.replace("METHOD", method), "my.twice", "forward")
    message = r"TypeError: flops gives 1\.5, expected an Expr such as product\(n\.values\(\)\) \* 2"
    assert_blamed(ran, tmp_path, "# class", "op 'my.twice'", message)


def test_a_pass_that_builds_an_op_that_is_none(tmp_path: Path) -> None:
    body = "Builder.before(module.registry, module.main.body.ops[0]).value('stg.gelo')  # here"
    ran = run(tmp_path, PASS.replace("BODY", body), "stg.gelu", "halve")
    assert ran.code == 1
    assert "pass 'halve': LookupError: unknown op 'stg.gelo': did you mean 'stg.gelu'?" in ran.err


def test_an_error_that_may_be_the_users_names_the_line_as_well(tmp_path: Path) -> None:
    method = "def dtypes(self, op):\n        return [{}['no such key']]  # here"
    ran = run(tmp_path, OP.replace("METHOD", method), "my.twice", "infer-shapes")
    assert ran.code == 1
    assert f"{tmp_path / 'm.stg'}:4:10: error: 'my.twice' cannot infer the size" in ran.err
    line = line_of(tmp_path, "# here")
    assert f"mine.py:{line}:1: note: KeyError in dtypes of the op's definition" in ran.err


SCHEDULE = """
class Half(Schedule):
    name = "half"
    summary = "raises"

    def rank_actions(self, rank, stages, microbatches, chunks):
        return [] + 1  # here

PLUGIN = Plugin(name="mine", schedules=(Half(),))
"""


def test_a_schedule_that_raises(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + SCHEDULE)
    ran = stagec("schedule", "half", "--stages", "2", "--microbatches", "2", "--plugin", file)
    message = r'TypeError: can only concatenate list \(not "int"\) to list'
    assert_blamed(ran, tmp_path, "# here", "schedule 'half'", message)


# -- what is refused at load

LOADS = {
    "kind": (OP, 'params = (Param("by", "float", "x"),)', "'by' of the unknown kind 'float'"),
    "near kind": (OP, 'params = (Param("by", "siez", "x"),)', "did you mean 'size'?"),
    "twice": (OP, 'params = (Param("a", "int"), Param("a", "int"))', "two parameters 'a'"),
    "no comma": (
        OP,
        'params = (Param("by", "int"))',
        "the params of op 'my.twice' are not a tuple",
    ),
    "no param": (OP, 'params = ("by",)', "has 'by' as a parameter"),
    "choices": (OP, 'params = (Param("a", "name", choices="ab"),)', "whose choices are a text"),
    "operands": (OP, 'operands = ("x")', "the operands of op 'my.twice' are not a tuple"),
    "no trait": (OP, "traits = (str,)", "has <class 'str'> as a trait"),
    "one trait": (OP, "traits = 'view'", "the traits of op 'my.twice' are not a tuple"),
    "index": (OP, 'index = "...->..."', "has '...->...' as its index rule"),
    "index text": (OP, 'index = IndexRule("x")', "'x' has no '->'"),
    "flops": (OP, 'flops_per_point = "2"', "has '2' FLOPs per point"),
    "fewer flops": (OP, "flops_per_point = -2", "has -2 FLOPs per point"),
    "exit": ("raise SystemExit(3)\n", "", "cannot be loaded: SystemExit: 3"),
    "types": (OP, 'element_types = "f32"', "the element_types of op 'my.twice' are not a tuple"),
    "op name": (OP, 'name = "twice"', "'twice' is not a valid name of an op"),
    "class": (OP.replace("Twice(),", "Twice,"), "", "Twice is the class of an op"),
    "no op": (OP.replace("Twice(),", "3,"), "", "3 is not an op"),
    "no tuple": (OP.replace("(Twice(),)", "Twice()"), "", "its ops are not a tuple"),
    "formats": (OP.replace("ops=", "formats=3, ops="), "", "its formats are not a tuple"),
    "pipelines": (OP.replace("ops=", "pipelines=3, ops="), "", "are not texts by name"),
    "no text": (OP.replace("ops=", "pipelines={'a': 3}, ops="), "", "are not texts by name"),
    "instance": (PASS.replace("(Halve,)", "(Halve(),)"), "", "is not a class of a pass"),
    "not a pass": (
        PASS.replace("(Halve,)", "(int,)"),
        "",
        "<class 'int'> is not a class of a pass",
    ),
    "pass name": (
        PASS.replace('"halve"', '"my pass"'),
        "",
        "'my pass' is not a valid name of a pass",
    ),
    "syntax": ("def f(:\n    pass\n", "", "mine.py:5:7: error: "),
    "raises": ("X = 1 // 0\n", "", "mine.py:5:5: error: "),
}


@pytest.mark.parametrize("name", LOADS)
def test_what_is_no_plugin_is_refused_at_load(name: str, tmp_path: Path) -> None:
    text, method, message = LOADS[name]
    ran = run(tmp_path, text.replace("METHOD", method).replace("BODY", "pass"), "stg.gelu", "clean")
    assert ran.code == 1, ran.err
    assert message in ran.err
    assert "  help: " in ran.err
    assert "bug in stagec" not in ran.err
    with pytest.raises(DiagnosticError):
        load_plugins([tmp_path / "mine.py"])


def test_a_mistake_of_the_compiler_is_still_called_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a plug-in is there that has no part in it."""

    def broken(_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr("stagec.passes.shapes.infer_shapes.infer_module", broken)
    ran = run(tmp_path, OP.replace("METHOD", ""), "stg.gelu", "infer-shapes")
    assert ran.code == 70
    assert "bug in stagec" in ran.err


def test_a_mistake_in_a_module_that_a_plugin_imports_is_one_of_the_plugin(tmp_path: Path) -> None:
    (tmp_path / "further_passes.py").write_text(HEAD + PASS.replace("BODY", "helper(0)"))
    plugin = f'import sys\nsys.path.insert(0, "{tmp_path}")\nfrom further_passes import PLUGIN\n'
    ran = run(tmp_path, plugin, "stg.gelu", "halve")
    assert ran.code == 1
    assert "a mistake in plug-in 'mine', pass 'halve': ZeroDivisionError" in ran.err
