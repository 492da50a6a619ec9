"""The registry of model families: built-in ones, and those of plug-ins."""

import re
from collections.abc import Iterable
from importlib import import_module

from stagec.importers.family import ModelFamily, declared_in, known_families
from stagec.support.source import Source

#: The modules of readers, in the order of the list of families.
_READERS = (
    "llama llama_variants gpt windows mixture deepseek compressed shortcut sigmoid_experts "
    "gated_heads puzzle selected_heads gemma4 mamba falcon_h1 linear_attention recurrences "
    "zamba encoders masked disentangled bart gemma_pairs vision waves pyramids pairs diffusion "
    "short_convolutions multimodal omni resampled pooled phi_media "
    "documents llava connectors llava_releases"
)
_MODULES = [import_module(f"stagec.importers.families.{name}") for name in _READERS.split()]
BUILT_IN: tuple[ModelFamily, ...] = tuple(
    family for module in _MODULES for family in declared_in(module.__name__)
)
_TYPE = re.compile(r'"(?:model_type|_class_name)"\s*:\s*"([^"]*)"')


def families_of(extras: Iterable[object]) -> list[ModelFamily]:
    """The built-in families, and those among the objects of plug-ins."""
    return [*BUILT_IN, *(each for each in extras if isinstance(each, ModelFamily))]


def knows(source: Source) -> bool:
    """Whether a built-in family may read a configuration, so that no plug-ins need to be loaded."""
    known = known_families(BUILT_IN)
    types: list[str] = _TYPE.findall(source.text)
    return not types or any(name in known for name in types)
