"""The generic form is MLIR: xDSL reads it at every phase and prints it to the same again."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.parser import Parser
from xdsl.printer import Printer

from stagec.ir.expr import const, symbol
from stagec.pipeline.instrument import DumpDir
from stagec.pipeline.manager import PassManager
from stagec.support.source import Source
from stagec.text.build import parse_module
from stagec.text.generic import attr_text, print_generic
from tests.support import EXHAUSTIVE, GPT, LLAMA, LONG, crossed, loaded, parse, tiny_module

LIT = Path(__file__).resolve().parent.parent / "lit"
TRAIN = "train"


def read(text: str) -> ModuleOp:
    """The module that xDSL makes of a text, verified."""
    context = Context(allow_unregistered=True)
    context.load_dialect(Builtin)
    module = Parser(context, text).parse_module()
    module.verify()
    return module


def printed(module: ModuleOp) -> str:
    stream = io.StringIO()
    Printer(stream, print_generic_format=True).print_op(module)
    return stream.getvalue()


def accept(text: str) -> ModuleOp:
    """xDSL reads the text, and what it prints reads as the same again."""
    module = read(text)
    again = printed(module)
    assert printed(read(again)) == again
    return module


def inputs() -> list[str]:
    """Lit tests that hold one module without an error."""
    names = [f.relative_to(LIT).as_posix() for f in LIT.rglob("*.stg")]
    return sorted(n for n in names if "verify" not in n and "Inputs" not in n)


@crossed(name=inputs(), locations=(True, False))
def test_lit_inputs(name: str, locations: bool) -> None:
    text = (LIT / name).read_text(encoding="utf-8")
    for part in text.split("// -----\n"):
        try:
            module = parse_module(Source(name, part), loaded().registry, allow_unregistered=True)
        except Exception:
            continue  # a test of an error
        accept(print_generic(module, locations=locations))


WHOLE = [(LLAMA, 2), (LLAMA, 1), (GPT, 1), (GPT, 2)]


@LONG
@pytest.mark.parametrize(
    ("model", "stages"),
    [pytest.param(*job, marks=EXHAUSTIVE if job != WHOLE[0] else ()) for job in WHOLE],
)
def test_every_dump_of_a_whole_pipeline(model: str, stages: int, tmp_path: Path) -> None:
    module = tiny_module(model, "", tp=2, dp=2, pp=stages)
    PassManager(loaded().pipeline(TRAIN), [DumpDir(tmp_path)]).run(module)
    dumps = sorted(tmp_path.iterdir())
    texts = [dump.read_text(encoding="utf-8") for dump in dumps]
    assert all(a != b for a, b in pairwise(texts)), "a pass that changes nothing writes nothing"
    names = [dump.stem.partition("-")[2] for dump in dumps]
    assert (names[0], names[-1]) == ("input", "lower-to-trace")
    assert {"infer-shapes", "differentiate", "insert-collectives", "plan-memory"} <= {*names}
    for dump in dumps[WHOLE.index((model, stages)) % 3 :: 3]:  # it takes time: each a third
        accept(print_generic(parse(dump.read_text(encoding="utf-8"), dump.name), locations=True))


ODD_NAMES = """stg.module @mä {
  stg.symbols[Bé]
  stg.func @f(%xö: f32[Bé], %0: f32[], %1x: f32[]) {
    %y = my.op[text = "a\\b"](%xö, %0, %1x) : node
    stg.return(%y)
  }
}
"""


def test_names_strings_and_symbols_that_mlir_would_not_take_bare() -> None:
    source = Source('a"b\\c.stg', ODD_NAMES)
    module = parse_module(source, loaded().registry, allow_unregistered=True)
    read(print_generic(module, locations=True))  # xDSL cannot read its own escapes of such keys


def test_names_are_unique_where_they_are_visible() -> None:
    module = parse("stg.module @m {\n  stg.func @f(%x: f32[]) {\n    stg.return(%x)\n  }\n}")
    arg = module.main.body.args[0]
    arg.name = "y"
    module.main.body.add_arg("y", arg.type)
    assert "^bb0(%y: !stg.tensor<f32[]>, %y_2: !stg.tensor<f32[]>)" in print_generic(module)


def test_attributes() -> None:
    assert attr_text(const(2**63 - 1)) == f"{2**63 - 1} : i64"
    assert attr_text(const(2**70)) == f'#stg.expr<"{2**70}">'
    assert attr_text(symbol("B") / 2) == '#stg.expr<"B/2">'
    assert attr_text((True, "tp")) == '[true, "tp"]'
