"""How much text is read: bounds that keep hostile input from costing more than a message."""

from __future__ import annotations

#: Longest text, in bytes; dumps of the largest models are an order below.
MAX_BYTES = 1 << 20
#: Deepest nesting of brackets.
MAX_DEPTH = 128
#: Most operations in a text.
MAX_OPERATIONS = 20_000
#: Most terms of an expression when multiplied out.
MAX_TERMS = 1000
#: Most operators in one parameter or size.
MAX_OPERATORS = 20_000
#: Largest coefficient in an expression.
MAX_COEFFICIENT = 1 << 64
