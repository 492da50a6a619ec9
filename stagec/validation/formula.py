"""Formulas of sources: exact arithmetic of sizes and counted quantities.

3 * matmul_executed.forward / S / 1e9
more(bytes(reduce_scatter, tp, bf16), L=2 * L)    the increase with twice as many layers
"""

import ast
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final, TypeAlias

#: The value of a quantity, given by its name and its arguments or its attribute, for these sizes.
#: Raises `ValueError`.
Quantity: TypeAlias = Callable[[tuple[str, ...], Mapping[str, int]], Fraction]
_OPERATORS: Final[Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def value_of(text: str, sizes: Mapping[str, int], quantity: Quantity) -> Fraction:
    """The value of a formula. Raises `ValueError` for other text."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, sizes, quantity)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"'{text:.80}' is not a formula") from None
    except ZeroDivisionError:
        raise ValueError(f"'{text:.80}' divides by zero") from None


def sizes_of(given: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of a row: numbers, and formulas of these. Raises `ValueError`."""
    sizes = {name: int(size) for name, size in given.items() if str(size).isdecimal()}
    formulas = {name: str(size) for name, size in given.items() if name not in sizes}
    return sizes | {n: _whole(value_of(f, sizes, _no_quantity)) for n, f in formulas.items()}


def _whole(value: Fraction) -> int:
    if value.denominator != 1:
        raise ValueError(f"a size cannot be {value}")
    return value.numerator


def _no_quantity(name: tuple[str, ...], _: Mapping[str, int]) -> Fraction:
    raise ValueError(f"unknown size '{'.'.join(name)}'")


def _value(node: ast.expr, sizes: Mapping[str, int], quantity: Quantity) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            sides = (_value(side, sizes, quantity) for side in (left, right))
            return _OPERATORS[type(op)](*sides)
        case ast.Name(name) if name in sizes:
            return Fraction(sizes[name])
        case ast.Call(ast.Name("more"), [inner], keywords):
            changes = {str(k.arg): _whole(_value(k.value, sizes, quantity)) for k in keywords}
            more = _value(inner, {**sizes, **changes}, quantity)
            return more - _value(inner, sizes, quantity)
        case ast.Call(func, [*inner], []):
            return quantity((*_names(func), *(n for each in inner for n in _names(each))), sizes)
        case _:
            return quantity(_names(node), sizes)


def _names(node: ast.expr) -> tuple[str, ...]:
    match node:
        case ast.Name(name):
            return (name,)
        case ast.Attribute(ast.Name(name), part):
            return (name, part)
        case _:
            raise ValueError(f"a formula cannot contain '{ast.unparse(node)}'")
