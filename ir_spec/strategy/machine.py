"""The machine of a part of the model, where it is not that of the job."""

from stagec.ir_spec.strategy.flag_values import FlagValues, Problems
from stagec.ir_spec.strategy.statement import Record, Section, Statement, flagged


class MachineRule(Record):
    """The machine of the ranks of a pod, by name or as a file; '' for that of the job."""

    name: str = flagged(
        "on_machine",
        "In the flags of a --part: the machine of its ranks, as --machine (default: that of the "
        "job).",
        "str",
        doc='a name or a file, as for `--machine`, such as "h100-sxm"',
        metavar="NAME|FILE",
        default="",
    )


class MachineOp(Statement):
    """The machine of the ranks of a part of the model, where it is not that of the job: attention
    may run on devices with much memory bandwidth, feed-forward on devices that multiply fast
    (MegaScale-Infer, arXiv 2504.02263; Step-3, arXiv 2507.19427).

    Times, memory and the types that products take are those of this machine. Messages between two
    machines pass the slower of the links that join each to other pods. `on-machine` in the flags of
    a part states it; a text of a strategy cannot.
    """

    name, record = "stg.machine", MachineRule
    section = Section.PARTS
    rare, software = True, True
    example = 'stg.machine[name = "h100-sxm"]'

    def problems(self, request: FlagValues) -> Problems:
        yield from super().problems(request)
        pod = request.flags.get("keep")
        if request["on_machine"] and (not pod or pod == request.flags.get("rest")):
            yield (
                "--on-machine is the machine of a part, expected in the flags of a --part",
                "give --machine for the whole job; a part is --part 'NAME=VALUE: on-machine=h20'",
            )
