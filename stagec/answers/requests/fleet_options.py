"""The options of replicas that start, stop and fail over time, and their values."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stagec.jobs.request.option import CommandOption, Kind, Number, TimeType, Whole, rare_option
from stagec.serving.fleet import SCALING_RULES, Autoscale, Failure, FleetPlan
from stagec.serving.step_times import SECOND
from stagec.support.diagnostics import error

_MOST_REPLICAS = 4096
_FAIL = re.compile(r"(?:(prefill):)?([0-9]{1,4})@([^+]{1,16})(?:\+(.{1,16}))?")
_SCALE = re.compile(
    r"(?:(prefill):)?([0-9]{1,4})\.\.([0-9]{1,4})(?::([a-z]{1,12})(?:=([0-9.]{1,12}))?)?"
)
#: The default target of autoscaling, as a share of the concurrent sequences of a replica (Knative,
#: container-concurrency-target-percentage).
_TARGET = 0.7
#: Seconds between evaluations of the load, and before a replica without load stops (Kubernetes,
#: --horizontal-pod-autoscaler-sync-period and -downscale-stabilization).
_WINDOW, _DELAY = 15.0, 300.0


@dataclass(frozen=True, slots=True)
class Outage:
    """An outage of a replica: times in femtoseconds, `seconds` None if the replica has to start
    again."""

    prefills: bool
    replica: int
    at: int
    seconds: int | None


class OutageType(Kind[Outage]):
    """`1@60s+30s`: replica 1 is down from 60 s on, for 30 s; `1@60s`: until it has started."""

    name = "REPLICA@TIME[+TIME]"

    def read(self, text: str) -> Outage:
        """The outage."""
        match = _FAIL.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"expects a replica and times, 1@60s+30s, found '{text:.40}'")
        at = round(TimeType(zero=True).read(match[3]) * SECOND)
        seconds = round(TimeType().read(match[4]) * SECOND) if match[4] else None
        return Outage(match[1] is not None, int(match[2]), at, seconds)

    def text(self, value: Outage) -> str:
        times = (TimeType().text(n / SECOND) for n in (value.at, value.seconds) if n is not None)
        return f"{'prefill:' if value.prefills else ''}{value.replica}@{'+'.join(times)}"


@dataclass(frozen=True, slots=True)
class Scaling:
    """Autoscaling between `least` and `most` replicas, by a rule with a target per replica (None:
    the default of the rule)."""

    prefills: bool
    least: int
    most: int
    rule: str
    target: float | None


class ScalingType(Kind[Scaling]):
    """`1..8`, `1..8:queue=4`, `prefill:1..4`."""

    name = "MIN..MAX[:RULE=N]"

    def read(self, text: str) -> Scaling:
        """The bounds and the rule."""
        match = _SCALE.fullmatch(text.strip())
        try:
            target = float(match[5]) if match and match[5] else None
        except ValueError:
            target = 0.0
        rule = (match and match[4]) or "requests"
        if match is None or target == 0 or not 1 <= int(match[2]) <= int(match[3]):
            raise ValueError(
                "expects bounds such as 1..8, with or without a rule as in 1..8:queue=4, found "
                f"'{text:.40}'"
            )
        if rule not in SCALING_RULES:
            raise ValueError(
                f"unknown rule '{rule}', expected {', '.join(SCALING_RULES)}, as in "
                "1..8:requests=64"
            )
        return Scaling(match[1] is not None, int(match[2]), int(match[3]), rule, target)

    def text(self, value: Scaling) -> str:
        target = "" if value.target is None else f"={value.target:.12g}"
        bounds = f"{value.least}..{value.most}:{value.rule}{target}"
        return f"prefill:{bounds}" if value.prefills else bounds


FLEET_OPTIONS = (
    CommandOption(
        "replicas",
        Whole(1, _MOST_REPLICAS),
        "Replicas of the server, or of the pod that decodes.",
        1,
    ),
    rare_option(
        "prefill_replicas",
        Whole(1, _MOST_REPLICAS),
        "With --serve disaggregated: pods that prefill (default: 1 for requests over time, else as "
        "many as keep the pods that decode busy).",
    ),
    rare_option(
        "fail",
        OutageType(),
        "A replica is down for a while: 1@60s+30s, or prefill:0@60s+30s; its requests are routed "
        "again. 1@60s: until it has started.",
        multiple=True,
    ),
    rare_option("mtbf", TimeType(), "Mean time until a replica fails, at random (default: never)."),
    rare_option(
        "repair",
        TimeType(),
        "With --mtbf: the mean time until a failed replica takes requests again (default: "
        "--start-time, without variation).",
    ),
    CommandOption(
        "autoscale",
        ScalingType(),
        "Start and stop replicas by the load: 1..8 or 1..8:queue=4, rules "
        f"{', '.join(SCALING_RULES)}; prefill:1..4 for pods that prefill.",
        multiple=True,
    ),
    rare_option(
        "scale_window",
        TimeType(),
        "With --autoscale: the time between two looks at the load, averaged between them (default: "
        f"{_WINDOW:g}s).",
        _WINDOW,
    ),
    rare_option(
        "scale_delay",
        TimeType(),
        "With --autoscale: a replica stops after this time without need for it (default: "
        f"{_DELAY:g}s).",
        _DELAY,
    ),
    rare_option(
        "start_time",
        TimeType(),
        "Time of the start of a replica (default: the weights of a rank over its host link).",
    ),
    rare_option(
        "price",
        Number(0, above=True),
        "Cost per rank and hour, in any currency: the answer has the cost of 10^6 tokens.",
        metavar="PRICE",
    ),
)


def failures(given: Mapping[str, Any], prefills: int, replicas: int) -> list[Failure]:
    """The failures, with replicas as the simulation numbers them. Raises `DiagnosticError`."""
    failures: list[Failure] = []
    for outage in given["fail"]:
        count = prefills if outage.prefills else replicas
        if outage.replica >= count:
            what = "prefill replicas" if outage.prefills else "replicas"
            last = f"replicas are numbered from 0 to {count - 1}"
            raise error(
                f"--fail: there is no replica {outage.replica} of {count} {what}",
                remedy=last if count else "leave out 'prefill:'",
            )
        place = outage.replica + (0 if outage.prefills else prefills)
        failures.append(Failure(place, outage.at, outage.seconds))
    return failures


def scaling_of(given: Mapping[str, Any], *, prefills: bool) -> Scaling | None:
    """The autoscaling of the prefill replicas, or of the others. Raises `DiagnosticError`."""
    scalings = [each for each in given["autoscale"] if each.prefills == prefills]
    if len(scalings) > 1:
        raise error("--autoscale is given twice for the same pool", remedy="give it once")
    return scalings[0] if scalings else None


def replicas_of(given: Mapping[str, Any], *, prefills: bool) -> tuple[int, int]:
    """The number of replicas at the start, and the largest number. Raises `DiagnosticError`."""
    scaling = scaling_of(given, prefills=prefills)
    first = (given["prefill_replicas"] or 1) if prefills else given["replicas"]
    if scaling is None:
        return first, first
    if first > scaling.most:
        raise error(
            f"--autoscale allows at most {scaling.most} replicas, but the server starts with "
            f"{first}",
            remedy="give fewer --replicas, or raise the upper bound of --autoscale",
        )
    return max(first, scaling.least), scaling.most


def plan_of(
    given: Mapping[str, Any], sequences: int, start: Callable[[], int], *, prefills: bool
) -> FleetPlan:
    """The plan of a pool whose replicas run `sequences` at once; `start` computes the femtoseconds
    of a start, unless --start-time is given. Raises `DiagnosticError`."""
    scaling = scaling_of(given, prefills=prefills)
    auto = None
    if scaling is not None:
        target = scaling.target if scaling.target is not None else _target(scaling.rule, sequences)
        times = (round(given[n] * SECOND) for n in ("scale_window", "scale_delay"))
        auto = Autoscale(scaling.least, scaling.most, scaling.rule, target, *times)
    waits = any(o.seconds is None for o in given["fail"] if o.prefills == prefills)
    starts = auto is not None or waits or (given["mtbf"] and not given["repair"])
    if given["start_time"] is not None:
        start_time = round(given["start_time"] * SECOND)
    else:
        start_time = start() if starts else 0
    return FleetPlan(
        replicas_of(given, prefills=prefills)[0],
        start_time,
        auto,
        round((given["mtbf"] or 0.0) * SECOND),
        round((given["repair"] or 0.0) * SECOND),
        given["seed"],
    )


def _target(rule: str, sequences: int) -> float:
    """The default target of a rule."""
    return {"requests": _TARGET * sequences, "queue": 1.0}.get(rule, _TARGET)
