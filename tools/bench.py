"""Measures the compiler: phases, memory, and the rate of writing relative to a plain write of the
same bytes.

`python tools/bench.py` prints JSON; `--quick` leaves the large jobs out. `python tools/bench.py
scale` measures emission at scale, `formats` all formats of 512 ranks, `memory` planning, `search`
searches of strategies, `time` evaluations of the time of a step. Every measured run is a separate
process, so that its peak memory is separate; both sides of a ratio are measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

#: The published runs whose memory planning is measured.
PLANNED = ("llama3-405b-8k", "llama3-405b-131k", "deepseek-v3", "megatron-gpt-1t")
#: Searches: the model, ranks, sizes, and the flags of the space. The second space has about 10^5
#: points.
SEARCHED: dict[str, tuple[str, ...]] = {
    "llama3-70b": ("llama3-70b", "--ranks", "512", "--set", "B=1024,S=8192"),
    "llama3-70b-wide": (
        *("llama3-70b", "--ranks", "512", "--set", "B=1024,S=8192", "--tp", "1..16"),
        *("--cp", "1..8", "--chunks", "0,2,4,5,8,10", "--microbatch-size", "1..16"),
        *("--schedule", "1f1b,interleaved,zb-h1"),
    ),
    "deepseek-v3": ("deepseek-v3", "--ranks", "256", "--set", "B=1024,S=4096"),
}
STRATEGY: dict[str, Any] = {"sp": True, "zero": 3}
#: Steps that are timed: a model and its flags.
TIMED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3-70b, 512 ranks, stages": (
        "llama3-70b",
        {"tp": 8, "pp": 4, "dp": 16, "sp": True, "zero": 1, "microbatches": 16},
    ),
    "llama3-70b, 512 ranks, sharded": ("llama3-70b", {"tp": 8, "dp": 64, **STRATEGY}),
    "llama3-8b, 64 ranks, sharded": ("llama3-8b", {"tp": 8, "dp": 8, **STRATEGY}),
    "deepseek-v3, 256 ranks": (
        "deepseek-v3",
        {"ep": 8, "pp": 8, "tp": 2, "dp": 16, "zero": 1, "microbatches": 16},
    ),
    **{name: ("", {"preset": name}) for name in PLANNED},
}
#: The measured formats other than Chakra's. Perfetto's and Chrome's are for some ranks of a job.
FORMATS = ("simai", "goal", "goal{binary}", "kineto{ranks=all}", "pytorch-et")
#: The bytes of a write to a large file.
_BLOCK = 1 << 24


def main() -> None:
    """Run the benchmarks and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "what", nargs="?", choices=["compiler", "scale", *ONE_EACH], default="compiler"
    )
    parser.add_argument("--folder", type=Path, default=Path("build"), help="scale: where to write")
    parser.add_argument("--limit", type=int, default=8 << 30, help="scale: bytes at a time")
    parser.add_argument("--largest", type=int, default=32768, help="scale: ranks of a job")
    parser.add_argument("--quick", action="store_true", help="small jobs only")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each measurement")
    arguments = parser.parse_args()
    if arguments.what == "scale":
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tools.bench_scale import scale

        arguments.folder.mkdir(parents=True, exist_ok=True)
        figures = scale(arguments.folder, arguments.limit, arguments.largest)
        json.dump(figures, sys.stdout, indent=1)
        print()
        return
    if arguments.what in ONE_EACH:
        measure, names = ONE_EACH[arguments.what]
        json.dump({name: in_process(measure, name) for name in names}, sys.stdout, indent=1)
        print()
        return
    data_parallel = (1, 8) if arguments.quick else (1, 8, 128)
    result = {
        "layers": layers(arguments.repeat),
        "pipeline": pipeline(),
        "passes": in_process(_passes),
        "many": in_process(_many, 20 if arguments.quick else 100),
        "jobs": [in_process(_job, dp) for dp in data_parallel],
        "formats": [in_process(_job, data_parallel[-1] // 2, name) for name in FORMATS],
    }
    json.dump(result, sys.stdout, indent=1)
    print()


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _planned(preset: str) -> dict[str, Any]:
    """Seconds to compile a published run up to its memory plan, to find the peak of every class,
    and to place all buffers of the first one; and peak memory."""
    from stagec.analysis.footprint import footprint, timelines
    from stagec.jobs.builder import JobBuilder
    from stagec.jobs.request.options import JobOptions
    from stagec.memory.arena import placed

    times = [time.perf_counter()]
    builder = JobBuilder(JobOptions("", preset=preset))
    module = builder.lower("plan-memory")
    times.append(time.perf_counter())
    planned = footprint(module, builder.model_name)
    times.append(time.perf_counter())
    _, _, first = next(timelines(module))
    fit = placed(first, "best-fit")
    times.append(time.perf_counter())
    seconds = [round(b - a, 2) for a, b in itertools.pairwise(times)]
    return {
        "ranks": math.prod(planned["mesh"].values()),
        "classes": len(planned["classes"]),
        "seconds": dict(zip(("plan", "worst moments", "placement"), seconds, strict=True)),
        "buffers placed": len(fit.places),
        "reserved over bound": round(fit.reserved / fit.bound, 4),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def _searched(name: str) -> dict[str, Any]:
    """A search by one process, as a command: seconds, CPU seconds, peak memory, and the counts of
    the search."""
    line = [*SEARCHED[name], "--machine", "h100-sxm", "--jobs", "1", "--no-cache", "--json"]
    began = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-m", "stagec", "search", *line], capture_output=True, check=True
    )
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = json.loads(ran.stdout)
    return {
        **{key: answer[key] for key in ("points", "legal", "evaluated")},
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "bounds_per_second": round(answer["legal"] / max(1e-9, answer["bound_seconds"])),
        "peak_mb": used.ru_maxrss // 1024,
    }


def _timed(name: str) -> dict[str, Any]:
    """CPU-seconds of the first evaluation of the time of a step, with its compile and without
    imports; milliseconds of one in other sizes, once its structure is compiled; peak memory."""
    from stagec.api import time_step

    model, flags = TIMED[name]
    batch = flags.get("dp", 1) * flags.get("microbatches", 1)
    length = 4096

    def once() -> float:
        sizes = {} if "preset" in flags else {"B": batch, "S": length}
        began = time.process_time()
        time_step(model, "h100-sxm", **flags, sizes=sizes)
        return time.process_time() - began

    time_step("llama3-8b", "h100-sxm", tp=2, sizes={"L": 2})  # imports and the grammar
    first = once()
    later: list[float] = []
    for _ in range(2 if "preset" in flags else 12):
        length += 128
        later.append(once())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    warm = round(1e3 * statistics.median(later), 1)
    return {
        "first_seconds": round(first, 2),
        "warm_milliseconds": warm,
        "evaluations_per_second": round(1e3 / warm),
        "peak_mb": peak,
    }


def pipeline() -> dict[str, Any]:
    """A GPT of a trillion parameters on 3,072 ranks in 64 stages: seconds up to the lowered program
    with 32 and with 512 microbatches, their ratio, and peak memory."""
    runs = {count: in_process(_staged, count) for count in (32, 512)}
    runs_by_name: dict[str, Any] = {f"microbatches={n}": run for n, run in runs.items()}
    runs_by_name["ratio"] = round(runs[512]["seconds"] / runs[32]["seconds"], 3)
    return runs_by_name


def _staged(microbatches: int) -> dict[str, Any]:
    from stagec.jobs.builder import JobBuilder
    from stagec.jobs.request.options import JobOptions

    began = time.perf_counter()
    options = JobOptions(
        "gpt-1008b",
        pp=64,
        dp=6,
        tp=8,
        sp=True,
        recompute="selective",
        microbatches=microbatches,
        sizes={"B": 3072},
    )
    JobBuilder(options).lower()
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": round(seconds, 3), "peak_mb": peak // 1024}


def layers(repeat: int) -> dict[str, Any]:
    """Seconds up to lowering of llama3-70b with 2 and with 80 layers, and their ratio."""
    seconds = {
        count: statistics.median(in_process(_lower_seconds, count) for _ in range(repeat))
        for count in (2, 80)
    }
    return {
        "seconds": {f"L={n}": round(s, 4) for n, s in seconds.items()},
        "ratio": round(seconds[80] / seconds[2], 3),
    }


def _lower_seconds(count: int) -> float:
    from stagec.jobs.builder import JobBuilder
    from stagec.jobs.request.options import JobOptions

    def once() -> float:
        began = time.perf_counter()
        options = JobOptions("llama3-70b", sizes={"L": count}, tp=8, dp=8, **STRATEGY)
        JobBuilder(options).lower()
        return time.perf_counter() - began

    once()  # imports and the grammar
    return once()


def _passes() -> dict[str, float]:
    """Seconds of each pass for llama3-70b on 64 ranks."""
    from io import StringIO

    from stagec.jobs.builder import TRAIN, JobBuilder
    from stagec.jobs.request.options import JobOptions
    from stagec.pipeline.instrument import Timing
    from stagec.pipeline.manager import PassManager

    builder = JobBuilder(JobOptions("llama3-70b", tp=8, dp=8, **STRATEGY))
    timing = Timing(StringIO())
    pipeline = builder.loaded.pipeline(TRAIN)
    PassManager(pipeline, [timing], known=builder.loaded.passes.values()).run(builder.module)
    by_pass: dict[str, float] = {}
    for name, seconds in timing.seconds:
        by_pass[name] = round(by_pass.get(name, 0.0) + seconds, 4)
    return by_pass


def _many(count: int) -> dict[str, Any]:
    """CPU milliseconds per configuration of llama3-8b on 64 ranks at many lengths: compiled
    separately, sharing compiles (`Compiles`), and as a row of a sweep; and the number of
    compiles."""
    from stagec.analysis.family import Compiles
    from stagec.jobs.builder import JobBuilder
    from stagec.jobs.figures import CompiledJob, compiled_of
    from stagec.jobs.request.options import JobOptions

    job = JobOptions("llama3-8b", tp=8, dp=8, **STRATEGY)
    jobs = [job.changed(sizes={"S": 1024 + 128 * i}) for i in range(count)]
    env = dict(JobBuilder(job).module.env)
    family = Compiles()

    def at(i: int) -> object:
        values = {**env, "S": 1024 + 128 * i}
        return family.find(values, lambda: compiled_of(JobBuilder(jobs[i]))).at(values)

    runs: dict[str, Callable[[int], object]] = {
        "compiled": lambda i: JobBuilder(jobs[i]).lower(verify=False),
        "family": at,
        "row": lambda i: CompiledJob.of(jobs[i]).figures(),
    }
    figures: dict[str, Any] = {}
    for name, run in runs.items():
        run(0)
        began = time.process_time()
        for i in range(1, count):
            run(i)
        figures[name] = round(1e3 * (time.process_time() - began) / (count - 1), 2)
    figures["compiled over family"] = round(figures["compiled"] / figures["family"], 1)
    return {**figures, "compiles of the family": len(family)}


def _job(dp: int, format_: str = "chakra") -> dict[str, Any]:
    """Compile and write llama3-70b for 8 x dp ranks, and write the same bytes plainly."""
    from stagec.formats.registry import parse_formats
    from stagec.jobs.builder import JobBuilder
    from stagec.jobs.request.options import JobOptions
    from stagec.machines import load_machine
    from stagec.time.costs.durations import Durations
    from stagec.traces.emit import make_job
    from stagec.traces.writer import write_source

    folder = Path(tempfile.mkdtemp(prefix="stagec-bench-"))
    (format_to,) = parse_formats(format_)
    try:
        began = time.perf_counter()
        builder = JobBuilder(JobOptions("llama3-70b", tp=8, dp=dp, **STRATEGY))
        module = builder.lower()
        lowered = time.perf_counter()
        seconds = Durations(load_machine("h100-sxm")) if format_to.needs else None
        how: dict[str, Any] = {"durations": seconds, "format_": format_to}
        if seconds is not None:
            how["machine"] = seconds.machine
        written = write_source(make_job(module, "job", **how), folder / "job", {})
        done = time.perf_counter()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        plain = _plain_write(folder, list(written.files.values()))
        return {
            "model": "llama3-70b",
            "format": format_,
            "ranks": 8 * dp,
            "bytes": written.bytes,
            "seconds_to_lowered": round(lowered - began, 3),
            "seconds_writing": round(done - lowered, 3),
            "seconds_plain_write": round(plain, 3),
            "writing_over_plain": round((done - lowered) / plain, 2),
            "peak_mb": round(peak / 1024, 1),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _as_format(name: str) -> dict[str, Any]:
    """512 ranks in a format."""
    return _job(64, name)


def _plain_write(folder: Path, sizes: list[int]) -> float:
    """Seconds to only write files of the same sizes, one after the other."""
    target = folder / "plain"
    block = memoryview(bytes(range(256)) * (min(max(sizes), _BLOCK) // 256 + 1))
    began = time.perf_counter()
    target.mkdir()
    for number, size in enumerate(sizes):
        with (target / str(number)).open("wb") as file:
            for start in range(0, size, len(block)):
                file.write(block[: size - start])
    return time.perf_counter() - began


#: The measurements with a function that is called for each of some names.
ONE_EACH: dict[str, tuple[Callable[[str], Any], Iterable[str]]] = {
    "formats": (_as_format, FORMATS),
    "memory": (_planned, PLANNED),
    "search": (_searched, SEARCHED),
    "time": (_timed, TIMED),
}

if __name__ == "__main__":
    main()
