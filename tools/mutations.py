"""Generated mutants: reversed comparisons, dropped conjuncts and attributes, in passes and in
`sharding`, each of which the lit folder of its pass should detect."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tools.mutants import LIT, ROOT, Mutant

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
#: The pass whose tests are about the algorithms of `sharding`.
_OF_SHARDING = "propagate_sharding"


def sampled(count: int, seed: int) -> list[Mutant]:
    """A random sample of mutants, equal for equal seeds."""
    every = [mutant for path, folder in _files() for mutant in mutants_of(path, folder)]
    return Random(seed).sample(every, min(count, len(every)))


def _files() -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / "passes").rglob("*.py")):
        if (ROOT / LIT / "passes" / path.stem).is_dir():
            yield path, f"passes/{path.stem}"
    for path in sorted((ROOT / "stagec" / "sharding").glob("*.py")):
        yield path, f"passes/{_OF_SHARDING}"


def mutants_of(path: Path, folder: str) -> Iterator[Mutant]:
    """All mutants of a file."""
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    source = text.encode()
    for node, instead in _changes(ast.parse(text)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset
        wrong = source[:first] + f"({instead})".encode() + source[last:]
        where = f"{path.name}:{node.lineno}: {_short(source[first:last].decode())}"
        file = path.relative_to(ROOT).as_posix()
        yield Mutant(f"{where} -> {_short(instead)}", folder, file, text, wrong.decode())


def _short(text: str) -> str:
    return " ".join(text.split())[:80]


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Each expression that can be changed, and its replacement."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left, [op], [right]):
                yield node, ast.unparse(ast.Compare(left, [_TURNED[type(op)]()], [right]))
            case ast.BoolOp(ast.And(), values):
                for dropped in values:
                    kept = [value for value in values if value is not dropped]
                    yield node, " and ".join(f"({ast.unparse(value)})" for value in kept)
            case ast.Dict(keys, values) if keys and all(isinstance(k, ast.Constant) for k in keys):
                for n in range(len(keys)):
                    kept_keys, kept = keys[:n] + keys[n + 1 :], values[:n] + values[n + 1 :]
                    yield node, ast.unparse(ast.Dict(kept_keys, kept))
            case _:
                pass
