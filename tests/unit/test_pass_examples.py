"""The `Before:` and `After:` blocks of passes that hold whole functions are run."""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from stagec.pipeline.manager import PassManager
from stagec.pipeline.passes import Pass
from stagec.pipeline.plugins import Loaded, load_plugins
from stagec.support.source import Source
from stagec.text.build import parse_module
from stagec.text.printer import print_op
from tests.support import DISTINCT

pytestmark = DISTINCT

PLUGIN = Path(__file__).resolve().parent.parent / "plugin_example/src/stagec_example/__init__.py"
#: What an example may use without declaring it. One with a mesh or symbols of its own states what
#: it assumes too.
DECLARATIONS = {
    "stg.symbols": "stg.symbols[B, S, D, E, H, G, K, F, L, T, V]",
    "stg.mesh": "stg.mesh @pod[dp, tp]",
    "stg.assume": "stg.assume[B % dp == 0, D % dp == 0, S % tp == 0, D % tp == 0, H % tp == 0]\n"
    "stg.assume[F % tp == 0, V % tp == 0]",
}
_BLOCK = re.compile(r"^(Before|After)(?: \((?P<pipeline>.*)\))?:\n(?P<text>(?:    .*\n|\n)+)", re.M)


@dataclass(frozen=True)
class Example:
    """A text, the pipeline that runs on it, and the text that must come out."""

    before: str
    after: str
    pipeline: str


def example(pass_type: type[Pass]) -> Example | None:
    """The example in the documentation of a pass."""
    doc = (inspect.getdoc(pass_type) or "") + "\n"
    blocks = {m[1]: m for m in _BLOCK.finditer(doc)}
    if len(blocks) < 2 or any("stg.return" not in m["text"] for m in blocks.values()):
        return None  # a fragment is shown, not run
    before, after = (textwrap.dedent(blocks[name]["text"]) for name in ("Before", "After"))
    return Example(before, after, blocks["After"]["pipeline"] or pass_type.name)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_plugins([PLUGIN])


def with_examples() -> list[str]:
    return [name for name, p in load_plugins([PLUGIN]).passes.items() if example(p)]


@pytest.mark.parametrize("name", with_examples())
def test_example(name: str, loaded: Loaded) -> None:
    pass_type = loaded.passes[name]
    actual = example(pass_type)
    assert actual is not None
    head = declarations(actual.before)
    module = parse_module(source(head, actual.before, pass_type.needs.label), loaded.registry)
    PassManager(loaded.pipeline(actual.pipeline)).run(module)
    wanted = parse_module(source(head, actual.after, module.phase), loaded.registry)
    given = [print_op(op) for op in wanted.root.body.ops]
    known = [print_op(op) for op in parse_module(source(head), loaded.registry).root.body.ops]
    shown = [print_op(op) for op in module.root.body.ops]
    assert [t for t in shown if t not in known] == [t for t in given if t not in known]


def declarations(text: str) -> str:
    """What the example uses without declaring it."""
    own = any(name in text for name in ("stg.mesh", "stg.symbols"))
    left = [v for k, v in DECLARATIONS.items() if k not in text and not (own and k == "stg.assume")]
    return "\n".join(left) + "\n"


def source(head: str, text: str = "", phase: str = "parsed") -> Source:
    """The text as a module in that phase."""
    return Source("example.stg", f"stg.module @example[phase = {phase}] {{\n{head}{text}}}\n")


def test_every_pass_says_what_it_does(loaded: Loaded) -> None:
    for name, pass_type in loaded.passes.items():
        first = (inspect.getdoc(pass_type) or "").partition("\n")[0]
        assert first.strip(), name
        assert len(first) <= 100, name
