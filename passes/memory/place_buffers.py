"""place-buffers: gives every buffer the offset at which an allocator would put it."""

from dataclasses import field

from stagec.api import Builder, Module, Operation, Pass, Phase, Value, error, made_by
from stagec.ir.builder import RawAttr
from stagec.ir.expr import UnboundError
from stagec.memory.arena import placed
from stagec.memory.placement import MODELS
from stagec.memory.timeline import DEVICE, HOST, MemoryTimeline
from stagec.schedule.attached import stages_of
from stagec.support.suggest import did_you_mean


class PlaceBuffers(Pass):
    """State the offset of every buffer in a planned module, for the first stage of each function.

    All sizes need values.

    Before:
        stg.symbols[B = 64]
        stg.mesh @pod[dp]
        stg.assume[B % dp == 0]
        stg.func @f(%x: f32[B | rep]) {
          %a = stg.gelu(%x) : f32[B | rep]
          %b = stg.gelu(%a) : f32[B | rep]
          stg.free(%a)
          %c = stg.gelu(%b) : f32[B | rep]
          stg.return(%c)
        }
    After:
        stg.symbols[B = 64]
        stg.mesh @pod[dp]
        stg.assume[B % dp == 0]
        stg.func @f (%x: f32[B | rep]) {
          %a = stg.gelu(%x) : f32[B | rep]
          %b = stg.gelu(%a) : f32[B | rep]
          stg.free(%a)
          %c = stg.gelu(%b) : f32[B | rep]
          stg.return(%c)
        }
        stg.arena @f_device[space = device, model = "best-fit", bound = 512,
            allocated = 1024, reserved = 1024] {
          stg.buffer[of = "a", first = 1, last = 3, offset = 0, bytes = 512]
          stg.buffer[of = "b", first = 2, last = 5, offset = 512, bytes = 512]
          stg.buffer[of = "c", first = 4, last = 6, offset = 0, bytes = 512]
        }
    """

    policy: str = field(
        default="best-fit", metadata={"help": "best-fit, or caching as PyTorch does it"}
    )

    needs = Phase.PLANNED

    def run(self, module: Module) -> None:
        if self.policy not in MODELS:
            raise error(
                f"there is no allocator '{self.policy}'",
                remedy=did_you_mean(self.policy, MODELS) or f"choose one of {', '.join(MODELS)}",
            )
        for func in module.functions:
            _place_buffers(module, func, self.policy)


def _place_buffers(module: Module, func: Operation, policy: str) -> None:
    """Add an `stg.arena` for each memory that a function uses. Raises `DiagnosticError` for sizes
    without values."""
    stage = next(iter(stages_of(func)), 0)
    timeline = MemoryTimeline(module, func, stage, MemoryTimeline.planner(module, func))
    try:
        for space in (DEVICE, HOST):
            _arena(module, func, timeline, policy, space)
    except UnboundError as e:
        raise func.error(
            f"no value for {', '.join(e.names)}, but offsets need all sizes",
            remedy=module.how_to_set(e.names),
        ) from None


def _arena(
    module: Module, func: Operation, timeline: MemoryTimeline, policy: str, space: str
) -> None:
    placement = placed(timeline, policy, space)
    if not placement.places:
        return
    times, values = _lifetimes(timeline, space)
    b = Builder(module.registry, module.root.body, loc=made_by(PlaceBuffers.name, func.loc))
    attrs: dict[str, RawAttr] = {"space": space, "model": policy, "bound": placement.bound}
    attrs |= {"allocated": placement.allocated, "reserved": placement.reserved}
    arena = b.op("stg.arena", (), attrs, symbol=f"{func.symbol}_{space}")
    inner = Builder(module.registry, arena.make_region(), loc=arena.loc)
    for number, spot in placement.places.items():
        first, last = times[number]
        sizes = {"first": first, "last": last, "offset": spot.offset, "bytes": spot.size}
        made = inner.op("stg.buffer", (), {"of": values[number].name, **sizes}, types=())
        made.loc = made_by(PlaceBuffers.name, values[number].loc)


def _lifetimes(
    timeline: MemoryTimeline, space: str
) -> tuple[dict[int, tuple[int, int]], dict[int, Value]]:
    """Start and end of each buffer by number, and the value of each buffer. Time is counted in
    starts and ends of buffers."""
    times: dict[int, tuple[int, int]] = {}
    values: dict[int, Value] = {}
    events = list(timeline.events(space))
    for number, (value, *_) in enumerate(timeline.fixed(space), 1):
        times[-number], values[-number] = (0, len(events)), value
    for time, event in enumerate(events, 1):
        first = time if event.starts else times[event.number][0]
        times[event.number] = first, len(events) if event.starts else time
        values[event.number] = event.buffer.value
    return times, values
