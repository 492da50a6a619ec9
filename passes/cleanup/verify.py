"""verify: runs the checks that run between all passes, and nothing else."""

from stagec.api import Module, Pass, Phase, verify_module


class Verify(Pass):
    """Verify the module against the rules of its phase, and change nothing."""

    needs = Phase.PARSED
    until = Phase.LOWERED

    def run(self, module: Module) -> None:
        verify_module(module)
