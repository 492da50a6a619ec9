"""The options of each pod of a job: those of `--serve disaggregated`, of which one prefills and one
decodes, those of `--part`, each of which has a part of the model, and that of `--draft`, which has
a model of its own, and its own ranks or those of the other model."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from stagec.ir.drafts import DRAFT
from stagec.ir.serving_step import DECODE, MIXED, PREFILL
from stagec.ir_spec.strategy.axes import AXES
from stagec.ir_spec.strategy.part import MAIN
from stagec.ir_spec.strategy.statement import Flag
from stagec.jobs.request.combine import complete
from stagec.jobs.request.draft import DraftText
from stagec.jobs.request.experts import mesh_axes
from stagec.jobs.request.flags import FLAGS
from stagec.jobs.request.options import JobOptions, job_options
from stagec.jobs.request.serving_flags import DISAGGREGATED, PODS
from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.suggest import did_you_mean

_OF_MESH = ("mesh", "ranks")


def has_pods(options: JobOptions) -> bool:
    """Whether a job has several pods, on ranks of their own or not."""
    return options.serve == DISAGGREGATED or bool(options.part) or options.draft is not None


def pod_names(options: JobOptions) -> tuple[str, ...]:
    """The pods that options ask for: first that of the rest of the model, or the one that prefills;
    those of parts; then the one that decodes, or drafts."""
    if options.draft is not None:
        return (MAIN, DRAFT)
    parts = (part.name for part in options.part)
    return (PREFILL, *parts, DECODE) if options.serve == DISAGGREGATED else (MAIN, *parts)


def guests(options: JobOptions) -> tuple[str, ...]:
    """The pods that run on the ranks of the first one, and have none of their own."""
    return (DRAFT,) if options.draft is not None and options.draft.on_model else ()


def models_alone(options: JobOptions) -> tuple[JobOptions, ...]:
    """The options of a job without its draft model, and of that model, if it has one, as jobs of
    their own. Raises `DiagnosticError`."""
    if options.draft is None:
        return (options,)
    return tuple(options_of(p, options).changed(draft=None, keep="") for p in (MAIN, DRAFT))


def options_of(pod: str, options: JobOptions) -> JobOptions:
    """The options of a pod of a job. Raises `DiagnosticError`."""
    if options.draft is not None:
        return options_of_draft(pod, options.draft, options)
    if options.serve != DISAGGREGATED:
        return options_of_part(pod, options)
    if pod == DECODE or not options.part:
        return options_of_pod(pod, options)
    if taken := [part.name for part in options.part if part.name in PODS]:
        raise error(f"the part '{taken[0]}' has the same name as another pod", remedy="rename it")
    strategy = {} if pod == PREFILL else {PREFILL: None}
    step = options_of_pod(PREFILL, options.changed(**strategy))
    alike = {"rest": PREFILL, "part": options.part, "dump_dir": options.dump_dir}
    return options_of_part(pod, step.changed(**alike))


def options_of_pod(pod: str, options: JobOptions) -> JobOptions:
    """The options of a pod: those of the job, with the strategy that --prefill or --decode gives.

    Raises `DiagnosticError`.
    """
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
    given, said = _said(f"--{pod}", getattr(options, pod) or "")
    return of_pod.changed(**said, explicit=of_pod.explicit | given.explicit)


def options_of_part(name: str, options: JobOptions) -> JobOptions:
    """The options of a part, or of the rest of the model: of the mesh what the part's own flags
    give, of all else what the job says where they say nothing. Raises `DiagnosticError`."""
    _refuse_text(options, "--part", "part", "--tp 8 --part 'encoder=e: tp=2,dp=4'")
    if options.serve == MIXED:
        raise error(
            "--part cannot be used with --serve mixed, a step of one pod",
            remedy="give --serve prefill, a step with the encoder",
        )
    dumps = options.dump_dir and options.dump_dir / name
    of_part = options.changed(keep=name, dump_dir=dumps)
    if name == options.rest:
        return of_part
    (part,) = (part for part in options.part if part.name == name)
    return _with_flags(of_part, f"--part {name}", part.flags)


def options_of_draft(pod: str, draft: DraftText, options: JobOptions) -> JobOptions:
    """The options of the pod that verifies, or of the one that drafts: its own model, and of the
    mesh what its own flags give. Raises `DiagnosticError`."""
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
    """Refuse passes and strategies of a job whose owners of a strategy are several."""
    if options.pipeline is not None or options.strategy is not None or options.preset:
        raise error(
            f"{option} takes no strategy text: each {owner} has a strategy of its own",
            remedy=f"give flags: {flags}",
        )


def _on_its_ranks(completed: JobOptions, draft: DraftText) -> JobOptions:
    """The options of a draft model on the ranks of its model, whose axes it has; with tp = 1 each
    of these ranks has all of it. Raises `DiagnosticError` for other degrees."""
    _, said = _said("--draft", draft.flags)
    completed = complete(completed)
    axes = mesh_axes(completed)
    for name in (n for n in (*AXES, *_OF_MESH) if n in said):
        if said[name] not in (getattr(completed, name), 1 if name == "tp" else None):
            shown = " x ".join(f"{a} {n}" for a, n in axes.items()) or "one device"
            raise error(
                f"--draft '{draft}': {name.replace('_', '-')}={said[name]} differs from the ranks "
                f"of the model, {shown}, on which the draft model runs",
                remedy="leave it out, give tp=1 (a copy on each rank), or leave out on=model",
            )
    if "pp" in axes:
        raise error(
            f"--draft '{draft}': a draft model on the ranks of the model does not support "
            "pipeline stages",
            remedy="leave out --pp, or on=model, which gives the draft model ranks of its own",
        )
    if said.pop("tp", 0) == 1:
        axes.pop("tp", None)
    whole = completed.mesh is not None or "ep" in axes  # a model without experts takes no --ep
    shape = {n: 1 if whole else axes.get(n, 1) for n in AXES}
    mesh = {"mesh": axes, "mesh_order": ""} if whole else {}
    return _with_mesh(completed, {**shape, "ranks": None, **mesh}, said, axes.keys())


def _with_flags(options: JobOptions, option: str, flags: str) -> JobOptions:
    """The options of a pod: of the mesh what its own flags give, of all else what the job says
    where they say nothing. Raises `DiagnosticError`."""
    given, said = _said(option, flags)
    axes = {n for n in AXES if getattr(given, n) > 1} | set(given.mesh or {})
    mesh = {n: FLAGS[n].default for n in AXES} | dict.fromkeys(_OF_MESH)
    return _with_mesh(options, mesh, said, axes)


def _with_mesh(
    options: JobOptions, mesh: dict[str, Any], said: dict[str, Any], axes: Set[str]
) -> JobOptions:
    """The options of a pod with this mesh of these axes and what it says of itself; flags that have
    no effect on such a mesh are left out."""
    lost = {n for n, flag in FLAGS.items() if n in mesh or _lacks(flag, axes)} - said.keys()
    usual = {n: FLAGS[n].default for n in lost} | mesh
    return options.changed(**(usual | said), explicit=(options.explicit - lost) | said.keys())


def _said(option: str, text: str) -> tuple[JobOptions, dict[str, Any]]:
    """The flags that an option gives a pod, and the values of those that it names."""
    given = read_flags(option, text)
    if given.part:
        raise error("--part inside of a --part", remedy="give each part its own --part")
    named = given.explicit | {n for n in _OF_MESH if getattr(given, n) is not None}
    return given, {n: getattr(given, n) for n in named}


def _lacks(flag: Flag, axes: Set[str]) -> bool:
    """Whether a flag has no effect on a mesh of these axes."""
    each = ((need,) if isinstance(need, str) else need for need in flag.needs)
    return any(set(names) <= set(AXES) and not axes & set(names) for names in each)


def read_flags(option: str, text: str) -> JobOptions:
    """The flags of `tp=4,sp`, or of `--tp 4 --sp`, which an option gives a pod. Raises
    `DiagnosticError`."""
    return job_options("", None, _values(option, text), where=f"{option} '{text}': ")


def _no_flag(option: str, text: str, name: str) -> DiagnosticError:
    options = {f.option.removeprefix("--") for f in FLAGS.values()}
    return error(
        f"{option} '{text}': '{name}' is not a flag of a strategy",
        remedy=did_you_mean(name, options) or "write flags without dashes, as in 'tp=4,sp'",
    )


def _values(option: str, text: str) -> dict[str, str | bool]:
    """The flags of a text and their values: what is no flag belongs to the value before it. Raises
    `DiagnosticError`."""
    values: dict[str, str | bool] = {}
    last = ""
    for part in text.replace("--", " ").replace(",", " ").split():
        name, equals, value = part.partition("=")
        known = name.replace("-", "_")
        awaited = bool(last) and values[last] is False and not equals
        if not awaited and (known in FLAGS or known in _OF_MESH):
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
