"""The option `--stack`: reads a stack with those that it extends, and adds its defaults to a
strategy.

Strategies and flags take precedence. A statement of the strategy gets the parameters of the stack
that it does not have; a default that the statement refuses together with others is left out.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagec.ir.core import Attr, Operation
from stagec.ir.opdef import Registry
from stagec.ir.signature import misfits
from stagec.ir_spec.strategy.scheduler import SchedulerOp
from stagec.ir_spec.strategy.stack import StackOp
from stagec.ir_spec.strategy.statement import Statement
from stagec.jobs.request.flags import FLAGS
from stagec.jobs.session import Session
from stagec.models import LIBRARY, library_text, stack_release, stacks
from stagec.support.diagnostics import Diagnostic, DiagnosticList, error
from stagec.support.source import UNKNOWN, Loc, Source, file_loc
from stagec.support.suggest import did_you_mean
from stagec.text.build import parse_op

SUFFIX = ".stg"
_FORM = "write 'stg.stack @name[version = \"1.0\"] { ... }'; 'stagec stacks NAME' prints one"


@dataclass(frozen=True)
class StackLine:
    """A line of a stack: its statement; the name of the stack, `torchtitan 0.2`; the axis or
    dimension that the statement is about, if statements of its kind repeat; and the origins of the
    parameters that the line inherits from stacks that its own extends."""

    op: Operation
    stack: str
    about: str = ""
    inherited: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def definition(self) -> Statement:
        """The definition of the statement."""
        statement = self.op.definition
        assert isinstance(statement, Statement)
        return statement

    @property
    def origin(self) -> str:
        """`torchtitan 0.2 (torchtitan.stg:9)`."""
        place = file_loc(self.op.loc)
        where = f" ({place.file.rpartition('/')[2]}:{place.line})" if place is not None else ""
        return self.stack + where

    def origins(self, names: Iterable[str]) -> str:
        """`grad: mine 1 (mine.stg:2); param: torchtitan 0.2 (torchtitan.stg:3)`: the origins of
        these parameters."""
        grouped: dict[str, list[str]] = {}
        for name in names:
            grouped.setdefault(self.inherited.get(name, self.origin), []).append(name)
        return "; ".join(f"{', '.join(each)}: {origin}" for origin, each in grouped.items())


def stack_source(name: str, session: Session, loc: Loc = UNKNOWN) -> Source:
    """The text of a shipped stack, NAME or NAME@VERSION, or of a file. Raises `DiagnosticError`;
    `OSError`."""
    if name.endswith(SUFFIX) or name == "-":
        return session.read_part(name, StackOp.name, _FORM)
    known, short = stacks(), stack_release(name)
    if short not in known:
        raise error(
            f"no stack '{short}', neither in the library nor as a file",
            loc,
            remedy=did_you_mean(short, known)
            or did_you_mean(short.lower(), (n for n in known if "@" not in n))
            or f"choose among {', '.join(known)}, or a file",
        )
    path = f"stacks/{short}{SUFFIX}"
    return session.remember(Source(LIBRARY + path, library_text(path)))


def stack_name(op: Operation) -> str:
    """The name of a stack in the form of --stack: megatron-core for @megatron_core."""
    return (op.symbol or "").replace("_", "-")


def read_stack(name: str, session: Session, registry: Registry) -> Sequence[StackLine]:
    """The lines of a stack, those of the stacks that it extends first. Raises `DiagnosticError` if
    stacks extend each other in a cycle, and for a line that is not a statement; `OSError`."""
    lines: dict[tuple[str, str], StackLine] = {}
    for op in reversed(_chain(name, session, registry)):
        title = " ".join(filter(None, (stack_name(op), op.text("version"))))
        for stated, key in [(each, key) for each in op.body.ops for key in _keys(each)]:
            own = {_subject(stated): (key[1],)} if key[1] else {}
            each = Operation(stated.definition, attrs={**stated.attrs, **own}, loc=stated.loc)
            inherited: dict[str, str] = {}
            if (base := lines.get(key)) is not None:
                for name, value in base.op.attrs.items():
                    if _give(each, name, value):
                        inherited[name] = base.inherited.get(name, base.origin)
            lines[key] = StackLine(each, title, key[1], inherited)
    return tuple(lines.values())


def _chain(name: str, session: Session, registry: Registry) -> list[Operation]:
    """A stack, the one that it extends, and so on."""
    chain: list[Operation] = []
    seen: list[str] = []
    loc: Loc = UNKNOWN
    while name or not seen:
        source = stack_source(name, session, loc)
        if source.name in seen:
            ring = " extends ".join(f"@{op.symbol}" for op in [*chain, chain[0]])
            raise error(
                f"stacks extend each other in a cycle: {ring}",
                loc,
                remedy="remove 'extends' from one of them",
            )
        op = _parsed(source, registry)
        _check_version(op, name, loc)
        seen.append(source.name)
        chain.append(op)
        name, loc = op.text("extends"), op.loc
        if name.endswith(SUFFIX):
            name = str(Path(source.name).parent / name)
    return chain


def _parsed(source: Source, registry: Registry) -> Operation:
    op = parse_op(source, registry)
    if op.name != StackOp.name:
        raise op.error(f"expected '{StackOp.name}', found '{op.name}'", remedy=_FORM)
    problems = DiagnosticList()
    seen: set[tuple[str, str]] = set()
    for each in op.body.ops:
        for message, remedy in _mistakes(each, seen):
            problems.error(f"'{each.name}' {message}", each.loc, remedy=remedy)
        seen.update(_keys(each))
    problems.check()
    return op


def _subject(op: Operation) -> str:
    """The parameter with the names that a statement is about, if statements of its kind repeat."""
    return op.definition.subject if isinstance(op.definition, Statement) else ""


def _keys(op: Operation) -> list[tuple[str, str]]:
    """The keys of a statement: its kind, with each of the names that it is about, if it repeats."""
    return [(op.name, name) for name in (op.names(_subject(op)) if _subject(op) else ("",))]


def _mistakes(op: Operation, before: Collection[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The errors in a line of a stack, as messages with remedies."""
    if not isinstance(op.definition, Statement):
        yield "is not a statement of a strategy", "'stagec ops' lists those that are"
    elif op.definition.repeats and not op.definition.subject:
        yield "sets the placement of values, which a stack cannot do", "move it to a strategy"
    elif twice := [name for kind, name in _keys(op) if (kind, name) in before]:
        about = f" for '{twice[0]}'" if twice[0] else ""
        yield f"occurs twice in the stack{about}, expected once", "remove one of them"
    yield from ((message, "'stagec ops' describes it") for message in op.definition.verify(op))


def _check_version(op: Operation, name: str, loc: Loc) -> None:
    _, at, wanted = name.partition("@")
    version = op.text("version")
    if at and not name.endswith(SUFFIX) and wanted != version:
        others = (each.partition("@") for each in stacks())
        earlier = [release for of, _, release in others if release and of == stack_name(op)]
        raise error(
            f"stack '{stack_name(op)}' has no version '{wanted}'",
            loc,
            remedy=f"its version is {', before that '.join([version, *earlier])}"
            if version
            else "leave out the version: this stack has none",
        )


# -- in a strategy ---------------------------------------------------------------------------------


def apply_stack(
    strategy: Operation,
    lines: Sequence[StackLine],
    *,
    given: Collection[str] | None,
    serves: bool,
    names: Collection[str],
) -> Mapping[Operation, str]:
    """Add the defaults of a stack to a strategy, which comes from a text (`given` is None) or from
    flags, of which some are `given`. Lines about axes or dimensions that are not in `names`, those
    of the job, are left out. Returns the origins of the statements with defaults."""
    own = {key: op for op in strategy.body.ops for key in _keys(op)}
    origins: dict[Operation, str] = {}
    for line in lines:
        if (serves and line.definition.training) or line.about not in {"", *names}:
            continue
        wanted = _wanted(line, given or ())
        op = own.get((line.op.name, line.about))
        if op is None:
            op = Operation(line.definition, attrs=wanted, loc=line.op.loc)
            if wanted and _fits(op):
                origins[strategy.body.append(op)] = (
                    line.origins(wanted) if line.inherited else line.origin
                )
            continue
        instead = given is not None  # then defaults of flags are replaced
        wanted.pop(_subject(op), None)
        flags = line.definition.flag_names
        stated = {n for n in op.attrs if given is None or flags.get(n) in given}
        for name, other in line.definition.unless_given.items():
            if other in stated:
                wanted.pop(name, None)
        new = [n for n, value in wanted.items() if _give(op, n, value, instead=instead)]
        if new:
            origins[op] = line.origins(new)
    return origins


def of_other_steps(name: str, lines: Sequence[StackLine], *, serves: bool) -> Iterator[Diagnostic]:
    """A warning about a stack of trainers in a step of serving, or of an engine in one of training.
    Engines state a scheduler; trainers have statements of training, and no scheduler."""
    engine = any(line.op.name == SchedulerOp.name for line in lines)
    if engine == serves or not (engine or any(line.definition.training for line in lines)):
        return
    text, remedy = "an engine, and says nothing about training", "'stagec stacks' has those that do"
    if serves:
        text = "a trainer: it has no scheduler ('stg.scheduler'), and says nothing about serving"
        remedy = "--stack vllm, sglang and trtllm do"
    yield Diagnostic(f"the stack {name} is that of {text}", severity="warning", remedy=remedy)


def stack_flags(lines: Sequence[StackLine], given: Collection[str]) -> dict[str, Any]:
    """The flags that correspond to a stack, with their values, except those that are `given`."""
    flags: dict[str, Any] = {}
    for line in lines:
        op = Operation(line.definition, attrs=_wanted(line, given))
        flags |= line.definition.flags_of(op) if op.attrs else {}
    return flags


def needed_flags(lines: Sequence[StackLine], given: Collection[str]) -> dict[str, Any]:
    """The flags of a stack, with their values, that `given` flags need, as `--recompute-every 3`
    needs the recomputation of the stack."""
    flags = [FLAGS[name] for name in given if name in FLAGS]
    needs = [need for flag in flags for need in flag.needs + flag.beside]
    names = {n for need in needs for n in ((need,) if isinstance(need, str) else need)}
    return {n: v for n, v in stack_flags(lines, given).items() if n in names}


def _wanted(line: StackLine, given: Collection[str]) -> dict[str, Attr]:
    """The parameters of a line that no flag gives; empty if a flag gives the whole statement."""
    flags = line.definition.flag_names
    whole = {flag.name for flag in line.definition.flags} - {*flags.values()}
    if whole & {*given}:
        return {}
    return {name: v for name, v in line.op.attrs.items() if flags.get(name) not in given}


def _give(op: Operation, name: str, value: Attr, *, instead: bool = False) -> bool:
    """Set a parameter of a statement if it has none, or also `instead` of its own, unless the
    statement is then invalid. Returns whether it was set."""
    before = op.attrs.get(name)
    if before == value or (before is not None and not instead):
        return False
    op.attrs[name] = value
    if _fits(op):
        return True
    del op.attrs[name]
    op.attrs |= {} if before is None else {name: before}
    return False


def _fits(op: Operation) -> bool:
    """Whether a statement is complete and valid."""
    return not [*misfits(op), *op.definition.verify(op)]
