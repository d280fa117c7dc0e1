"""The flag page is the frozen list of public flags."""

import re

from slime.arguments.core.parser import build_parser
from tools.generate_flag_docs import PAGE, flag_page

ELSEWHERE = {
    *("--async", "--form", "--json", "--key-variable", "--max-tokens", "--system", "--temperature"),
    *("--config", "--run-dir", "--write-config", "--nodes", "--node-ip-address", "--secret", "--shm-size"),
    *("--sglang-mem-fraction-static", "--sglang-enable-lora"),
    *("--build-arg", "--gpus", "--rm", "--user"),
}
"""Flags of commands beside ``slime train``, of SGLang's own parser, and of Docker."""


def test_flag_page_is_fresh():
    assert PAGE.read_text(encoding="utf-8") == flag_page(), "run python tools/generate_flag_docs.py"


def test_every_option_of_the_parser_is_on_the_page():
    parser, _ = build_parser("embedded")
    page = PAGE.read_text(encoding="utf-8")
    options = {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}
    assert sorted(name for name in options if f"`{name}`" not in page) == []


def test_page_has_a_table_row_of_four_cells_for_each_honoured_flag():
    row = next(line for line in flag_page().splitlines() if line.startswith('| <a id="--rollout-batch-size"'))
    cell = '<a id="--rollout-batch-size"></a>`--rollout-batch-size`'
    assert row == f"| {cell} | int, more than 0 | **required** | prompts of one rollout |"


def test_flags_that_pages_for_newcomers_name_exist():
    parser, _ = build_parser("embedded")
    options = {name for action in parser._actions for name in action.option_strings}
    for name in ("coming-from", "cluster", "troubleshooting", "your-own-task", "command"):
        text = (PAGE.parent / f"{name}.md").read_text(encoding="utf-8")
        if name == "coming-from":
            text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)  # other programs' names
        found = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))
        assert sorted(found - options - ELSEWHERE) == [], name
