"""Jobs as TOML files, which can be given in place of a model: `stagec time job.toml`.

    model = "llama3-8b"

    [sizes]
    L = 4

    [strategy]
    tp = 8
    zero = 3

    [serving]
    serve = "decode"
    batch = 8

    [machine]
    name = "h100-sxm"

Keys are options of the command line, with dashes or underscores. `--print-job` writes such a file.
Options of the command line override those of the file.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from stagec.ir_spec.strategy.axes import AXES
from stagec.jobs.request.configurations import check_model
from stagec.jobs.request.flags import SHORTHANDS, words
from stagec.jobs.request.options import JobOptions, find_preset, job_options
from stagec.jobs.request.other_tools import flag_here
from stagec.jobs.request.serving_flags import STEP
from stagec.jobs.session import Session
from stagec.models import library
from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.json_values import is_list, is_object
from stagec.support.source import FileLoc, Source
from stagec.support.suggest import did_you_mean
from stagec.support.toml_text import toml_tables

SUFFIX = ".toml"
_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "strategy": ("ranks", *AXES, *SHORTHANDS),
    "serving": ("serve", *STEP, "draft", "page", "kv_dtype", "sampling", "prefill", "decode"),
    "passes": ("pipeline", "plugin"),
}
_FIRST = ("model", "strategy_file", "preset", "stack")
_TOP = (*_FIRST, "sizes", "mesh", "machine")
_EXAMPLE = "as --print-job writes it: model, [sizes], [strategy], [serving], [machine], [passes]"


@dataclass(frozen=True, slots=True)
class JobFile:
    """The contents of a file: a job, and the machine that it runs on."""

    options: JobOptions
    machine: str | None = None
    used_ranks: Mapping[str, int] = field(default_factory=dict[str, int])


def is_job_file(model: str) -> bool:
    """Whether a MODEL is a job file."""
    return model.endswith(SUFFIX)


def read_job_file(path: str, session: Session, preset: str | None = None) -> JobFile:
    """The job of a file, whose file names are relative to it. Without a model it needs a preset, in
    the file or as `preset`. Raises `DiagnosticError` with the line of an error."""
    source = session.read(path)
    tables = toml_tables(source, _EXAMPLE)
    flags: dict[str, Any] = {}
    for name, value in tables.items():
        if is_object(value) and name in _SECTIONS:
            for key, each in value.items():
                flags[_option_of(source, name, key)] = each
        elif name not in _TOP:
            place = key_place(source, "", name)
            raise error(f"unknown key '{name}' in a job", place, remedy=_where(name))
    flags |= {name: tables[name] for name in ("sizes", "mesh", "preset") if name in tables}
    plugins: object = flags.get("plugin", [])
    files = plugins if is_list(plugins) else [plugins]
    flags["plugin"] = [_relative(path, str(each)) for each in files]
    files = [tables.get("model", ""), tables.get("strategy_file", "")]
    names = [_relative(path, str(each)) for each in files]
    if "stack" in tables:
        flags["stack"] = _relative(path, str(tables["stack"]))
    try:
        options = job_options(names[0], names[1] or None, flags)
    except DiagnosticError as problem:
        first = problem.diagnostics[0]
        name = first.message.partition(":")[0]
        where = next((section for section, names in _SECTIONS.items() if name in names), "")
        raise error(first.message, key_place(source, where, name), remedy=first.remedy) from None
    if options.model:
        check_model(options.model, key_place(source, "", "model"))
    elif not (options.preset or preset):
        raise _wrong(source, "", "model", "no model is given")
    return JobFile(options, *_machine(source, tables.get("machine", {})))


def _machine(source: Source, given: object) -> tuple[str | None, Mapping[str, int]]:
    """The name and used ranks in a table of a machine. Raises `DiagnosticError`."""
    table: dict[str, Any] = given if is_object(given) else {"": given}
    name, used = table.pop("name", None), table.pop("used_ranks", {})
    sizes: dict[str, Any] = used if is_object(used) else {"": -1}
    numbers = all(type(number) is int and number > 0 for number in sizes.values())
    if not table and numbers and (name is None or isinstance(name, str)):
        return name, sizes
    if is_object(given) and (other := next(iter(table), "")):
        raise error(
            f"unknown key '{other}' in [machine]",
            key_place(source, "machine", other),
            remedy="it has name and used_ranks; for other figures name a machine file",
        )
    raise _wrong(source, "", "machine", "expected a table with name and used_ranks, of numbers")


def _where(name: str) -> str:
    """The remedy for a key that is not one of the top level."""
    for section, keys in _SECTIONS.items():
        if name.replace("-", "_") in keys:
            return f"write it in [{section}]"
    return did_you_mean(name, (*_TOP, *_SECTIONS)) or _EXAMPLE


def _option_of(source: Source, table: str, key: str) -> str:
    """The option that a key of a table names. Raises `DiagnosticError`."""
    name = key.replace("-", "_")
    if name not in _SECTIONS[table] and not (table == "strategy" and name == "mesh"):
        remedy = did_you_mean(name, _SECTIONS[table]) or flag_here(name) or _EXAMPLE
        raise error(
            f"unknown key '{key}' in [{table}]", key_place(source, table, key), remedy=remedy
        )
    return name


def _relative(path: str, name: str) -> str:
    """The path of a file that the job file at `path` names; names of models stay."""
    if "\0" in name:
        return name
    file = Path(path).parent / name
    is_file = name.endswith((".stg", ".json", ".py")) or (file.exists() and name not in library())
    return str(file) if name and is_file else name


def key_place(source: Source, table: str, key: str) -> FileLoc:
    """The place of a key of a table in the text, which tomllib does not give."""
    inside, word = not table, re.escape(key).replace("_", "[-_]")
    for number, line in enumerate(source.text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*[\"']?(.*?)[\"']?\s*\]", line):
            inside = header[1] == table
        line_of_key = re.match(rf"\s*\[?\s*([\"']?{word}[\"']?)\s*[=\]]", line)
        if line_of_key and (inside or line.lstrip().startswith("[")):
            return FileLoc(source.name, number, line_of_key.start(1) + 1, len(line_of_key[1]))
    return FileLoc(source.name, 1, 1)


def _wrong(source: Source, table: str, key: str, message: str) -> DiagnosticError:
    return error(message, key_place(source, table, key), remedy=_EXAMPLE)


def with_job_file(options: JobOptions, given: dict[str, Any], session: Session) -> JobOptions:
    """The options, completed by those of a job file that is given as the model. Its machine becomes
    the machine of the command (`given`), unless that has one. Raises `DiagnosticError`."""
    if not is_job_file(options.model):
        return options
    job = read_job_file(options.model, session, options.preset)
    more = {name: getattr(options, name) for name in options.explicit - {"model", "sizes"}}
    sizes = {**job.options.sizes, **options.sizes}
    explicit = job.options.explicit | options.explicit
    if "machine" in given and given["machine"] is None:
        given["machine"] = job.machine
        given["used_ranks"] = given["used_ranks"] or dict(job.used_ranks) or None
    return job.options.changed(**more, sizes=sizes, explicit=explicit)


def asked_job(
    model: str, strategy: str | None, flags: Mapping[str, Any], session: Session
) -> JobOptions:
    """The options of a model, or of a job file, with flags by their names. Raises `DiagnosticError`
    as the command line does."""
    return with_job_file(job_options(model, strategy, flags), {}, session)


def printed(options: JobOptions, given: Mapping[str, Any]) -> str:
    """The text of the job file of a command with these options."""
    return job_text(JobFile(options, given.get("machine"), given.get("used_ranks") or {}))


# -- writing ---------------------------------------------------------------------------------------


def job_text(job: JobFile) -> str:
    """The text of a job file, which reads back as the same job."""
    options, default = job.options, JobOptions("")
    if options.preset:  # which gives the step
        default = default.changed(**find_preset(options).step)
    stack = "" if options.stack == default.stack else options.stack
    texts = (options.model, options.strategy, options.preset, stack)
    first = zip(_FIRST, texts, strict=True)
    lines = [f"{name} = {_toml(value)}" for name, value in first if value]
    tables: dict[str, dict[str, Any]] = {"sizes": dict(options.sizes)}
    for section, names in _SECTIONS.items():
        values = {name: getattr(options, name) for name in names}
        explicit = options.explicit if section == "strategy" else ()
        tables[section] = {
            name: value
            for name, value in values.items()
            if value is not None and (name in explicit or value != getattr(default, name))
        }
    if options.mesh:
        sizes = options.mesh.items()
        tables["strategy"]["mesh"] = ",".join(n if v is None else f"{n}={v}" for n, v in sizes)
    if job.machine is not None:
        used = {"used_ranks": dict(job.used_ranks)} if job.used_ranks else {}
        tables["machine"] = {"name": job.machine, **used}
    for section, table in tables.items():
        if table:
            lines += ["", f"[{section}]", *(f"{n} = {_value(n, v)}" for n, v in table.items())]
    return "\n".join(lines) + "\n"


def _value(name: str, value: Any) -> str:
    """A value as TOML: numbers, switches and texts directly, others in the form of the command
    line."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return "{" + ", ".join(f"{_toml(n)} = {_toml(v)}" for n, v in items) + "}"
    if isinstance(value, bool | int | str):
        return _toml(value)
    if name in ("part", "plugin"):
        return _toml([str(each) for each in value])
    return _toml([*words(name, value)][-1])


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
