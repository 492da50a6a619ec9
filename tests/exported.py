"""Jobs that exporters are tried on, with tiny sizes, and what `stagec analyze` says of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stagec.analysis.report import analysis
from stagec.jobs.builder import JobBuilder
from stagec.machines import load_machine
from stagec.time.costs.durations import Durations
from stagec.traces.emit import EmittedJob, make_job
from stagec.traces.writer import Emission, write_source
from tests.support import (
    DEEPSEEK,
    EXHAUSTIVE,
    GPT,
    LLAMA,
    MIXTRAL,
    PALM,
    TINY,
    stagec,
    tiny_options,
)

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "one": {},
    "tp": {"tp": 2},
    "tp-sp-dp": {"tp": 2, "sp": True, "dp": 2, "zero": 1},
    "fsdp": {"dp": 4, "zero": 3},
    "hybrid": {"dp": 2, "tp": 2, "zero": 2, "microbatches": 2, "recompute": "full"},
    "cp": {"cp": 2, "dp": 2},
    "1f1b": {"pp": 2, "tp": 2, "microbatches": 4},
    "gpipe": {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "gpipe"},
    "interleaved": {"pp": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 2},
    "zb-h1": {"pp": 4, "microbatches": 4, "schedule": "zb-h1", "sizes": {"L": 4}},
    "zbv": {"pp": 2, "microbatches": 4, "schedule": "zbv", "sizes": {"L": 4}},
    "dualpipe": {"pp": 2, "microbatches": 4, "schedule": "dualpipe"},
    "ep": {"dp": 4, "ep": 2, "tp": 2, "sp": True},
    "ep-pp": {"dp": 2, "ep": 2, "pp": 2, "microbatches": 2},
}
_CHUNKS = {"interleaved", "zbv"}


class Tried(NamedTuple):
    """A model and a strategy."""

    model: str
    strategy: str

    @property
    def options(self) -> dict[str, Any]:
        """The options of the job."""
        actual = dict(STRATEGIES[self.strategy])
        if self.strategy in _CHUNKS:
            actual["sizes"] = {"L": 4}
        return actual

    @property
    def words(self) -> tuple[str, ...]:
        """The same as the words of a command."""
        options = self.options
        sizes: Mapping[str, int] = options.pop("sizes", {})
        return tiny(self.model, *_flags(options), **sizes)


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        yield f"--{name}"
        if value is not True:
            yield str(value)


def _known(model: str, strategy: str) -> bool:
    experts = model in (MIXTRAL, DEEPSEEK)
    return (
        (experts or not strategy.startswith("ep"))
        and not (model == DEEPSEEK and strategy in ("cp", "zb-h1", "zbv", "interleaved"))
        and (model, strategy) != (GPT, "cp")
    )  # its attention is not fused


ALL = [Tried(m, s) for m, s in product((LLAMA, GPT, MIXTRAL, PALM, DEEPSEEK), STRATEGIES)]
JOBS = [job for job in ALL if _known(*job)]


def tried(*quick: Tried, jobs: Sequence[Tried] = JOBS) -> pytest.MarkDecorator:
    """These jobs; those that are not `quick` are exhaustive."""
    rows = [pytest.param(j, id="-".join(j), marks=[] if j in quick else EXHAUSTIVE) for j in jobs]
    assert len(rows) >= 30
    return pytest.mark.parametrize("tried_job", rows)


def made(tried_job: Tried, **more: Any) -> tuple[EmittedJob, dict[str, Any]]:
    """A job with the times of computations on a machine, and what `analyze` says of it."""
    options = {**tried_job.options, **more}
    module = JobBuilder(tiny_options(tried_job.model, **options)).lower(verify=False)
    machine = load_machine("h100-sxm")
    job = make_job(module, "job", Durations(machine), machine=machine)
    return job, analysis(module, tried_job.model)


def written(job: EmittedJob, folder: Path) -> Path:
    """The job's files."""
    write_source(job, folder, {}, Emission())
    return folder


def sums(rows: Sequence[Mapping[str, Any]]) -> Counter[tuple[str, str]]:
    """Bytes of the full buffer by kind and axes, of what `analyze` says."""
    actual: Counter[tuple[str, str]] = Counter()
    for row in rows:
        actual[row["op"], "+".join(row["over"])] += row["bytes"]
    return actual


# -- jobs as the words of commands -----------------------------------------------------------------

#: Jobs of several ranks that whole commands are tried on, as a parameter `tried_job`.
WRITTEN = tried(
    Tried(LLAMA, "1f1b"),
    Tried(MIXTRAL, "tp-sp-dp"),
    jobs=[job for job in JOBS if job.strategy != "one"],
)
#: Calls and bytes of the full buffer, by kind and axes; of messages by `send` and `recv`.
Traffic = Mapping[tuple[str, str], tuple[int, int]]


def tiny(model: str, *words: str, **more: int) -> tuple[str, ...]:
    """The words of a tiny job."""
    sizes = ",".join(f"{k}={v}" for k, v in {**TINY[model], **more}.items())
    return model, "--set", sizes, *words


@cache
def _analyzed(words: Sequence[str]) -> dict[str, Any]:
    done = stagec("analyze", *words, "--json")
    assert done.code == 0, done.err
    actual: dict[str, Any] = json.loads(done.out)
    return actual


def classes(words: Sequence[str]) -> list[dict[str, Any]]:
    """What `stagec analyze` says of each class of a job."""
    actual: list[dict[str, Any]] = _analyzed(tuple(words))["classes"]
    return actual


def flops_of(each: Mapping[str, Any]) -> int:
    """FLOPs of a rank of a class."""
    return sum(each["flops"].values())


def traffic_of(each: Mapping[str, Any]) -> Traffic:
    """The traffic of a rank of a class."""
    actual: dict[tuple[str, str], Counter[str]] = {}
    for row in each["collectives"]:
        actual.setdefault((row["op"], "+".join(row["over"])), Counter()).update(
            calls=row["count"], bytes=row["bytes"]
        )
    for row in each["p2p"]:
        actual.setdefault((row["dir"], ""), Counter()).update(
            calls=row["count"], bytes=row["bytes"]
        )
    return {key: (v["calls"], v["bytes"]) for key, v in actual.items()}
