"""Tasks in containers of a stand-in for docker: what is run where, and what comes to no reward."""

from itertools import pairwise

import pytest

from slime.agent.harbor import TaskError, VerifierError, grade, load_task, open_sandbox
from slime.agent.harbor.__main__ import main
from slime.agent.harbor.grading import workdir_of
from slime.agent.harbor.images import image_of
from slime.agent.sandbox import LocalSandbox, SandboxError
from tests.agent.containers import IMAGE, StandIn, has_namespaces
from tests.agent.harbor_tasks import TESTS, TOML, make_task

pytestmark = pytest.mark.slow
SAYS = "#!/bin/sh\nmkdir -p /logs/verifier\n"


@pytest.fixture
def engine(tmp_path, monkeypatch):
    if not has_namespaces():
        pytest.skip("the stand-in for docker needs namespaces")
    (tmp_path / "engine").mkdir()
    made = StandIn(tmp_path / "engine", monkeypatch)
    yield made
    made.remove_all()


@pytest.fixture
def graded(engine, tmp_path):
    """``await graded(line, **files)``: the rewards of a task after a line of shell in its sandbox."""

    async def run(line, **files):
        task = load_task(make_task(tmp_path / "task", **files))
        async with open_sandbox(task, None) as sandbox:
            folder = await workdir_of(task, sandbox)
            code, said = await sandbox.exec(line, workdir=folder)
            assert code == 0, said
            return await grade(task, sandbox, folder, None)

    return run


async def test_what_was_done_in_the_working_directory_is_graded(graded, engine):
    assert await graded("pwd | grep -qx /app && cat given && echo 42 > answer") == {"reward": 1.0}
    assert await graded("echo 41 > answer") == {"reward": 0.0}
    assert [words[0] for words in engine.calls].count("build") == 1 and not engine.running


async def test_whoever_works_reaches_neither_tests_nor_rewards_of_the_grading(graded):
    line = """
    [ ! -e /tests ] && [ ! -e /solution ] || exit 1
    mkdir -p /tests /logs/verifier
    echo 1 > /logs/verifier/reward.txt; echo '{"reward": 1}' > /logs/verifier/reward.json
    printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' > /tests/test.sh; echo 41 > /tests/wanted
    echo 41 > answer; ln -s /tests tests; ln -s /logs/verifier/reward.json reward.json
    """
    assert await graded(line) == {"reward": 0.0}


async def test_what_was_removed_is_not_there_in_the_grading(graded):
    tests = (
        SAYS + "[ -e given ] && echo 0 > /logs/verifier/reward.txt || echo 1 > /logs/verifier/reward.txt\n"
    )
    assert await graded("true", tests=tests) == {"reward": 0.0}
    assert await graded("rm given", tests=tests) == {"reward": 1.0}
    assert await graded("rm -rf /app", tests=tests) == {"reward": 1.0}


async def test_rewards_are_read_first_from_json(graded):
    tests = (
        SAYS
        + 'echo 0 > /logs/verifier/reward.txt\necho \'{"a": 1, "b": 0.5}\' > /logs/verifier/reward.json\n'
    )
    assert await graded("true", tests=tests + "exit 3\n") == {"a": 1.0, "b": 0.5}


async def test_tests_that_come_to_no_reward_are_no_reward_of_0(graded):
    with pytest.raises(VerifierError, match=r"its tests wrote no reward, and ended with exit code 7: wrong"):
        await graded("true", tests=SAYS + "echo wrong >&2\nexit 7\n")
    slow = TOML.replace("120.0", "0.5")
    with pytest.raises(VerifierError, match=r"its tests took longer than 0.5 s"):
        await graded("true", toml=slow, tests=SAYS + "echo 1 > /logs/verifier/reward.txt\nsleep 600\n")
    with pytest.raises(SandboxError, match="not a regular file"):
        await graded("true", tests=SAYS + "ln -s /proc/1/status /logs/verifier/reward.json\n")


async def test_limits_environment_and_network_are_the_task_s(engine, tmp_path):
    toml = TOML.replace('"no-network"', '"public"\nenv = { A = "b c" }')
    task = load_task(make_task(tmp_path / "task", toml=toml))
    for grades in (False, True):
        with pytest.raises(
            TaskError, match=r"network_mode public, which is the default \(wanted: no-network"
        ):
            async with open_sandbox(task, None, grades=grades):
                pass
    async with open_sandbox(task, "of-mine") as sandbox:
        assert (await sandbox.exec('echo "$A"')).output == "b c\n"
    (run,) = [words for words in engine.calls if words[0] == "run"]
    wanted = {"--memory": "536870912b", "--cpus": "1", "--network": "of-mine"}
    assert wanted.items() <= dict(pairwise(run)).items() and run[-1] == str(300 + 120 + 600)
    private = load_task(make_task(tmp_path / "private"))
    async with open_sandbox(private, "of-mine"):
        assert dict(pairwise(engine.calls[-1]))["--network"] == "none"


async def test_an_image_is_built_again_once_its_files_have_changed(engine, tmp_path):
    task = load_task(make_task(tmp_path / "task"))
    first = await image_of(task)
    assert await image_of(task) == first
    (tmp_path / "task/environment/given").write_text("other\n")
    assert await image_of(task) != first
    assert [words[0] for words in engine.calls].count("build") == 2
    (tmp_path / "task/environment/Dockerfile").write_text("RUN make")
    with pytest.raises(SandboxError, match=r"task .*: its image cannot be built: Error: RUN: not understood"):
        await image_of(task)


async def test_a_sandbox_without_a_root_of_its_own_is_refused(tmp_path):
    toml = TOML + f'docker_image = "{IMAGE}"\n'
    task = load_task(make_task(tmp_path / "task", toml=toml))
    with pytest.raises(
        TaskError, match=r"LocalSandbox has no root of its own, and tasks use /app, /tests and"
    ):
        async with open_sandbox(task, None, make=lambda *_: LocalSandbox()):
            pass


def test_solutions_show_whether_tasks_hold(engine, tmp_path, capsys):
    make_task(tmp_path / "tasks/good")
    make_task(tmp_path / "tasks/silent", tests=TESTS.replace("reward.txt", "nothing"))
    assert main([str(tmp_path / "tasks/good"), "--oracle"]) == 0
    assert main([str(tmp_path / "tasks/silent"), "--oracle"]) == 1
    good, silent = capsys.readouterr().out.splitlines()[:2]
    assert good == 'good: {"reward": 1.0}, exit code 0 of the solution'
    assert silent.startswith("silent: task ") and "its tests wrote no reward" in silent
