"""Hooks of mkdocs for `make site`: pages outside docs/ become pages of the site, other linked files
are copied as text, and headings have the anchors of GitHub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.markup import MARK, ROOT, anchor

DOCS = ROOT / "docs"
#: A page outside docs/ -> its name on the site.
OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "ir_spec/stg.md": "language.md",
    "validation/README.md": "validation.md",
}
_SOURCES = {site: ROOT / path for path, site in OUTSIDE.items()}
_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.M)
#: Code in a row of a table, in which Python-Markdown keeps the backslash of an escaped bar.
_CELL_CODE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
#: Code within a line, and a flag in it.
_INLINE, _FLAG = re.compile(r"<code>[^<]*</code>"), re.compile(r"(?<![\w-])--[a-z][\w-]*")
_LINK = re.compile(r"(\[[^\]]*\])\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the anchors of headings to those of links, a section for each folder with an index, and a
    choice of versions if mike builds the site."""
    settings: Any = config
    settings.mdx_configs.setdefault("toc", {})["slugify"] = _slug
    settings.nav = _with_folders(settings.nav)
    if "mike" in config.plugins:  # it builds one of several versions
        settings.extra["version"] = {"provider": "mike"}
    return config


def _slug(text: str, _: str) -> str:
    return anchor(text)


def _with_folders(nav: Any) -> Any:
    entries: Any = nav
    if isinstance(nav, str):
        index = DOCS / nav
        if index.parent == DOCS or index.name not in ("index.md", "README.md"):
            return nav
        others = sorted(page for page in index.parent.glob("*.md") if page != index)
        return [nav, *(page.relative_to(DOCS).as_posix() for page in others)]
    if isinstance(nav, dict):
        return {title: _with_folders(entry) for title, entry in entries.items()}
    return [_with_folders(entry) for entry in entries]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the linked files outside docs/."""
    for site, source in _SOURCES.items():
        files.append(File.generated(config, site, content=source.read_text(encoding="utf-8")))
    pages = [file.src_uri for file in files if file.is_documentation_page()]
    linked = {path for uri in pages for path in _linked(_source(uri))}
    for path in sorted(linked):
        site = _site(path)
        if path.is_file() and site.startswith("source/"):
            files.append(File.generated(config, site, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Convert the links of a page to links of the site; links to folders are removed."""
    source = _source(page.file.src_uri)
    here = PurePosixPath(page.file.src_uri).parent

    def moved(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, hash_, heading = target.partition("#")
        if not path or "://" in target:
            return match[0]
        there = (source.parent / path).resolve()
        if there.is_dir():
            return text[1:-1]
        return f"{text}({os.path.relpath(_site(there), here)}{hash_}{heading})"

    def prose(text: str) -> str:
        return _CELL_CODE.sub(lambda code: code[0].replace(r"\|", "|"), _LINK.sub(moved, text))

    parts = _CODE.split(markdown.removeprefix(MARK))  # a comment would hide the title
    return "".join(part if n % 2 else prose(part) for n, part in enumerate(parts))


def on_page_content(html: str, **_: Any) -> str:
    """Prevent line breaks within flags."""
    return _INLINE.sub(lambda code: _FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)


def _source(uri: str) -> Path:
    """The file of a page of the site."""
    return _SOURCES.get(uri, DOCS / uri)


def _site(path: Path) -> str:
    """The name of a file on the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return OUTSIDE.get(name, f"source/{name}.txt")


def _linked(page: Path) -> Iterator[Path]:
    """The files to which a page links."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    for _, target in _LINK.findall(text):
        path = target.partition("#")[0]
        if path and "://" not in target:
            yield (page.parent / path).resolve()
