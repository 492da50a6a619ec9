"""Searches with a stack: knobs of the space vary, all other flags are those of the stack.

Bounds depend on options, so the flags of the stack are set in the options as if they had been
given. Statements of the stack without a flag, or with one that needs experts, are added to the
strategy by the compiler, as for any job.
"""

from collections.abc import Collection, Mapping
from typing import Any

from stagec.ir_spec.strategy.axes import EXPERTS
from stagec.jobs.legal import needless, rules
from stagec.jobs.request.flags import FLAGS
from stagec.jobs.request.options import IDEAL, JobOptions
from stagec.jobs.session import Session
from stagec.jobs.stack import read_stack, stack_flags
from stagec.pipeline.plugins import load_plugins


def with_stack(base: JobOptions, varied: Collection[str], session: Session) -> JobOptions:
    """The options that all jobs of a space share if it varies these flags. Raises `DiagnosticError`
    for an unknown stack; `OSError`."""
    flags = _flags(base, varied, session)
    return base.changed(**flags, explicit=base.explicit | {*varied} | flags.keys())


def as_written(options: JobOptions) -> JobOptions:
    """A job of a search as a command line states it, with `--stack` in place of its flags."""
    if options.stack == IDEAL:
        return options.changed(explicit=frozenset())
    plain, session = JobOptions(""), Session()
    flags = _flags(options, (), session)
    other = {n for n, value in flags.items() if getattr(options, n) != value}
    given = {n: getattr(plain, n) for n in flags.keys() - other}
    needed = {n for n in other if n in _flags(options, other - {n}, session)}
    explicit = {n for n in needed if _may_be(options.changed(**{n: flags[n]}), n)}
    return options.changed(**given, explicit=frozenset(explicit))


def _may_be(options: JobOptions, flag: str) -> bool:
    """Whether the rules accept a job and one of its flags has an effect in it."""
    sizes = {n: v for n, v in options.sizes.items() if v is not None}
    if needless(FLAGS[flag], options, sizes):
        return False
    return all(rule(options) is None for rule in rules(sizes))


def _flags(options: JobOptions, given: Collection[str], session: Session) -> Mapping[str, Any]:
    if options.stack == IDEAL:
        return {}
    lines = read_stack(options.stack, session, load_plugins(()).registry)
    serves = options.serve is not None
    flags = stack_flags([n for n in lines if not (serves and n.definition.training)], given)
    return {n: v for n, v in flags.items() if EXPERTS not in FLAGS[n].needs}
