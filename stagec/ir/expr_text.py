"""The text of expressions, in the grammar of STG: equal expressions have the same text.

Like `stagec.ir.evaluation`, the module does not import sympy, but queries attributes of nodes.
"""

from functools import lru_cache
from typing import Any

# sympy ships partial types only, so nodes are of no type here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

#: The name of the function that `%` prints.
MOD = "mod"


@lru_cache(maxsize=1 << 16)
def text_of(node: Any) -> str:
    """The text of a node: terms with negative ones last, factors by name."""
    if node.func.__name__ == "Tuple":
        return f"({', '.join(map(text_of, node.args))})"
    if node.is_Add:
        terms = sorted(map(_term, node.args), key=lambda t: (t[0] < 0, t[1].isdigit(), t[1]))
        text = ("-" if terms[0][0] < 0 else "") + terms[0][1]
        return text + "".join((" - " if sign < 0 else " + ") + body for sign, body in terms[1:])
    sign, body = _term(node)
    return ("-" if sign < 0 else "") + body


def _term(node: Any) -> tuple[int, str]:
    """The sign of a term, 1 or -1, and its text without the sign."""
    coefficient, product = node.as_coeff_Mul()
    parts: list[tuple[str, int]] = []
    for factor in product.args if product.is_Mul else (product,):
        base, exponent = (factor.base, int(factor.exp)) if factor.is_Pow else (factor, 1)
        if base != 1:
            parts.append((_atom(base), exponent))
    parts.sort(key=lambda p: (not p[0][0].isalpha(), p[0]))
    above = [_power(b, e) for b, e in parts if e > 0]
    below = [_power(b, -e) for b, e in parts if e < 0]
    number, divisor = abs(int(coefficient.p)), int(coefficient.q)
    if number != 1 or not above:
        above.insert(0, str(number))
    if divisor != 1:
        below.insert(0, str(divisor))
    text = "*".join(above)
    if below:
        text += "/" + (below[0] if len(below) == 1 else "(" + "*".join(below) + ")")
    return (-1 if coefficient < 0 else 1), text


def _power(base: str, exponent: int) -> str:
    return base if exponent == 1 else f"{base}^{exponent}"


def _operand(node: Any) -> str:
    return text_of(node) if node.is_Integer and node >= 0 else _atom(node)


def _atom(node: Any) -> str:
    if node.is_Symbol:
        return str(node.name)
    if node.is_Function:
        name = node.func.__name__
        if name == MOD:
            left, right = map(_operand, node.args)
            return f"({left} % {right})"
        return f"{name}({', '.join(map(text_of, node.args))})"
    return f"({text_of(node)})"
