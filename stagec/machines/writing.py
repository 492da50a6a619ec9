"""Writes fitted constants as tables of machine texts.

`rounded` and `rounded_network` round constants to the precision of a text, so that reading the text
returns the same numbers.
"""

import json
import re
from collections.abc import Mapping

from stagec.machines.efficiency import NetworkEfficiency, Protocol

_TIMES = ("start", "step", "tile", "reduction")


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Round the constants of kernels: times to a nanosecond, others to four decimals."""
    return {
        n: float(f"{round(v * 1e6, 3):g}e-6") if n in _TIMES else float(f"{round(v, 4):g}")
        for n, v in values.items()
    }


def kernel_section(
    kind: str, values: Mapping[str, float | bool], rates: Mapping[str, float], fitted: str
) -> str:
    """The table of a kind of kernels: its constants, and the rates of types; `fitted` names the
    data that they were fitted on."""
    lines = [f"[efficiency.{kind}]"]
    if rates:
        lines.append(f"rate = {{ {', '.join(f'{n} = {v:.4g}' for n, v in rates.items())} }}")
    lines += [
        f'{n} = "{_microseconds(v, 3)}"' if n in _TIMES else f"{n} = {_number(v)}"
        for n, v in values.items()
    ]
    return "\n".join([*lines, f"fitted = {quoted(fitted)}"]) + "\n"


def rounded_network(network: NetworkEfficiency) -> NetworkEfficiency:
    """Round the constants of a level to three significant figures."""

    def one(p: Protocol) -> Protocol:
        start, hops, share, copied = (
            float(f"{v:.3g}") for v in (p.start * 1e6, p.hops, p.share, p.copy_)
        )
        return Protocol.model_construct(
            start=float(f"{start:g}e-6"), hops=hops, share=share, copy_=copied
        )

    return network.model_copy(
        update={
            "protocols": {n: one(p) for n, p in network.protocols.items()},
            "pairs": {n: one(p) for n, p in network.pairs.items()},
            "direct": {n: one(p) for n, p in network.direct.items()},
            "multicast": one(network.multicast),
        }
    )


def network_section(level: str, network: NetworkEfficiency) -> str:
    """The tables of a level of the network."""

    def inline(p: Protocol) -> str:
        names = f'start = "{_microseconds(p.start, 9)}", hops = {p.hops:g}, share = {p.share:g}'
        return f"{{ {names}, copy = {p.copy_:g} }}"

    lines = [f"[efficiency.network.{level}]", f"fitted = {quoted(network.fitted)}"]
    lines.append(f"multicast = {inline(network.multicast)}")
    direct = {str(name): p for name, p in network.direct.items()}
    if direct:
        lines.append(f"direct_fitted = {quoted(network.direct_fitted)}")
    for name, group in (
        *(("protocols", network.protocols), ("pairs", network.pairs)),
        *((("direct", direct),) if direct else ()),
    ):
        lines += ["", f"[efficiency.network.{level}.{name}]"]
        lines += [f"{n} = {inline(p)}" for n, p in group.items()]
    return "\n".join(lines) + "\n"


def _number(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{round(value, 4):g}"


def _microseconds(seconds: float, decimals: int) -> str:
    """`2.7 us`; texts of machines have no exponents."""
    return f"{seconds * 1e6:.{decimals}f}".rstrip("0").rstrip(".") + " us"


def with_sections(text: str, sections: Mapping[str, str]) -> str:
    """A machine text with new sections, by title: each replaces the section with that title, or is
    appended."""
    for title, section in sections.items():
        old = rf"(?ms)^\[{re.escape(title)}(\.[^\]]*)?\]\n.*?(?=^\[|\Z)"
        match = re.search(old, text)
        before, rest = (text, "") if match is None else (text[: match.start()], text[match.end() :])
        parts = (before, section, re.sub(old, "", rest))
        text = "\n\n".join(filter(None, (part.rstrip() for part in parts))) + "\n"
    return text


def quoted(text: str) -> str:
    """A text as a TOML string. Characters that UTF-8 cannot represent become escapes."""
    known = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return json.dumps(known, ensure_ascii=False).replace("\x7f", "\\u007f")
