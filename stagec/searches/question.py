"""Turns the options of a search into questions: one for each machine, number of ranks and batch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any, cast

from stagec.ir.module import BATCH, Module
from stagec.ir.serving_step import MIXED
from stagec.jobs.builder import JobBuilder
from stagec.jobs.pod_options import has_pods
from stagec.jobs.request.limit import AT_HAND, Limit
from stagec.jobs.request.machine import machine_of, on_machine, with_used
from stagec.jobs.request.option import Kind
from stagec.jobs.request.options import JobOptions, find_preset
from stagec.jobs.session import Session
from stagec.machines import Machine
from stagec.pipeline.plugins import load_plugins
from stagec.schedule.attached import schedule_of
from stagec.searches.explore.layout import Layers
from stagec.searches.explore.space import Space
from stagec.searches.job_file import with_job
from stagec.searches.main_pod import layers_of_part, main_pod, ranks_of_others
from stagec.searches.probes import LAYERS
from stagec.searches.run import Question
from stagec.searches.serving_space import (
    most_seconds,
    of_preset,
    serving_space,
    step_of_groups,
    step_options,
    steps_of_batches,
)
from stagec.searches.space import (
    KNOBS,
    MICROBATCH,
    Values,
    base_options,
    default_space,
    values_text,
    without_axes,
)
from stagec.searches.stack import with_stack
from stagec.support.diagnostics import error
from stagec.support.suggest import did_you_mean
from stagec.text.build import parse_op

#: The most points that a search lists, and the seconds that it takes for each.
_MOST_POINTS, _EACH = 2_000_000, 1e-4
PARETO = ("time", "memory", "ranks")
#: The objective of a search for servers: most tokens within the limits.
GOODPUT = "goodput"
_FORM = "write 'stg.space @s { stg.vary[tp, \"1..8\"] }'; --print-space prints one to start from"


class Machines(Kind["tuple[str | Machine, ...]"]):
    """`h100-sxm`, or several names with commas; in Python also machines."""

    name = "NAME|FILE,..."
    completes = "machines"

    def read(self, text: str) -> tuple[str | Machine, ...]:
        """The names of machines."""
        return tuple(name.strip() for name in text.split(","))

    def of(self, given: Any) -> tuple[str | Machine, ...]:
        several = isinstance(given, list | tuple)
        each = tuple(cast("Iterable[str | Machine]", given)) if several else (given,)
        return each if any(isinstance(m, Machine) for m in each) else super().of(given)

    def text(self, value: Sequence[str | Machine]) -> str:
        return ",".join(m if isinstance(m, str) else m.name for m in value)


class Pareto(Kind[tuple[str, ...]]):
    """`time,memory`, or `time,memory,ranks`."""

    name = "time,memory[,ranks]"

    def read(self, text: str) -> tuple[str, ...]:
        """The respects by name."""
        names = tuple(n.strip() for n in text.split(","))
        for name in names:
            if name not in PARETO:
                raise ValueError(f"'{name}' is not one of {', '.join(PARETO)}")
        if len(set(names) - {"ranks"}) < 2:
            raise ValueError("expects time and memory, and ranks only if these vary")
        return names


class Prices(Kind[tuple[float, ...]]):
    """`2.5`, or `2.5,6` for two machines."""

    name = "PRICE,..."

    def read(self, text: str) -> tuple[float, ...]:
        """The price of a rank of each machine for an hour."""
        try:
            prices = tuple(float(part) for part in text.split(","))
        except ValueError:
            raise ValueError(f"expects numbers such as 2.5,6, found '{text}'") from None
        if not all(0 < price < 1e9 for price in prices):
            raise ValueError(f"expects prices above 0, found '{text}'")
        return prices


def questions(given: Mapping[str, Any], session: Session) -> list[Question]:
    """The questions of a search. Raises `DiagnosticError`."""
    given, of_job = with_job(given, session)
    if given["objective"] == GOODPUT:
        raise error(f"--objective {GOODPUT} needs --serve server", remedy="add --serve server")
    if not given["machine"]:
        raise error("no machine is given", remedy="add --machine h100-sxm, for example")
    used = given["used_ranks"]
    asked: Sequence[str | Machine] = given["machine"]
    machines = [
        machine_of(m, session, used) if isinstance(m, str) else with_used(m, used) for m in asked
    ]
    if not given["ranks"]:
        batch = "" if given["batch"] or BATCH in given["sizes"] else " --batch 1024"
        remedy = f"add --ranks 512{batch}, for example"
        raise error("the number of ranks is not given", remedy=remedy)
    model, set_sizes = given["model"], dict(given["sizes"])
    if given["batch"] and BATCH in set_sizes:
        raise error("--batch and --set B cannot be used together", remedy="give one of them")
    if given["seed_from"]:
        preset = find_preset(JobOptions("", preset=given["seed_from"]))
        model, set_sizes = model or preset.model, {**preset.values, **set_sizes}
        given = {**given, **of_preset(preset.step, given)}
    pods = {"part": given["part"] or (), "draft": given["draft"]}
    about = {"stack": given["stack"], **pods, **step_options(given)}
    options = JobOptions(model, sizes=set_sizes, **about)
    serves = options.serve is not None
    first = next(steps_of_batches(options, given, {}))[0] if serves else options
    with session.once() if serves else nullcontext(session.aside()) as aside:
        builder = main_pod(with_weights(first, given), aside, symbolic=not serves)
    known = {n: v for n, v in builder.module.symbols.items() if v is not None}
    layers = layers_of(builder.module, known)
    if options.part:
        layers = Layers(layers_of_part(builder, known), 0)
    prices, said = prices_of(machines, given["price"]), said_values(given, session)
    other_ranks = ranks_of_others(options)
    questions: list[Question] = []
    ranks: Sequence[int] = given["ranks"]
    places = product(zip(machines, prices, strict=True), ranks)
    if not serves and not given["batch"] and BATCH not in known:
        given = {**given, "batch": (max(ranks),)}
        session.remark(
            f"--batch is not given: a step has {max(ranks):,} sequences, one per rank; the best "
            "strategy depends on the batch"
        )
    steps = list((steps_of_batches if serves else _batches)(options, given, known))
    objective = given["objective"] or ("tokens-per-rank" if serves else "time")
    for ((machine, price), main_ranks), (step, sizes) in product(places, steps):
        space = space_of(given, said, of_job, sizes, layers.total, main_ranks, machine)
        base = with_stack(on_machine(step, machine), space.knobs, session)
        questions.append(
            Question(
                *(base, sizes, layers, space, machine, main_ranks),
                given["limit"] or Limit(AT_HAND, 0),
                objective,
                given["top"],
                given["overlap"],
                exhaustive=given["exhaustive"] or options.serve == MIXED or has_pods(options),
                pareto=given["pareto"] or (),
                price=price,
                most_seconds=most_seconds(given, base),
                group=step_of_groups(base),
                given=frozenset(said),
                other_ranks=other_ranks,
            )
        )
    return questions


def _batches(
    options: JobOptions, given: Mapping[str, Any], sizes: Mapping[str, int]
) -> Iterator[tuple[JobOptions, Mapping[str, int]]]:
    """The job with each of the batches, and the sizes of all symbols."""
    for batch in given["batch"] or (None,):
        with_batch = sizes if batch is None else {**sizes, BATCH: batch}
        yield base_options(options, with_batch), with_batch


def prices_of(
    machines: Sequence[Machine], prices: tuple[float, ...] | None
) -> tuple[float | None, ...]:
    """The price of a rank of each machine for an hour, None if not known. Raises `DiagnosticError`
    if the numbers of prices and of machines differ."""
    if prices is None or len(prices) == 1:
        return (prices or (None,)) * len(machines)
    if len(prices) != len(machines):
        raise error(
            f"--price gives {len(prices)} prices for {len(machines)} machines",
            remedy="give one price for each machine",
        )
    return prices


def layers_of(module: Module, sizes: Mapping[str, int]) -> Layers:
    """The layers of a model: before, in, and after its repeated layers."""
    counts = [op.expr("count") for op in module.walk() if op.name == "stg.repeat"]
    names = [count.symbol_name for count in counts]
    numbers = [sizes.get(n or "", count.value or 0) for n, count in zip(names, counts, strict=True)]
    at = names.index(LAYERS) if LAYERS in names else len(names)
    mixed = any(op.name == "stg.order" for op in module.walk())
    return Layers(sum(numbers[:at]), sizes.get(LAYERS, 0), sum(numbers[at + 1 :]), mixed)


# -- space -----------------------------------------------------------------------------------------


def said_values(given: Mapping[str, Any], session: Session) -> dict[str, tuple[Any, ...]]:
    """The values of flags that are given by a text, a preset, or options of the search."""
    said = dict(_of_text(given["space"], session)) if given["space"] else {}
    said |= _of_preset(given["seed_from"]) if given["seed_from"] else {}
    return said | {n: given[n] for n in KNOBS if given[n] is not None}


def space_of(
    given: Mapping[str, Any],
    said: Mapping[str, tuple[Any, ...]],
    of_job: Mapping[str, tuple[Any, ...]],
    sizes: Mapping[str, int],
    layers: int,
    ranks: int,
    machine: Machine,
) -> Space:
    """The space of a question: the default space with the values of a job file added, and with
    given values (`said`) in place of its own. With a text (--space), only given values and those of
    the job file. Raises `DiagnosticError` for a space that is too large."""
    knobs = dict(
        serving_space(sizes, layers, ranks, machine, given["serve"]).knobs
        if given["serve"]
        else default_space(sizes, layers, ranks, machine).knobs
    )
    if given["space"]:
        knobs = {}
    if "microbatches" in said:
        knobs.pop(MICROBATCH, None)
        if MICROBATCH in said:
            raise error(
                "--microbatches and --microbatch-size cannot be used together",
                remedy="give one of them",
            )
    job = {n: tuple(dict.fromkeys((*knobs.get(n, ()), *own))) for n, own in of_job.items()}
    every = {**knobs, **job, **said}
    stays = {*said, *of_job}
    space = Space({n: every[n] for n in every if n in stays or n not in without_axes(every)})
    for name in space.knobs.get("schedule", ()):
        schedule_of(load_plugins(()).registry, name)
    if space.count > _MOST_POINTS:
        raise error(
            f"the space has {space.count:,} points, which take about {_long(space.count * _EACH)} "
            "to list",
            remedy=f"vary fewer flags or values, up to {_MOST_POINTS:,} points; --print-space "
            "prints the space",
        )
    return space


def _of_text(name: str, session: Session) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The knobs of a text with a `stg.space`. Raises `DiagnosticError` with the line of an
    error."""
    op = parse_op(session.read_part(name, "stg.space", _FORM), load_plugins(()).registry)
    spaces = [o for o in (op, *(op.region.ops if op.region else ())) if o.name == "stg.space"]
    if not spaces:
        raise error(f"{name} has no 'stg.space', expected one", op.loc, remedy=_FORM)
    for each in spaces[0].region.ops if spaces[0].region else ():
        flag = each.text("flag")
        if flag not in KNOBS:
            remedy = did_you_mean(flag, KNOBS) or "'stagec search --help' lists the flags"
            raise error(f"'{flag}' is not a flag that can vary", each.loc, remedy=remedy)
        try:
            yield flag, Values(KNOBS[flag]).read(each.text("values"))
        except ValueError as problem:
            raise error(f"{flag}: {problem}", each.loc, remedy='as in "1,2,4"') from None


def with_weights(options: JobOptions, given: Mapping[str, Any]) -> JobOptions:
    """Options with the last of the types of weights that are searched, so that a quantized
    checkpoint causes no warning."""
    types = given["weight_dtype"]
    return options.changed(weight_dtype=types[-1]) if types and options.serve else options


def _of_preset(name: str) -> dict[str, tuple[Any, ...]]:
    """The degrees of a preset, with half and twice each of them."""
    mesh = JobBuilder(JobOptions("", preset=name)).module.mesh
    choices: dict[str, tuple[Any, ...]] = {}
    sizes: Mapping[str, int | None] = mesh.sizes if mesh else {}
    for axis, size in sizes.items():
        if axis in KNOBS and axis not in ("dp", "dp_replicate", "dp_shard") and size:
            choices[axis] = tuple(sorted({max(1, size // 2), size, size * 2}))
    return choices


def space_text(space: Space) -> str:
    """A space as a text for --space."""
    lines = [
        f'  stg.vary[{name}, "{values_text(name, values)}"]' for name, values in space.knobs.items()
    ]
    return "\n".join(["stg.space @space {", *lines, "}", f"// {space.count:,} points", ""])


def _long(seconds: float) -> str:
    for unit, size in (("years", 3.15e7), ("days", 86400.0), ("hours", 3600.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 60:,.0f} minutes"
