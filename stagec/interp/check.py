"""Numeric check around passes: what a program computes before a pass, it computes after it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stagec.interp.data import random_inputs, tiny_sizes
from stagec.interp.machine import DisagreementError, run_module
from stagec.ir.module import Module
from stagec.ir.opdef import Array
from stagec.support.diagnostics import error

_TOLERANCE = 1e-7


class NumericCheck:
    """An instrument for the pass manager: runs the program on tiny random inputs around every pass.

    Before collectives are explicit the program runs on one device; afterwards all ranks run in
    lockstep on a mesh with axes of size 2. The loss (result 0) must stay; other results too, while
    their number stays.
    """

    def __init__(self, fixed: Mapping[str, int] | None = None, seed: int = 0) -> None:
        self._fixed, self._seed = dict(fixed or {}), seed
        self._before: list[Array] | None = None
        self.checked: list[str] = []

    def before_pass(self, pass_: object, module: Module) -> None:
        """Remember what the program computes."""
        self._before = self._run(module)

    def after_pass(self, pass_: object, module: Module) -> None:
        """Compare. Raises `DiagnosticError` if the results differ, or ranks disagree."""
        name = str(getattr(pass_, "name", pass_))
        after = self._run(module, name)
        before = self._before
        if before is None or after is None:
            return
        shared = len(before) if len(before) == len(after) else 1
        for i, (x, y) in enumerate(zip(before[:shared], after[:shared], strict=True)):
            if x.shape != y.shape or not np.allclose(x, y, rtol=_TOLERANCE, atol=_TOLERANCE):
                gap = float(np.max(np.abs(x - y))) if x.shape == y.shape else float("nan")
                raise error(
                    f"pass '{name}' changes what the program computes: result {i} is off by "
                    f"{gap:.3g}",
                    module.main.loc,
                    remedy="dump the module before and after it: --dump-dir",
                )
        self.checked.append(name)

    def _run(self, module: Module, name: str = "") -> list[Array] | None:
        if not module.functions or any(v.type is None for v in module.main.body.args):
            return None
        if any(r.type is None for op in module.main.body.walk() for r in op.results):
            return None
        env = tiny_sizes(module, 2, self._fixed)
        inputs = random_inputs(module.main.body.args, env, self._seed)
        mesh = module.mesh
        if mesh and module.phase not in ("partitioned", "planned"):
            env |= dict.fromkeys(mesh.axes, 1)
        try:
            return run_module(module, env, inputs)
        except DisagreementError as e:
            raise error(
                f"after pass '{name}' {e}",
                module.main.loc,
                remedy="a collective is missing or wrong; dump the module: --dump-dir",
            ) from None
