"""The module of another pod for a pass that meets: one of the job, or a text."""

from stagec.ir.module import Module
from stagec.support.diagnostics import error
from stagec.support.texts import read_text
from stagec.text.build import parse_module


def peer_module(module: Module, name: str, file: str, *, example: str) -> Module:
    """The peer of this name, else the module in a file. Raises `DiagnosticError` if there is
    neither."""
    if (peer := module.peers.get(name)) is not None:
        return peer
    if not file:
        raise error("expected the module of the other pod", remedy=f"as in {example}")
    return parse_module(read_text(file), module.registry)
