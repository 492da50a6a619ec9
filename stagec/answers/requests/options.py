"""The options of a server over time, and the requests that they describe."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from stagec.answers.requests.fleet_options import FLEET_OPTIONS
from stagec.ir_spec.strategy.scheduler import BUDGET
from stagec.jobs.admission import page_of, prefix_block
from stagec.jobs.request.limit import SizeType
from stagec.jobs.request.option import (
    AnyText,
    CommandOption,
    File,
    Kind,
    Number,
    OneOf,
    TimeType,
    Whole,
    rare_option,
)
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.steps import BLOCK, SEQUENCES, Blocks
from stagec.serving.arrivals import Conversations, renewal, with_adapters
from stagec.serving.requests import MAX_REQUESTS, Request, read_requests
from stagec.serving.requests import SECOND as NANOSECONDS
from stagec.serving.rollouts import Rollouts
from stagec.serving.routing import ROUTERS
from stagec.serving.step_times import SECOND
from stagec.support.diagnostics import error

#: The most batches of rollouts.
MOST_ITERATIONS = 1000
#: The default number of random requests.
_COUNT = 1000
#: The options for the source of requests, of which one is given.
_SOURCES = ("requests", "rate", "concurrency", "batch_of")
#: The options for the numbers of pods.
_PODS = ("replicas", "prefill_replicas")
#: The places that hold keys and values of prompts.
DEVICE = "device"
TIERS = HOST, DISK = "host", "disk"
#: The ways in which blocks from lower tiers are loaded.
BLOCKING = "block"
LOADS = ("overlap", BLOCKING)
#: Options that have no effect without another one: that one, its topic, and a remedy.
_ABOUT = {
    "until": ("batch_of", "a rollout", "--batch-of N"),
    "iterations": ("batch_of", "rollouts", "--batch-of N"),
    "train_time": ("iterations", "batches that follow each other", "--iterations 8"),
    "update_time": ("iterations", "batches that follow each other", "--iterations 8"),
    "train_ranks": ("iterations", "batches that follow each other", "--iterations 8"),
    "ahead": ("iterations", "batches that follow each other", "--iterations 8"),
    "burst": ("rate", "arrivals at random", "--rate R"),
    "pause": ("turns", "the turns of a conversation", "--turns 4"),
    "repair": ("mtbf", "failures at random", "--mtbf 24h"),
    "disk_cache": ("disk_bandwidth", "the speed of the disk", "--disk-bandwidth 6.8"),
    "disk_bandwidth": ("disk_cache", "a disk", "--disk-cache 1TiB"),
    "scale_window": ("autoscale", "--autoscale", "--autoscale 1..4"),
    "scale_delay": ("autoscale", "--autoscale", "--autoscale 1..4"),
}


class StepGrid(Kind[int]):
    """Points in each doubling of a grid, or `exact`: 0."""

    name = "N|exact"
    annotated = "int | str"

    def read(self, text: str) -> int:
        """The points."""
        return 0 if text == "exact" else Whole(1, 64).read(text)

    def text(self, value: int) -> str:
        return str(value) if value else "exact"


OVER_TIME = (
    CommandOption(
        "requests",
        File(),
        "Requests over time: a CSV or JSONL file of arrivals, prompts and outputs, in the forms "
        "of Azure, Mooncake, Splitwise, Vidur or LLMServingSim.",
        metavar="FILE",
    ),
    CommandOption(
        "rate", Number(0, above=True), "Requests per second, with random arrivals.", metavar="R"
    ),
    rare_option(
        "burst",
        Number(0, 1e6, above=True),
        "With --rate: the shape of the gamma distribution of gaps; 1 is a Poisson process "
        "(default), less has bursts.",
        1.0,
        metavar="SHAPE",
    ),
    CommandOption(
        "concurrency",
        Whole(1, MAX_REQUESTS),
        "Concurrent requests: when one ends, another one starts, as in benchmarks.",
        metavar="C",
    ),
    CommandOption(
        "batch_of",
        Whole(1, MAX_REQUESTS),
        "A rollout: this number of requests arrives at the start, and no others.",
    ),
    rare_option(
        "until",
        Number(0, 1, above=True),
        "With --batch-of: stop when this share of the requests is done; the others keep their "
        "tokens.",
        metavar="SHARE",
    ),
    rare_option(
        "iterations",
        Whole(2, MOST_ITERATIONS),
        "With --batch-of: N rollouts, with an update of the weights between them; each begins "
        "with those that the one before left.",
    ),
    rare_option(
        "train_time",
        TimeType(),
        "With --iterations: the time in which a batch is trained, as of 'stagec time' (default: "
        "none).",
    ),
    rare_option(
        "update_time",
        TimeType(),
        "With --iterations: the time in which servers get new weights (default: those of a rank "
        "over the network between pods).",
    ),
    rare_option(
        "train_ranks",
        Whole(1),
        "With --iterations: ranks of the trainer, which share the work of sending each rank of the "
        "servers its new weights (default: only what a rank receives takes time).",
        metavar="N",
    ),
    rare_option(
        "ahead",
        Whole(0, MOST_ITERATIONS),
        "With --iterations: how many batches servers may be ahead of the trainer; 0: they wait for "
        "it (default).",
        0,
    ),
    CommandOption(
        "lengths",
        AnyText(),
        "Tokens of requests: prompt=lognormal:1024:0.8,output=~200 (also 512 or 64..256), or a "
        "file of requests to draw from (default: --prompt and --output-tokens).",
        "",
        metavar="TEXT|FILE",
    ),
    rare_option(
        "turns",
        AnyText(),
        "Turns of each random conversation: 4, 2..8 or ~5. Each prompt contains all turns before "
        "it, which a prefix cache may hold.",
        metavar="N",
    ),
    rare_option(
        "pause",
        TimeType(),
        "With --turns: the time from an answer to the next turn, for a person or a tool "
        "(default: none).",
    ),
    CommandOption(
        "count",
        Whole(1, MAX_REQUESTS),
        f"Number of random requests (default: {_COUNT:,}), or of requests to read from the file.",
    ),
    rare_option(
        "adapters",
        Whole(1, MAX_REQUESTS),
        "With --lora: adapters that requests name at random; those beyond --max-loras are loaded "
        "from the host.",
    ),
    rare_option(
        "warmup",
        Whole(0, MAX_REQUESTS),
        "Leave the first N requests out of times and limits; they are served (default: 0).",
        0,
        metavar="N",
    ),
    rare_option("seed", Whole(0), "Seed of random numbers (default: 0).", 0),
    CommandOption(
        "route",
        OneOf(tuple(ROUTERS)),
        "Which replica gets a request (default: least-loaded).",
        "least-loaded",
    ),
    rare_option(
        "max_batch",
        Whole(1),
        f"The most sequences that a group of ranks runs at once (default: {SEQUENCES}).",
        SEQUENCES,
    ),
    rare_option(
        "max_tokens",
        Whole(1),
        "The most tokens of a step of a group, with chunks of prompts (default: --step-tokens, "
        f"{BUDGET:,} or that of a --stack).",
    ),
    rare_option(
        "cache_blocks",
        Blocks(),
        f"Blocks of {BLOCK} tokens, or of a --page, that the cache of a group has, or all that "
        "are needed (default: as many as the machine has room for).",
        metavar="N|all",
    ),
    rare_option(
        "preempt",
        OneOf(("recompute", "swap")),
        "When no block is free, recompute the newest sequence (default), or swap its cache to "
        "the host and back.",
        "recompute",
    ),
    rare_option(
        "host_cache",
        SizeType(),
        "Memory of the host for each rank, to which the prefix cache of a device moves blocks that "
        "it has no room for.",
    ),
    rare_option(
        "disk_cache",
        SizeType(),
        "Room on a disk for each rank, for blocks that --host-cache has no room for.",
    ),
    rare_option(
        "disk_bandwidth",
        Number(0, above=True),
        "With --disk-cache: GB/s at which a rank reads it, such as 6.8 of an NVMe drive.",
        metavar="GB/S",
    ),
    rare_option(
        "cache_loads",
        OneOf(LOADS),
        "A request waits for blocks from the host or a disk while others go on (overlap), or the "
        "step that begins it waits (block).",
        LOADS[0],
    ),
    *FLEET_OPTIONS,
    rare_option(
        "step_grid",
        StepGrid(),
        "Points per doubling of the grid between whose steps seconds are interpolated (default: "
        "2), or exact: evaluate every step.",
        2,
        metavar="N|exact",
    ),
)


def is_over_time(given: Mapping[str, Any], *, whole: bool = False) -> bool:
    """Whether requests over time are given. Raises `DiagnosticError` for options that need them;
    numbers of pods do not if `whole` is set."""
    sources = [name for name in _SOURCES if given[name] is not None]
    if len(sources) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in sources[:2])
        raise error(
            f"{first} and {second} cannot be used together: both say when requests arrive",
            remedy="give one of them",
        )
    shared = {"disk_bandwidth"} if given["context_from"] != DEVICE else set[str]()
    shared |= {*_PODS} if whole else set()
    for option in () if sources else (o for o in OVER_TIME if o.name not in shared):
        if given[option.name] != option.usual:
            words = option.words[0]
            raise error(
                f"{words} needs requests over time",
                remedy="say when requests arrive: --rate 4, --concurrency 64, --batch-of 512 or "
                "--requests FILE",
            )
    if sources and given["context_from"] != DEVICE:
        raise error(
            "--context-from cannot be used with requests over time",
            remedy="give --host-cache 64GiB, to which prefixes move that a device has no room for",
        )
    if sources and given["batches"] is not None:
        raise error(
            "--batches cannot be used with requests over time, whose batches follow from the "
            "arrivals",
            remedy="leave it out; --max-batch limits the sequences of a step",
        )
    for option in OVER_TIME if sources else ():
        of = _ABOUT.get(option.name)
        if of is not None and given[option.name] != option.usual and not given[of[0]]:
            raise error(f"{option.words[0]} needs {of[1]}", remedy=f"give {of[2]}")
    return bool(sources)


def given_requests(options: JobOptions, given: Mapping[str, Any]) -> list[Request]:
    """The requests that the options describe. Raises `DiagnosticError`, `OSError`."""
    file: Path | None = given["requests"]
    rollouts = rollouts_of(given)
    count = given["count"] if rollouts is None else rollouts.requests
    if file is not None:
        if given["lengths"]:
            raise error(
                "--requests and --lengths cannot be used together: both give the tokens of "
                "requests",
                remedy="give one",
            )
        if given["turns"] is not None:
            raise error(
                "--turns cannot be used with --requests: the file has all requests",
                remedy="leave it out",
            )
        if given["adapters"] is not None:
            raise error(
                "--adapters cannot be used with --requests: the file has all requests",
                remedy="give the file a column 'adapter'",
            )
        return read_requests(file)[:count]
    drawn = given["rate"] or 0.0, given["burst"], count or _COUNT, given["lengths"], given["seed"]
    several = None
    if given["turns"] is not None:
        pause = round((given["pause"] or 0.0) * NANOSECONDS)
        several = Conversations(given["turns"], pause, page_of(options))
    requests = renewal(*drawn, options.prompt, given["output_tokens"], several)
    if given["adapters"] is None:
        return requests
    return with_adapters(requests, given["adapters"], given["seed"])


def rollouts_of(given: Mapping[str, Any], update: int = 0) -> Rollouts | None:
    """The batches of rollouts, if there are any, whose weights take `update` femtoseconds. Raises
    `DiagnosticError`."""
    if given["batch_of"] is None:
        return None
    count, times = given["batch_of"], given["iterations"] or 1
    quota = count if given["until"] is None else ceil(given["until"] * count)
    train = round((given["train_time"] or 0.0) * SECOND)
    rollouts = Rollouts(count, quota, times, given["ahead"], train, update)
    if rollouts.requests > MAX_REQUESTS:
        raise error(
            f"{times} batches have {rollouts.requests:,} requests, at most {MAX_REQUESTS:,} are "
            "supported",
            remedy="give fewer --iterations",
        )
    return rollouts


def prefix_block_of(
    options: JobOptions, given: Mapping[str, Any], requests: Sequence[Request]
) -> int:
    """The tokens of a block of the prefix cache; 0 if no request states its prefix. Raises
    `DiagnosticError`."""
    if given["turns"] is not None:
        return page_of(options)
    return prefix_block(options, requests)
