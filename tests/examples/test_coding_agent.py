"""A model that repairs code: what it earns, and what it cannot cheat by."""

import json

import pytest

from examples.coding_agent import make_data, repair
from examples.coding_agent.grading import share_of_right_cases
from slime.agent.sandbox import LocalSandbox, SandboxError, by_line
from slime.rollout.base_types import RolloutError
from slime.rollout.episodes import Episodes
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.utils.types import Sample
from tests.engines.fake import HEADER, TalkingEngine

# The tokenizer and the args of the rollout tests.
from tests.rollout.conftest import *  # noqa: F403

pytestmark = pytest.mark.slow

RIGHT = {
    "last": "def last(items):\n    return items[-1] if items else None\n",
    "clamp": "def clamp(n, low, high):\n    return max(low, min(n, high))\n",
    "mean": "def mean(ns):\n    return sum(ns) / len(ns) if ns else 0.0\n",
    "vowels": "def vowels(text):\n    return sum(c in 'aeiouAEIOU' for c in text)\n",
}


def shell(command):
    return f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': command}})}</tool_call>"


def written(source):
    return shell(f"cat > solution.py <<'EOF'\n{source}EOF")


@pytest.fixture
async def sandboxed():
    try:
        async with LocalSandbox():
            pass
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture
def engine(tokenizer):
    engine = TalkingEngine(tokenizer)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def try_on(engine, make_args):
    """An episode in which the model says these, then that it is done."""

    async def run(name, *says):
        engine.answer = lambda conversation: [*says, "done"][conversation.count(HEADER)]
        row = make_data.row_of(name, make_data.BUGS[name])
        sample = Sample(prompt=row["prompt"], metadata=row["metadata"], index=0, group_index=0)
        return await repair.generate(make_args(), sample, {"max_new_tokens": 600})

    return run


async def test_a_model_that_looks_and_repairs_is_rewarded(
    sandboxed, engine, make_args, make_source, tmp_path
):
    make_data.main(["--output", str(tmp_path / "bugs.jsonl")])
    args = make_args(
        prompt_data=str(tmp_path / "bugs.jsonl"),
        label_key=None,
        apply_chat_template=False,
        custom_generate_function_path="examples.coding_agent.repair.generate",
        custom_rm_path=None,
        rollout_max_response_len=600,
        n_samples_per_prompt=1,
    )

    def answer(conversation):
        name = conversation.split("`")[1]
        return [shell("cat solution.py"), written(RIGHT[name]), "done"][conversation.count(HEADER)]

    engine.answer = answer
    samples = [group[0] for group in (await generate_rollout_async(args, 0, make_source(args))).samples]
    assert [sample.reward for sample in samples] == [1.0] * 3
    for sample in samples:
        assert sample.metadata["source"] in sample.response and "(exit code 0)" in sample.response


@pytest.mark.parametrize(
    "says",
    [
        [],
        [shell("rm solution.py && touch solution.py")],
        [shell("rm solution.py")],
        [written("import os\nos._exit(0)\n")],
        [written("import sys\ndef last(items):\n    sys.exit(0)\n")],
        [written("def last(items):\n    while True: pass\n")],
        [shell("echo 'import os; os._exit(0)' > runner.py; echo '[]' > arguments.json")],
    ],
    ids=range(7),
)
async def test_nothing_but_the_right_function_is(sandboxed, try_on, says, monkeypatch):
    monkeypatch.setattr("examples.coding_agent.grading.CALL_S", 3)
    sample = await try_on("last", *says)
    assert (sample.reward, sample.status) == (0.0, Sample.Status.COMPLETED), says


async def test_what_is_no_command_is_told_so(sandboxed, try_on):
    sample = await try_on("last", '<tool_call>{"name": "shell", "arguments": {"command": 7}}</tool_call>')
    assert "error: no command" in sample.response and sample.reward == 0.0


@pytest.mark.parametrize("name", make_data.BUGS)
async def test_each_function_is_wrong_as_it_is_and_right_when_repaired(sandboxed, name):
    row = make_data.row_of(name, make_data.BUGS[name])["metadata"]
    for source, all_right in ((row["source"], False), (RIGHT[name], True)):
        async with LocalSandbox() as sandbox:
            share = await share_of_right_cases(sandbox, source, row["function"], row["cases"])
        assert (share == 1.0) is all_right


async def test_a_repository_is_prepared_once_and_no_episode_changes_it(
    sandboxed, try_on, monkeypatch, tmp_path
):
    tmp_path.chmod(0o755)  # who works in a sandbox is another user
    (tmp_path / "helper.py").write_text("def first(items): return items[0]\n")
    lines = []
    monkeypatch.setattr(repair, "by_line", lambda line: lines.append(line) or by_line(line))
    options = {"prepare": f"cp {tmp_path}/helper.py .", "readable": [str(tmp_path)]}
    monkeypatch.setattr(repair, "generate", Episodes(repair.Repair, options, max_turns=12))
    right = "import helper\ndef last(items):\n    return helper.first(items[::-1]) if items else None\n"
    for _ in range(2):
        sample = await try_on("last", shell("cat helper.py"), shell("rm helper.py"), written(right))
        assert "def first" in sample.response and sample.reward == 1.0
    assert lines == [options["prepare"]]


async def test_a_machine_that_holds_no_sandbox_ends_the_run(try_on, monkeypatch):
    async def fails(self):
        raise SandboxError("cannot hold files")

    monkeypatch.setattr(LocalSandbox, "__aenter__", fails)
    with pytest.raises(RolloutError, match="cannot hold files"):
        await try_on("last")
