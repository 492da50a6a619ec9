"""The answer of `stagec search --serve server`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from stagec.ir_spec.strategy.scheduler import ALONE, ANY, BESIDE
from stagec.jobs.builder import model_name
from stagec.jobs.pod_options import has_pods
from stagec.jobs.request.measurements import MEASURED, remark_unused
from stagec.jobs.session import Session
from stagec.output.report import Report, csv_text
from stagec.output.svg_text import SVGText
from stagec.searches.server.run import launched
from stagec.searches.server.servers import ServerPlan, WorkerPool, behind
from stagec.searches.server.table import launch_files, print_servers
from stagec.searches.serving_space import SERVER
from stagec.support.files import write_file
from stagec.support.processors import processors

if TYPE_CHECKING:
    from pathlib import Path

    from stagec.searches.server.run import FoundServers

SCHEMA = 1
#: Columns of `--csv`: keys of a row of `best`, with dots for those of its pools.
_COLUMNS = (
    *("mode", "ranks", "per_rank", "per_user", "tokens_per_second", "ttft", "tpot", "cost"),
    *(
        f"{pool}.{name}"
        for pool in ("prefill", "decode")
        for name in ("strategy", "ranks", "replicas", "batch", "stack", "machine")
    ),
    "reason",
)


@dataclass(frozen=True)
class FoundServer:
    """One of the best servers. `row` has all its figures."""

    row: Mapping[str, Any]

    @property
    def mode(self) -> str:
        """`aggregated` or `disaggregated`."""
        return str(self.row["mode"])

    @property
    def prefill(self) -> Mapping[str, Any] | None:
        """The workers that prefill; None for an aggregated server."""
        prefill: Mapping[str, Any] | None = self.row["prefill"]
        return prefill

    @property
    def decode(self) -> Mapping[str, Any]:
        """The workers that decode: `strategy`, `ranks` of each, `replicas`, `batch` of each."""
        decode: Mapping[str, Any] = self.row["decode"]
        return decode

    @property
    def per_rank(self) -> float:
        """Output tokens per second per rank."""
        return float(self.row["per_rank"])

    @property
    def per_user(self) -> float:
        """Output tokens per second of one sequence."""
        return float(self.row["per_user"])

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return float(self.row["ttft"])

    @property
    def tpot(self) -> float:
        """Seconds for each further token."""
        return float(self.row["tpot"])


@dataclass(frozen=True)
class ServerSearchAnswer(Report):
    """The object of `stagec search --serve server --json`, and the command of the search."""

    data: Mapping[str, Any]
    command: str = ""

    @property
    def best(self) -> Sequence[FoundServer]:
        """The best servers, the first one first."""
        return [FoundServer(row) for row in self.data["best"]]

    @property
    def front(self) -> Sequence[Mapping[str, Any]]:
        """The Pareto front of tokens per second per rank and per user."""
        front: Sequence[Mapping[str, Any]] = self.data["front"]
        return front

    def as_json(self) -> dict[str, Any]:
        return dict(self.data)

    @property
    def title(self) -> str:
        return f"{self.data['model']}: servers"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each server of the front."""
        return [dict(row) for row in self.front]

    def plot(self) -> SVGText:
        from stagec.searches.server.server_page import front_plot

        return SVGText(front_plot(self.data, self.command).svg())

    def page(self) -> str:
        from stagec.searches.server.server_page import server_page

        return server_page(self.title, self.data, self.command)

    def write_launch(self, folder: Path) -> list[Path]:
        """Write the files that start the best server into a folder, which is created. Returns their
        paths. Raises `OSError`."""
        files = launch_files(self.data)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_file(folder / name, text)
        return [folder / name for name in files]

    def as_csv(self) -> str:
        best = self.data["best"]
        return csv_text(_COLUMNS, ({n: _value(row, n) for n in _COLUMNS} for row in best))

    def print(self, stream: TextIO) -> None:
        print_servers(self.data, stream)


def search_servers(
    given: Mapping[str, Any], session: Session, progress: Callable[[str], None] = lambda text: None
) -> ServerSearchAnswer:
    """The answer of a search for servers. Raises `DiagnosticError`, `OSError`, and
    `KeyboardInterrupt`, since there is no answer before all workers are timed."""
    from stagec.searches.server.question import server_question
    from stagec.searches.server.run import find_servers

    question = server_question(given, session)
    servers = find_servers(question, given["jobs"] or processors(), progress)
    data = _data(servers)
    if any(question.measured.values()):
        data["found"] = dict(servers.costed_by)
        remark_unused(servers.costed_by, question.measured, session, "these steps")
    return ServerSearchAnswer(data)


# -- JSON ------------------------------------------------------------------------------------------


def _data(servers: FoundServers) -> dict[str, Any]:
    question, load = servers.question, servers.question.load
    first = servers.best[0] if servers.best else None
    return {
        "schema": SCHEMA,
        "model": model_name(question.model),
        "serve": SERVER,
        "objective": question.objective,
        "priced": any(task.price is not None for task in question.tasks),
        "places": list(
            dict.fromkeys(f"{t.options.stack} on {t.machine.given}" for t in question.tasks)
        ),
        "prompt": load.prompt,
        "output": load.output,
        "limits": {n: getattr(load, n) for n in ("ttft", "tpot")},
        "points": question.points,
        "workers": len(question.tasks),
        "timed": servers.timed,
        "servers": servers.servers,
        "seconds": servers.seconds,
        "best": [_row(servers, server, first) for server in servers.best],
        "modes": {
            mode: None if server is None else _row(servers, server, first)
            for mode, server in servers.by_mode.items()
        },
        "searches": [
            {"ranks": ranks, "best": None if server is None else _row(servers, server, server)}
            for ranks, server in servers.by_ranks.items()
        ],
        "front": [_row(servers, server, None) for server in servers.front],
        "launch": _launch(servers),
        "cut": dict(servers.cut.most_common()),
        "cautions": list(servers.cautions),
    }


def _row(servers: FoundServers, server: ServerPlan, best: ServerPlan | None) -> dict[str, Any]:
    prefill, point, sent = server.prefill, server.point, server.sent
    row: dict[str, Any] = {
        "mode": server.mode,
        "ranks": server.ranks,
        "idle_ranks": server.ranks - server.used,
        "per_rank": server.per_rank,
        "per_user": server.per_user,
        "tokens_per_second": server.tokens_per_second,
        "requests_per_second": server.tokens_per_second / servers.question.load.output,
        "ttft": server.ttft,
        "tpot": server.tpot,
        "cost": server.cost,
        "prefill": None if prefill is None else _pool(prefill, prefill.step.peak),
        "decode": _pool(server.decode, server.decode.step.peak if point is None else point.peak),
    }
    row["decode"]["chunk"] = None if point is None else point.work.size
    row["decode"]["max_tokens"] = None if point is None else point.budget
    row["decode"]["mixed_share"] = None if point is None else point.work.share
    row["transfer"] = (
        None if sent is None else {"busy_seconds": sent.busy, "exposed_seconds": sent.exposed}
    )
    row["parts"] = dict(server.parts)
    row["within"] = server.is_within(servers.question.load)
    if best is not None:
        checked = servers.over_time.get(id(server))
        load = servers.question.load
        row["over_time"] = None if checked is None else checked.as_json(load, server.ranks)
        row["reason"] = _reason(servers, server, best)
        row["command"] = _command(servers, server)
    return row


def _reason(servers: FoundServers, server: ServerPlan, best: ServerPlan) -> str:
    checked = servers.over_time.get(id(server))
    missed = checked.missed(servers.question.load) if checked is not None else []
    why = behind(server, best)
    if server is best:
        why = f"the best of {servers.servers:,} servers of {servers.timed:,} workers"
    return "; ".join((why, *missed))


def _pool(pool: WorkerPool, peak: int) -> dict[str, Any]:
    from stagec.searches.server.run import strategy_words

    kind, worker = pool.kind, pool.kind.worker
    return {
        "strategy": strategy_words(kind.options) or "one rank",
        "ranks": worker.ranks,
        "replicas": pool.workers,
        "batch": pool.step.sequences,
        "stack": kind.options.stack,
        "machine": kind.machine.given,
        "step_seconds": pool.step.seconds,
        "memory_peak": peak,
        "room": worker.room,
    }


def _command(servers: FoundServers, server: ServerPlan) -> str | None:
    """The command that times the workers of a server; None if they are on different machines, or if
    their caches cannot be transferred exactly."""
    from stagec.jobs.request.command_line import asked_words, job_words
    from stagec.searches.server.run import pods_of, strategy_words

    question, load = servers.question, servers.question.load
    options, prefill, point = server.decode.kind.options, server.prefill, server.point
    words = ["stagec", "serve"]
    if point is not None:
        plain = question.model.changed(stack=options.stack, serve=None)
        rule = server.decode.kind.worker.scheduler
        alone = rule.prompts == ALONE or has_pods(options)
        if not alone and point.budget != rule.tokens:
            options = options.changed(step_tokens=point.budget)
        if rule.prompts == ANY and not alone:
            options = options.changed(prompt_steps=BESIDE)
        words += [*job_words(plain), *shlex.split(strategy_words(options))]
        words += ["--prompt", str(load.prompt)]
        words += ["--context", str(load.cached)] if load.cached else []
        words += ["--chunk", str(point.budget)] if alone and point.budget < load.prompt else []
    elif (
        prefill is not None
        and (server.sent is not None and server.sent.exact)
        and len({pool.kind.machine.given for pool in server.pools}) == 1
    ):
        words += job_words(pods_of(question, prefill, server.decode))
        prompts = prefill.step.sequences // prefill.kind.worker.stages
        words += ["--prefill-batch", str(prompts)]
        words += ["--prefill-replicas", str(prefill.workers)]
        words += ["--replicas", str(server.decode.workers)]
    else:
        return None
    batch = str(server.decode.step.sequences)
    more = ["--output-tokens", str(load.output), "--batches", batch]
    more += ["--accepted", str(load.accepted)] if load.drafts else []
    more += asked_words(MEASURED, question.measured)
    return shlex.join([*words, *more, "--machine", server.decode.kind.machine.given])


def _launch(servers: FoundServers) -> dict[str, Any] | None:
    """The files that start the best server with the engine of --emit-run; None without it."""
    from stagec.searches.server.launch import ENGINES

    run = servers.question.run
    if run is None or not servers.best:
        return None
    server = servers.best[0]
    about = f"{model_name(servers.question.model)}, {server.mode}, {server.ranks} ranks"
    files = ENGINES[run.engine].files(about, launched(servers.question, server))
    return {"engine": run.engine, "files": files}


def _value(row: Mapping[str, Any], name: str) -> Any:
    pool, dot, key = name.partition(".")
    if not dot:
        return row[name]
    return "" if row[pool] is None else row[pool][key]
