"""Options of private functions: their declarations, and their values in calls.

stg.option @bias[no, yes] one of these words, by default the first one stg.statics @rope[base =
theta] static parameters of an op, by default these %y = stg.when[bias](%x) {...} what the region
yields, %x where bias is no %r = stg.rope[statics = rope](%y)       stg.rope[base = theta](%y) %a =
stg.call @f[bias, rope = (base = 100, first = R)](%x)
"""

from collections.abc import Iterator, Mapping

from stagec.ir.core import Attr, NamedAttr, Operation, substitute_attr
from stagec.ir.expr import Expr, symbol
from stagec.ir.param import STATICS, attr_text

#: The value of an option: a word, or static parameters by name (True: a flag); None for `no`.
Choice = str | Mapping[str, Attr] | None
NO, YES = "no", "yes"


def declared_options(func: Operation) -> dict[str, Operation]:
    """The declarations of the options of a function, by name."""
    ops = func.region.ops if func.region is not None else []
    declared: dict[str, Operation] = {}
    for op in ops:
        if op.definition.declares in ("option", "statics"):
            declared.setdefault(op.symbol or "", op)
    return declared


def is_statics(option: Operation) -> bool:
    """Whether the values of an option are static parameters, not words."""
    return option.definition.declares == "statics"


def words_of(option: Operation) -> tuple[str, ...]:
    """The words by which `stg.when` may refer to the values of an option."""
    return (YES, NO) if is_statics(option) else tuple(option.attrs)


def choice(option: Operation, given: Attr | None, sizes: Mapping[str, Expr]) -> Choice:
    """The value of an option, from the attribute of a call (None: the default) and the sizes that
    it gives to the function. Raises ValueError with the expected values."""
    if is_statics(option):
        return _statics(option, given, sizes)
    words = tuple(option.attrs)
    word = words[0] if given is None else _word(given)
    if word is None or word not in words:
        raise ValueError(f"one of {', '.join(words)}")
    return word


def _statics(
    option: Operation, given: Attr | None, sizes: Mapping[str, Expr]
) -> Mapping[str, Attr] | None:
    if given is None:
        own = {name: substitute_attr(value, sizes) for name, value in option.attrs.items()}
        return None if NO in own else own
    if given is True:
        raise ValueError("static parameters such as (base = theta), or no")
    items = given if isinstance(given, tuple) else (given,)
    if items and _word(items[0]) == NO:
        return None
    named = dict(map(_static, items))
    if STATICS in named or len(named) < len(items):
        raise ValueError("static parameters of an op, each once")
    return named


def _static(item: Attr) -> tuple[str, Attr]:
    if isinstance(item, NamedAttr):
        return item.name, item.value
    name = _word(item)
    if name is None:
        raise ValueError(f"static parameters such as (causal, window = W), found {attr_text(item)}")
    return name, True


def _word(value: Attr) -> str | None:
    if value is True:
        return YES
    return value.symbol_name if isinstance(value, Expr) else None


def handed_on(chosen: Choice) -> Attr:
    """The attribute of a call for a value of an option."""
    if chosen is None or isinstance(chosen, str):
        return symbol(chosen or NO)
    return tuple(symbol(n) if v is True else NamedAttr(n, v) for n, v in chosen.items())


def conditions(when: Operation) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The options in the conditions of a `stg.when`, each with its allowed words; without words any
    value but `no` is allowed."""
    for name, value in when.attrs.items():
        items = () if value is True else value if isinstance(value, tuple) else (value,)
        yield name, tuple(map(attr_text, items))


def holds(when: Operation, chosen: Mapping[str, Choice]) -> bool:
    """Whether all conditions of a `stg.when` hold."""
    for name, words in conditions(when):
        now = chosen[name]
        word = now if isinstance(now, str) else NO if now is None else YES
        if word not in words if words else word == NO:
            return False
    return True
