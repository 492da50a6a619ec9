"""The forms of a MODEL: a name of the library, a text, or a configuration, which is a config.json
or a folder with one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from stagec.ir.module import Module
from stagec.ir_spec.phases import Phase
from stagec.jobs.session import Session
from stagec.models import library
from stagec.support.diagnostics import Diagnostic, error
from stagec.support.limits import MAX_CONFIGURATION
from stagec.support.source import UNKNOWN, Loc, Source
from stagec.support.suggest import did_you_mean, other_spelling

if TYPE_CHECKING:
    from stagec.importers.reading.json_text import Object

CONFIG, ADAPTER = "config.json", "adapter_config.json"
#: Files that stand beside the configuration of a model.
_BESIDE = re.compile(r"adapter_config|\.index\.|token|generation_|preprocessor|processor_")
QUANTIZATION = "quantization_config"
#: The ends of names of files of weights.
WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx")


def is_file_name(name: str) -> bool:
    """Whether a model is given by a file."""
    return name == "-" or name.endswith((".stg", ".json")) or Path(name).exists()


def check_no_weights(name: str, loc: Loc = UNKNOWN) -> None:
    """Raise `DiagnosticError` at `loc` for a file of weights."""
    if name.lower().endswith(WEIGHTS) and not Path(name).is_dir():
        raise error(
            f"{name} is a file of weights",
            loc,
            remedy="give the config.json of the model that it belongs to, or that it was made from",
        )


def check_model(name: str, loc: Loc = UNKNOWN) -> None:
    """Raise `DiagnosticError` at `loc` for a name that is neither in the library nor a file."""
    check_no_weights(name, loc)
    if name.endswith((".yaml", ".yml")):
        raise error(
            f"{name} is YAML: a model is a name, or a .stg, .json or .toml file",
            loc,
            remedy="write jobs in TOML, as --print-job does",
        )
    if name not in (models := library()) and not is_file_name(name):
        near = did_you_mean(name, models) or other_spelling(name, models)
        if "/" in name:
            near = f"{near or ''} Nothing is downloaded: give the path of its config.json".strip()
        raise error(
            f"no model '{name}' in the library, and no file of that name",
            loc,
            remedy=near
            or "'stagec models' lists the models; the config.json of any other is a model, too",
        )


def check_texts(model: str, strategy: str | None) -> None:
    """Raise `DiagnosticError` for an unknown MODEL, and for a STRATEGY that is no file."""
    check_model(model)
    if strategy is not None and strategy != "-" and not Path(strategy).exists():
        raise error(
            f"no strategy file '{strategy}'",
            remedy="STRATEGY is a .stg file with a stg.strategy; flags such as --tp 8 need none",
        )


def check_parsed(module: Module) -> None:
    """Raise `DiagnosticError` for a module that passes have been run on, such as a dump."""
    if module.phase != Phase.PARSED.label:
        raise module.root.error(
            f"the module is {module.phase}: a model is a text before all passes",
            remedy="run further passes with 'stagec opt FILE -p PASSES', or give --pipeline",
        )


def is_configuration(model: str) -> bool:
    """Whether a MODEL is given by a configuration: a folder, or a name that ends in .json."""
    return model.endswith(".json") or Path(model).is_dir()


def configuration_name(model: str) -> str:
    """The name of a model that is given by a configuration: that of the file, or of its folder if
    the file is config.json."""
    path = Path(model)
    if path.is_dir() or path.name == CONFIG:
        return (path if path.is_dir() else path.parent).resolve().name or "model"
    return path.stem


def import_configuration(
    path: str,
    session: Session,
    ignored: Collection[str] = (),
    plugins: Iterable[Path] = (),
    *,
    images: bool = False,
    unknown: bool = False,
) -> Source:
    """The STG text of an imported configuration, with a name for diagnostics; '-' is stdin. Keys in
    `ignored` count as absent, and with `unknown` also those that are not known, with a remark. With
    `images` the step also has images as inputs. Raises `DiagnosticError`."""
    from stagec.importers.importing import import_model  # loads many modules
    from stagec.importers.registry import BUILT_IN, families_of, knows

    check_no_weights(path)
    source = session.read(path if path == "-" else _file(path), MAX_CONFIGURATION)
    families = list(BUILT_IN)
    plugins = list(plugins)
    if plugins or not knows(source):
        from stagec.pipeline.plugins import load_plugins  # takes longer than the import itself

        families = families_of(load_plugins(plugins).registry.extras)
    remarks: list[Diagnostic] | None = [] if unknown else None
    model = import_model(source, families, ignored, images=images, remarks=remarks)
    session.report(*remarks or ())
    return Source(f"<import {source.name}>", model.text())


def quantized_checkpoint(path: str, session: Session) -> Diagnostic | None:
    """A warning if a configuration, or a section such as `text_config`, is that of a checkpoint
    with quantized weights, which a job has only with --weight-dtype; else None. The configuration
    is known to be valid."""
    from stagec.importers.reading.json_text import JsonText

    text = JsonText(session.read(_file(path), MAX_CONFIGURATION))
    members = text.read()
    for section in (members, *(m.value for m in members.values())):
        member = section.get(QUANTIZATION) if isinstance(section, dict) else None
        if member is None or not isinstance(member.value, dict) or not member.value:
            continue
        format_ = _weight_dtype(member.value)
        experts = section.get("expert_dtype") if isinstance(section, dict) else None
        if experts is not None and experts.value == "fp4":  # DeepSeek-V4, whose blocks have 32
            format_ = "mxfp4 --weight-parts experts"
        return Diagnostic(
            f"'{QUANTIZATION}': the checkpoint has quantized weights, this job has not",
            text.place(member.key_at, len(QUANTIZATION) + 2),
            "warning",
            remedy=f"give --weight-dtype {format_ or 'and the type of its weights'}",
        )
    return None


def _weight_dtype(quantization: Object) -> str | None:
    """The `--weight-dtype` of a `quantization_config` of transformers (docs:
    quantization/overview), or None."""
    given = {key: str(member.value) for key, member in quantization.items()}
    method, bits = given.get("quant_method"), given.get("bits")
    if method == "bitsandbytes":
        return "nf4" if given.get("load_in_4bit") == "True" else "int8"
    if method in ("gptq", "awq", "auto-round", "intel/auto-round"):
        return f"int{bits}" if bits in ("4", "8") else None
    stored = given.get("quant_algo", method or "").lower().removeprefix("fbgemm_")
    if stored in ("fp8", "mxfp4", "nvfp4"):
        return stored
    return _dtype_of_groups(quantization)


def _dtype_of_groups(quantization: Object) -> str | None:
    """The `--weight-dtype` that all `config_groups` of compressed-tensors state, or None."""
    groups = quantization.get("config_groups")
    each = groups.value.values() if groups and isinstance(groups.value, dict) else ()
    stated: set[str] = set()
    for group in each:
        weights = group.value.get("weights") if isinstance(group.value, dict) else None
        if weights is None or not isinstance(weights.value, dict):
            return None
        given = {key: str(member.value) for key, member in weights.value.items()}
        kind, bits = given.get("type"), given.get("num_bits")
        if (kind, bits) == ("float", "4"):
            stated.add("mxfp4" if given.get("group_size") == "32" else "nvfp4")
        else:
            stated.add({"float8": "fp8", "int8": "int8", "int4": "int4"}.get(f"{kind}{bits}", ""))
    return stated.pop() or None if len(stated) == 1 else None


def _file(path: str) -> str:
    """The file of a configuration that is given by a file or a folder."""
    file = Path(path)
    if file.is_dir():
        file = file / CONFIG
        if not file.is_file():
            names = sorted(f.name for f in Path(path).iterdir() if f.suffix == ".json")
            others = [n for n in names if not _BESIDE.search(n)][:5]
            remedy = "give a model's config.json, or the folder that has it"
            if others:
                remedy = f"give the file itself: {', '.join(others)}"
            elif ADAPTER in names:
                remedy = f"{path}/{ADAPTER} names the model: give its config.json, and --lora"
            raise error(f"folder {path} has no {CONFIG}", remedy=remedy)
    elif path != "-" and not file.exists() and file.suffix != ".json":
        raise error(
            f"no file or folder '{path}'",
            remedy="nothing is downloaded: give the path of a model's config.json",
        )
    return str(file)
