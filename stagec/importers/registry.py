"""The families by name of their models: those built in, and those of plug-ins."""

from __future__ import annotations

import re
from collections.abc import Iterable

from stagec.importers import (
    attended,
    beside,
    classic,
    conditioned,
    deepseek,
    diffusion,
    encoders,
    falcon_h1,
    further,
    gemma4,
    griffin,
    hybrids,
    kimi,
    linear,
    llama,
    masked,
    mixture,
    multimodal,
    omni,
    pairs,
    recent,
    rwkv,
    sides,
    vision,
    zamba,
)
from stagec.importers.family import ModelFamily, known_families
from stagec.support.source import Source

BUILT_IN: tuple[ModelFamily, ...] = (
    *llama.FAMILIES,
    *classic.FAMILIES,
    *attended.FAMILIES,
    *mixture.FAMILIES,
    *deepseek.FAMILIES,
    *further.FAMILIES,
    *gemma4.FAMILIES,
    *hybrids.FAMILIES,
    *falcon_h1.FAMILIES,
    *linear.FAMILIES,
    *kimi.FAMILIES,
    *griffin.FAMILIES,
    *rwkv.FAMILIES,
    *zamba.FAMILIES,
    *encoders.FAMILIES,
    *masked.FAMILIES,
    *sides.FAMILIES,
    *vision.FAMILIES,
    *pairs.FAMILIES,
    *diffusion.FAMILIES,
    *conditioned.FAMILIES,
    *recent.FAMILIES,
    *multimodal.FAMILIES,
    *omni.FAMILIES,
    *beside.FAMILIES,
)
_TYPE = re.compile(r'"(?:model_type|_class_name)"\s*:\s*"([^"]*)"')


def families_of(extras: Iterable[object]) -> list[ModelFamily]:
    """The built-in families and those among what plug-ins have brought."""
    return [*BUILT_IN, *(each for each in extras if isinstance(each, ModelFamily))]


def knows(source: Source) -> bool:
    """Whether a built-in family can be the one of a configuration: no plug-in needs to be loaded to
    look for it."""
    known = known_families(BUILT_IN)
    found: list[str] = _TYPE.findall(source.text)
    return not found or any(name in known for name in found)
