"""Configuration for the stock `lit` runner: `.venv/bin/lit -v tests/lit`.

The substitutions are those of stagec/testing, so that a RUN line means the same in both.
"""

from pathlib import Path

import lit.formats

from stagec.testing import syntax

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

OUTPUT = ROOT / "build" / "lit"
OUTPUT.mkdir(parents=True, exist_ok=True)

config.name = "stagec"
config.test_format = lit.formats.ShTest(execute_external=False)
config.suffixes = list(syntax.SUFFIXES)
config.excludes = ["Inputs", *(path.name for path in HERE.rglob("*.golden"))]
config.test_source_root = str(HERE)
config.test_exec_root = str(OUTPUT)
config.environment.update(syntax.environment())
config.substitutions += [*syntax.tool_substitutions().items(), ("%T", str(OUTPUT))]
