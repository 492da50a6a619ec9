"""The Python interface: `stagec.job(...)`, and what else `import stagec` gives (docs/python.md).

Flags are those of the command line, with underscores for dashes: `tp=8`, `zero=3`, `sp=True`,
`recompute="full"`, and as dictionaries `sizes` of symbols (`--set`) and `mesh`. A flag that is None
is not given. Warnings of a command are warnings of Python, and its errors are raised as
`DiagnosticError`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast, overload

from stagec.answers.analyze import JobAnalysis, analyze
from stagec.answers.check import CheckAnswer, check
from stagec.answers.compile import COMPILE, compile_job
from stagec.answers.compiled import CompileAnswer
from stagec.answers.memory.answer import FIT, MemoryPlan, memory
from stagec.answers.questions import QUESTIONS, question_of
from stagec.answers.time.answer import StepAnswer, time
from stagec.answers.words import asked
from stagec.jobs.builder import model_name
from stagec.jobs.pods import Pods
from stagec.jobs.request.acceptance import ACCEPTANCE, Acceptance, take_acceptance
from stagec.jobs.request.command_line import job_words
from stagec.jobs.request.configurations import import_configuration
from stagec.jobs.request.emission import workers
from stagec.jobs.request.job_file import JobFile, asked_job, job_text
from stagec.jobs.request.limit import Limit, LimitType
from stagec.jobs.request.machine import UsedRanks, machine_of
from stagec.jobs.request.measurements import MEASURED, measurements
from stagec.jobs.request.option import (
    AS_THERE,
    AnyText,
    CommandOption,
    File,
    Kind,
    Switch,
    Whole,
    values_of,
)
from stagec.jobs.request.options import JobOptions
from stagec.jobs.session import Session
from stagec.machines import Machine
from stagec.output.report import Report
from stagec.pipeline.instrument import Dumps
from stagec.support.diagnostics import error
from stagec.support.garbage import seldom_collected
from stagec.text.ir_text import IRText
from stagec.time.costs.replay_options import ReplayOptions

if TYPE_CHECKING:
    from stagec.answers.requests.answer import RequestsAnswer
    from stagec.answers.serve_answer import ServeAnswer
    from stagec.answers.sweep.run import SweepAnswer
    from stagec.jobs.request.signature import JobFlags
    from stagec.searches.answer import SearchAnswer
    from stagec.searches.server.answer import ServerSearchAnswer

Progress = Callable[[str], None]
T = TypeVar("T")
F = TypeVar("F")
_IGNORE = CommandOption("ignore", AnyText(), "keys that are treated as absent", multiple=True)


class Job:
    """A model and how it is parallelized, or served. Jobs are immutable: `with_` returns a changed
    one. Jobs with the same options are equal."""

    def __init__(self, options: JobOptions) -> None:
        self._options = options

    def __repr__(self) -> str:
        return f"<stagec job: {self.command}>"

    def __eq__(self, other: object) -> bool:
        return self._options == other._options if isinstance(other, Job) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.command)

    @property
    def model(self) -> str:
        """The name of its model."""
        return model_name(self._options)

    @property
    def command(self) -> str:
        """Its arguments of a command line: model and flags."""
        return shlex.join(job_words(self._options))

    def with_(self, **flags: Unpack[JobFlags]) -> Job:
        """The job with these flags; of `sizes`, those that are given. Raises `DiagnosticError`."""
        with asked() as session:
            more = asked_job(self._options.model, self._options.strategy, flags, session)
        names = more.explicit - {"model", "strategy", "sizes"}
        given: dict[str, Any] = {name: getattr(more, name) for name in names}
        given["sizes"] = {**self._options.sizes, **more.sizes}
        explicit = self._options.explicit | more.explicit
        return Job(self._options.changed(**given, explicit=explicit))

    def print_strategy(self) -> IRText:
        """The text of its mesh and strategy, which can be given as a strategy. A notebook shows it
        with colors. Raises `DiagnosticError`."""
        with asked() as session:
            return IRText(Pods.of(self._options, session).strategy())

    def print_job(self, machine: str | Path | None = None) -> str:
        """The job as a file, `job.toml`, which can be given as a model; with the name or file of a
        machine, if that is given."""
        return job_text(JobFile(self._options, None if machine is None else str(machine)))

    def analyze(
        self, *, symbolic: bool = False, machine: str | Machine | None = None, limit: Any = None
    ) -> JobAnalysis:
        """Parameters, FLOPs, bytes of communication and memory of each class of ranks, with
        `symbolic` as expressions in the symbols. Of a step of serving, `machine` says what each op
        waits for, and `limit` (`"80GiB"`, `"h100"`) which batch is the largest that fits. Raises
        `DiagnosticError`."""
        with asked() as session, seldom_collected():
            on = None if machine is None else _machine(machine, session)
            symbols, most = _on("symbolic", symbolic), _limit(limit)
            return analyze(self._options, session, symbolic=symbols, machine=on, limit=most)

    def memory(
        self, *, limit: Any = None, fit: str | None = None, advise: bool = False
    ) -> MemoryPlan:
        """What a rank of each class holds at its peak, in bytes; whether it fits a size or a device
        (`limit`); with `fit` (`best-fit`, `caching`) all buffers are placed. With `advise` a job
        that does not fit has `advice`, changes with which it does. Raises `DiagnosticError`."""
        with asked() as session, seldom_collected():
            kind = None if fit is None else _read("fit", FIT, fit)
            most, search = _limit(limit), _on("advise", advise)
            plan = memory(self._options, session, fit=kind, limit=most)
            if search and most is not None:
                from stagec.searches.advice.suggestions import advised

                plan = advised(plan, most, session)
            return plan

    def time(
        self,
        machine: str | Machine,
        *,
        overlap: bool = True,
        graphs: bool = True,
        levers: bool = False,
        measured: str | Path | Sequence[str | Path] = (),
        kernels_from: str | None = None,
        accepted: float | None = None,
        acceptance: float | None = None,
        progress: Progress | None = None,
    ) -> StepAnswer | Any:
        """How long a step takes on a machine, and why: a `StepAnswer` with `step_seconds`,
        `breakdown`, `memory`; of `serve="disaggregated"` a `PodsTime` with `ttft` and `tpot`.
        `levers` tries what would help. Files of `measured` times override the models. With
        `speculative` decode, a step gives `accepted` tokens per sequence, or a share `acceptance`
        of drafts is right. A process compiles a structure once: a call that differs in sizes and
        degrees takes milliseconds. Raises `DiagnosticError`."""
        with asked() as session, seldom_collected():
            on = _machine(machine, session)
            given, _ = values_of(MEASURED, {"measured": measured, "kernels_from": kernels_from})
            known = measurements(given["measured"], given["kernels_from"], on)
            return time(
                self._options,
                on,
                session,
                ReplayOptions(_on("overlap", overlap), _on("graphs", graphs), known),
                levers=_on("levers", levers),
                accepted=self._accepted(accepted, acceptance),
                again=True,
                progress=_followed(progress) or _silent,
            )

    def serve(
        self,
        machine: str | Machine,
        *,
        output_tokens: int = 128,
        batches: str | Sequence[int] | None = None,
        ttft: float | str | None = None,
        tpot: float | str | None = None,
        accepted: float | None = None,
        acceptance: float | None = None,
        measured: str | Path | Sequence[str | Path] = (),
        kernels_from: str | None = None,
    ) -> ServeAnswer:
        """Rates of a server over batches, by default as they double while they fit: times to the
        first token and for each further one, tokens per second. Prompts have `prompt` tokens, a
        flag of the job, answers `output_tokens`. `best` is within `ttft` and `tpot` seconds. Files
        of `measured` times override the models. Raises `DiagnosticError`."""
        limits = {"ttft": ttft, "tpot": tpot}
        tokens = {"accepted": accepted, "acceptance": acceptance}
        tables = {"measured": measured, "kernels_from": kernels_from}
        how = {"output_tokens": output_tokens, "batches": batches, **tokens, **limits, **tables}
        return cast("ServeAnswer", self._ask("serve", machine, how))

    def serve_requests(
        self,
        machine: str | Machine,
        *,
        requests: str | Path | None = None,
        rate: float | None = None,
        concurrency: int | None = None,
        batch_of: int | None = None,
        lengths: str | None = None,
        count: int | None = None,
        seed: int = 0,
        replicas: int = 1,
        output_tokens: int = 128,
        ttft: float | str | None = None,
        tpot: float | str | None = None,
        **how: Any,
    ) -> RequestsAnswer:
        """A server over time, with a file of `requests`, `rate` requests per second, `concurrency`
        requests at any time, or a rollout of `batch_of` requests. `spreads` are the seconds of
        `ttft`, `tpot` and `latency`, `pools` what replicas do, `good` the requests within `ttft`
        and `tpot` seconds. `how` has the other options of `stagec serve`, such as `route` and
        `max_batch`. Raises `DiagnosticError`, `OSError`."""
        load = {"requests": requests, "rate": rate, "concurrency": concurrency}
        if all(value is None for value in (*load.values(), batch_of)):
            raise error("no arrivals of requests are given", remedy="give rate=4, for example")
        drawn = {"batch_of": batch_of, "lengths": lengths, "count": count, "seed": seed}
        server = {"replicas": replicas, "output_tokens": output_tokens, "ttft": ttft, "tpot": tpot}
        asked_for = {**load, **drawn, **server, **how}
        return cast("RequestsAnswer", self._ask("serve", machine, asked_for))

    def ask(self, question: str, machine: str | Machine | None = None, **how: Any) -> Report:
        """The answer to a question of this name, as the command of this name gives it; `how` are
        its options. Raises `DiagnosticError`."""
        return self._ask(question, machine, how)

    def _ask(self, question: str, machine: str | Machine | None, how: Mapping[str, Any]) -> Report:
        with asked(depth=5) as session, seldom_collected():
            if str(question) not in QUESTIONS:
                names = ", ".join(QUESTIONS)
                raise error(f"unknown question '{question}'", remedy=f"ask for one of: {names}")
            asks = question_of(question)
            given, _ = values_of(asks.options, how)
            on = None if machine is None else _machine(machine, session)
            return asks.ask(self._options, on, given, session)

    def compile(self, folder: str | Path | None = None, **how: Any) -> CompileAnswer:
        """Write the traces of all ranks into a new folder: `format`, `machine` and the other
        options of `stagec compile` are flags. Without a folder nothing is written. Raises
        `DiagnosticError`."""
        writes = folder is not None or how.get("archive") is not None
        with asked() as session, seldom_collected():
            if not isinstance(how.get("machine"), str | Path | None):
                raise error(
                    "machine: 'compile' takes a name or a file, found a Machine",
                    remedy='give a name such as "h100-sxm", which manifests record',
                )
            given, _ = values_of(COMPILE, {"output": folder, **how, "quiet": True})
            return compile_job(
                self._options, {**given, "dry_run": not writes or given["dry_run"]}, session
            )

    def dumps(self) -> dict[str, IRText]:
        """The text of the IR before the first pass and after each pass that changes it, in order:
        `00-input`, `01-infer-shapes`, as `--dump-dir` names them; of several pods `main/00-input`.
        A notebook shows a text with colors, and its regions can be folded. Raises
        `DiagnosticError`."""
        with asked() as session:
            pods = Pods.of(self._options, session)
            several = len(pods.every) > 1
            dumps = {f"{pod}/" if several else "": (pod, Dumps()) for pod in pods.every}
            pods.lower({pod: [each] for pod, each in dumps.values()})
            texts = ((f"{of}{n}", t) for of, (_, d) in dumps.items() for n, t in d.texts.items())
            return {name: IRText(text) for name, text in texts}

    def sweep(self, over: Mapping[str, Any], **how: Any) -> SweepAnswer:
        """`stagec.sweep` of this job. Raises `DiagnosticError`."""
        return _sweep(self._options, over, **how)

    def _accepted(self, tokens: float | None, rate: float | None) -> Acceptance:
        given = {"accepted": tokens, "acceptance": rate}
        values, _ = values_of(ACCEPTANCE, given)
        return take_acceptance(self._options, values)


def job(
    model: str | Path = "", strategy: str | Path | None = None, **flags: Unpack[JobFlags]
) -> Job:
    """A job: a model of the library, a .stg file or a config.json, with a strategy of flags or of a
    file. Raises `DiagnosticError`.

        stagec.job("llama3-8b", tp=8, dp=8, sp=True, zero=3)
    """
    with asked() as session:
        return Job(
            asked_job(_model(model), None if strategy is None else str(strategy), flags, session)
        )


def time_step(
    model: str = "",
    machine: str | Machine = "h100-sxm",
    *,
    strategy: str | Path | None = None,
    overlap: bool = True,
    levers: bool = False,
    **flags: Unpack[JobFlags],
) -> StepAnswer:
    """How long a step takes on a machine, and why: `job(model, **flags).time(machine)` of a job of
    one step. Raises `DiagnosticError`."""
    answer = job(model, strategy, **flags).time(machine, overlap=overlap, levers=levers)
    if not isinstance(answer, StepAnswer):
        raise error(
            "time_step: the job has two steps, expected one",
            remedy="use stagec.job(...).time(machine)",
        )
    return answer


@overload
def search(
    model: str | Path = "",
    *,
    serve: Literal["server"],
    progress: Progress | None = None,
    **flags: Any,
) -> ServerSearchAnswer: ...


@overload
def search(
    model: str | Path = "",
    *,
    serve: Literal["prefill", "decode", "mixed"] | None = None,
    progress: Progress | None = None,
    **flags: Any,
) -> SearchAnswer: ...


def search(
    model: str | Path = "",
    *,
    serve: str | None = None,
    progress: Progress | None = None,
    **flags: Any,
) -> SearchAnswer | ServerSearchAnswer:
    """The strategies that fit and are fastest: `best[0].step_seconds`, `best[0].strategy`. Flags
    are those of `stagec search`, with values as `tp="1..8"` or `zero=[0, 1, 3]`. `progress` is
    called with messages; if it raises KeyboardInterrupt, the answer has what is known by then. With
    `serve="server"` it is about whole servers: `best[0].mode`, `best[0].per_rank`, `front`. Raises
    `DiagnosticError`.

        stagec.search("llama3-8b", ranks=16, machine="h100-sxm").best[0].step_seconds
    """
    from stagec.searches import answer as verb
    from stagec.searches.options import SEARCH, search_command
    from stagec.searches.question import questions
    from stagec.searches.server.answer import search_servers
    from stagec.searches.serving_space import SERVER

    with asked() as session:
        given, _ = values_of(SEARCH, {**flags, "serve": serve})
        given["model"], follow = _model(model), _followed(progress) or _silent
        if given["serve"] == SERVER:
            servers = search_servers(given, session, follow)
            return replace(servers, command=search_command(given))
        strategies = verb.search(questions(given, session), given, follow)
        return replace(strategies, command=search_command(given))


def sweep(model: str | Path, over: Mapping[str, Any], **how: Any) -> SweepAnswer:
    """One job in many configurations: `over` has values of flags, of symbols and of figures of the
    machine (`{"tp": [1, 2, 4], "S": "4096..16384", "machine.memory.bandwidth": ["x1", "x2"]}`), of
    which every combination is a row. `how` is `machine`, `limit`, `overlap`, `graphs`, `jobs`
    (worker processes), `progress`, which is called with rows done and in all, the flags of the
    job, and as on the command line `sort`, `pareto` and `plot`, the columns that `plot()` draws.
    Raises `DiagnosticError`."""
    names = ("machine", "limit", "overlap", "graphs", "jobs", "progress", "sort", "pareto", "plot")
    flags = {name: value for name, value in how.items() if name not in names}
    asked_for = {name: value for name, value in how.items() if name in names}
    with asked() as session:
        options = asked_job(_model(model), None, flags, session)
    return _sweep(options, over, **asked_for)


def _sweep(
    options: JobOptions,
    over: Mapping[str, Any],
    *,
    machine: str | Machine | None = None,
    limit: Any = None,
    overlap: bool = True,
    graphs: bool = True,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    sort: str | None = None,
    pareto: str | None = None,
    plot: str | None = None,
) -> SweepAnswer:
    from stagec.answers.sweep.axes import axis_of
    from stagec.answers.sweep.rows import Case
    from stagec.answers.sweep.run import answer_of, rows_of, selection_of, with_limit
    from stagec.answers.sweep.table import ANALYSIS, TIME

    with asked(depth=5) as session:
        if not isinstance(cast("object", over), Mapping):
            raise error(
                f"over: expected a dictionary, found {over!r:.60}",
                remedy='write over={"tp": [1, 2]}',
            )
        axes = [axis_of(name, values) for name, values in over.items()]
        on = None if machine is None else _machine(machine, session)
        case = Case(options, on, _on("overlap", overlap), graphs=_on("graphs", graphs))
        timed = on is not None or "machine" in over
        most = _limit(limit, at_hand=timed)
        columns = with_limit(TIME if timed else ANALYSIS, most)
        processes = None if jobs is None else _read("jobs", Whole(1), jobs)
        named = {"sort": sort, "pareto": pareto, "plot": plot}
        texts = {n: None if v is None else _read(n, AnyText(), v) for n, v in named.items()}
        selection = selection_of(axes, columns, **texts)
        follow = _followed(progress) or _uncounted
        with workers({"jobs": processes, "scheduler": None}) as run:
            rows = rows_of(case, axes, run, most, follow)
        return answer_of(rows, case, axes, columns, selection, most, session)


def import_config(
    config: str | Path,
    *,
    ignore: str | Sequence[str] = (),
    ignore_unknown: bool = False,
    images: bool = False,
) -> str:
    """The STG text of a model from its config.json, or the folder of one. Keys in `ignore` are
    treated as absent, with `ignore_unknown` all unknown keys. Raises `DiagnosticError`."""
    with asked() as session:
        keys, _ = values_of([_IGNORE], {"ignore": ignore})
        unknown, seen = _on("ignore_unknown", ignore_unknown), _on("images", images)
        ignored = keys["ignore"]
        return import_configuration(
            str(_read("config", File(), config)), session, ignored, images=seen, unknown=unknown
        ).text


def machine(name: str | Path, used_ranks: Mapping[str, int] | None = None) -> Machine:
    """A machine by its name or file; `used_ranks` of levels of its network. Raises
    `DiagnosticError`."""
    with asked() as session:
        used = None if used_ranks is None else _read("used_ranks", UsedRanks(), used_ranks)
        return machine_of(str(name), session, used)


def check_traces(path: str | Path, *, strict: bool = False) -> CheckAnswer:
    """Whether the traces of a folder, an archive or one rank are well-formed and free of deadlock;
    with `strict`, warnings fail too. Raises `DiagnosticError` if there is nothing of that name."""
    with asked():
        return check(Path(str(path)), strict=_on("strict", strict))


def _machine(given: object, session: Session) -> Machine:
    if isinstance(given, Machine):
        return given
    if isinstance(given, str | Path):
        return machine_of(str(given), session)
    about = f"machine: expects a name, a file or a machine, found {given!r:.60}"
    raise error(about, remedy='give "h100-sxm", or stagec.machine("h100-sxm")')


def _model(given: object) -> str:
    if isinstance(given, str | Path):
        return str(given)
    about = f"model: expects a name or a file, found {given!r:.60}"
    raise error(about, remedy='give "llama3-8b", or the file of a job: job.print_job()')


def _limit(given: Any, *, at_hand: bool = False) -> Limit | None:
    """A limit, as `--limit` takes it."""
    return None if given is None else _read("limit", LimitType(at_hand=at_hand), given)


def _read(name: str, kind: Kind[T], given: Any) -> T:
    """A value as the option of that name takes it. Raises `DiagnosticError`."""
    try:
        return kind.of(given)
    except ValueError as problem:
        raise error(f"{name}: {problem}", remedy=AS_THERE) from None


def _on(name: str, given: Any) -> bool:
    """Whether a switch is on, as the command line takes it. Raises `DiagnosticError`."""
    return _read(name, Switch(), given)


def _followed(progress: F | None) -> F | None:
    """What follows progress, if it can be called. Raises `DiagnosticError`."""
    if progress is not None and not callable(progress):
        about = f"progress: expects a function, found {progress!r:.60}"
        raise error(about, remedy="give a function such as print")
    return progress


def _silent(_: str) -> None:
    """Progress that nobody follows."""


def _uncounted(_: int, __: int) -> None:
    """The same, in numbers of rows."""
