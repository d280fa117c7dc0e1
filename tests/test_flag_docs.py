"""The flag page is the frozen list of public flags."""

from slime.arguments.core.parser import build_parser
from tools.generate_flag_docs import PAGE, flag_page


def test_flag_page_is_fresh():
    assert PAGE.read_text(encoding="utf-8") == flag_page(), "run python tools/generate_flag_docs.py"


def test_every_option_of_the_parser_is_on_the_page():
    parser, _ = build_parser("embedded")
    page = PAGE.read_text(encoding="utf-8")
    options = {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}
    assert sorted(name for name in options if f"`{name}`" not in page) == []


def test_page_has_a_table_row_of_four_cells_for_each_honoured_flag():
    row = next(line for line in flag_page().splitlines() if line.startswith("| `--rollout-batch-size`"))
    assert row == "| `--rollout-batch-size` | int, more than 0 | **required** | prompts of one rollout |"
