"""Spaces of strategies: the flags that a search may vary."""

from collections.abc import Iterator

from stagec.ir.core import Operation
from stagec.ir.opdef import OpDef
from stagec.ir.param import Param
from stagec.ir.traits import Declares, Holds
from stagec.ir_spec.ops.structure import Declaration


class SpaceOp(Declaration):
    """A space of strategies for `stagec search`, with a `stg.vary` for each flag that has several
    values. Its points are all combinations; the valid ones are jobs."""

    name = "stg.space"
    traits = (Declares("space"), Holds('statements such as stg.vary[tp, "1..8"]'))
    parents = ("stg.module",)
    example = 'stg.space @s {\n  stg.vary[tp, "1..8"]\n  stg.vary[zero, "0,1,3"]\n}'

    def verify(self, op: Operation) -> Iterator[str]:
        """Check that no flag varies twice."""
        seen: set[str] = set()
        for each in op.region.ops if op.region else ():
            if each.name == VaryOp.name:
                flag = each.text("flag")
                if flag in seen:
                    yield f"varies '{flag}' twice, expected one stg.vary with all its values"
                seen.add(flag)


class VaryOp(Declaration):
    """The values that a flag may have, as the command line takes them: `1,2,4`, `1..8` (doubled
    from 1 up to 8), `on,off`."""

    name = "stg.vary"
    parents = ("stg.space",)
    params = (
        Param("flag", "name", "the flag, with _ for -", required=True, positional=True),
        Param("values", "str", "its values", required=True, positional=True),
    )
    example = 'stg.vary[tp, "1..8"]'


OPS: tuple[OpDef, ...] = (SpaceOp(), VaryOp())
