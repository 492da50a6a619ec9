"""The command line: the table of commands, without their implementations.

The module of a command is imported only when it runs, so that help and usage errors are fast.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from stagec import __version__
from stagec.answers.questions import QUESTIONS, question_of

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: section of the help -> name -> (module with `command`, or with the question from which the
#: command is built; one line of help)
SECTIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "What a job costs": {
        "compile": (".commands.compile", "Compile a model to one execution trace per rank."),
        "analyze": (".commands.analyze", "Count parameters, FLOPs, communication and memory."),
        "memory": (".commands.memory", "Plan the memory of each rank, and whether it fits."),
        "time": (".commands.time", "Compute how long a step takes on a machine, and why."),
        **QUESTIONS,
        "search": (".commands.search", "Search the strategies that fit and are fastest."),
    },
    "Models and machines": {
        "models": (".commands.models", "List the models of the library."),
        "import": (".commands.import_", "Write the text of a model from its config.json."),
        "presets": (".commands.presets", "List published runs, or print the strategy of one."),
        "stacks": (".commands.stacks", "List stacks of software, or print the text of one."),
        "schedule": (".commands.schedule", "Draw a pipeline schedule, or list them."),
        "machines": (".commands.machines", "List machines, or print the figures of one."),
    },
    "Traces": {
        "check": (".commands.check", "Prove a folder of traces well-formed and free of deadlock."),
        "show": (".commands.show", "Print an execution trace."),
        "diff": (".commands.diff", "Show what differs between two traces or jobs."),
        "convert": (".commands.convert", "Convert traces, also of other tools, between formats."),
        "scale": (".commands.scale", "Extend traces to more replicas."),
        "materialize": (".commands.materialize", "Write traces of ranks from an archive."),
        "simulate": (".commands.simulate", "Run ASTRA-sim on a folder of traces."),
    },
    "Validation": {
        "validate": (".commands.validate", "Print published figures beside those computed here."),
        "measure": (".commands.measure", "Read times of kernels from profiler traces."),
        "fit": (".commands.fit", "Fit the constants of a machine to measured kernels."),
    },
    "The compiler": {
        "opt": (".commands.opt", "Run passes over a module, text in, text out."),
        "passes": (".commands.passes", "List passes and pipelines, or describe one."),
        "ops": (".commands.ops", "List ops, or describe one."),
        "test": ("stagec.testing.command", "Run the lit and golden tests of a folder."),
        "doctor": (".commands.doctor", "Report what is installed, and what is missing."),
    },
}
COMMANDS = {name: about for section in SECTIONS.values() for name, about in section.items()}


#: `bash_source`, `zsh_source` or `fish_source` prints the script that a shell reads.
COMPLETE = "_STAGEC_COMPLETE"


class LazyGroup(click.Group):
    """A group whose commands are in a table and are imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name in QUESTIONS:
            from stagec.driver.shell.question import command_of

            return command_of(question_of(cmd_name))
        command = importlib.import_module(COMMANDS[cmd_name][0], __package__).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{COMMANDS[cmd_name][0]}.command is not a click command")
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        lines = {name: line for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)}
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=line) for name, line in lines.items()]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            from stagec.support.suggest import did_you_mean

            hint = did_you_mean(name, COMMANDS) or f"the commands are: {', '.join(COMMANDS)}"
            ctx.fail(f"no such command '{name}'; {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as problem:
            from stagec.jobs.request.other_tools import flag_here

            option = problem.option_name
            commands = {name: self.get_command(ctx, name) for name in COMMANDS}
            owners = [
                n for n, c in commands.items() if c and any(option in p.opts for p in c.params)
            ]
            if owners:
                message = f"No such option {option!r}. It is an option of: {', '.join(owners)}."
                given = problem.ctx.command.params if problem.ctx else ()
                kinds = (p.type for p in given if "--limit" in p.opts)  # a size, or rows to print
                if option == "--machine" and not all(isinstance(k, click.IntRange) for k in kinds):
                    message += " --limit h100-sxm says whether a job fits."
            elif here := flag_here(option):
                message = f"No such option {option!r}; {here}"
            elif len(option) == len("-t"):
                message = f"No such option {option!r}; names of several letters have two dashes"
            else:
                raise
            raise click.NoSuchOption(option, message, ctx=problem.ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                lines = [(name.ljust(width), line) for name, (_, line) in commands.items()]
                formatter.write_dl(lines)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="stagec")
def cli() -> None:
    """Compile a training or serving step of an LLM to execution traces, and compute its cost:
    FLOPs, communication, memory, seconds.

        stagec time llama3-8b --tp 8 --machine h100-sxm

    Results go to stdout, everything else to stderr. Exit codes: 0 success, 1 invalid input (or
    plug-in), or an answer of no (a job does not fit, a step is not --within its time, traces differ
    or are not well-formed), 2 invalid usage, 70 a bug in stagec, 130 an interrupted search, 141 a
    closed output pipe.
    """


def main(argv: Sequence[str]) -> int:
    """Run `stagec ARGV` and return the exit code. Does not raise, whatever the input."""
    from stagec.driver.shell.run import run_safely
    from stagec.driver.shell.session import ShellSession

    session = ShellSession()

    def run() -> object:
        # not cli.main, which exits by itself if the output pipe is closed
        with cli.make_context("stagec", list(argv), obj=session) as context:
            return cli.invoke(context)

    return run_safely(run, session)


def entry() -> None:
    """The entry point of the console script. With `_STAGEC_COMPLETE` it prints completions."""
    if COMPLETE in os.environ:
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(cli, {}, "stagec", COMPLETE, os.environ[COMPLETE]))
    from stagec.driver.shell.streams import flush_streams, prepare_streams
    from stagec.support.garbage import leave_garbage, seldom_collected

    prepare_streams()
    with seldom_collected():
        code = main(sys.argv[1:])
        leave_garbage()
    flush_streams()
    sys.exit(code)
