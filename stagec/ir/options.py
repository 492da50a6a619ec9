"""Options of private functions: what a function declares, and what a call chooses.

stg.option @bias[no, yes]               one of these words, the first if a call says nothing
stg.statics @rope[base = theta]         static parameters of an op, these if it says nothing
%y = stg.when[bias](%x) {...}           what the region yields, %x where bias is no
%r = stg.rope[statics = rope](%y)       stg.rope[base = theta](%y)
%a = stg.call @f[bias, rope = (base = 100, first = R)](%x)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stagec.ir.core import Attr, NamedAttr, Operation, substitute_attr
from stagec.ir.expr import Expr, symbol
from stagec.ir.param import STATICS, attr_text

#: What an option is: a word, or static parameters with their values (True: a flag); None for `no`.
Choice = str | Mapping[str, Attr] | None
NO, YES = "no", "yes"


def declared_options(func: Operation) -> dict[str, Operation]:
    """The declarations of a function's options, by name."""
    ops = func.region.ops if func.region is not None else []
    declared: dict[str, Operation] = {}
    for op in ops:
        if op.definition.declares in ("option", "statics"):
            declared.setdefault(op.symbol or "", op)
    return declared


def is_statics(option: Operation) -> bool:
    """Whether an option is static parameters, not one of some words."""
    return option.definition.declares == "statics"


def words_of(option: Operation) -> tuple[str, ...]:
    """What an option may be called in `stg.when`."""
    return (YES, NO) if is_statics(option) else tuple(option.attrs)


def choice(option: Operation, given: Attr | None, sizes: Mapping[str, Expr]) -> Choice:
    """What an option is, from what a call says of it (None: nothing) and of the sizes of the
    function. Raises ValueError with what it expects."""
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
    """An option as it stands in a call."""
    if chosen is None or isinstance(chosen, str):
        return symbol(chosen or NO)
    return tuple(symbol(n) if v is True else NamedAttr(n, v) for n, v in chosen.items())


def conditions(when: Operation) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The options that a `stg.when` asks for, each with the words of which it is one; without words
    it is not `no`."""
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
