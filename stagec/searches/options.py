"""The options of `stagec search`."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stagec.jobs.request.command_line import asked_words
from stagec.jobs.request.draft import DRAFT_OPTION
from stagec.jobs.request.emission import WORKERS
from stagec.jobs.request.flags import FLAGS, option
from stagec.jobs.request.limit import limit_option
from stagec.jobs.request.machine import USED_RANKS
from stagec.jobs.request.measurements import MEASURED
from stagec.jobs.request.option import AnyText, CommandOption, OneOf, Whole, switch
from stagec.jobs.request.options import SIZES, STACK
from stagec.searches.question import Machines, Pareto, Prices
from stagec.searches.server.launch import EngineRunType
from stagec.searches.server.question import VERIFIED
from stagec.searches.serving_space import SERVING
from stagec.searches.space import BATCHES, KNOBS, RANKS, Values, knob_option

#: The options of a search, except for its model.
SEARCH = (
    SIZES,
    STACK,
    CommandOption(
        "batch",
        Values(BATCHES),
        "The global batch in sequences, as --set B=N; with several (512..2048 doubles), which is "
        "best by the time of a sequence.",
        metavar="N|A..B",
    ),
    CommandOption(
        "ranks",
        Values(RANKS),
        "Total number of ranks; with several (256..4096 doubles), the best for each. With --part "
        "or --draft, ranks of the main pod: other pods add theirs.",
        metavar="N|A..B",
    ),
    CommandOption(
        "machine",
        Machines(),
        "The machine: a name that 'stagec machines' lists, or a file; with several, which is best.",
    ),
    USED_RANKS,
    CommandOption(
        "space", AnyText(), "The space to search, as a text with a stg.space.", metavar="FILE"
    ),
    CommandOption(
        "seed_from",
        AnyText("presets"),
        "Start from a published run: its model and sizes, and degrees near its own.",
        metavar="PRESET",
    ),
    replace(
        option(FLAGS["part"]),
        help="Give a part of the model its own mesh and strategy, which do not vary, on "
        "ranks in addition to --ranks: 'encoder=e: tp=2,dp=2'. May be given several "
        "times. With --serve server: also try workers whose feed-forward has some of the ranks, "
        "'experts=feed-forward'.",
    ),
    *(knob_option(flag) for flag in KNOBS.values()),
    limit_option(
        "The memory limit of a rank (default: that of the device, less what is reserved).",
        at_hand=True,
    ),
    CommandOption("top", Whole(1, 1000), "How many strategies to show.", 5),
    CommandOption(
        "objective",
        OneOf(["time", "tokens-per-rank", "cost", "memory", "goodput"]),
        "What to optimize: the shortest step (default), most tokens/s per rank, fewest "
        "rank-seconds, or the smallest peak of memory. With --serve server: goodput (default), "
        "the most tokens/s per rank within the limits, or cost, the cheapest tokens within them.",
    ),
    CommandOption(
        "price",
        Prices(),
        "Cost per rank and hour, in any currency; with several machines one for each.",
    ),
    CommandOption(
        "pareto", Pareto(), "Show all strategies that no other one beats in these respects."
    ),
    switch("exhaustive", "Evaluate every legal point, without bounds."),
    switch("neighbours", "Evaluate all strategies that differ from the best in one flag."),
    switch(
        "levers",
        "Whether to try other values of flags outside the space on the best, if they keep the "
        "numerics: often half of the time of a search.",
        default=True,
    ),
    switch(
        "sensitivity",
        "Show which figures of the machine, halved or doubled, change which strategy is best.",
    ),
    switch(
        "overlap",
        "Whether collectives overlap with computations, or are all blocking.",
        default=True,
    ),
    switch("cache", "Whether to store answers and to use stored ones.", default=True),
    *SERVING,
    CommandOption(
        "emit_run",
        EngineRunType(),
        "With --serve server: print the files that start the best server with an engine (vllm, "
        "sglang or trtllm), or write them into a folder. Only what the engine has flags for is "
        "searched.",
    ),
    CommandOption(
        "verify",
        Whole(0, 100),
        "With --serve server: how many of the best to run in a closed loop, with as many requests "
        f"as they have sequences (default: {VERIFIED}).",
        VERIFIED,
        metavar="N",
    ),
    *(replace(o, help=f"With --serve server: {o.help}", rare=True) for o in MEASURED),
    replace(
        DRAFT_OPTION,
        help="With --serve decode: the model that computes the --speculative drafts, on "
        "ranks in addition to --ranks; its flags do not vary: 'llama3-8b: tp=2'.",
    ),
    *WORKERS,
)


def search_command(given: Mapping[str, Any]) -> str:
    """The command of a search, without options that do not affect its answer, such as workers."""
    asked = [option for option in SEARCH if option not in WORKERS and option.name != "cache"]
    model = [given["model"]] if given["model"] else []
    return shlex.join(["stagec", "search", *model, *asked_words(asked, given)])
