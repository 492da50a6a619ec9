"""The help of commands with many options, in sections: first the job, then its execution and
output, and last the options of the command itself, which remain visible on a terminal.

Flags of a strategy are in the section of the flag that they require, or else in that of their
statement (`Statement.section`). Other options are listed here by name; those that are not belong to
the command itself.
"""

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import click

from stagec.driver.shell.click_options import RareOption
from stagec.ir_spec.strategy import STATEMENTS
from stagec.ir_spec.strategy.axes import AXES, EXPERTS
from stagec.ir_spec.strategy.mesh_flags import OF_MESH
from stagec.ir_spec.strategy.statement import Flag, Section
from stagec.jobs.request.flags import FLAGS
from stagec.jobs.request.option import YES_OR_NO

_ABOUT = {flag.name: statement.section for statement in STATEMENTS for flag in statement.flags}
_BESIDE = {
    "tp": Section.TENSOR,
    "pp": Section.PIPELINE,
    "cp": Section.SEQUENCE,
    EXPERTS: Section.EXPERTS,
}
_OTHERS: Mapping[Section, str] = {
    Section.MODEL: "preset seed_from sizes stack",
    Section.RANKS: "ranks mesh microbatch_size",
    Section.SERVING: "serve batch prompt context chunk speculative draft step prefill decode page "
    "kv_dtype sampling accepted acceptance ttft tpot",
    Section.REQUESTS: "steps requests policy cache_blocks bucket tick rate burst concurrency "
    "batch_of until iterations train_time update_time ahead lengths turns pause count replicas "
    "prefill_replicas route max_batch max_tokens "
    "preempt fail step_grid mtbf repair autoscale scale_window scale_delay start_time price",
    Section.PASSES: "pipeline print_strategy print_job print_after dump_dir time_passes reproducer "
    "check_numerics plugin",
    Section.MANY: "sweep sort pareto plot",
    Section.MACHINE: "machine used_ranks measured kernels_from peak_tflops memory_gbps overlap "
    "graphs",
    Section.WORKERS: "jobs scheduler",
}
_SECTIONS: Mapping[str, Section | None] = {
    name: section for section, names in _OTHERS.items() for name in names.split()
}
_SWITCHES = {flag.option for flag in FLAGS.values() if flag.kind == "switch"}
#: The other spelling of switches that are on by default, switched off: `--no-async-tp`.
_NEGATIONS = {
    f"--no-{flag.option[2:]}": flag.option for flag in FLAGS.values() if flag.default is True
}
#: The key in the context of a command whose help has all options.
_ALL = "stagec.help-all"
#: The range that click prints for numbers with only a lower bound, which is removed.
_LEAST = re.compile(r"  \[x>=?[0-9]+\]$")


def section_of(flag: Flag) -> Section:
    """The section of a flag of a strategy."""
    if flag.name in (*AXES, *OF_MESH):
        return Section.RANKS
    beside = [_BESIDE[need] for need in flag.needs if isinstance(need, str) and need in _BESIDE]
    return beside[0] if beside else _ABOUT[flag.name]


class JobCommand(click.Command):
    """A command with switches of a strategy, which may have a value: `--sp`, `--sp off`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words, each switch with its value."""
        options = [p for p in self.params if isinstance(p, click.Option) and not p.is_flag]
        valued = {word for p in options for word in p.opts} - _SWITCHES
        return super().parse_args(ctx, [*_with_values(args, valued)])


def _with_values(args: Iterable[str], valued: Collection[str]) -> Iterator[str]:
    """The words of a command line, with the value behind each switch: `--sp=off`. It is on unless
    the next word says on or off, or in a search both. The next word of `valued` options is their
    value."""
    rest = deque(args)
    while rest:
        word = rest.popleft()
        if word in _SWITCHES:
            yield f"{word}={rest.popleft() if rest and _states(rest[0]) else 'on'}"
        elif word in _NEGATIONS:
            yield f"{_NEGATIONS[word]}=off"
        else:
            yield word
            if rest and word in valued:
                yield rest.popleft()


def _states(word: str) -> bool:
    return any(part.lower() in YES_OR_NO for part in word.split(","))


class LongCommand(JobCommand):
    """A command whose help has sections. `places` has the sections of options whose meaning differs
    from that in other commands; None is the section of the command itself."""

    def __init__(
        self, *args: Any, places: Mapping[str, Section | None] | None = None, **given: Any
    ) -> None:
        super().__init__(*args, **given)
        self._places = {**_SECTIONS, **(places or {})}
        self._rare = sum(isinstance(p, RareOption) for p in self.params)
        if self._rare:
            every = click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_help_all,
                help="Show this message with all options and exit.",
            )
            self.params.append(every)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, each in its section."""
        rows: dict[Section | None, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None and (_ALL in ctx.meta or not isinstance(option, RareOption)):
                words, text = record
                rows.setdefault(self._section(option), []).append((words, _LEAST.sub("", text)))
        for section in (*Section, None):
            if section in rows:
                title = section.value if section is not None else f"Options of {self.name}"
                with formatter.section(title):
                    formatter.write_dl(rows[section])
        if self._rare and _ALL not in ctx.meta:
            formatter.write_paragraph()
            formatter.write_text(
                f"--help-all shows {self._rare} more options, which are rarely used."
            )

    def _section(self, option: click.Parameter) -> Section | None:
        flag = FLAGS.get(str(option.name))
        return section_of(flag) if flag is not None else self._places.get(str(option.name))


def _help_all(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()
