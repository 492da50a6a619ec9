"""Figures of machine texts: quantities with units and sources."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def _units(base: str, scales: Mapping[str, int | Fraction]) -> Mapping[str, Fraction]:
    return MappingProxyType({f"{name}{base}": Fraction(scale) for name, scale in scales.items()})


#: Data sheets of networks state bits.
_BITS = _units("b/s", {name: Fraction(_DECIMAL[name], 8) for name in "kMGT"})
#: The units of each kind of quantity, and an example.
UNITS: Mapping[str, tuple[Mapping[str, Fraction], str]] = MappingProxyType(
    {
        "bytes": (_units("B", {**_DECIMAL, **_BINARY}), "80 GiB"),
        "bandwidth": ({**_units("B/s", {**_DECIMAL, **_BINARY}), **_BITS}, "3.35 TB/s"),
        "rate": (_units("FLOP/s", _DECIMAL), "989 TFLOP/s"),
        "frequency": (_units("Hz", _DECIMAL), "1.83 GHz"),
        "time": (
            _units("s", {"": 1, **{n: Fraction(1, 1000**p) for p, n in enumerate("mun", 1)}}),
            "3 us",
        ),
    }
)
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z/]{1,8})")


def quantity(kind: str, value: object) -> Fraction:
    """The exact quantity of a text in bytes, bytes/s, FLOP/s, Hz or seconds.

    Raises ValueError for another text or value, and for zero unless the kind is time.
    """
    units, example = UNITS[kind]
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        form = "a text such as" if match is None else f"a unit among {', '.join(units)}, as in"
        raise ValueError(f"expects {form} '{example}', found {value!r:.60}")
    result = Fraction(match[1]) * units[match[2]]
    if not result and kind != "time":
        raise ValueError(f"expects more than zero, such as '{example}', found '{value}'")
    return result


def _floating(kind: str) -> Callable[[Any], float]:
    return lambda value: float(quantity(kind, value))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**53:
        raise ValueError(f"expects a number such as 132, found {value!r:.60}")
    return value


def listed(value: Any) -> tuple[Any, ...]:
    """The items of an array in a text, or of the levels of a machine; empty for other values."""
    return tuple(value) if isinstance(value, list | tuple) else ()  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


class Text(BaseModel):
    """A part of a machine text; unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Sourced(Text):
    """A figure with its source: a document and the place in it."""

    source: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Unit:
    """Marks a number in the schema with the kind of quantity that its text states."""

    kind: str


Seconds = Annotated[float, BeforeValidator(_floating("time")), Unit("time")]
#: A number of bytes without a source, such as a threshold.
Bytes = Annotated[int, BeforeValidator(lambda v: math.floor(quantity("bytes", v))), Unit("bytes")]
#: The element types for which machines state rates of products.
DataType = Literal["f64", "f32", "bf16", "f16", "f8e4m3", "f8e5m2", "f4e2m1", "i8"]
#: A share of a peak: more than 0, at most 1.
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class Size(Sourced):
    """Bytes."""

    value: Annotated[int, BeforeValidator(lambda v: math.floor(quantity("bytes", v)))]


class Bandwidth(Sourced):
    """Bytes per second."""

    value: Annotated[float, BeforeValidator(_floating("bandwidth"))]


class Rate(Sourced):
    """FLOPs per second."""

    value: Annotated[float, BeforeValidator(_floating("rate"))]


class Frequency(Sourced):
    """Hertz."""

    value: Annotated[float, BeforeValidator(_floating("frequency"))]


class Duration(Sourced):
    """Seconds; may be zero."""

    value: Seconds


class Count(Sourced):
    """A number of things."""

    value: Annotated[int, BeforeValidator(_count)]


Figure = Size | Bandwidth | Rate | Frequency | Duration | Count
#: The kind of quantity of each class of figures.
KINDS: Mapping[type[Figure], str] = MappingProxyType(
    {Size: "bytes", Bandwidth: "bandwidth", Rate: "rate", Frequency: "frequency", Duration: "time"}
)
_BASES: Mapping[str, str] = MappingProxyType(
    {"bytes": "B", "bandwidth": "B/s", "rate": "FLOP/s", "frequency": "Hz", "time": "s"}
)
_SHOWN = ("P", "T", "G", "M", "k", "", "m", "u", "n")


def figure_text(figure: Figure) -> str:
    """A figure with its unit: `3.35 TB/s`; bytes in powers of 1024."""
    value, kind = figure.value, KINDS.get(type(figure))
    if kind is None:
        return str(value)
    scales = {n.removesuffix(base): s for base in [_BASES[kind]] for n, s in UNITS[kind][0].items()}
    chosen = ("Ti", "Gi", "Mi", "Ki", "") if kind == "bytes" else _SHOWN
    fitting = [n for n in chosen if n in scales and value >= scales[n]]
    if not fitting:
        return f"{value:g} {_BASES[kind]}"
    return f"{float(value / scales[fitting[0]]):.6g} {fitting[0]}{_BASES[kind]}"
