"""How steps are replayed on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagec.time.costs.nodes import Measurements


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a step is replayed. Without `overlap` all collectives are blocking. Without `graphs`
    hosts launch steps of serving op by op, as they do steps of training. Times in `measured` take
    precedence over models."""

    overlap: bool = True
    graphs: bool = True
    measured: Measurements | None = None


#: The options of most answers.
USUAL = ReplayOptions()
