"""Ops for reusable blocks: imports, calls, local parameters and options.

The pass 'inline' expands them; later passes never see them.
"""

from collections.abc import Iterator
from typing import ClassVar

from stagec.ir.core import Operation
from stagec.ir.opdef import OpDef
from stagec.ir.param import Param
from stagec.ir.traits import Conditional, Declares, Free, Named, OpenParams, Stays, Trait
from stagec.ir.types import Type
from stagec.ir_spec.ops.structure import Declaration

AS = "as"


class ImportOp(Declaration):
    """Imports the private functions of another text, whose path is relative to this text's folder,
    or else to the library's. The imports of that text are included.

    The symbols and relations of that text say what its functions expect: a relation holds for each
    call, in the sizes of the call.
    """

    name = "stg.import"
    traits = (Declares("import"),)
    parents = ("stg.module",)
    params = (Param("path", "str", "the text", required=True, positional=True),)
    example = 'stg.import["blocks/swiglu.stg"]'


class _Opened(OpDef):
    """Base class of ops that 'inline' expands."""

    traits: ClassVar[tuple[Trait, ...]] = ()

    def infer(self, op: Operation) -> list[Type]:
        raise op.error(f"'{op.name}' has not been inlined", remedy="run the pass 'inline' first")


class ParamOp(_Opened):
    """A parameter of the model, stated where it is used: 'inline' makes it an argument of the
    function.

    In a repeat, every iteration has its own, stacked along a new first dimension. A parameter
    outside of a repeat that is used inside is shared by the iterations. Its role is `param`, unless
    its type has another.
    """

    name = "stg.param"
    traits = (Declares("parameter"),)
    example = "%wq = stg.param : bf16[D, H, K]"


class CallOp(_Opened):
    """Calls a private function: 'inline' puts its operations here.

    A parameter in brackets gives a symbol of the function a value, `F = F_shared`, or chooses one
    of its options: `bias`, `qk_norm = rms`, `rope = (base = theta, first = R)`. Other symbols are
    those of the caller, other options what the function says. What the function computes is
    named by a path of the function's name, or of `as`: `%layers/mla/q`. A second call of one name
    gets a number: `%layers/mla_2/q`.
    """

    name = "stg.call"
    operands = ("argument*",)
    results = ("result*",)
    traits = (Free(), Stays(), Named(), OpenParams(words=True))
    params = (Param(AS, "name", "how paths call it (default: the function's name)"),)
    example = "%y = stg.call @swiglu[F = 4*D, as = shared](%x)"


class OptionOp(Declaration):
    """Declares an option of a private function with its values, of which the first is the default.
    The option's name alone means `yes`: `stg.call @f[bias](%x)`."""

    name = "stg.option"
    traits = (Declares("option"), Named(), OpenParams())
    parents = ("stg.func",)
    example = "stg.option @qk_norm[no, rms, layer]"

    def verify(self, op: Operation) -> Iterator[str]:
        if len(op.attrs) < 2 or any(value is not True for value in op.attrs.values()):
            yield "expects two words or more, such as [no, yes]"


class StaticsOp(Declaration):
    """Declares static parameters of an op of a private function, with their defaults. A call gives
    others, `rope = (base = theta, first = R)`, or `rope = no`. The op names them: `stg.rope[statics
    = rope](%q)`."""

    name = "stg.statics"
    traits = (Declares("statics"), Named(), OpenParams(words=True))
    parents = ("stg.func",)
    example = "stg.statics @mask[causal]"


class WhenOp(_Opened):
    """The values that its region yields if the options of the function have these values, otherwise
    its operands. Without operands the value is then absent: ops do not have that operand.

    `bias` means that the option bias is not `no`; `norm = rms` and `norm = (rms, layer)` list its
    possible values. All conditions must be true.
    """

    name = "stg.when"
    operands = ("otherwise*",)
    results = ("result*",)
    traits = (Conditional(), OpenParams(words=True))
    example = "%y = stg.when[bias](%x) {\n  %a = stg.gelu(%x)\n  stg.yield(%a)\n}"
