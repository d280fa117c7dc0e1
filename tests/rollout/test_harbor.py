"""A model works on tasks in containers of a stand-in for docker: what it is trained on, what it earns."""

import json
import shutil

import pytest

from slime.agent.harbor import load_task, row_of
from slime.agent.sandbox import LocalSandbox
from slime.agent.sandbox.engine import ENGINE
from slime.rollout import harbor
from slime.rollout.base_types import RolloutError
from slime.rollout.harbor import HarborAgents, harbor_shell
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.utils.types import Sample
from tests.agent.containers import StandIn, has_namespaces
from tests.agent.harbor_tasks import PYTHON, TESTS, TOML, agent_harness, make_task
from tests.engines.fake import EOS, HEADER, TalkingEngine

pytestmark = pytest.mark.slow
PARAMS = {"max_new_tokens": 300, "temperature": 1.0}
AGENT = 'raise SystemExit(subprocess.run(["sh", "-c", said]).returncode)\n'
generate = harbor_shell(max_turns=3)


def shell(command):
    return f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': command}})}</tool_call>"


@pytest.fixture
def containers(tmp_path, monkeypatch):
    if not has_namespaces():
        pytest.skip("the stand-in for docker needs namespaces")
    (tmp_path / "engine").mkdir()
    made = StandIn(tmp_path / "engine", monkeypatch)
    yield made
    assert not made.running
    made.remove_all()


@pytest.fixture
def engine(tokenizer):
    engine = TalkingEngine(tokenizer)
    engine.start()
    yield engine
    engine.stop()
    harbor._provider.cache_clear()


@pytest.fixture
def sample_of(tmp_path):
    def make(**files):
        row = row_of(load_task(make_task(tmp_path / "task", **files)))
        return Sample(prompt=row["prompt"], metadata=row["metadata"], index=0, group_index=0)

    return make


def saying(*said):
    return lambda conversation: said[conversation.count(HEADER)]


def trained(tokenizer, sample):
    ids = sample.tokens[-sample.response_length :]
    return tokenizer.decode([token for token, mask in zip(ids, sample.loss_mask, strict=True) if mask])


async def test_rows_are_worked_on_and_trained_by_their_own_tokens(
    containers, engine, make_args, make_source, tokenizer, tmp_path
):
    said = [shell("cat given; echo 42 > answer"), "Done."]
    engine.answer = saying(*said)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row_of(load_task(make_task(tmp_path / "task")))) + "\n")
    args = make_args(
        prompt_data=str(path),
        label_key=None,
        apply_chat_template=False,
        custom_generate_function_path=f"{__name__}.generate",
        custom_rm_path=None,
        rollout_max_response_len=300,
        rollout_batch_size=1,
        over_sampling_batch_size=1,
        n_samples_per_prompt=2,
    )
    output = await generate_rollout_async(args, 0, make_source(args))
    samples = [sample for group in output.samples for sample in group]
    assert [sample.reward for sample in samples] == [1.0, 1.0]
    for one in samples:
        assert trained(tokenizer, one) == f"{said[0]}{EOS}{said[1]}{EOS}"
        assert "here\n(exit code 0)" in tokenizer.decode(one.tokens)
    assert [words[0] for words in containers.calls].count("run") == 4


async def test_the_last_turn_is_graded_and_so_is_the_end_of_the_time(
    containers, engine, make_args, sample_of
):
    engine.answer = saying(shell("true"), shell("echo 42 > answer"))
    made = await harbor_shell(max_turns=2)(make_args(), sample_of(), PARAMS)
    assert (made.reward, made.metadata["round_number"]) == (1.0, 2)
    engine.answer = saying(shell("echo 42 > answer"))
    made = await generate(make_args(), sample_of(toml=TOML.replace("300.0", "1e-3")), PARAMS, evaluation=True)
    assert (made.reward, made.metadata["round_number"]) == (0.0, 1)


async def test_containers_start_from_what_was_prepared_once_and_graders_do_not(
    containers, engine, make_args, sample_of
):
    tests = TESTS.replace("reward=1 ||", "[ ! -e /srv/tool ] && reward=1 ||")
    prepared = harbor_shell(max_turns=3, prepare="mkdir -p /srv && echo 42 > /srv/tool")
    engine.answer = saying(shell("cp /srv/tool answer; echo changed > /srv/tool"), "Done.")
    for _ in range(2):
        made = await prepared(make_args(), sample_of(tests=tests), PARAMS)
        assert made.reward == 1.0
    calls = [words[0] for words in containers.calls]
    assert (calls.count("commit"), calls.count("run")) == (1, 5)
    failing = harbor_shell(prepare="echo why; exit 3")
    assert (await failing(make_args(), sample_of(), PARAMS)).status is Sample.Status.ABORTED


async def test_a_task_without_a_verdict_is_no_reward_of_0(containers, engine, make_args, sample_of):
    engine.answer = saying("Done.")
    made = await generate(make_args(), sample_of(tests=TESTS.replace("reward.txt", "nothing")), PARAMS)
    assert made.status is Sample.Status.FAILED and made.remove_sample and made.reward is None
    assert "its tests wrote no reward" in made.metadata["grading_failure"]


async def test_what_is_wrong_for_all_rows_ends_the_run(
    containers, engine, make_args, sample_of, monkeypatch, tmp_path
):
    args, toml = make_args(), TOML.replace("no-network", "public")
    with pytest.raises(RolloutError, match="network_mode public, which is the default"):
        await generate(args, sample_of(toml=toml), PARAMS)
    with pytest.raises(RolloutError, match=r"no task of Harbor \(wanted: --prompt-data of python -m"):
        await generate(args, Sample(prompt=[{"role": "user", "content": "x"}], index=0), PARAMS)
    local = harbor_shell(make=lambda *_: LocalSandbox())
    with pytest.raises(RolloutError, match="LocalSandbox has no root of its own"):
        await local(args, sample_of(), PARAMS)
    monkeypatch.setenv(ENGINE, "no-such-engine")
    with pytest.raises(RolloutError, match=f"{ENGINE}=no-such-engine is no program"):
        await generate(args, sample_of(), PARAMS)


@pytest.mark.skipif(not shutil.which(PYTHON), reason=f"needs {PYTHON}")
async def test_an_agent_works_through_an_adapter(containers, engine, make_args, sample_of, tokenizer):
    agents = HarborAgents(agent_harness(), network="agents", adapter_host="127.0.0.1")
    sample = sample_of(agent=AGENT)
    engine.answer = saying("echo 42 > answer; exit 3")
    made = await agents(make_args(), sample, PARAMS)
    assert (made.reward, made.metadata["agent_exit_code"]) == (1.0, 3)
    assert made.metadata["harbor_rewards"] == {"reward": 1.0}
    assert trained(tokenizer, made) == f"echo 42 > answer; exit 3{EOS}"
    runs = [words for words in containers.calls if words[0] == "run"]
    assert [words[words.index("--network") + 1] for words in runs] == ["agents", "none"]
    installed = HarborAgents(
        agent_harness(), network="agents", adapter_host="127.0.0.1", install_network="bridge"
    )
    for _ in range(2):
        assert (await installed(make_args(), sample_of(agent=AGENT), PARAMS)).reward == 1.0
    runs = [words for words in containers.calls if words[0] == "run"][2:]
    found = [words[words.index("--network") + 1] for words in runs]
    assert found == ["bridge", "agents", "none", "agents", "none"]
    images = [words[-2] for words in runs]
    assert images[1] == images[3] != images[0] == images[2] == images[4]
    engine.answer = saying("true")
    made = await agents(make_args(), sample_of(agent=AGENT, tests="#!/bin/sh\n"), PARAMS)
    assert made.status is Sample.Status.FAILED and "wrote no reward" in made.metadata["grading_failure"]
    with pytest.raises(ValueError, match="network none"):
        HarborAgents(agent_harness(), network="none", adapter_host="127.0.0.1")
