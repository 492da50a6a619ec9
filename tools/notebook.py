"""Runs the cells of notebooks in an empty folder and stores their results in them.

python -m tools.notebook docs/examples/tour.ipynb
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def read(path: Path) -> Any:
    """A notebook without results."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return notebook


def ran(notebook: Any) -> Any:
    """The notebook with the results of its cells, which share their names."""
    names: dict[str, Any] = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        cell |= {
            "execution_count": number,
            "outputs": _outputs("".join(cell["source"]), names, number),
        }
    return notebook


def _outputs(text: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """The output of a cell, and the value of its last line."""
    body = ast.parse(text).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue()
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(True)}
        if hasattr(value, "_repr_html_"):
            data = {
                "text/html": value._repr_html_().splitlines(True),
                "text/plain": [f"<{type(value).__name__}>"],
            }
        about: dict[str, Any] = {
            "execution_count": number,
            "metadata": {},
            "output_type": "execute_result",
        }
        outputs.append({"data": data, **about})
    return outputs


if __name__ == "__main__":
    for place in map(Path.absolute, map(Path, sys.argv[1:])):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            text = json.dumps(ran(read(place)), indent=1) + "\n"
        place.write_text(text, encoding="utf-8")
