"""docs/reference/flags.md: every flag that says how to parallelize, from its statement."""

from __future__ import annotations

from collections.abc import Iterator

from stagec.driver.shell.sections import section_of
from stagec.ir_spec.strategy import STATEMENTS
from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.ir_spec.strategy.statement import Flag, Section
from stagec.jobs.request.flags import FLAGS
from tools.markup import page

_INTRO = (
    "Every flag of `compile`, `analyze` and `memory` that says how to parallelize, in the sections "
    "of `--help`: what it writes (`--print-strategy` shows the text), its values, and its default. "
    "[strategies.md](../strategies.md) says what each does to placements and traffic, "
    "[the reference](ops/index.md#statements-of-a-strategy) what else a statement takes. "
    "All of them can be swept: `--sweep zero=1,2,3`. "
    "One that is `on` or `off` is on if it has no value."
)
_MESH = "stg.mesh"
_HEAD = ("| flag | writes | values | default | meaning |", "|---|---|---|---|---|")


def flags_page() -> str:
    """docs/reference/flags.md."""
    return page("Flags", _INTRO, _rows())


def _rows() -> Iterator[str]:
    writes = {flag.name: op.name for op in STATEMENTS for flag in op.flags}
    for section in Section:
        flags = [flag for flag in FLAGS.values() if section_of(flag) is section]
        if flags:
            yield from (f"## {section.value}", "", *_HEAD)
            yield from (_row(flag, writes.get(flag.name, _MESH)) for flag in flags)
            yield ""


def _row(flag: Flag, op: str) -> str:
    meaning = " ".join([flag.help, *_needs(flag)])
    cells = (f"`{flag.option}`", f"[`{op}`](ops/{op}.md)", _values(flag), _default(flag), meaning)
    return f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |"


def _values(flag: Flag) -> str:
    match flag.kind:
        case "switch":
            other = f", or `--no-{flag.option[2:]}`" if flag.default else ""
            return f"`on`, `off`{other}"
        case "choice":
            return ", ".join(f"`{c}`" for c in flag.choices)
        case "int" if flag.most is not None:
            return f"{flag.least} to {flag.most}"
        case "int" | "ratio":
            return f"{flag.least} or more"
        case "loads":
            return "a file, or a list"
        case _:
            return f"`{flag.metavar}`"


def _default(flag: Flag) -> str:
    if isinstance(flag.default, bool):
        return "on" if flag.default else "off"
    return f"`{flag.default}`" if flag.default not in ("", ()) else ""


def _needs(flag: Flag) -> Iterator[str]:
    """The requirements of a flag."""
    names = [need if isinstance(need, str) else need[0] for need in flag.needs + flag.beside]
    if EXPERTS in names:
        yield "For models with experts."
    flags = [f"`{FLAGS[name].option}`" for name in names if name in FLAGS]
    if flags:
        yield f"With {' and '.join(flags)}."
