"""`stg.stack`: the behaviour of a software release, as defaults of statements."""

from stagec.ir.param import Param
from stagec.ir.traits import Declares, Holds
from stagec.ir_spec.ops.structure import Declaration


class StackOp(Declaration):
    """The software that runs a program: defaults of statements, which flags and strategies
    override. It is a separate file, which `--stack` names.

    `extends` names another stack, whose statements apply unless this one has its own. Statements
    that place values, such as `stg.split`, are allowed only in a strategy. A statement that
    repeats, such as `stg.blocking`, counts separately for each axis or dimension that it names, and
    applies to jobs that have the axis or dimension.
    """

    name = "stg.stack"
    traits = (Declares("stack"), Holds("defaults of statements such as stg.fusion[elementwise]"))
    parents = ()
    params = (
        Param("version", "str", "the release whose source the lines were read from"),
        Param("extends", "str", "the name of another stack, NAME or NAME@VERSION, or its file"),
    )
    example = 'stg.stack @mine[version = "1.0"] {\n  stg.fusion[elementwise]\n}'
