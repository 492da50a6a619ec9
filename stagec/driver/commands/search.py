"""`stagec search`: the fastest strategies that fit, why others lose, and the command of each."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from stagec.driver.shell.click_options import takes
from stagec.driver.shell.options import takes_model
from stagec.driver.shell.run import INTERRUPTED
from stagec.driver.shell.sections import LongCommand
from stagec.driver.shell.session import log, the_session
from stagec.driver.shell.show import show, write_output
from stagec.ir_spec.strategy.statement import Section
from stagec.jobs.request.option import CommandOption, switch
from stagec.jobs.request.result import CSV, FORM, JSON, OUTPUT, PAGE, form_of
from stagec.searches.answer import search
from stagec.searches.options import SEARCH, search_command
from stagec.searches.question import questions, space_text
from stagec.searches.serving_space import SERVER
from stagec.searches.space import REFUSED
from stagec.support.diagnostics import DiagnosticError, error

#: The options that need --serve server.
_OF_SERVERS = ("emit_run", "verify", "measured", "kernels_from")
#: The sections of options that have another meaning than in other commands.
_PLACES = {"batch": Section.DATA, "pareto": None}
#: The remedy after an interrupt without an answer.
_LESS = "let it run, or give a smaller space"


@click.command("search", cls=LongCommand, places=_PLACES)
@takes_model
@takes(
    *SEARCH,
    switch("print_space", "Print the space, and stop."),
    JSON,
    CSV,
    FORM,
    CommandOption(
        "html", PAGE, "Write a page: memory over time, all flags side by side, and each strategy."
    ),
    OUTPUT,
)
def command(**given: Any) -> int:
    """Search the strategies that fit and are fastest, and say why the others lose.

    Each flag of a strategy takes several values (--tp 1..8 --zero 0,1,3; A..B doubles from A);
    'stagec compile --help-all' describes it. Other flags vary within the default space
    (--print-space), or keep their default. A job.toml in place of MODEL gives model, ranks, batch,
    machine, step and flags.

        stagec search llama3-8b --ranks 64 --machine h100-sxm --batch 256
    """
    form_of(given)
    if given["serve"] == SERVER:
        return _servers(given)
    for option in SEARCH:
        if option.name in _OF_SERVERS and given[option.name] != option.usual:
            raise error(f"{option.words[0]} needs --serve server", remedy="add --serve server")
    asked = questions(given, the_session())
    if given["print_space"]:
        write_output(space_text(asked[0].space), given["output"])
        return 0
    try:
        with the_session().live() as progress:
            answer = replace(search(asked, given, progress), command=search_command(given))
    except KeyboardInterrupt:
        log(f"interrupted while the points were listed: {_LESS}")
        raise
    data = answer.data
    the_session().remark(*data["cautions"])
    show(answer, given)
    if not data["proven"]:
        if not data["best"]:
            left = data["left"]
            log(f"interrupted before a strategy was found; {left:,} points are left: {_LESS}")
        return INTERRUPTED
    if not data["best"]:
        refused = any(reason.startswith(REFUSED) for reason in data["cut"])
        raise _nothing(data["nearest"], serves=asked[0].base.serve is not None, refused=refused)
    return 0


def _servers(given: Mapping[str, Any]) -> int:
    """Run the search of `--serve server`."""
    from stagec.searches.server.answer import search_servers

    session = the_session()
    with session.live() as progress:
        servers = search_servers(given, session, progress)
    answer = replace(servers, command=search_command(given))
    session.remark(*answer.data["cautions"])
    show(answer, given)
    run = given["emit_run"]
    if run is not None and run.folder is not None and answer.best:
        paths = answer.write_launch(run.folder)
        log(f"wrote {', '.join(map(str, paths))}")
    if not answer.data["timed"]:
        raise error(
            "no worker of the space can be compiled and fits its device",
            remedy="the counts above say why they were left out; for less memory give --tp, "
            "--weight-dtype fp8 or --kv-dtype fp8",
        )
    if not answer.best:
        raise error(
            "no server meets the limits of time and memory",
            remedy="the counts above say why servers were left out; give more --ranks, raise "
            "--ttft or --tpot, or use less memory: --weight-dtype fp8, --kv-dtype fp8",
        )
    return 0


def _nothing(nearest: Mapping[str, Any] | None, *, serves: bool, refused: bool) -> DiagnosticError:
    """The error of a search without an answer; `refused`: the compiler refused points."""
    from stagec.output.tables import bytes_text

    if nearest is None:
        more = "--print-space prints the space"
        if refused:
            more = "'stagec memory MODEL' prints the whole message of the compiler"
        return error(
            "no strategy of the space can be compiled within the limits",
            remedy=f"the counts above say why they were left out; {more}",
        )
    needed, room = bytes_text(nearest["memory_at_least"]), bytes_text(nearest["room"])
    exact = f"{needed} per rank, the least of those compiled,"
    wanted = exact if nearest["exact"] else f"at least {needed} per rank,"
    return error(
        f"no strategy of the space fits: '{nearest['strategy']}' needs {wanted} "
        f"but {nearest['machine']} has {room} for it",
        remedy="give more --ranks, another --machine, or use less memory: "
        + ("a smaller --batch" if serves else "--zero 3, --recompute full, --offload activations"),
    )
