"""docs/families.md: the families of models whose configurations are read, from their readers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from stagec.importers.family import ModelFamily
from stagec.importers.reading.config import Config
from stagec.importers.reading.json_text import JsonText
from stagec.importers.reading.keys import ENDINGS, NO_EFFECT, OFF
from stagec.importers.registry import BUILT_IN
from stagec.support.diagnostics import DiagnosticError
from stagec.support.source import Source
from tools.markup import page

_INTRO = (
    "The families whose configurations `stagec import` reads: the values of `model_type`, what "
    "distinguishes a family from Llama, and its keys besides those of Llama. Keys that several "
    "families have in common have a name in italics ([below](#keys-in-common)); keys in the other "
    "sections are not listed. The name of a family leads to its reader. [models.md](models.md) "
    "says how an import works."
)

#: Keys in common: their name, and the families of which they are the intersection.
_COMMON = {
    "experts with scores": ("deepseek_v3", "glm4_moe", "afmoe", "mimo_v2_flash", "hy_v3"),
    "experts": ("mixtral", "qwen3_moe", "dbrx"),
    "latent attention": ("youtu",),
    "encoder and decoder": ("bart", "pegasus"),
    "sounds": ("wav2vec2", "hubert"),
    "state space": ("mamba", "bamba"),
}


def families_page() -> str:
    """The page."""
    return page("Families", _INTRO, _body())


def _shared(keys: Sequence[frozenset[str]]) -> frozenset[str]:
    """The keys that all of these families have."""
    first, *others = keys
    return first.intersection(*others)


def _body() -> Iterator[str]:
    by_type = {name: family for family in BUILT_IN for name in family.model_types}
    usual = _keys(by_type["llama"])
    common = {
        title: _shared([_keys(by_type[name]) - usual for name in names])
        for title, names in _COMMON.items()
    }
    yield "| family | `model_type` | features | keys |"
    yield "|---|---|---|---|"
    for family in sorted(BUILT_IN, key=lambda f: f.name.lower()):
        names = _listed((*family.model_types, *family.marks))
        own = ", ".join(_grouped(_keys(family) - usual, common))
        file = f"../{family.read.__module__.replace('.', '/')}.py"
        yield f"| [{family.name}]({file}) | {names} | {family.features} | {own} |"
    yield from ("", "## Keys in common", "", "| name | keys |", "|---|---|")
    yield from (f"| *{title}* | {_listed(sorted(keys))} |" for title, keys in common.items())
    yield from ("", "## Keys of Llama", "", "All readers that follow Llama know these:", "")
    yield from (_listed(sorted(usual)) + ".", "")
    yield from ("## Keys without effect", "")
    yield "Any family may have these; they do not change what a training step computes:"
    yield from ("", _listed(sorted(NO_EFFECT)) + ".", "")
    yield "So have keys that begin with `_`, and those that end in one of these:"
    yield from ("", _listed(ENDINGS) + ".", "")
    yield from ("## Features that are off", "")
    yield "Families that do not ask for one of these keys accept these values, and null:"
    yield from ("", "| key | values |", "|---|---|")
    for key, values in OFF.items():
        yield f"| `{key}` | {_listed(json.dumps(v) for v in values) or '`null`'} |"


def _grouped(keys: frozenset[str], common: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """The names of common keys, each with all of its keys there, then the other keys."""
    for title, shared in common.items():
        if shared <= keys:
            keys -= shared
            yield f"*{title}*"
    yield from (f"`{key}`" for key in sorted(keys))


def _keys(family: ModelFamily) -> frozenset[str]:
    """The keys that a reader asks for, of a configuration that states as little as it can."""
    key = "model_type" if family.model_types else "_class_name"
    name = (*family.model_types, *family.marks)[0]
    text = JsonText(Source("config.json", json.dumps({key: name})))
    config = Config(text, text.read())
    with suppress(DiagnosticError):  # it needs more: the keys up to there count
        family.read(config)
    return config.asked - {"model_type", "_class_name"}


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
