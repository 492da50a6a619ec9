"""`stg.stack`: what a software release makes of programs, as defaults of statements."""

from __future__ import annotations

from stagec.ir.param import Param
from stagec.ir.traits import Declares, Holds
from stagec.ir_spec.ops.structure import Declaration


class StackOp(Declaration):
    """The software that runs a program: defaults of statements, which flags and strategies
    override. It is a separate file, which `--stack` names.

    `extends` names another stack, whose lines hold where this one has none. Statements that place
    values, such as `stg.split`, stand in a strategy only. One that repeats, such as `stg.blocking`,
    counts as one for each axis or dimension that it names, and holds in jobs that have this one.
    """

    name = "stg.stack"
    traits = (Declares("stack"), Holds("defaults of statements such as stg.fusion[elementwise]"))
    parents = ()
    params = (
        Param("version", "str", "the release whose source the lines were read from"),
        Param("extends", "str", "the name of another stack, NAME or NAME@VERSION, or its file"),
    )
    example = 'stg.stack @mine[version = "1.0"] {\n  stg.fusion[elementwise]\n}'
