"""The flag page is the frozen list of public flags."""

import re

from slime.arguments.core.parser import build_parser
from tests.page_runs import printed
from tools import generate_flag_docs
from tools.generate_flag_docs import PAGE, flag_page

ROOT = PAGE.parents[1]
ELSEWHERE = {
    *("--build-arg", "--entrypoint", "--gpus", "--rm", "--runtime", "--secret", "--shm-size", "--user"),
    *("--address", "--generate", "--head", "--node-ip-address", "--nodes", "--num-gpus"),
    *("--exclude", "--local-dir", "--no-deps", "--plugin-module", "--repo-type"),
    *("--allow-auto-truncate", "--api-key", "--enable-deterministic-inference", "--enable-metrics"),
    *("--disable-overlap-schedule", "--enable-return-routed-experts", "--model-path", "--no-x", "--x"),
    *("--no-sglang-x", "--rollout-batch-sise"),
    *("--exit-immediately", "--task", "--yolo"),
    *("--signal", "--overlap"),
}
"""Options of Docker and SkyPilot; of Ray; of the hub, pip, pytest; of SGLang; what pages show as one; of
mini-swe-agent; and of Slurm."""
OTHERS = ("launch-scripts", "flags")
"""Pages whose flags other tests hold: SGLang's earlier names, and our own list."""


def test_flag_page_is_fresh():
    assert PAGE.read_text(encoding="utf-8") == flag_page(), "run python tools/generate_flag_docs.py"


def test_the_page_is_written_as_printed(tmp_path, monkeypatch):
    (command,) = printed("python tools/generate_flag_docs.py")
    monkeypatch.setattr("sys.argv", list(command.words[1:]))
    monkeypatch.setattr(generate_flag_docs, "PAGE", tmp_path / PAGE.name)
    assert generate_flag_docs.main() == 0
    assert (tmp_path / PAGE.name).read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_every_option_of_the_parser_is_on_the_page():
    parser, _ = build_parser("embedded")
    page = PAGE.read_text(encoding="utf-8")
    options = {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}
    assert sorted(name for name in options if f"`{name}`" not in page) == []


def test_page_has_a_table_row_of_four_cells_for_each_honoured_flag():
    row = next(line for line in flag_page().splitlines() if line.startswith('| <a id="--rollout-batch-size"'))
    cell = '<a id="--rollout-batch-size"></a>`--rollout-batch-size`'
    assert row == f"| {cell} | int, more than 0 | **required** | prompts of one rollout |"


def of_programs() -> set[str]:
    """Words like flags in what reads them: commands, tools, scripts, benchmarks and plug-ins."""
    folders = (
        "benchmarks",
        "examples",
        "scripts",
        "slime/agent",
        "slime/backends/megatron_utils/server",
        "slime/cli",
        "slime/environments",
        "slime_plugins",
        "tests/golden",
        "tools",
    )
    files = [
        file for folder in folders for kind in ("py", "sh") for file in (ROOT / folder).rglob(f"*.{kind}")
    ]
    return {flag for file in files for flag in flags_in(file.read_text(encoding="utf-8"))}


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z](?:[a-z0-9-]*[a-z0-9])?(?![\w*-])", text))


def test_flags_that_pages_name_exist():
    known = (
        set(re.findall(r'<a id="(--[\w-]+)"></a>', PAGE.read_text(encoding="utf-8")))
        | of_programs()
        | ELSEWHERE
    )
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        text = page.read_text(encoding="utf-8")
        if page.stem == "coming-from":
            text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)  # other programs' names
        unknown = {flag for flag in flags_in(text) - known if not flag.startswith("--sglang-")}
        assert page.stem in OTHERS or sorted(unknown) == [], page
    assert flags_in("`--lr 1`, `--lrr`, `--eval-...`") - known == {"--lrr"}
