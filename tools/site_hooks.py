"""What MkDocs does for the site beside its own: formulas, and links from flags to their rows in flags.md.

Formulas are blocks of LaTeX named ``math``. They become MathML, which browsers draw themselves: pages load no
script and no font for them.
"""

import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

FLAGS = "flags.md"
_ROW = re.compile(r'<a id="(--[\w-]+)"></a>')
_KEPT = r"<a [^>]*>.*?</a>|<pre.*?</pre>|<h[1-6].*?</h[1-6]>"
_CODE = re.compile(rf"({_KEPT})|<code>((--[a-z][\w-]*)[^<]*)</code>", re.DOTALL)
_log = get_plugin_logger(__name__)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lets blocks named ``math`` be formulas."""
    fences = [{"name": "math", "class": "formula", "format": formula}]
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = fences
    return config


def formula(source: str, language: str, css_class: str, options: Any, md: Any, **more: Any) -> str:
    """A block of LaTeX as MathML: a formula for each part between two ``\\\\``."""
    try:
        from latex2mathml.converter import convert
    except ModuleNotFoundError:
        _tell_that_formulas_stay_text()
        return f"<pre>{escape(source)}</pre>"
    parts = (part.strip() for part in source.split("\\\\\n"))
    return f'<div class="{css_class}">{"".join(convert(part, display="block") for part in parts)}</div>'


@cache
def _tell_that_formulas_stay_text() -> None:
    _log.info("formulas stay text without latex2mathml (wanted: pip install -e '.[docs]')")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links each flag in the text of a page to its row."""
    target = files.get_file_from_path(FLAGS)
    if target is None or page.file.src_uri == FLAGS:
        return html
    place, known = get_relative_url(target.url, page.url), anchors(Path(config.docs_dir) / FLAGS)

    def linked(match: re.Match[str]) -> str:
        kept, code, flag = match.groups()
        return f'<a href="{place}#{flag}"><code>{code}</code></a>' if flag in known else kept or match[0]

    return _CODE.sub(linked, html)


@cache
def anchors(flags: Path) -> frozenset[str]:
    """The flags that have a row of their own."""
    return frozenset(_ROW.findall(flags.read_text(encoding="utf-8")))
