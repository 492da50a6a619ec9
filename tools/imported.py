"""Shows whether a change of importers or blocks changes a model, by comparing the inlined modules
of configurations before and after.

`python tools/imported.py record FILE` imports the configurations of the tests, and of each folder
after `--configs`, and stores the module of each after `inline` without names of values. `python
tools/imported.py compare FILE` shows the differences, and fails if there are any.
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stagec.importers.importing import import_model
from stagec.importers.registry import BUILT_IN
from stagec.ir.core import Attr, Operation, Quoted, Value
from stagec.ir.module import Module
from stagec.ir.param import attr_text
from stagec.ir.types import TensorType
from stagec.pipeline.manager import PassManager
from stagec.support.diagnostics import DiagnosticError
from stagec.support.source import Source
from tests.configurations import variants
from tests.oracle.test_images import SMALL as WITH_IMAGES
from tests.support import loaded, parse

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "tests/data/configs", ROOT / "stagec/models/configs")
_ASSUMED = "assume "


def main() -> int:
    """Record or compare, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--configs", type=Path, action="append", default=[])
    parser.add_argument("-k", default="", help="only configurations whose name has this text")
    given = parser.parse_args()
    folders = [*FOLDERS, *given.configs]
    if given.what == "record":
        models = {n: model_text(c, i) for n, c, i in configurations(folders)}
        given.file.write_bytes(gzip.compress(json.dumps(models).encode()))
        print(f"{len(models)} models in {given.file}")
        return 0
    return compare(json.loads(gzip.decompress(given.file.read_bytes())), folders, given.k)


def compare(before: Mapping[str, str], folders: list[Path], only: str) -> int:
    """Print the first difference of each changed model, and return 1 if there is one."""
    after = {n: model_text(c, i) for n, c, i in configurations(folders) if only in n}
    expected = {name: text for name, text in before.items() if only in name}
    differ = [n for n in {**expected, **after} if _changed(expected.get(n, ""), after.get(n, ""))]
    for name in differ:
        lines = (expected.get(name, "").splitlines(), after.get(name, "").splitlines())
        print(f"== {name}", *list(difflib.unified_diff(*lines, lineterm="", n=1))[2:14], sep="\n")
    print(f"{len(after)} models, {len(differ)} differ")
    return 1 if differ else 0


def _changed(before: str, after: str) -> bool:
    """Whether a model changed; additional assumptions about sizes do not count."""
    lines = before.splitlines()
    more = {line for line in after.splitlines() if line.startswith(_ASSUMED)} - {*lines}
    return lines != [line for line in after.splitlines() if line not in more]


def configurations(folders: list[Path]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Name, configuration, and whether images are taken: the small ones of each family with every
    feature, those of steps that take images, and the files of these folders."""
    for family in BUILT_IN:
        for kind in (*family.model_types, *family.marks):
            for label, config in variants(kind):
                yield f"{kind} {label}", config, False
    for kind, (keys, _) in WITH_IMAGES.items():
        yield f"{kind} images", {"model_type": kind, **keys}, True
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            yield f"{folder.name}/{path.stem}", json.loads(path.read_text()), False


def model_text(config: Mapping[str, Any], images: bool) -> str:
    """The model of a configuration without names, or the message of the error."""
    source = Source("config.json", json.dumps(config))
    try:
        module = parse(import_model(source, BUILT_IN, images=images).text())
        PassManager(loaded().pipeline("inline,infer-shapes"), verify=False).run(module)
    except DiagnosticError as e:
        return f"error: {e}"
    return "\n".join(_Nameless(module).lines())


class _Nameless:
    """Prints a module with numbers for names of values and letters of index rules. Parameters have
    their types where they are first used, in whatever order they are declared."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._numbers: dict[Value, int] = {}
        self._slices: dict[Value, Value] = {}

    def lines(self) -> Iterator[str]:
        """The lines of a module."""
        yield f"{dict(self._module.root.attrs)}"
        used = _symbols(self._module)
        yield from sorted(f"{n} = {v}" for n, v in self._module.symbols.items() if n in used)
        yield from sorted(
            {f"{_ASSUMED}{r}" for r, _ in self._module.relations if r.symbols <= used}
        )
        for op in self._module.root.body.ops:
            if op.name not in ("stg.symbols", "stg.assume"):
                yield from self._op(op, "")
                args = op.region.args if op.region is not None else ()
                yield from sorted(f"unused {v.type}" for v in args if v not in self._numbers)

    def _op(self, op: Operation, pad: str) -> Iterator[str]:
        inner = list(op.region.args) if op.region is not None else []
        if op.name == "stg.repeat":
            pairs = zip(op.operands, inner, strict=True)
            self._slices |= {a: self._slices.get(v, v) for v, a in pairs if self._is_parameter(v)}
            operands = [v for v in op.operands if not self._is_parameter(v)]
        else:
            operands = list(op.operands)
        given = " ".join(map(self._name, operands))
        args = " ".join(f"{self._name(v)}: {v.type}" for v in inner if not self._is_parameter(v))
        results = " ".join(f"{self._name(v)}: {v.type}" for v in op.results)
        yield f"{pad}{op.name} @{op.symbol or ''} {_attrs(op)} ({given}) <{args}> -> {results}"
        for child in op.region.ops if op.region is not None else ():
            yield from self._op(child, pad + "  ")

    def _is_parameter(self, value: Value) -> bool:
        """Whether a value is a parameter, a frozen one or state, or the argument of a repeat for
        one."""
        has_role = isinstance(value.type, TensorType) and value.type.role != ""
        return has_role or value in self._slices

    def _name(self, value: Value) -> str:
        """A number by the first use, whatever the order of declarations; for a parameter with its
        type."""
        value = self._slices.get(value, value)
        first = value not in self._numbers
        name = f"%{self._numbers.setdefault(value, len(self._numbers))}"
        return f"{name}: {value.type}" if first and self._is_parameter(value) else name


def _symbols(module: Module) -> set[str]:
    """The names in parameters and types, without declarations."""
    symbols: set[str] = set()
    for op in module.walk():
        if op.name not in ("stg.symbols", "stg.assume"):
            values = (*op.results, *(op.region.args if op.region is not None else ()))
            text = " ".join([*map(attr_text, op.attrs.values()), *(str(v.type) for v in values)])
            symbols |= set(re.findall(r"[A-Za-z_]\w*", text))
    return symbols


def _attrs(op: Operation) -> str:
    """The parameters of an op, in the order of their names, with letters by their first use."""
    letters: dict[str, str] = {}

    def renamed(name: str, value: Attr) -> str:
        if isinstance(value, Quoted) and "->" in value.text:
            return "".join(_letter(c, letters) for c in value.text)
        if name == "factors":
            return "".join(_letter(c, letters) for c in attr_text(value))
        return attr_text(value)

    attrs = {n: renamed(n, v) for n, v in op.attrs.items() if isinstance(v, Quoted)}
    attrs |= {n: renamed(n, v) for n, v in op.attrs.items() if n not in attrs}
    return ", ".join(f"{n} = {v}" for n, v in sorted(attrs.items()))


def _letter(char: str, letters: dict[str, str]) -> str:
    return letters.setdefault(char, f"<{len(letters)}>") if char.isalpha() else char


if __name__ == "__main__":
    sys.exit(main())
