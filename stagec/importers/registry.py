"""The families by name of their models: those built in, and those of plug-ins."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import import_module

from stagec.importers.family import ModelFamily, declared_in, known_families
from stagec.support.source import Source

#: The modules of readers, in the order in which their families are listed.
_READERS = (
    "llama llama_variants gpt windows mixture deepseek latent sigmoid_experts gemma3n gemma4 mamba "
    "falcon_h1 linear_attention kimi griffin rwkv zamba encoders masked disentangled bart vision "
    "waves pyramids swin pairs diffusion conditioned short_convolutions multimodal omni llava"
)
_MODULES = [import_module(f"stagec.importers.families.{name}") for name in _READERS.split()]
BUILT_IN: tuple[ModelFamily, ...] = tuple(
    family for module in _MODULES for family in declared_in(module.__name__)
)
_TYPE = re.compile(r'"(?:model_type|_class_name)"\s*:\s*"([^"]*)"')


def families_of(extras: Iterable[object]) -> list[ModelFamily]:
    """The built-in families and those among what plug-ins have brought."""
    return [*BUILT_IN, *(each for each in extras if isinstance(each, ModelFamily))]


def knows(source: Source) -> bool:
    """Whether a built-in family can be the one of a configuration: no plug-in needs to be loaded to
    look for it."""
    known = known_families(BUILT_IN)
    types: list[str] = _TYPE.findall(source.text)
    return not types or any(name in known for name in types)
