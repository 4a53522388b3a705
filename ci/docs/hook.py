"""A hook of mkdocs that adds the pages generated from the code, and lists them on the page "Reference"."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

from reference import PAGES


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri != "reference.md":
        return markdown
    titles = {path: files.src_uris[path].content_string.partition("\n")[0].lstrip("# ") for path in PAGES}
    return "\n".join([markdown, *(f"- [{title}]({path})" for path, title in titles.items()), ""])
