"""A plug-in whose op has no rule."""

from stagec.api import OpDef, Plugin


class Ruleless(OpDef):
    """An op whose author forgot its rule."""

    name = "my.ruleless"
    operands = ("x",)


PLUGIN = Plugin(name="mine", ops=(Ruleless(),))
