"""What is read of a task's directory, what is refused, and which rewards and trees are believed."""

import io
import json
import tarfile

import pytest

from slime.agent.harbor import TaskError, VerifierError, find_tasks, load_task, reward_of, row_of
from slime.agent.harbor.__main__ import main
from slime.agent.harbor.rewards import from_json, from_text
from slime.agent.harbor.trees import checked, tree_of
from slime.agent.sandbox import ContainerLimits, SandboxError
from tests.agent.harbor_tasks import TOML, make_task
from tests.each import hold_each
from tests.page_runs import printed


def test_a_task_says_what_its_files_say(tmp_path):
    toml = TOML + 'workdir = "/srv"\nenv = { A = "b" }\ncpus_ = 1\n[solution]\nenv = { S = "t" }\n'
    task = load_task(make_task(tmp_path / "one", toml=toml))
    assert task.instruction == "Write 42 to the file answer in the working directory.\n"
    assert (task.agent_s, task.verifier_s, task.build_s) == (300.0, 120.0, 600.0)
    assert task.limits == ContainerLimits(memory_bytes=512 << 20, cpus=1.0)
    assert (task.workdir, task.needs_network, task.verifier_needs_network) == ("/srv", False, False)
    assert (task.env, task.solution_env, task.verifier_env) == ({"A": "b"}, {"S": "t"}, {})
    assert (task.image, task.agent_user, task.verifier_user) == (None, "root", "root")


def test_what_a_task_does_not_say_has_a_default(tmp_path):
    toml = (
        '[environment]\ndocker_image = "debian:12"\nmemory = "2G"\n[verifier]\nnetwork_mode = "no-network"\n'
    )
    task = load_task(make_task(tmp_path / "one", toml=toml))
    assert (task.image, task.limits.memory_bytes, task.workdir) == ("debian:12", 2 << 30, None)
    assert (task.needs_network, task.verifier_needs_network) == (True, False)
    older = TOML.replace('network_mode = "no-network"', "allow_internet = false")
    assert not load_task(make_task(tmp_path / "two", toml=older)).needs_network


REFUSED = {
    r"\[\[steps\]\]: not supported": TOML + '[[steps]]\nname = "a"\n',
    "Windows: not supported": TOML + 'os = "Windows"\n',
    "GPUs: not supported": TOML + "gpus = 1\n",
    "TPUs: not supported": TOML + 'tpu = { type = "v4", topology = "2x2" }\n',
    "MCP servers: not supported": TOML + '[[environment.mcp_servers]]\nname = "a"\n',
    "healthcheck: not supported": TOML + '[environment.healthcheck]\ncommand = "true"\n',
    r"\[verifier.environment\]: not supported": TOML + "[verifier.environment]\ncpus = 1\n",
    "network_mode allowlist: not supported": TOML.replace("no-network", "allowlist"),
    r"env KEY: values of the host's environment": TOML + 'env = { KEY = "${KEY}" }\n',
    r"memory '2X' \(wanted: such as 512M": TOML.replace("memory_mb = 512", 'memory = "2X"'),
    r"timeout_sec 0.0 \(wanted: above 0\)": TOML.replace("300.0", "0"),
    "environment is no table": "environment = 3",
    "Invalid value": "environment = ",
}


def test_what_is_not_supported_is_refused_by_name(tmp_path):
    def holds(row):
        match, toml = row
        task = make_task(tmp_path / "one", toml=toml)
        with pytest.raises(TaskError, match=f"task {task}: .*{match}"):
            load_task(task)

    hold_each(REFUSED.items(), holds)


def test_files_that_are_missing_or_not_supported_are_named(tmp_path):
    def holds(row):
        name, match = row
        task = make_task(tmp_path / name.replace("/", "-"))
        if (task / name).exists():
            (task / name).unlink()
        else:
            (task / name).write_text("")
        with pytest.raises(TaskError, match=match):
            load_task(task)

    rows = {
        "task.toml": "no task.toml",
        "instruction.md": "no instruction.md",
        "tests/test.sh": "no test.sh",
        "environment/Dockerfile": "neither environment/Dockerfile nor docker_image",
        "environment/docker-compose.yaml": "docker-compose: not supported",
        "trajectory.json": "trajectory.json: not supported",
    }
    hold_each(rows.items(), holds)
    with pytest.raises(TaskError, match=r"instruction.md is empty"):
        load_task(make_task(tmp_path / "empty", instruction="# canary\n\n"))


def test_tasks_become_rows_of_a_run(tmp_path, capsys):
    for name in ("b", "a"):
        make_task(tmp_path / "tasks" / name)
    (tmp_path / "tasks" / "notes").mkdir()
    (page,) = printed("python -m slime.agent.harbor")
    own = {"tasks": str(tmp_path / "tasks"), "tasks.jsonl": str(tmp_path / "new/rows.jsonl")}
    assert main([own.get(word, word) for word in page.words[3:]]) == 0
    assert capsys.readouterr().out == f"2 rows in {tmp_path / 'new/rows.jsonl'}\n"
    first, second = map(json.loads, (tmp_path / "new/rows.jsonl").read_text().splitlines())
    assert first == row_of(load_task(tmp_path / "tasks" / "a"))
    assert first["prompt"] == [
        {"role": "user", "content": "Write 42 to the file answer in the working directory.\n"}
    ]
    assert second["metadata"] == {"harbor": str(tmp_path / "tasks" / "b")}
    assert find_tasks(tmp_path / "tasks" / "a") == [tmp_path / "tasks" / "a"]
    assert main([str(tmp_path / "tasks" / "notes"), "--rows", str(tmp_path / "x")]) == 1
    assert "no directory in it has a task.toml" in capsys.readouterr().err


def test_rewards_are_finite_numbers():
    assert from_json('{"a": 1, "b": 0.5, "c": true}') == {"a": 1.0, "b": 0.5, "c": 1.0}
    assert from_json("0.25") == from_text(" 0.25\n") == {"reward": 0.25}

    def holds(row):
        read, text = row
        with pytest.raises(VerifierError, match=r"reward\.(json|txt)"):
            read(text)

    of_json = [
        "",
        "{}",
        "[1]",
        '{"a": "1"}',
        '{"a": NaN}',
        "1e400",
        '{"a": null}',
        '{"a": {}}',
        "9" * 400,
        "[",
    ]
    rows = [
        *((from_json, text) for text in of_json),
        *((from_text, text) for text in ("", "one", "nan", "1 2")),
    ]
    hold_each(rows, holds)


def test_of_several_rewards_the_one_with_the_name_counts_or_their_mean():
    assert reward_of({"reward": 0.2, "other": 1.0}) == 0.2
    assert reward_of({"style": 0.5}) == 0.5
    assert reward_of({"style": 0.0, "speed": 1.0}) == 0.5


def tree(*members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as target:
        for name, kind, rest in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if kind == tarfile.REGTYPE:
                member.size = len(rest)
                target.addfile(member, io.BytesIO(rest))
            else:
                member.linkname = rest
                target.addfile(member)
    return out.getvalue()


def members_of(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as source:
        return {member.name: member.linkname or member.size for member in source}


def test_a_tree_changes_nothing_outside_of_its_folder(caplog):
    file, folder, link, same = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
    kept = checked(
        tree(
            *[
                ("./", folder, ""),
                ("./a", folder, ""),
                ("a/b", file, b"text"),
                ("python", link, "/usr/bin/python3"),
            ],
            *[
                ("again", same, "./a/b"),
                ("a/b", file, b"other"),
                ("../out", file, b"x"),
                ("/tests/x", file, b"x"),
            ],
            *[("tests", link, "/tests"), ("tests/test.sh", file, b"x"), ("a/../../x", file, b"x")],
            *[
                ("passwd", same, "/etc/passwd"),
                ("through", same, "tests/test.sh"),
                ("pipe", tarfile.FIFOTYPE, ""),
            ],
            *[("disk", tarfile.BLKTYPE, ""), ("python/x", folder, ""), ("linked", same, "python")],
        ),
        longest=100,
    )
    wanted = {
        ".": 0,
        "./a": 0,
        "./a/b": 4,
        "./python": "/usr/bin/python3",
        "./again": "./a/b",
        "./tests": "/tests",
    }
    assert members_of(kept) == wanted
    assert "'../out'" in caplog.text and "'tests/test.sh'" in caplog.text


def test_what_is_no_tree_or_too_large_is_refused():
    for data in (b"", b"no tree" * 100, tree(("a", tarfile.REGTYPE, b"x" * 9000))[:2000]):
        with pytest.raises(SandboxError, match="a tree of a sandbox cannot be read"):
            checked(data, longest=10_000)
    with pytest.raises(SandboxError, match="more than 10 bytes"):
        checked(tree(("a", tarfile.REGTYPE, b"x" * 6), ("b", tarfile.REGTYPE, b"x" * 6)), longest=10)


def test_a_folder_of_this_machine_belongs_to_root_there(tmp_path):
    make_task(tmp_path / "one")
    with tarfile.open(fileobj=io.BytesIO(tree_of(tmp_path / "one" / "tests"))) as source:
        assert {(m.name, m.uid, m.uname) for m in source} >= {
            ("./test.sh", 0, "root"),
            ("./wanted", 0, "root"),
        }
