"""Configuration for the stock `lit` runner: `.venv/bin/lit -v tests/lit`.

The substitutions are those of tools/lit_syntax.py, so that a RUN line means the same in both.
"""

import sys
from pathlib import Path

import lit.formats

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from tools import lit_syntax  # noqa: E402

OUTPUT = ROOT / "build" / "lit"
OUTPUT.mkdir(parents=True, exist_ok=True)

config.name = "stagec"
config.test_format = lit.formats.ShTest(execute_external=False)
config.suffixes = list(lit_syntax.SUFFIXES)
config.excludes = ["Inputs", *(path.name for path in HERE.rglob("*.golden"))]
config.test_source_root = str(HERE)
config.test_exec_root = str(OUTPUT)
config.environment.update(lit_syntax.environment())
config.substitutions += [*lit_syntax.tool_substitutions().items(), ("%T", str(OUTPUT))]
