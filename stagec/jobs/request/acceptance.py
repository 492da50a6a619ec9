"""The options for the share of accepted drafts in a step of decode, which is given, since it cannot
be computed from the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from stagec.analysis.serving_rates import tokens_accepted
from stagec.jobs.request.option import CommandOption, Number, rare_option
from stagec.jobs.request.options import JobOptions
from stagec.support.diagnostics import error

#: The options of a step that verifies drafts.
ACCEPTANCE = (
    CommandOption(
        "accepted",
        Number(least=1),
        "With --speculative K: tokens per sequence and step on average, from 1 to K + 1 "
        "(default: 1, no draft accepted).",
        metavar="N",
    ),
    rare_option(
        "acceptance",
        Number(least=0, most=1),
        "Instead of --accepted: the share of accepted drafts, which gives (1 - A^(K+1)) / (1 - "
        "A) tokens (arXiv 2211.17192).",
        metavar="A",
    ),
)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The mean number of tokens that a step of decode generates for a sequence, from 1 to `most`;
    `given` says whether an option gave it."""

    tokens: float
    most: int
    given: bool

    @property
    def speculates(self) -> bool:
        """Whether a step verifies drafts."""
        return self.most > 1


def take_acceptance(options: JobOptions, given: Mapping[str, Any]) -> Acceptance:
    """The tokens that a step generates. Raises `DiagnosticError` for more tokens than a step has,
    and for options without drafts."""
    tokens: float | None = given["accepted"]
    rate: float | None = given["acceptance"]
    drafts = options.speculative or 0
    if tokens is None and rate is None:
        return Acceptance(1.0, 1 + drafts, given=False)
    name = "--acceptance" if tokens is None else "--accepted"
    if not drafts:
        raise error(
            f"{name} needs drafts, which this step of decode does not have",
            remedy="give --speculative 4",
        )
    if tokens is not None and rate is not None:
        raise error(
            "--accepted and --acceptance cannot be used together", remedy="give one of them"
        )
    count = tokens or tokens_accepted(rate or 0.0, drafts)
    if not isfinite(count):  # NaN is within any range
        raise error(f"{name} expects a number, found {given[name[2:]]}", remedy=f"give {name} 0.7")
    if count > 1 + drafts:
        raise error(
            f"--accepted {count:g} is more than the {1 + drafts} tokens of each sequence in a step",
            remedy=f"give at most {1 + drafts}",
        )
    return Acceptance(count, 1 + drafts, given=True)
