"""The costs of a step: parameters, FLOPs, communication and memory of every class of ranks; of a
step of serving also its caches and weights, and the largest batch that fits."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from stagec.ir.expr import Expr, evaluate
from stagec.ir.loads import planned_env
from stagec.ir.module import Module
from stagec.ir.serving_step import DECODE, PREFILL
from stagec.jobs.builder import JobBuilder, model_name
from stagec.jobs.idle_flags import unscheduled
from stagec.jobs.planned import Looks, Planned
from stagec.jobs.pods import Pods
from stagec.jobs.request.command_line import question_command
from stagec.jobs.request.limit import AT_HAND, Limit
from stagec.jobs.request.machine import on_machine, own_machine
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import DISAGGREGATED, Serving
from stagec.jobs.session import Session
from stagec.output.report import Report
from stagec.output.tables import bytes_text, count_text
from stagec.support.diagnostics import error

if TYPE_CHECKING:
    from stagec.machines import Machine


@dataclass(frozen=True)
class JobAnalysis(Report):
    """The counts of a step: the object of `stagec analyze --json` (analyze.schema.json); with
    several pods those of each (`pods`), and of the messages between them. `command` is its command
    line."""

    data: Mapping[str, Any]
    command: str = ""

    @property
    def ranks(self) -> Any:
        """The ranks of the job; an expression if it is symbolic."""
        return self.data["ranks"]

    @property
    def mesh(self) -> Mapping[str, int]:
        """The axes of the mesh, slowest first."""
        mesh: Mapping[str, int] = self.data["mesh"]
        return mesh

    @property
    def parameters(self) -> Any:
        """The parameters of the model, counted once; an expression if it is symbolic."""
        return self.data["parameters"]

    @property
    def model_flops(self) -> Any:
        """FLOPs of a step by the model's text; a multiply-add is 2."""
        return self.data["model_flops"]

    @property
    def classes(self) -> list[Mapping[str, Any]]:
        """The classes of ranks that execute the same program: FLOPs by phase, collectives,
        messages and memory in bytes, per rank."""
        classes: list[Mapping[str, Any]] = self.data["classes"]
        return classes

    def as_json(self) -> dict[str, Any]:
        return dict(self.data)

    @property
    def pods(self) -> Mapping[str, Mapping[str, Any]]:
        """The counts of each of several pods, in the form of a job with one pod, whose name is
        empty."""
        pods: Mapping[str, Mapping[str, Any]] = self.data.get("pods", {"": self.data})
        return pods

    def rows(self) -> list[dict[str, Any]]:
        """A row for each class of ranks, of each pod."""
        each = ((pod, c) for pod, counts in self.pods.items() for c in counts["classes"])
        return [{**({"pod": pod} if pod else {}), **c} for pod, c in each]

    def print(self, stream: TextIO) -> None:
        from stagec.output.analysis_table import print_analysis

        for counts in self.pods.values():
            print_analysis(dict(counts), stream)
        stream.writelines(f"{text}\n" for text in self.crossings())

    def crossings(self) -> Iterator[str]:
        """A sentence for each direction in which pods send to each other."""
        if "handover" in self.data:
            crossed = self.data["handover"]
            size, count = bytes_text(crossed["bytes"]), f"{crossed['messages']:,}"
            yield f"From prefill to decode: {size} of caches and tokens in {count} messages"
        for each in self.data.get("crossings", ()):
            size, count = bytes_text(each["bytes"]), f"{each['messages']:,}"
            yield f"From {each['source']} to {each['to']}: {size} in {count} messages"

    def page(self) -> str:
        """Bars and tables of each class; plain text for symbolic counts and steps of serving."""
        from stagec.answers.analyze_page import analysis_page

        classes: list[Mapping[str, Any]] = [
            {**each, "name": "/".join(filter(None, (pod, each["name"])))}
            for pod, counts in self.pods.items()
            for each in counts["classes"]
        ]
        numbers = [v for each in classes for v in each["flops"].values()]
        if any("serving" in counts for counts in self.pods.values()) or not all(
            isinstance(number, int) for number in numbers
        ):
            return super().page()
        figures = {
            " ".join(filter(None, (pod, name))): text
            for pod, counts in self.pods.items()
            for name, text in (
                ("parameters", f"{counts['parameters']:,}"),
                ("model FLOPs per step", count_text(counts["model_flops"], "FLOP")),
                (
                    " x ".join(f"{a} {n}" for a, n in counts["mesh"].items()),
                    f"{counts['ranks']:,} ranks",
                ),
            )
        }
        return analysis_page(self.title, figures, classes, [*self.crossings()], self.command)


def analyze(
    options: JobOptions,
    session: Session,
    *,
    symbolic: bool = False,
    machine: Machine | None = None,
    limit: Limit | None = None,
) -> JobAnalysis:
    """The counts of a step, for each pod. With `symbolic` they are expressions in the symbols;
    traffic between pods is a number, since senders and receivers depend on the sizes. For a step
    of serving, `machine` adds whether each op is bound by memory or by compute, and `limit` adds
    the largest batch that fits. Raises `DiagnosticError`."""
    from stagec.analysis.op_bounds import op_bounds
    from stagec.analysis.report import analysis

    session.report(*unscheduled(options))
    pods = Pods.of(on_machine(options, machine), session, symbolic=symbolic)
    _check(pods.first, limit, machine)
    # several pods have the counts alone, unless more is requested
    whole = not pods.several or symbolic or machine is not None or limit is not None
    looks = {pod: Looks() for pod in pods.every}
    how: dict[str, dict[str, Any]] = {
        pod: {"machine": machine and own_machine(each.options, machine), "symbolic": symbolic}
        for pod, each in pods.builders.items()
    }
    serving = {
        pod: [Planned(partial(serving_figures, builder=each, limit=limit, **how[pod]))]
        for pod, each in pods.builders.items()
        if each.serving is not None
    }
    asked = {"worst": True, "flops": True, "peak": machine is not None}
    watching = {p: [*look.watching(**asked), *serving.get(p, ())] for p, look in looks.items()}
    pods.lower(watching if whole else None)
    counts: dict[str, dict[str, Any]] = {}
    for pod, builder in pods.builders.items():
        module, look = builder.module, looks[pod]
        worst, flops = look.worst.result or {}, pods.flops([pod], looks)
        result = analysis(module, pods.titles[pod], symbolic=symbolic, worst=worst, flops=flops)
        if whole:
            result["repeated"] = builder.repeated.shares
        for figures in (each.result for each in serving.get(pod, ()) if each.result is not None):
            result["serving"] = {**figures, "ops": op_bounds(module, **how[pod])}
        if (own := how[pod]["machine"]) is not None:
            result |= verdict_on(own, result["mesh"], look.peak.result, session)
        counts[pod] = result
    numbers = counts
    if symbolic and pods.several:
        numbers = {pod: analysis(module, pod) for pod, module in pods.modules.items()}
    command = question_command("analyze", options, machine)
    command += f" --limit {shlex.quote(limit.text)}" if limit is not None else ""
    command += " --symbolic" if symbolic else ""
    return replace(analysis_of(options, counts, numbers), command=command)


def _check(builder: JobBuilder, limit: Limit | None, machine: Machine | None) -> None:
    """Refuse options of serving for a step of training, and `--limit machine` without one."""
    if limit is not None and builder.serving is None:
        raise error(
            "--limit for one job without --serve is an option of 'stagec memory'",
            remedy="run 'stagec memory', or add --sweep",
        )
    if limit is not None and limit.text == AT_HAND and machine is None:
        raise error("--limit machine needs --machine", remedy="add --machine h100")
    if machine is not None and builder.serving is None:
        raise error(
            "'stagec analyze' takes --machine only for a step of serving",
            remedy="add --serve decode, or run 'stagec time' for the time of a training step",
        )


# -- between pods ----------------------------------------------------------------------------------


def analysis_of(
    options: JobOptions,
    pods: Mapping[str, dict[str, Any]],
    numbers: Mapping[str, Mapping[str, Any]],
) -> JobAnalysis:
    """The counts of a job, from those of its pods. With several pods the traffic between them is
    added, from `numbers`, their numeric counts."""
    if len(pods) == 1:
        (only,) = pods.values()
        return JobAnalysis(only)
    result: dict[str, Any] = {"schema": 1, "model": model_name(options), "pods": pods}
    if options.serve == DISAGGREGATED:
        result["handover"] = asdict(_sent(numbers[PREFILL], DECODE))
    if options.part or options.draft:
        ways = ((a, b, _sent(numbers[a], b)) for a in pods for b in pods if DECODE not in (a, b))
        sent = [{"source": a, "to": b, **asdict(sent)} for a, b, sent in ways if sent.messages]
        result["crossings"] = sent
    return JobAnalysis(result)


@dataclass(frozen=True, slots=True)
class PodTraffic:
    """Traffic from one pod to another: messages and bytes of all ranks."""

    messages: int
    bytes: int


def _sent(pod: Mapping[str, Any], to: str) -> PodTraffic:
    """The traffic that the ranks of a pod send to those of another one."""
    messages = total = 0
    for each in pod["classes"]:
        rows = [row for row in each["p2p"] if row["over"] == to and row["dir"] == "send"]
        messages += each["count"] * sum(row["count"] for row in rows)
        total += each["count"] * sum(row["bytes"] for row in rows)
    return PodTraffic(messages, total)


def verdict_on(
    machine: Machine, mesh: Mapping[str, Any], peak: int | None, session: Session
) -> dict[str, Any]:
    """The entries `fit` and `cautions` for a job with this peak in bytes, which is None if sizes
    are open. Cautions are also reported as remarks."""
    from stagec.analysis.memory_fit import memory_fit
    from stagec.time.cautions import cautions

    fit = None if peak is None else memory_fit(machine, mesh, peak).as_json()
    warnings = cautions(machine, [] if peak is None else [mesh])
    session.remark(*warnings)
    return {"fit": fit, "cautions": list(warnings)}


def serving_figures(
    module: Module,
    builder: JobBuilder,
    limit: Limit | None,
    machine: Machine | None = None,
    *,
    symbolic: bool = False,
) -> dict[str, Any]:
    """The object `serving` of the analysis, without its ops, for the rank with most bytes of caches
    and weights. `module` is planned; `machine` is that of `--limit machine`. Raises
    `DiagnosticError` for a batch that does not fit the limit."""
    from stagec.analysis.kv_figures import LARGEST, longest_context, served

    serving = builder.serving
    if serving is None:
        raise ValueError("the job is not a step of serving")
    stages = served(module, serving.cached_tokens)
    if symbolic:
        return {**next(iter(stages.values())).shown(str), **dict.fromkeys(LARGEST)}
    env = planned_env(module)

    def number(size: Expr) -> int:
        return evaluate(size, env)

    each = [stage_figures.shown(number) for stage_figures in stages.values()]
    most = max(each, key=lambda f: f["cache_bytes"] + f["state_bytes"] + f["weight_bytes"])
    if limit is None or serving.step is not None:  # a mixed step has no single batch
        return {**most, **dict.fromkeys(LARGEST)}
    room = limit.room(module.axis_sizes, machine)
    longest = longest_context(module, room) if serving.mode == "decode" and serving.past else None
    largest = _largest(module, serving, limit, room)
    return {**most, **dict(zip(LARGEST, (largest, longest), strict=True))}


def _largest(module: Module, serving: Serving, limit: Limit, room: int) -> int:
    """The largest batch that fits. Raises `DiagnosticError` if the batch of the step is larger."""
    from stagec.analysis.kv_figures import largest_batch

    batch = largest_batch(module, room)
    if serving.batch is not None and serving.batch > batch:
        shown = f"the largest that does is {batch}" if batch else "no batch does"
        raise error(
            f"--batch {serving.batch} does not fit {limit.text}: {shown}",
            remedy="give a smaller batch or context, or split the model over more ranks",
        )
    return batch
