"""The private functions that a module may call: its own, and those of imported texts.

A path is relative to the folder of the importing text, or else to the library. A text that is
imported twice is read once. An imported text is a module of its own, and is verified by itself.
"""

import posixpath
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stagec.ir.core import Operation
from stagec.ir.facts import Relation
from stagec.ir.module import Module
from stagec.ir.verify import verify_module
from stagec.models import LIBRARY, blocks, library_text
from stagec.support.diagnostics import error, note
from stagec.support.limits import MAX_DEPTH
from stagec.support.source import Loc, Source, file_loc
from stagec.support.suggest import did_you_mean
from stagec.support.texts import read_text
from stagec.text.build import parse_module

#: Imported texts of the library. Functions are copied from them; they are never changed.
_library: dict[Source, Module] = {}


@dataclass(frozen=True, slots=True)
class ImportedFunction:
    """A private function, and the assumptions about sizes in the text from which it was
    imported."""

    func: Operation
    relations: tuple[Relation, ...] = ()


def read_blocks(module: Module) -> dict[str, ImportedFunction]:
    """The private functions by name. Imported texts become sources of the module.

    Raises `DiagnosticError` for a text that cannot be read, for cyclic imports, and for two
    functions of one name.
    """
    reader = _Reader(module)
    root = file_loc(module.root.loc)
    reader.take(module, (root.file,) if root is not None else (), imported=None)
    return reader.blocks


class _Reader:
    def __init__(self, module: Module) -> None:
        self._module = module
        self.blocks: dict[str, ImportedFunction] = {}

    def take(self, module: Module, chain: tuple[str, ...], *, imported: Operation | None) -> None:
        """Add the private functions of a module and of its imports. `chain` are the names of the
        importing texts, `imported` is the operation that imports the module."""
        relations = tuple(r for r, _ in module.relations) if imported is not None else ()
        for func in module.functions:
            if func.flag("private") and func.symbol:
                self._add(func.symbol, ImportedFunction(func, relations), imported or func)
        for op in module.declaring("import"):
            source = _find(op)
            if source.name in chain:
                raise op.error(
                    f"texts import each other: {' -> '.join((*chain, source.name))}",
                    remedy="move what both need to a text of its own",
                )
            if len(chain) > MAX_DEPTH:
                raise op.error(
                    f"imports are nested more than {MAX_DEPTH} deep",
                    remedy="import the texts directly",
                )
            if source.name not in self._module.sources:
                self._module.sources[source.name] = source
                text = _library.get(source)
                if text is None:
                    text = parse_module(source, module.registry)
                    _check_private(text, op.loc)
                    verify_module(text)
                    if source.name.startswith(LIBRARY):
                        _library[source] = text
                self.take(text, (*chain, source.name), imported=op)

    def _add(self, name: str, block: ImportedFunction, where: Operation) -> None:
        known = self.blocks.setdefault(name, block)
        if known is not block:
            raise where.error(
                f"@{name} is defined twice",
                remedy="rename one of the two",
                notes=[
                    note("it is defined here first", known.func.loc),
                    note("it is defined here too", block.func.loc),
                ],
            )


def _check_private(text: Module, loc: Loc) -> None:
    for func in text.functions:
        if not func.flag("private"):
            raise error(
                f"@{func.symbol} of an imported text is not private",
                loc,
                remedy="write 'stg.func @name[private] (...)', or import another text",
                notes=[note("it is defined here", func.loc)],
            )


def _find(op: Operation) -> Source:
    """The text that an import names. Raises `DiagnosticError` if there is none."""
    path, place = op.text("path"), file_loc(op.loc)
    if posixpath.isabs(path) or not path.endswith(".stg") or set(path) & {"\\", "\0"}:
        raise op.error(
            f"an import expects the relative path of an .stg text, found {op.attrs['path']}",
            remedy='write it relative to this text or to the library: "blocks/swiglu.stg"',
        )
    file = place.file if place is not None else ""
    inside = file.startswith(LIBRARY)
    if not inside:
        source = _read(posixpath.normpath(posixpath.join(posixpath.dirname(file), path)), op)
        if source is not None:
            return source
    for folder in (posixpath.dirname(file.removeprefix(LIBRARY)), "") if inside else ("",):
        name = posixpath.normpath(posixpath.join(folder, path))
        with suppress(OSError):
            if not name.startswith(".."):
                return Source(LIBRARY + name, library_text(name))
    raise op.error(
        f'no text "{path}", neither in this folder nor in the library',
        remedy=did_you_mean(path.removesuffix(".stg"), [b.removesuffix(".stg") for b in blocks()])
        or "check the path, which is relative to the folder of this text",
    )


def _read(path: str, op: Operation) -> Source | None:
    """The text of a file, or None. Raises `DiagnosticError` if it cannot be read."""
    try:
        return read_text(path) if Path(path).is_file() else None
    except OSError as e:
        raise op.error(
            f"cannot read {path}: {e.strerror}", remedy="check the path and its permissions"
        ) from None
