"""The options of each pod of a job. With `--serve disaggregated` one pod prefills and one decodes;
with `--part` each pod has a part of the model; with `--draft` a pod has a model of its own, on its
own ranks or on those of the other model."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

from stagec.ir.drafts import DRAFT
from stagec.ir.serving_step import DECODE, MIXED, PREFILL
from stagec.ir_spec.strategy.axes import AXES
from stagec.ir_spec.strategy.part import FEED_FORWARD, MAIN
from stagec.ir_spec.strategy.statement import Flag
from stagec.jobs.request.combine import complete
from stagec.jobs.request.draft import DraftText
from stagec.jobs.request.experts import mesh_axes
from stagec.jobs.request.flags import FLAGS, PartText
from stagec.jobs.request.machine import on_machine, own_machine
from stagec.jobs.request.option import YES_OR_NO
from stagec.jobs.request.options import JobOptions, job_options
from stagec.jobs.request.serving_flags import DISAGGREGATED, PODS
from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.suggest import did_you_mean

if TYPE_CHECKING:
    from stagec.machines import Machine

_OF_MESH = ("mesh", "ranks")


def has_pods(options: JobOptions) -> bool:
    """Whether a job has several pods, on separate ranks or not."""
    return options.serve == DISAGGREGATED or bool(options.part) or options.draft is not None


def pod_names(options: JobOptions) -> tuple[str, ...]:
    """The names of the pods of a job: first the rest of the model, or the pod that prefills; then
    those of parts; then the pod that decodes, or drafts."""
    if options.draft is not None:
        return (MAIN, DRAFT)
    parts = (part.name for part in options.part)
    return (PREFILL, *parts, DECODE) if options.serve == DISAGGREGATED else (MAIN, *parts)


def of_layers(options: JobOptions) -> tuple[PartText, ...]:
    """The parts of a job that every step has: those with the feed-forward of layers."""
    return tuple(part for part in options.part if part.value == FEED_FORWARD)


def guests(options: JobOptions) -> tuple[str, ...]:
    """The pods without ranks of their own, which run on those of the first pod."""
    return (DRAFT,) if options.draft is not None and options.draft.on_model else ()


def models_alone(options: JobOptions) -> tuple[JobOptions, ...]:
    """The options of a job without its draft model, followed by those of the draft model as a job
    of its own, if there is one. Raises `DiagnosticError`."""
    if options.draft is None:
        return (options,)
    return tuple(options_of(p, options).changed(draft=None, keep="") for p in (MAIN, DRAFT))


def options_of(pod: str, options: JobOptions) -> JobOptions:
    """The options of a pod of a job. Raises `DiagnosticError`."""
    if options.draft is not None:
        return options_of_draft(pod, options.draft, options)
    if options.serve != DISAGGREGATED:
        return options_of_part(pod, options)
    if layers := of_layers(options):
        raise error(
            f"the part '{layers[0].name}' with feed-forward cannot be used with --serve "
            "disaggregated, whose pods send caches to each other",
            remedy="give --decode 'pp=2,afd', or ask for a pod alone: --serve decode; 'stagec "
            "serve' has both pods",
        )
    if pod == DECODE or not options.part:
        return options_of_pod(pod, options)
    if same := [part.name for part in options.part if part.name in PODS]:
        raise error(f"the part '{same[0]}' has the same name as another pod", remedy="rename it")
    strategy = {} if pod == PREFILL else {PREFILL: None}
    step = options_of_pod(PREFILL, options.changed(**strategy))
    shared = {"rest": PREFILL, "part": options.part, "dump_dir": options.dump_dir}
    return options_of_part(pod, step.changed(**shared))


def options_of_pod(pod: str, options: JobOptions) -> JobOptions:
    """The options of a pod of `--serve disaggregated`: those of the job, with the strategy of
    --prefill or --decode. Raises `DiagnosticError`."""
    if options.prompt is None:
        raise error(
            "--serve disaggregated needs --prompt: the tokens whose caches are transferred",
            remedy="give --prompt 4096",
        )
    if options.chunk is not None:
        raise error(
            "--serve disaggregated cannot be used with this --chunk: caches are transferred after "
            "the last chunk of a prompt",
            remedy="give the tokens of the last chunk in --prompt, those before it in --context",
        )
    _refuse_text(options, "--serve disaggregated", "pod", "--prefill 'tp=4' --decode 'dp=8,tp=2'")
    past = options.context or 0
    steps: Mapping[str, Mapping[str, Any]] = {
        PREFILL: {"serve": PREFILL, "speculative": None, "context": past},
        DECODE: {"serve": DECODE, "prompt": None, "context": past + options.prompt},
    }
    dumps = options.dump_dir and options.dump_dir / pod
    of_pod = options.changed(prefill=None, decode=None, part=(), dump_dir=dumps, **steps[pod])
    given, values = _own_flags(f"--{pod}", getattr(options, pod) or "")
    return of_pod.changed(**values, explicit=of_pod.explicit | given.explicit)


def options_of_part(name: str, options: JobOptions) -> JobOptions:
    """The options of a part, or of the rest of the model: the part's own flags give its mesh, and
    override other options of the job. Raises `DiagnosticError`."""
    _refuse_text(options, "--part", "part", "--tp 8 --part 'encoder=e: tp=2,dp=4'")
    if options.serve == MIXED:
        raise error(
            "--part cannot be used with --serve mixed, a step of one pod",
            remedy="give --serve prefill or decode",
        )
    dumps = options.dump_dir and options.dump_dir / name
    of_part = options.changed(keep=name, dump_dir=dumps)
    if name == options.rest:
        return of_part
    (part,) = (part for part in options.part if part.name == name)
    of_part = _with_flags(of_part, f"--part {name}", part.flags)
    if not of_part.on_machine:
        return of_part
    from stagec.machines import load_machine

    return on_machine(of_part, load_machine(of_part.on_machine))


def options_of_draft(pod: str, draft: DraftText, options: JobOptions) -> JobOptions:
    """The options of the pod that verifies, or of the one that drafts: this one has its own model,
    and its own flags give its mesh. Raises `DiagnosticError`."""
    if options.serve == DISAGGREGATED or options.part:
        other = "--part" if options.part else "--serve disaggregated"
        raise error(
            f"--draft and {other} cannot be used together: both add pods",
            remedy="leave one of them out",
        )
    _refuse_text(options, "--draft", "model", "--tp 8 --draft 'llama3-8b: tp=2'")
    of_draft = options.changed(keep=pod, dump_dir=options.dump_dir and options.dump_dir / pod)
    if pod == MAIN:
        return of_draft
    of_draft = of_draft.changed(model=draft.model, sizes=draft.sizes)
    if draft.on_model:
        return _on_its_ranks(of_draft, draft)
    return _with_flags(of_draft, "--draft", draft.flags)


def _refuse_text(options: JobOptions, option: str, owner: str, flags: str) -> None:
    """Raise `DiagnosticError` for a pipeline or strategy text of a job with several strategies."""
    if options.pipeline is not None or options.strategy is not None or options.preset:
        raise error(
            f"{option} takes no strategy text: each {owner} has a strategy of its own",
            remedy=f"give flags: {flags}",
        )


def _on_its_ranks(completed: JobOptions, draft: DraftText) -> JobOptions:
    """The options of a draft model on the ranks and axes of the model that it drafts for; with
    tp = 1 each of these ranks has all of it. Raises `DiagnosticError` for other degrees."""
    _, own = _own_flags("--draft", draft.flags)
    completed = complete(completed)
    axes = mesh_axes(completed)
    for name in (n for n in (*AXES, *_OF_MESH) if n in own):
        if own[name] not in (getattr(completed, name), 1 if name == "tp" else None):
            shown = " x ".join(f"{a} {n}" for a, n in axes.items()) or "one device"
            raise error(
                f"--draft '{draft}': {name.replace('_', '-')}={own[name]} differs from the ranks "
                f"of the model, {shown}, on which the draft model runs",
                remedy="leave it out, give tp=1 (a copy on each rank), or leave out on=model",
            )
    if "pp" in axes:
        raise error(
            f"--draft '{draft}': a draft model on the ranks of the model does not support "
            "pipeline stages",
            remedy="leave out --pp, or on=model, which gives the draft model ranks of its own",
        )
    if own.pop("tp", 0) == 1:
        axes.pop("tp", None)
    whole = completed.mesh is not None or "ep" in axes  # a model without experts takes no --ep
    shape = {n: 1 if whole else axes.get(n, 1) for n in AXES}
    mesh = {"mesh": axes, "mesh_order": ""} if whole else {}
    return _with_mesh(completed, {**shape, "ranks": None, **mesh}, own, axes.keys())


def _with_flags(options: JobOptions, option: str, flags: str) -> JobOptions:
    """The options of a pod whose own flags give its mesh, and override other options of the job.
    Raises `DiagnosticError`."""
    given, own = _own_flags(option, flags)
    axes = {n for n in AXES if getattr(given, n) > 1} | set(given.mesh or {})
    mesh = {n: FLAGS[n].default for n in AXES} | dict.fromkeys(_OF_MESH)
    return _with_mesh(options, mesh, own, axes)


def _with_mesh(
    options: JobOptions, mesh: dict[str, Any], own: dict[str, Any], axes: Set[str]
) -> JobOptions:
    """The options of a pod with this mesh, which has these axes, and with its own flags. Flags of
    the job without effect on such a mesh get their defaults."""
    lost = {n for n, flag in FLAGS.items() if n in mesh or _lacks(flag, axes)} - own.keys()
    usual = {n: FLAGS[n].default for n in lost} | mesh
    return options.changed(**(usual | own), explicit=(options.explicit - lost) | own.keys())


def _own_flags(option: str, text: str) -> tuple[JobOptions, dict[str, Any]]:
    """The flags of a pod in the text of an option, as options, and the values of those that it
    names."""
    given = read_flags(option, text)
    if given.part:
        raise error("--part inside of a --part", remedy="give each part its own --part")
    named = given.explicit | {n for n in _OF_MESH if getattr(given, n) is not None}
    return given, {n: getattr(given, n) for n in named}


def _lacks(flag: Flag, axes: Set[str]) -> bool:
    """Whether a flag has no effect on a mesh with these axes."""
    each = ((need,) if isinstance(need, str) else need for need in flag.needs)
    return any(set(names) <= set(AXES) and not axes & set(names) for names in each)


def machines_text(options: JobOptions, machine: Machine) -> str:
    """The names of `machine`, on which a job runs, and of those of its parts: `h20 and h100-sxm`.
    Raises `DiagnosticError`."""
    parts = (read_flags(f"--part {part.name}", part.flags) for part in options.part)
    names = (machine, *(own_machine(part, machine) for part in parts))
    return " and ".join(dict.fromkeys(each.name for each in names))


def read_flags(option: str, text: str) -> JobOptions:
    """The flags in the text of an option for a pod, `tp=4,sp` or `--tp 4 --sp`, as options. Raises
    `DiagnosticError`."""
    return job_options("", None, _values(option, text), where=f"{option} '{text}': ")


def _no_flag(option: str, text: str, name: str) -> DiagnosticError:
    options = {f.option.removeprefix("--") for f in FLAGS.values()}
    return error(
        f"{option} '{text}': '{name}' is not a flag of a strategy",
        remedy=did_you_mean(name, options) or "write flags without dashes, as in 'tp=4,sp'",
    )


def _values(option: str, text: str) -> dict[str, str | bool]:
    """The flags of a text and their values. A word that is not a flag belongs to the value before
    it. Raises `DiagnosticError`."""
    values: dict[str, str | bool] = {}
    last = ""
    for part in text.replace("--", " ").replace(",", " ").split():
        name, equals, value = part.partition("=")
        known = name.replace("-", "_")
        awaited = bool(last) and values[last] is False and not equals
        states = bool(last) and values[last] is True and name.lower() in YES_OR_NO
        if states and not equals:
            values[last] = name
        elif not awaited and (known in FLAGS or known in _OF_MESH):
            last = known
            values[last] = value or (last in FLAGS and FLAGS[last].kind == "switch")
        elif equals or not last or values[last] is True:
            raise _no_flag(option, text, name)
        else:
            before = values[last]
            values[last] = f"{before},{part}" if before else part
    for name in (name for name, value in values.items() if value is False):
        flag = name.replace("_", "-")
        raise error(
            f"{option} '{text}': --{flag} expects a value", remedy="write it as in 'tp=4,sp'"
        )
    return values
