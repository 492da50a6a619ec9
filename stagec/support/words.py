"""Words of messages and tables."""


def counted(count: int | str, noun: str, plural: str = "s") -> str:
    """`1 stage`, `4 stages`, of a number or of its text; `plural` is what the noun ends in."""
    return f"{count} {noun}{plural if str(count) != '1' else ''}"
