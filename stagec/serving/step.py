"""A step of a server: classes of equal sequences, and their text.

A class is `count` sequences that add `new` tokens each after `cached` ones. The last `sampled` of
the new tokens get logits. The text names four kinds:

    decode=64x4096        64 sequences add one token each after 4096, and sample
    prefill=1x2048+512    one sequence adds the last 2048 tokens of its prompt, after 512; samples
    chunk=2x512+1024      two sequences add 512 tokens each after 1024, and sample nothing yet
    verify=8x3+4096       8 sequences add three tokens each after 4096, and all three are sampled
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from stagec.support.diagnostics import error

#: The most classes that one step may have: each is an op of its own in every layer.
MAX_CLASSES = 1024
#: The largest number in a class.
MAX_TOKENS = 1 << 40

_EXAMPLE = "write classes as decode=64x4096,prefill=1x2048+0"
_CLASS = re.compile(r"(?P<kind>[a-z]+)=(?P<count>[0-9]+)x(?P<first>[0-9]+)(\+(?P<cached>[0-9]+))?")


@dataclass(frozen=True, slots=True, order=True)
class SequenceClass:
    """`count` equal sequences of a step: the tokens that each adds, has cached before, and
    samples."""

    new: int
    cached: int
    sampled: int
    count: int = 1

    @property
    def kind(self) -> str:
        """The word for it in the text of a step."""
        if self.new == self.sampled:
            return "decode" if self.new == 1 else "verify"
        return "prefill" if self.sampled else "chunk"

    @property
    def tokens(self) -> int:
        """The tokens that it adds to the step."""
        return self.count * self.new

    def __str__(self) -> str:
        if self.kind == "decode":
            return f"decode={self.count}x{self.cached}"
        return f"{self.kind}={self.count}x{self.new}+{self.cached}"


@dataclass(frozen=True, slots=True)
class Step:
    """A step: its classes, each once, in order of tokens added and cached."""

    classes: tuple[SequenceClass, ...]

    @property
    def tokens(self) -> int:
        """The number of new tokens, over which products, norms and collectives run."""
        return sum(c.tokens for c in self.classes)

    @property
    def sampled(self) -> int:
        """The number of tokens that get logits."""
        return sum(c.count * c.sampled for c in self.classes)

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return sum(c.count for c in self.classes)

    @property
    def pairs(self) -> int:
        """The number of pairs of a query and a key in its causal mask without a window:
        n*(q*c + q*(q + 1)/2), summed over classes of n sequences with q new and c cached tokens."""
        return sum(c.count * (c.new * c.cached + c.new * (c.new + 1) // 2) for c in self.classes)

    @property
    def structure(self) -> tuple[tuple[int, bool, bool], ...]:
        """What distinguishes the modules of two steps, apart from sizes. For each class: its new
        tokens if all are sampled (latents are absorbed for so few of them), else 0; whether some
        are sampled; whether some are cached."""
        return tuple(
            (c.new if c.sampled == c.new else 0, bool(c.sampled), bool(c.cached))
            for c in self.classes
        )

    def values(self, sequence: str) -> dict[str, int]:
        """The values of the symbols of `stagec.passes.serving.mixed`; `sequence` is the symbol of
        the number of new tokens."""
        values = {sequence: self.tokens}
        for i, each in enumerate(self.classes):
            values |= {f"count{i}": each.count, f"new{i}": each.new, f"past{i}": each.cached}
        return values

    def later(self, steps: int) -> Step:
        """The step `steps` steps later, if each step adds the same tokens to the same sequences. A
        prompt that ends is followed by one like it."""
        if not steps:
            return self
        grown = (c.kind != "prefill" for c in self.classes)
        return step_of(
            replace(c, cached=c.cached + steps * c.new * more)
            for c, more in zip(self.classes, grown, strict=True)
        )

    def rounded(self, bucket: int) -> Step:
        """The step with all cached tokens rounded up to a multiple of `bucket`: an approximation
        that makes more steps equal, and merges classes."""
        if bucket == 1:
            return self
        return step_of(replace(c, cached=-(-c.cached // bucket) * bucket) for c in self.classes)

    def together(self, *, prompts: bool = True) -> Step:
        """An approximation of the step with one kernel over many sequences. Sequences that sample
        all of their new tokens become one class for each number of them, with the mean of their
        cached tokens, rounded up. With `prompts` all other sequences become one class
        (`mean_class`); without, they stay as they are."""
        classes: dict[int, list[SequenceClass]] = {}
        for each in self.classes:
            classes.setdefault(each.new if each.new == each.sampled else 0, []).append(each)
        chunked = classes.pop(0, [])
        every = [
            SequenceClass(new, -(-sum(c.count * c.cached for c in same) // count), new, count)
            for new, same in classes.items()
            if (count := sum(c.count for c in same))
        ]
        if chunked and prompts:
            chunks = [(c.new, c.cached) for c in chunked for _ in range(c.count)]
            every.append(mean_class(chunks, max(c.sampled for c in chunked)))
        return step_of([*every, *([] if prompts else chunked)])

    def __str__(self) -> str:
        return ",".join(map(str, self.classes))


def mean_chunk(chunks: Sequence[tuple[int, int]]) -> tuple[int, float, float]:
    """The number, the new and the cached tokens of equal chunks that stand for chunks of prompts,
    given by new and cached tokens: with the same sums of tokens and of pairs of a query and a key,
    and as many of them as bring the sum of cached tokens, which attention reads, nearest.

    Chunks with T new and R cached tokens and A = sum of new (cached + new/2) are k equal ones with
    k = T (R + T/2) / A, at least 1, if that is whole.
    """
    tokens, rows, area = 0, 0, 0.0
    for new, past in chunks:
        tokens, rows, area = tokens + new, rows + past, area + new * (past + new / 2)
    number = round(tokens * (rows + tokens / 2) / area)
    cached = area / tokens - tokens / number / 2
    if cached < 0:  # too few: pairs would be too many
        number += 1
        cached = max(0.0, area / tokens - tokens / number / 2)
    return number, tokens / number, cached


def mean_class(chunks: Sequence[tuple[int, int]], sampled: int = 1) -> SequenceClass:
    """The chunks of `mean_chunk` as a class: engines launch one kernel over chunks of all sizes,
    such as `flash_attn_varlen_func`."""
    number, mean, past = mean_chunk(chunks)
    size = max(1, round(mean))
    return SequenceClass(size, round(past), min(sampled, size), number)


def step_of(classes: Iterable[SequenceClass]) -> Step:
    """The step of these classes; classes that differ in their count only are merged."""
    counts: Counter[tuple[int, int, int]] = Counter()
    for each in classes:
        counts[each.new, each.cached, each.sampled] += each.count
    return Step(tuple(SequenceClass(*key, n) for key, n in sorted(counts.items())))


def padded(steps: Sequence[Step]) -> Step:
    """The step of groups of ranks that wait for each other: with the sequences of each group sorted
    by tokens, the largest first, the n-th sequence adds, has cached and samples as many tokens as
    the largest n-th one of all groups. The difference to a group's own step is padding."""
    if len(set(steps)) == 1:
        return steps[0]
    ordered = ([c for c in reversed(s.classes) for _ in range(c.count)] for s in steps)
    rows = (list(filter(None, row)) for row in zip_longest(*ordered))
    return step_of(
        SequenceClass(*(max(getattr(c, n) for c in row) for n in ("new", "cached", "sampled")))
        for row in rows
    )


def parse_step(text: str) -> Step:
    """Parse the text of a step. Raises `DiagnosticError`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise error("the step has no sequences", remedy=_EXAMPLE)
    if len(parts) > MAX_CLASSES:
        raise error(
            f"the step has {len(parts):,} classes of sequences, expected at most {MAX_CLASSES:,}",
            remedy="round contexts up, so that more sequences are equal",
        )
    return step_of(map(_parse_class, parts))


def _parse_class(text: str) -> SequenceClass:
    match = _CLASS.fullmatch(text)
    if match is None or match["kind"] not in ("decode", "prefill", "chunk", "verify"):
        raise error(
            f"'{text:.60}' is not a class of sequences", remedy=f"{_EXAMPLE}; or chunk=, verify="
        )
    kind = match["kind"]
    if (match["cached"] is None) != (kind == "decode"):
        expected = "decode=COUNTxCONTEXT" if kind == "decode" else f"{kind}=COUNTxNEW+CACHED"
        raise error(
            f"'{text:.60}' is not a class of sequences: expected {expected}", remedy=_EXAMPLE
        )
    numbers = [_number(text, match[name] or "0") for name in ("count", "first", "cached")]
    count, first, cached = numbers
    new, cached = (1, first) if kind == "decode" else (first, cached)
    if not count or not new:
        what = "sequences" if not count else "new tokens"
        raise error(f"'{text:.60}' has no {what}", remedy="drop it, or give at least 1")
    sampled = {"chunk": 0, "verify": new}.get(kind, 1)
    return SequenceClass(new, cached, sampled, count)


def _number(text: str, digits: str) -> int:
    if len(digits) > len(str(MAX_TOKENS)) or int(digits) > MAX_TOKENS:
        raise error(
            f"'{text:.60}' has a number above {MAX_TOKENS:,}", remedy="give a smaller number"
        )
    return int(digits)
