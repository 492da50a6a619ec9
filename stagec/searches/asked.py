"""The options of a search."""

from __future__ import annotations

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
from stagec.jobs.request.option import AnyText, CommandOption, OneOf, Whole, switch
from stagec.jobs.request.options import SIZES, STACK
from stagec.searches.question import Machines, Pareto, Prices
from stagec.searches.server.launch import EngineRunType
from stagec.searches.server.question import VERIFIED
from stagec.searches.serving import SERVING
from stagec.searches.space import BATCHES, KNOBS, RANKS, Values, knob_option

#: What a search is asked, beside its model.
SEARCH = (
    SIZES,
    STACK,
    CommandOption(
        "batch",
        Values(BATCHES),
        "The global batch in sequences, as --set B=N; several (512..2048 doubles): which is "
        "best by the time of a sequence.",
        metavar="N|A..B",
    ),
    CommandOption(
        "ranks",
        Values(RANKS),
        "All ranks; several (256..4096 doubles): the best for each. With --part or --draft those "
        "of the main pod: the ranks of the others come on top.",
        metavar="N|A..B",
    ),
    CommandOption(
        "machine",
        Machines(),
        "The machine that the job runs on: a name that 'stagec machines' lists, or a file; "
        "several: which is best.",
    ),
    USED_RANKS,
    CommandOption("space", AnyText(), "What varies, as a text with a stg.space.", metavar="FILE"),
    CommandOption(
        "seed_from",
        AnyText("presets"),
        "Start from a published run: its model and sizes, and degrees next to its own.",
        metavar="PRESET",
    ),
    replace(
        option(FLAGS["part"]),
        help="A part of the model with a mesh and a strategy of its own, which do not vary, on "
        "further ranks beside --ranks: 'encoder=e: tp=2,dp=2'. May be given several times.",
    ),
    *(knob_option(flag) for flag in KNOBS.values()),
    limit_option(
        "What a rank may hold (default: the device, less what is not for the job).", at_hand=True
    ),
    CommandOption("top", Whole(1, 1000), "How many to show.", 5),
    CommandOption(
        "objective",
        OneOf(["time", "tokens-per-rank", "cost", "memory", "goodput"]),
        "What is best: the shortest step (default), most tokens/s per rank, fewest "
        "rank-seconds, or the smallest peak of memory; of --serve server goodput (default), most "
        "tokens/s per rank within the limits, or cost, the cheapest tokens within them.",
    ),
    CommandOption(
        "price",
        Prices(),
        "Cost per rank and hour, in any currency; for several machines one for each.",
    ),
    CommandOption(
        "pareto", Pareto(), "Instead of the best: all that no other beats in these respects."
    ),
    switch("exhaustive", "Evaluate every legal point: no bounds."),
    switch("neighbours", "Evaluate all that differ from the best in one flag."),
    switch(
        "levers",
        "Whether to try other values of flags that keep the numerics, and are not in the space, on "
        "the best: often half of the time of a search.",
        default=True,
    ),
    switch(
        "sensitivity",
        "Show which figure of the machine, halved or doubled, changes which of them is best.",
    ),
    switch(
        "overlap",
        "Whether collectives run beside computations, or all of them are blocking.",
        default=True,
    ),
    switch("cache", "Whether to keep answers and to use kept ones.", default=True),
    *SERVING,
    CommandOption(
        "emit_run",
        EngineRunType(),
        "Of server: the files that start the best server with an engine, vllm, sglang or trtllm: "
        "printed, or written into a folder. Only what the engine has flags for is searched.",
    ),
    CommandOption(
        "verify",
        Whole(0, 100),
        "Of server: how many of the best run in a closed loop over time, with as many requests as "
        f"they have sequences (default: {VERIFIED}).",
        VERIFIED,
        metavar="N",
    ),
    replace(
        DRAFT_OPTION,
        help="Of decode: the model that makes the --speculative drafts, on further ranks beside "
        "--ranks; its flags do not vary: 'llama3-8b: tp=2'.",
    ),
    *WORKERS,
)


def search_command(given: Mapping[str, Any]) -> str:
    """The command of a search; what does not change its answer, such as workers, is left out."""
    asked = [option for option in SEARCH if option not in WORKERS and option.name != "cache"]
    model = [given["model"]] if given["model"] else []
    return shlex.join(["stagec", "search", *model, *asked_words(asked, given)])
