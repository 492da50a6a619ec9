"""The sources of measured steps, and the convention of each: how its framework runs a step.

A convention says what is the same in all rows of a source: the text of the model, which
computations are fused, what is exchanged in which type, what may run beside computations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, Final

from stagec.analysis.measured import MeasuredStep, Row, read

#: Megatron-LM of 2021 and 2022: 16-bit gradients are summed up and reduced as they are, when
#: backward is done (`--DDP-impl local`); element-wise computations fused by hand.
_MEGATRON: Final[Mapping[str, Any]] = {
    **{"param_dtype": "f16", "grad_dtype": "f16", "reduce_dtype": "f16"},
    **{"ddp_bucket": 0, "fusion": "elementwise"},
}


def _steps(source: str) -> Iterator[tuple[Row, dict[str, Any], dict[str, int]]]:
    for row in read("steps"):
        if row["source"] == source:
            yield row, json.loads(row["strategy"]), json.loads(row["sizes"])


def _published(
    source: str, machine: str, model: str, flags: Mapping[str, Any], *, overlap: bool = True
) -> Iterator[MeasuredStep]:
    for row, given, sizes in _steps(source):
        yield MeasuredStep(
            source,
            row["row"],
            source,
            float(row["measured_s"]),
            int(row["gpus"]),
            machine,
            model,
            sizes,
            {**flags, **given},
            {},
            overlap,
        )


def korthikanti() -> Iterator[MeasuredStep]:
    for step in _published("korthikanti", "a100-80g", "gpt3-175b", _MEGATRON):
        yield step


def narayanan() -> Iterator[MeasuredStep]:
    flags = {**_MEGATRON, "async_tp": False}
    yield from _published("narayanan", "a100-80g", "gpt3-175b", flags)


def mcore() -> Iterator[MeasuredStep]:
    yield from _published("mcore", "h100-sxm", "stagec/models/gpt_rope.stg", {"fusion": "elementwise"})


_TITAN = {"8B": "llama3-8b", "70B": "llama3-70b", "405B": "llama3-405b"}


def torchtitan() -> Iterator[MeasuredStep]:
    from dataclasses import replace

    for step in _published("torchtitan", "h100-500w", "", {"fusion": "elementwise"}):
        yield replace(step, model=_TITAN[step.row.split()[0]])


def _deepspeed(source: str, name: str, flags: Mapping[str, Any], changes: Mapping[str, str]) -> Iterator[MeasuredStep]:
    for row in read(name):
        n = {k: int(v) for k, v in row.items() if k not in ("ms", "billions")}
        micro = n["batch"] // (n["microbatch"] * n["dp"])
        sizes = {"L": n["layers"], "D": n["width"], "H": n["heads"], "K": n["width"] // n["heads"],
                 "F": 4 * n["width"], "V": 51200, "S": n["sequence"], "B": n["batch"]}
        given = {"tp": n["tp"], "dp": n["dp"], "pp": n["pp"], "microbatches": micro}
        yield MeasuredStep(
            source, f"D{n['width']} L{n['layers']} b{n['batch']} mb{n['microbatch']} t{n['tp']} d{n['dp']} p{n['pp']}",
            f"{source} D{n['width']} L{n['layers']} {n['gpus']} b{n['batch']}", float(row["ms"]) * 1e-3, n["gpus"], "a100-80g", "gpt3-175b", sizes,
            {**flags, **given}, changes)


def multi() -> Iterator[MeasuredStep]:
    yield from _deepspeed("multi", "megatron_deepspeed_a100_multi", {**_MEGATRON, "async_tp": False, "recompute": "full"},
        {"network.infiniband.bandwidth": "12.5 GB/s"})


def single() -> Iterator[MeasuredStep]:
    yield from _deepspeed("single", "megatron_deepspeed_a100_single", {**_MEGATRON, "async_tp": False},
        {})


_B200 = {
    "llama3_70b": ("llama3-70b", {}),
    "llama3_405b": ("llama3-405b", {"G": 16}),
    "deepseekv2": ("deepseek-v2", {"L_dense": 1}),
    "deepseekv3": ("deepseek-v3", {"L_dense": 1}),
}


def b200() -> Iterator[MeasuredStep]:
    for row in read("megatron_b200"):
        case = row["case"]
        name = next(n for n in _B200 if case.startswith(n))
        model, extra = _B200[name]
        v = {m[1]: int(m[2]) for m in re.finditer(r"_(l|tp|ep|pp|dp|cp|seq|mbc)(\d+)", case)}
        axes = {a: v.get(a, 1) for a in ("tp", "cp", "pp", "dp", "ep")}
        s = v.get("seq", 4096)
        sizes = {**extra, "S": s, "B": axes["dp"] * v["mbc"], "L": v["l"] - extra.get("L_dense", 0)}
        flags = {**axes, "microbatches": v["mbc"], "zero": 1, "sp": axes["tp"] > 1, "fusion": "elementwise"}
        yield MeasuredStep("b200", case.replace("_cef", ""), f"b200 {name} {s}", float(row["real_ms"]) * 1e-3, 8, "b200", model, sizes, flags, {})


def nanotron() -> Iterator[MeasuredStep]:
    for row in read("nanotron_h100"):
        n = {k: int(v) for k, v in row.items() if k not in ("tied", "tokens_per_second_per_gpu")}
        gpus = 8 * n["nodes"]
        B = n["microbatch"] * n["microbatches"] * n["dp"]
        sizes = {"L": n["layers"], "D": n["width"], "H": n["heads"], "G": n["kv_heads"], "K": n["width"] // n["heads"],
                 "F": 14336 if n["width"] == 4096 else 4 * n["width"], "V": n["vocabulary"], "S": 4096, "B": B}
        flags = {"tp": n["tp"], "dp": n["dp"], "pp": n["pp"], "microbatches": n["microbatches"], "sp": n["tp"] > 1, "zero": n["zero"] if n["dp"] > 1 else 0,
                 "fusion": "none"}
        yield MeasuredStep("nanotron", f"D{n['width']} mb{n['microbatch']}x{n['microbatches']} t{n['tp']} d{n['dp']} p{n['pp']} z{n['zero']}",
            f"nanotron D{n['width']} {gpus}", B * 4096 / (gpus * float(row["tokens_per_second_per_gpu"])), gpus, "h100-sxm", "llama3-8b", sizes, flags, {})


SOURCES: Mapping[str, Callable[[], Iterator[MeasuredStep]]] = {
    f.__name__: f for f in (korthikanti, narayanan, multi, single, mcore, torchtitan, b200, nanotron)
}
