"""Blocks of the library have the options that models need, and no others."""

from __future__ import annotations

import json

import pytest

from stagec.importers.importing import import_model
from stagec.importers.registry import BUILT_IN
from stagec.ir.core import Attr, Operation
from stagec.ir.expr import Expr
from stagec.ir.options import NO, YES, Choice, choice, declared_options, is_statics, words_of
from stagec.models import blocks, library_text
from stagec.passes.shapes import inline
from stagec.support.source import Source
from tests.configurations import variants
from tests.oracle.test_images import SMALL as WITH_IMAGES
from tests.support import LONG, parse

Chosen = tuple[str | None, str | None, str]


def _declared() -> set[Chosen]:
    """Function, option and value of all options of the library."""
    functions = [f for path in blocks() for f in parse(library_text(path)).functions]
    return {
        (func.symbol, name, word)
        for func in functions
        for name, option in declared_options(func).items()
        for word in ((YES,) if is_statics(option) else words_of(option))
    }


@LONG
def test_some_model_has_each_value_of_each_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one a line of a block would be tried by nobody."""
    chosen: set[Chosen] = set()

    def recorded(option: Operation, given: Attr | None, sizes: dict[str, Expr]) -> Choice:
        actual = choice(option, given, sizes)
        word = actual if isinstance(actual, str) else NO if actual is None else YES
        owner = option.parent_op
        chosen.add((owner.symbol if owner else None, option.symbol, word))
        return actual

    monkeypatch.setattr(inline, "choice", recorded)
    for family in BUILT_IN:
        for kind in (*family.model_types, *family.marks):
            for _, config in variants(kind, draws=0):
                text = import_model(Source("config.json", json.dumps(config)), BUILT_IN).text()
                inline.inline(parse(text))
    for kind, (keys, _) in WITH_IMAGES.items():
        source = Source("config.json", json.dumps({"model_type": kind, **keys}))
        inline.inline(parse(import_model(source, BUILT_IN, images=True).text()))
    idle = sorted(_declared() - chosen)
    assert not idle, idle
