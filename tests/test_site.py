"""The site that MkDocs makes: it loads nothing from elsewhere, and who searches it finds what helps."""

import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from lunr import lunr

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(directory)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, str]:
    """The pages' HTML by their place."""
    return {str(file.parent.relative_to(site)): file.read_text() for file in site.glob("**/index.html")}


def test_pages_load_nothing_from_other_servers(pages: dict[str, str]) -> None:
    loads = re.compile(r'<(?:script|link|img|iframe)[^>]*\s(?:src|href)="(?:https?:)?//[^"]*"')
    assert {place: tags for place, html in pages.items() if (tags := loads.findall(html))} == {}


def test_formulas_are_drawn(pages: dict[str, str]) -> None:
    written = {page: page.read_text().count("```math") for page in ROOT.glob("docs/**/*.md")}
    assert sum(written.values()) > 10
    for page, count in written.items():
        place = (
            str(page.relative_to(ROOT / "docs").with_suffix("")).removesuffix("/index").removesuffix("index")
            or "."
        )
        assert pages[place].count('<div class="formula"><math') == count, page


def test_flags_in_text_lead_to_their_rows(pages: dict[str, str]) -> None:
    rows = re.findall(r'<a id="(--[\w-]+)"></a>', pages["flags"])
    assert len(rows) > 500 and len(rows) == len(set(rows))
    linked = re.findall(r'<a href="[./]*flags/#(--[\w-]+)"><code>', "".join(pages.values()))
    assert len(linked) > 500 and set(linked) <= set(rows)
    assert '<a href="../flags/#--save"><code>--save DIR --save-interval N</code></a>' in pages["usage"]


HELP = {
    "out of memory": ("troubleshooting/#out-of-memory", "slime check", "--max-tokens-per-gpu", "OOM killer"),
    "stuck": ("troubleshooting/#a-stuck-engine", "--use-fault-tolerance"),
    "dashboard": (
        "troubleshooting/#where-is-the-dashboard",
        "--use-tensorboard",
        "--use-wandb",
        "slime report",
        "Metrics",
    ),
    "chat": ("command/#talking-to-a-model-chat", "/reset"),
    "LoRA": ("troubleshooting/#lora-or-less-memory", "slime check"),
    "hangs": ("troubleshooting/#it-hangs-at-the-start", "--cluster-timeout"),
    "NCCL": ("troubleshooting/#nccl", "NCCL_SOCKET_IFNAME"),
    "kubernetes": ("cluster/#kubernetes", "RayJob"),
}
"""What people search for, where it is answered, and what the answer names."""


def test_a_search_leads_to_what_helps(site: Path) -> None:
    """As the site's own script ranks: lunr, with titles far above texts."""
    entries: list[dict[str, Any]] = json.loads((site / "search/search_index.json").read_text())["docs"]
    texts = {entry["location"]: re.sub(r"<[^>]+>", "", unescape(entry["text"])) for entry in entries}
    fields = [{"field_name": "title", "boost": 1000}, "text"]
    index = lunr(ref="location", fields=fields, documents=entries)
    for words, (place, *named) in HELP.items():
        found = [hit["ref"] for hit in index.search(words)[:3]]
        shown = found if words == "LoRA" else found[:1]  # its flags and its page come before the answer
        assert place in shown, f"{words}: {found}"
        assert [name for name in named if name not in texts[place]] == [], place
