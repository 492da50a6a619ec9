"""Random requests, the same for the same seed: arrivals of a Poisson process, and lengths.

    poisson:rate=4,count=1000,prompt=512,output=64..256,seed=7
    poisson:rate=4,count=1000,lengths=trace.csv

`rate` is in requests per second, so gaps are exponential with mean 1/rate, each rounded to a
nanosecond. A length is a number, `A..B` (integers from A to B, all equally likely), `~M` (geometric
with mean M: P(n) = (1 - 1/M)^(n-1) / M), or `lognormal:M:S` (lognormal with mean M and standard
deviation S of the logarithm, rounded up). `lengths` names a file of requests: each time one of them
is drawn, prompt and output together.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from stagec.serving.requests import (
    MAX_LENGTH,
    MAX_REQUESTS,
    MAX_TIME,
    SECOND,
    Request,
    read_lengths,
    read_requests,
)
from stagec.support.diagnostics import DiagnosticError, error
from stagec.support.suggest import did_you_mean

PREFIX = "poisson:"
_EXAMPLE = "poisson:rate=4,count=100,prompt=512,output=64..256,seed=7"
_NAMES = ("rate", "count", "prompt", "output", "lengths", "seed")
_LOGNORMAL = "lognormal:"
_LONGEST = 20
#: Blocks of a conversation, at most.
_BLOCKS = 1 << 32
_MAX_RATE = 10**9

_Draw = Callable[[], int]


def requests_of(text: str) -> list[Request]:
    """The requests of a text: a file, or `poisson:...`, see above. Raises `DiagnosticError`,
    `OSError`."""
    if text.startswith(PREFIX):
        return poisson(text.removeprefix(PREFIX))
    return read_requests(Path(text))


def poisson(text: str) -> list[Request]:
    """The requests of a Poisson process. Raises `DiagnosticError`, `OSError`."""
    given = _options(text)
    rate = _rate(given)
    count = _whole(given, "count", 1, MAX_REQUESTS)
    source = random.Random(_whole(given, "seed", 0, MAX_LENGTH, default="0"))
    lengths = _lengths(given, source)
    requests: list[Request] = []
    at = 0
    for number in range(count):
        gap = -math.log(1.0 - source.random())
        at += round(Fraction(gap) * SECOND / rate)
        if at > MAX_TIME:
            raise error(f"request {number + 1} arrives after more than a century", remedy=_EXAMPLE)
        requests.append(Request(at, *lengths()))
    return requests


def with_adapters(requests: Sequence[Request], number: int, seed: int) -> list[Request]:
    """The same requests, each with one of `number` adapters, all equally likely; all turns of a
    conversation have the same one."""
    source = random.Random(f"{seed} adapters")
    return [request.with_adapter(str(1 + source.randrange(number))) for request in requests]


@dataclass(frozen=True, slots=True)
class Conversations:
    """How conversations are drawn: the number of turns (a text as for lengths), the nanoseconds
    from the end of a turn to the next one, and the tokens of a block of the prefix cache."""

    turns: str
    pause: int
    block: int


def renewal(
    rate: float,
    shape: float,
    count: int,
    lengths: str,
    seed: int,
    prompt: int | None,
    output: int,
    conversations: Conversations | None = None,
) -> list[Request]:
    """`count` requests of a renewal process whose gaps have a gamma distribution of mean 1/rate and
    this `shape`: 1 is a Poisson process, less than 1 has bursts, more is more even. With a rate of
    0 all of them arrive at once. `lengths` is `prompt=...,output=...` or a file; `prompt` and
    `output` are the tokens where it does not state them. With `conversations` each request is the
    first of several turns, and the prompt of a turn contains all turns before. Raises
    `DiagnosticError`, `OSError`."""
    source = random.Random(seed)
    draw = lengths_of(lengths, source, prompt, output)
    turns = _drawn("--turns", conversations.turns, source) if conversations else None
    requests: list[Request] = []
    at = 0
    for number in range(count):
        if rate:
            at += round(source.gammavariate(shape, 1 / (rate * shape)) * SECOND)
            if at > MAX_TIME:
                raise error(
                    f"request {number + 1} arrives after more than a century", remedy=_EXAMPLE
                )
        if conversations is None or turns is None:
            requests.append(Request(at, *draw()))
        else:
            lengths_by_turn = [draw() for _ in range(turns())]
            first = number * _BLOCKS
            requests.append(_conversation(at, lengths_by_turn, conversations, first))
    return requests


def _conversation(
    at: int, lengths: Sequence[tuple[int, int]], how: Conversations, first: int
) -> Request:
    """The first turn of a conversation with these prompts and outputs, whose blocks are numbered
    from `first` on."""
    context = sum(prompt + output for prompt, output in lengths)
    after: tuple[int, Request] | None = None
    for prompt, output in reversed(lengths):
        context -= output
        if context > MAX_LENGTH:
            raise error(
                f"a conversation has {context:,} tokens, at most {MAX_LENGTH:,} are supported",
                remedy="give fewer --turns",
            )
        blocks = range(first, first + (context + output) // how.block)
        after = how.pause, Request(at, context, output, prefix=blocks, then=after)
        context -= prompt
    return after[1] if after is not None else Request(at, 1, 1)


def lengths_of(
    text: str, source: random.Random, prompt: int | None, output: int
) -> Callable[[], tuple[int, int]]:
    """A function that draws a prompt and an output, as `prompt=100..2000,output=~200` or a file of
    requests states; without a text all have the given tokens. Raises `DiagnosticError`,
    `OSError`."""
    given: dict[str, str] = {"output": str(output)}
    if prompt is not None:
        given["prompt"] = str(prompt)
    if text and "=" not in text:
        given = {"lengths": text}
    for part in text.split(",") if "=" in text else ():
        name, _, value = (p.strip() for p in part.partition("="))
        if name not in ("prompt", "output"):
            raise error(
                f"--lengths expects prompt=... or output=..., found '{part:.60}'",
                remedy="for example prompt=lognormal:1024:0.8,output=~200, or a file of requests",
            )
        given[name] = value
    if "prompt" not in given and "lengths" not in given:
        raise error(
            "the number of tokens of a prompt is missing",
            remedy="give --prompt 2048, or prompt= in --lengths",
        )
    return _lengths(given, source, "--lengths: ")


def _options(text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = (p.strip() for p in part.partition("="))
        if not equals or name not in _NAMES or name in options:
            what = "given twice" if name in options else "not an option of poisson"
            raise error(
                f"'{part:.60}' is {what}",
                remedy=did_you_mean(name, _NAMES) or f"for example {_EXAMPLE}",
            )
        options[name] = value
    both = "lengths" in options and ("prompt" in options or "output" in options)
    if both or not ("lengths" in options or {"prompt", "output"} <= options.keys()):
        raise error("poisson expects prompt and output, or lengths=FILE", remedy=_EXAMPLE)
    return options


def _rate(given: Mapping[str, str]) -> Fraction:
    text = given.get("rate", "")
    try:
        rate = Fraction(text) if len(text) <= _LONGEST and "e" not in text.lower() else Fraction(0)
    except (ValueError, ZeroDivisionError):
        rate = Fraction(0)
    if not 0 < rate <= _MAX_RATE:
        raise _wrong("rate", text, "requests per second, more than 0")
    return rate


def _whole(given: Mapping[str, str], name: str, least: int, most: int, default: str = "") -> int:
    whole = _integer(given.get(name, default))
    if whole is None or not least <= whole <= most:
        raise _wrong(name, given.get(name, default), f"a whole number from {least} to {most:,}")
    return whole


def _integer(text: str) -> int | None:
    plain = text.isascii() and text.isdigit() and len(text) <= _LONGEST
    return int(text) if plain else None


def _lengths(
    given: Mapping[str, str], source: random.Random, where: str = "poisson: "
) -> Callable[[], tuple[int, int]]:
    """A function that draws a prompt and an output; messages of errors begin with `where`."""
    if "lengths" in given:
        known = read_lengths(Path(given["lengths"]))
        return lambda: known[source.randrange(len(known))]
    prompt, output = (_drawn(where + name, given[name], source) for name in ("prompt", "output"))
    return lambda: (prompt(), output())


def _drawn(what: str, text: str, source: random.Random) -> _Draw:
    """A function that draws integers: 512, 64..256, ~128 or lognormal:128:1.0."""
    low, dots, high = text.partition("..")
    if text.startswith(_LOGNORMAL):
        return _lognormal(what, text, source)
    mean = _integer(text.removeprefix("~")) if text.startswith("~") else None
    if mean is not None and 1 <= mean <= MAX_LENGTH:
        return lambda: _geometric(mean, source)
    ends = _integer(low), _integer(high if dots else low)
    if ends[0] is None or ends[1] is None or not 1 <= ends[0] <= ends[1] <= MAX_LENGTH:
        raise error(
            f"{what} is '{text:.40}', expected a number of 1 to {MAX_LENGTH:,}, a range or a mean",
            remedy="write 512, 64..256, ~128 or lognormal:128:1.0",
        )
    first, last = ends[0], ends[1]
    return lambda: source.randint(first, last)


def _lognormal(what: str, text: str, source: random.Random) -> _Draw:
    mean, _, spread = text.removeprefix(_LOGNORMAL).partition(":")
    try:
        mu, sigma = float(Fraction(mean)), float(Fraction(spread or "1"))
    except (ValueError, ZeroDivisionError, OverflowError):
        mu = sigma = 0.0
    if not (1 <= mu <= MAX_LENGTH and 0 < sigma <= 10):
        raise error(
            f"{what} is '{text:.40}', expected lognormal:MEAN:DEVIATION, a mean of 1 to "
            f"{MAX_LENGTH:,} and a deviation above 0, at most 10",
            remedy="for example lognormal:512:0.8",
        )
    centre = math.log(mu) - sigma * sigma / 2
    return lambda: min(MAX_LENGTH, max(1, math.ceil(source.lognormvariate(centre, sigma))))


def _geometric(mean: int, source: random.Random) -> int:
    if mean == 1:
        return 1
    drawn = math.log(1.0 - source.random()) / math.log1p(-1.0 / mean)
    return min(MAX_LENGTH, 1 + int(drawn))


def _wrong(name: str, problem: str, expected: str) -> DiagnosticError:
    return error(f"poisson: {name} is '{problem:.40}', expected {expected}", remedy=_EXAMPLE)
