"""The time of messages from one pod to another. Each pod begins on a node of its own, so messages
between pods cross the network."""

from collections import Counter
from dataclasses import dataclass

from stagec.ir.serving_step import DECODE
from stagec.machines import Level, Machine
from stagec.program.groups import crosses_pods
from stagec.program.nodes import Program
from stagec.time.costs.network import message_seconds
from stagec.time.costs.replay_options import USUAL, ReplayOptions
from stagec.time.step import IssuedStep, StepTime, step_time
from stagec.time.streams import PICOSECONDS


@dataclass(frozen=True, slots=True)
class TransferTime:
    """The transfer of the caches of a prefill step.

    `bytes` and `messages` are those of all ranks. `alone_seconds` is the time of the rank that
    sends most, if it did nothing else; `exposed_seconds` is the part of it behind the step of
    prefill, since layers are sent as they finish. `level` is the level of the network between the
    pods.
    """

    bytes: int
    messages: int
    level: str
    alone_seconds: float
    exposed_seconds: float


def transfer_time(
    issued: IssuedStep,
    machine: Machine,
    level: Level,
    alone: StepTime,
    replay: ReplayOptions = USUAL,
) -> TransferTime:
    """The transfer of the caches that the first pod sends to the pod that decodes, over a level of
    the network; `alone` is the step if transfers take no time. A rank sends its messages one after
    the other over its link; a receiver is assumed to have a link for each sender."""
    sender, messages, total = issued.jobs[0], 0, 0
    longest = 0.0
    for sizes, members in zip(map(_sent, sender.programs), sender.members, strict=True):
        messages += len(members) * sum(sizes.values())
        total += len(members) * sum(size * count for size, count in sizes.items())
        busy = sum(n * message_seconds(machine, size, level) for size, n in sizes.items())
        longest = max(longest, busy)
    sending = step_time(issued, machine, replay, pods={DECODE: level})
    exposed = max(0, sending.picoseconds - alone.picoseconds) / PICOSECONDS
    return TransferTime(total, messages, level.name, longest, exposed)


def _sent(program: Program) -> Counter[int]:
    """The messages that a rank sends to the pod that decodes: their number by size in bytes."""
    sent = Counter[int]()
    for node, times in zip(program.prototypes, program.counts.tolist(), strict=True):
        if node.over == DECODE and crosses_pods(node.op) and times:
            sent[node.size] += times
    return sent
