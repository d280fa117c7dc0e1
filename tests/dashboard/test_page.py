"""The page in a browser: a newcomer finds what went wrong, by mouse and keys, on a phone and in the dark."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.cli.dashboard import runs_of
from slime.dashboard.server import dashboard
from slime.observability.jsonl import JsonlWriter
from tests.dashboard.browser import CHROMIUM, Browser, chromium
from tests.dashboard.planted import ATTACK, COLLAPSED, FAULTS, MASKED, SLOW, books_after, plant
from tests.serving import served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium (apt install chromium)"),
]
SHOTS = os.environ.get("SLIME_PAGE_PICTURES")
"""A directory for pictures of what the tests see."""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Browser]:
    base = tmp_path_factory.mktemp("page")
    run = plant(base / "planted")
    app = dashboard(runs_of([str(run)]), "secret", "127.0.0.1")
    with served(app, timeout_graceful_shutdown=5) as port, chromium(base / "profile") as browser:
        browser.address = f"http://127.0.0.1:{port}/secret/"
        yield browser


def open_page(page: Browser, address: str = "") -> None:
    page.problems.clear()
    page.open(f"{page.address}{address}")
    page.until("typeof runs !== 'undefined' && runs.length && document.querySelector('#faults li')")


def picture(page: Browser, name: str) -> None:
    if SHOTS:
        page.picture(Path(SHOTS) / f"{name}.png")


def test_a_newcomer_finds_the_planted_faults_above_everything_else(page) -> None:
    page.look(1300)
    open_page(page)
    page.until("document.querySelectorAll('#faults li').length >= 5 && document.querySelector('.uplot')")
    told = page.evaluate("[...document.querySelectorAll('#faults li')].map((row) => row.innerText)")
    assert len(told) == len(FAULTS) and page.text("#alarms") == f"{len(FAULTS)} alerts"
    for rule, step in FAULTS.items():
        (text,) = [text for text in told if text.startswith(rule)]
        assert f"step {step}" in text or f"rollout {step}" in text, text
        assert len(text.splitlines()[-1]) > 40, "the advice"
    picture(page, "curves")
    assert page.problems == []


def test_alerts_lead_to_the_curve_the_samples_and_the_time(page) -> None:
    open_page(page)

    def press(rule: str, button: str) -> None:
        row = (
            f"[...document.querySelectorAll('#faults li')].find((row) => row.innerText.startsWith('{rule}'))"
        )
        page.evaluate(
            f"[...{row}.querySelectorAll('button')].find((b) => b.innerText === '{button}').click()"
        )

    press("engine died", "curve")
    page.until(
        "[...document.querySelectorAll('figure')]"
        ".some((figure) => figure.innerText.startsWith('fleet/default/replaced'))"
    )
    press("everything masked", "samples")
    page.until(
        "document.querySelector('#tokens') && document.querySelectorAll('#samples tbody tr').length === 4"
    )
    assert page.evaluate("document.querySelector('#which input').value") == str(MASKED)
    page.evaluate(
        "(() => { const s = document.querySelector('#sample select'); s.value = 'mask'; s.onchange(); })()"
    )
    assert page.evaluate("document.querySelectorAll('#tokens .masked').length") == 7
    picture(page, "samples-masked")
    press("slow rank", "time")
    page.until("document.querySelectorAll('#lanes .lane').length >= 6")
    assert "log_probs 2.5 s" in page.text("#spent") and page.evaluate(
        "document.querySelector('#when input').value"
    ) == str(SLOW)
    assert "sample lane 2" in page.text("#lanes") and "tool" in page.text("#lanes")
    picture(page, "time")
    assert page.problems == []


def test_what_a_model_wrote_is_text(page) -> None:
    open_page(page, f"#view=samples&run=planted&step={COLLAPSED}&sample=1")
    page.until(
        "document.querySelectorAll('#samples tbody tr').length === 4 && document.querySelector('#tokens')"
    )
    assert ATTACK in page.text("#samples")
    assert ATTACK in page.evaluate("document.querySelector('#sample').textContent")
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert page.evaluate("document.title") == "slime" and page.problems == []


def test_keys_go_through_views_steps_samples_and_tokens(page) -> None:
    open_page(page, f"#view=samples&run=planted&step={COLLAPSED}")
    page.until("document.querySelector('#tokens')")
    page.press("j")
    page.until("document.querySelector('#sample h2').innerText.startsWith('sample 1,')")
    page.evaluate("document.querySelector('#tokens').focus()")
    for _ in range(5):
        page.press("ArrowRight")
    assert page.text("#token").startswith("token 1 of the response, id 1, log-prob, engine -0.2")
    page.press("]")
    page.until(f"document.querySelector('#which input').value === '{MASKED}'")
    for key, view in (("3", "engines"), ("4", "time"), ("1", "curves"), ("2", "samples")):
        page.press(key)
        page.until(
            "[...document.querySelectorAll('[data-view]')]"
            f".every((part) => part.hidden === (part.dataset.view !== '{view}'))"
        )
        assert page.evaluate("document.querySelector('#views [aria-pressed=true]').value") == view
    page.press("/")
    page.until("document.activeElement.id === 'filter'")
    assert page.problems == []


def test_tokens_are_coloured_by_what_the_step_changed_where_that_was_recorded(page) -> None:
    open_page(page, f"#view=samples&run=planted&step={COLLAPSED}&sample=1&colour=change by the step")
    page.until("document.querySelector('#tokens')")
    page.evaluate("document.querySelector('#tokens').focus()")
    for _ in range(4):
        page.press("ArrowRight")
    told = page.text("#token")
    assert "log-prob, before the step -0.6, log-prob, after the step -0.4" in told
    assert told.endswith("change by the step 0.2") and "not recorded" not in page.text("#sample")
    assert page.text("#scale").strip() == "-0.1 (red) to 0.2"
    reds = "[...document.querySelectorAll('.token')].filter((t) => t.style.background.includes('214')).length"
    assert page.evaluate(reds) == 6
    picture(page, "samples-change")
    page.press("[")
    page.until("document.querySelector('#sample').innerText.includes('training step: not recorded')")
    options = "[...document.querySelectorAll('#sample option')].map((option) => option.value)"
    assert "gap" in page.evaluate(options) and "change by the step" not in page.evaluate(options)
    assert page.problems == []


def test_curves_of_each_of_several_policies_are_there_at_first(page, tmp_path) -> None:
    metrics = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in range(3):
        own = {f"rollout/{policy}/raw_reward": 0.5 for policy in ("solver", "rewriter")}
        row = {"rollout/raw_reward": 0.5, "rollout/source/solver/raw_reward": 0.5, **own}
        metrics.write("rollout", step, row | {"rollout/solver/response_len/max": 0.0})
        metrics.write("train", step, {"train/solver/loss": 0.1})
    metrics.close()
    app = dashboard(runs_of([str(tmp_path)]), "secret", "127.0.0.1")
    with served(app, timeout_graceful_shutdown=5) as port:
        page.problems.clear()
        page.open(f"http://127.0.0.1:{port}/secret/")
        page.until("document.querySelectorAll('figure').length === 4 && document.querySelector('#faults li')")
        shown = page.evaluate("[...document.querySelectorAll('figure h2')].map((head) => head.innerText)")
        assert shown == [
            *("rollout/raw_reward", "rollout/rewriter/raw_reward", "rollout/solver/raw_reward"),
            "train/solver/loss",
        ]
        assert "policy solver: no answer has a token" in page.text("#faults")
        page.evaluate(
            "[...document.querySelectorAll('#faults button')].find((b) => b.innerText === 'curve').click()"
        )
        page.until("document.querySelector('figure').innerText.startsWith('rollout/solver/response_len/max')")
    assert page.problems == []


def test_engines_and_ledger_are_tables(page) -> None:
    open_page(page, "#view=engines")
    page.until("document.querySelectorAll('#tables .wide table').length === 4")
    text = page.text("#tables").replace("\u200b", "")
    assert "fleet/default/replaced" in text and "rollout/dropped/aborted" in text
    totals = page.evaluate("[...document.querySelectorAll('#tables .total')].map((row) => row.innerText)")
    assert [row.split() for row in totals][1] == ["all", "9"]
    picture(page, "engines")


def test_the_books_are_shown_in_numbers_and_stacked_rollout_by_rollout(page) -> None:
    open_page(page, "#view=engines")
    page.until("document.querySelector('.books .uplot')")
    assert page.text("p.sum") == (
        "After rollout 59: 515 groups issued = "
        "480 trained + 19 filtered + 9 dropped + 3 buffered + 4 leased. They balance."
    )
    rows = "[...[...document.querySelectorAll('#tables .wide table')][1].rows]"
    cells = f"{rows}.map((row) => [...row.cells].map((cell) => cell.innerText))"
    head, total, latest, *_ = page.evaluate(cells)
    assert head[:3] == ["rollout", "carried over", "issued"] and head[-1] == "balance"
    assert total == ["all", "", "515", "480", "19", "9", "3", "4", "yes"]
    assert latest == ["59", "5", "10", "8", "0", "0", "3", "4", "yes"]
    assert page.evaluate("document.querySelectorAll('#tables .loud').length") == 0
    stacked = "books.get('planted').plot.data.map((column) => column.at(-1))"
    assert page.evaluate(stacked) == [59, 15, 11, 8, 8, 8, 15, None]
    page.evaluate("refresh()")
    assert page.evaluate("document.querySelectorAll('.books .uplot').length") == 1
    picture(page, "ledger")
    assert page.problems == []


def test_books_that_do_not_balance_are_loud_and_those_that_are_not_kept_are_said_to_be_missing(
    page, tmp_path
) -> None:
    for name, accounts in (("broken", True), ("foreign", False)):
        metrics = JsonlWriter(tmp_path / name / "metrics.jsonl")
        for rollout in range(6):
            books = books_after(rollout) | {"unbalanced": 2 * (rollout in (3, 5))}
            told = {f"rollout/ledger/{account}": groups for account, groups in books.items()}
            metrics.write("rollout", rollout, {"rollout/step": rollout, **(told if accounts else {})})
        metrics.close()
    app = dashboard(runs_of([str(tmp_path / "broken"), str(tmp_path / "foreign")]), "secret", "127.0.0.1")
    with served(app, timeout_graceful_shutdown=5) as port:
        page.problems.clear()
        page.open(f"http://127.0.0.1:{port}/secret/")
        page.until("document.querySelector('#faults li')")
        assert page.text("#faults").startswith(
            "books do not balance"
        ) and "since rollout 3, 2 times" in page.text("#faults")
        page.evaluate(
            "[...document.querySelectorAll('#faults button')].find((b) => b.innerText === 'ledger').click()"
        )
        page.until("document.querySelector('.books .uplot')")
        assert page.text("p.loud") == (
            "The books do not balance: after 2 rollouts, the first of them 3; "
            "now 2 groups have no place, or more than one"
        )
        assert (
            not page.text("p.sum").endswith("They balance.")
            and page.evaluate("document.querySelectorAll('td.loud').length") == 3
        )
        assert "foreign: ledger\n\nnot recorded: " in page.text("#tables")
        picture(page, "ledger-broken")
    assert page.problems == []


def test_each_engine_has_a_row_as_the_run_last_told_it(page) -> None:
    open_page(page, "#view=engines")
    page.until("document.querySelectorAll('table.engines tbody tr').length === 4")
    cells = "[...document.querySelectorAll('table.engines tbody tr')].map((row) => [...row.cells].map({}))"
    rows = page.evaluate(cells.format("(cell) => cell.innerText"))
    heads = page.evaluate("[...document.querySelectorAll('table.engines thead th')].map((c) => c.innerText)")
    assert heads == [
        *("engine", "model", "state", "since", "health", "weights", "running", "waiting", "tokens/s"),
        *("cache", "last failure", "address"),
    ]
    by_name = [dict(zip(heads, row, strict=True)) for row in rows]
    assert [row["state"] for row in by_name] == ["serving", "serving", "draining", "dead"]
    assert all(row["since"] for row in by_name) and by_name[2]["running"] == "1"
    assert by_name[1]["last failure"].endswith("was killed by SIGKILL") and by_name[0]["last failure"] == ""
    assert by_name[3]["last failure"].endswith("within 30 s") and by_name[3]["tokens/s"] == ""
    assert [row["cache"] for row in by_name] == ["25 %", "13 %", "8 %", ""]
    assert page.evaluate("document.querySelector('table.engines .problem').innerText") == "dead"
    told = page.text("#tables p")
    assert told.startswith("2 serving; 1 draining; 1 dead; requests: 6 running, 2 waiting; 121.5 tokens/s")
    assert re.search(r"\(as the run last wrote it, .*, \d+ min( \d+ s)? ago\)$", told)
    assert page.problems == []


def test_what_a_server_said_before_it_died_is_text(page) -> None:
    open_page(page, "#view=engines")
    row = {"rank": 0, "state": ATTACK, "kind": ATTACK, "model": ATTACK, "url": ATTACK, "version": ATTACK}
    row |= {"health": ATTACK, "failure": ATTACK, "since": 1, "failed": 1, "running": 1, "waiting": None}
    told = {
        "is_live": True,
        "time": 1,
        "problem": ATTACK,
        "rows": [row | {"tokens_per_second": None, "cache": None}],
    }
    shown = page.evaluate(  # at once, before the next look at the run
        f"element('tables').replaceChildren(...enginesOf('x', {json.dumps(told)})), "
        "[document.querySelectorAll('main img, main script').length, element('tables').innerText]"
    )
    assert shown[0] == 0 and shown[1].count(ATTACK) == 9
    assert page.evaluate("document.title") == "slime" and page.problems == []


def test_a_run_that_comes_between_two_questions_is_shown_at_the_next_look(page) -> None:
    open_page(page, "#view=engines")
    page.until("document.querySelector('table.engines')")
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true})")  # it does not look by itself
    page.evaluate(
        "(() => { const real = window.fetch; window.left = 1; window.fetch = async (path) => "
        "path === 'api/engines' && window.left-- > 0 ? new Response('{}') : real(path); })()"
    )
    page.evaluate("refresh()")
    assert page.evaluate("window.left") == 0 and page.text("#state").startswith("as of ")
    assert page.evaluate("document.querySelectorAll('#tables .wide table').length") == 0
    page.evaluate("refresh()")
    assert page.evaluate("document.querySelectorAll('table.engines tbody tr').length") == 4
    assert page.problems == []


@pytest.mark.parametrize("view", ["curves", "samples", "engines", "time"])
def test_nothing_sticks_out_of_a_phone_and_text_can_be_read_in_the_dark(page, view: str) -> None:
    page.look(390, 844, "dark")
    open_page(page, f"#view={view}&run=planted&step={COLLAPSED}")
    shown = {"curves": ".uplot", "samples": "#tokens", "engines": "#tables table", "time": ".lane"}[view]
    page.until(f"document.querySelector('{shown}')")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    light = "getComputedStyle(document.body).{}.match(/\\d+/g).slice(0, 3).reduce((a, b) => +a + +b)"
    assert page.evaluate(light.format("color")) > 400 > 150 > page.evaluate(light.format("backgroundColor"))
    picture(page, f"phone-{view}")
    page.look(1300, 900, "dark")
    page.evaluate("document.querySelector('#tables').scrollIntoView()")
    picture(page, f"dark-{view}")
    page.look(1300)
    assert page.problems == []
