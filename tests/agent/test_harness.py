"""Command-line agents in sandboxes: what is installed, written and started, and what becomes of their turns.

The agents themselves are not to be had here; `tests.agent.stand_in_cli` speaks their protocols.
"""

import asyncio
import json
from pathlib import Path

import pytest

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.harness import (
    CLAUDE_CODE,
    CODEX,
    ClaudeCodeHarness,
    CodexHarness,
    CommandHarness,
    HarnessContext,
    run_agent,
)
from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, ExecResult, LocalSandbox, SandboxError
from slime.utils.types import Sample
from tests.agent import stand_in_cli
from tests.engines.fake import EOS

KEY = "a-session-whose-id-nobody-else-may-see"
PROGRAMS = "/workspace/bin"
REPO = "/workspace/repo"
CONTEXT = HarnessContext(REPO, KEY, "http://127.0.0.1:1")
OTHER = CommandHarness(
    "other",
    f'{PROGRAMS}/other "$SLIME_PROMPT_FILE"',
    env={
        "OPENAI_BASE_URL": "{adapter_url}/v1",
        "OPENAI_API_KEY": "{session_id}",
        "AGENT_CONFIG": "{folder}/agent.json",
    },
    files={"agent.json": '{"model": "m", "key": "{session_id}", "where": "{workdir}"}'},
)
HARNESSES = {
    "claude": (ClaudeCodeHarness(f"{PROGRAMS}/claude"), AnthropicAdapter),
    "codex": (CodexHarness(f"{PROGRAMS}/codex"), OpenAIAdapter),
    "other": (OTHER, OpenAIAdapter),
}


def call(command):
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


@pytest.fixture
async def enter():
    """``await enter(...)``: a local sandbox with these options, which ends with the test."""
    entered = []

    async def make(**options):
        try:
            entered.append(await LocalSandbox(**options).__aenter__())
        except SandboxError as error:
            pytest.skip(str(error))
        return entered[-1]

    yield make
    for sandbox in entered:
        await sandbox.close()


async def put(sandbox, name):
    """Writes the stand-in under an agent's name."""
    source = Path(stand_in_cli.__file__).read_text()
    await sandbox.write_file(f"{PROGRAMS}/{name}", f"#!{sandbox.python}\n{source}")
    await sandbox.exec(f"chmod +x {PROGRAMS}/{name}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", HARNESSES)
async def test_an_agent_s_turns_are_trained_by_their_own_tokens(enter, engine, tokenizer, kind):
    harness, adapter_class = HARNESSES[kind]
    answers = [call("echo one > a; cat a"), f"More. {call('cat a a > b; cat b')}", "Done."]
    left = iter(answers)
    engine.answer = lambda conversation: next(left)
    adapter = adapter_class(tokenizer=tokenizer, sglang_url=f"{engine.url}/generate", tool_parser="hermes")
    server = run_app_in_thread(adapter.app)
    try:
        sandbox = await enter(ports=[server.port])
        await put(sandbox, kind)
        adapter.open_session(KEY, sampling_defaults={"max_new_tokens": 500})
        task = {"workdir": REPO, "session_id": KEY, "adapter_url": server.url, "time_budget_sec": 600}
        assert await harness.run(sandbox, prompt="Write it twice.", **task) == 0
        assert await sandbox.read_file(f"{REPO}/b") == "one\none\n"
        (sample,) = await adapter.finish_session(KEY, base_sample=Sample(index=1), reward=1.0)
    finally:
        server.stop()
    ids = sample.tokens[-sample.response_length :]
    trained = [token for token, mask in zip(ids, sample.loss_mask, strict=True) if mask]
    made = [tokenizer(text + EOS, add_special_tokens=False)["input_ids"] for text in answers]
    assert trained == [token for ids in made for token in ids]
    assert tokenizer.decode(sample.tokens).count("one\none\n") == 1 and sample.metadata["round_number"] == 3
    seen = json.loads(await sandbox.read_file(f"{REPO}/seen.json"))
    assert seen["prompt"] == "Write it twice." and seen["mode"] == "0o600"
    lines = [line for line in seen["command_lines"] if line]
    assert any(f"{PROGRAMS}/{kind}" in line for line in lines) and not [line for line in lines if KEY in line]


async def test_what_a_task_says_is_filled_into_the_configuration(enter):
    sandbox = await enter()
    await OTHER.write_config(sandbox, CONTEXT)
    written = json.loads(await sandbox.read_file(f"{OTHER.folder}/agent.json"))
    assert written == {"model": "m", "key": KEY, "where": REPO}
    modes = (await sandbox.exec(f"stat -c %a {OTHER.folder} {OTHER.folder}/agent.json")).output
    assert modes == "700\n600\n" and KEY not in repr(CONTEXT)
    with pytest.raises(ValueError, match=r"\{session_id\} in the command \(wanted: in env or files alone\)"):
        CommandHarness("other", "agent --key {session_id}")


@pytest.mark.slow
@pytest.mark.parametrize("stays", [False, True], ids=["one command", "detached"])
async def test_an_agent_over_its_time_ends_with_all_that_it_started(enter, stays):
    sandbox = await enter(keep_background=stays)
    start = "sleep 6000 & (sleep 6001 & sleep 6002) & echo begun > begun; wait"
    options = {"workdir": sandbox.workspace, "env": {}, "time_budget_sec": 1.0}
    assert await run_agent(sandbox, start_cmd=start, **options) == EXIT_TIME_BUDGET_EXCEEDED
    assert await sandbox.read_file("begun") == "begun\n"
    async with asyncio.timeout(300):  # the kill has been sent; each process dies when its turn comes
        while "sleep" in (await sandbox.exec("cat /proc/[0-9]*/comm")).output.split():
            await asyncio.sleep(0.01)


async def test_an_agent_that_fails_is_told_from_one_that_cannot_be_run(enter, caplog):
    sandbox = await enter()
    options = {"workdir": sandbox.workspace, "env": {}, "time_budget_sec": 600}
    assert await run_agent(sandbox, start_cmd="echo why; exit 3", **options) == 3
    assert "exit code 3; its output ends with:\nwhy" in caplog.text
    with pytest.raises(SandboxError, match=r"could not be run, exit code 127: .*no-such-agent"):
        await run_agent(sandbox, start_cmd="no-such-agent", **options)
    with pytest.raises(SandboxError, match=f"other: no {PROGRAMS}/other in the sandbox: it is not installed"):
        await OTHER.run(
            sandbox, workdir=REPO, session_id=KEY, adapter_url="http://x", time_budget_sec=1, prompt=""
        )


class Recorder:
    """A sandbox that does nothing: it notes commands and files, and has a program once it is installed."""

    def __init__(self, installs=True):
        self.commands, self.files, self.installs, self.there = [], {}, installs, False

    async def exec(self, cmd, *, user="root", env=None, workdir=None, timeout=60):
        self.commands.append((user, cmd))
        if "install" in cmd:
            self.there = self.installs
            return ExecResult(0 if self.installs else 1, "no such version")
        return ExecResult(0 if self.there or not cmd.startswith("command -v") else 1, "")

    async def write_file(self, path, content):
        self.files[path] = content


@pytest.mark.parametrize(
    ("harness", "wanted"),
    [
        (CLAUDE_CODE, "npm install -g @anthropic-ai/claude-code@latest"),
        (ClaudeCodeHarness(version="2.0.1"), "npm install -g @anthropic-ai/claude-code@2.0.1"),
        (CODEX, "npm install -g @openai/codex@0.171.0"),
        (
            CommandHarness("mini", "mini -y", install="pip install mini-swe-agent"),
            "pip install mini-swe-agent",
        ),
    ],
)
async def test_an_agent_is_installed_by_root_once_and_looked_for_as_its_user(harness, wanted):
    sandbox = Recorder()
    await harness.install_cli(sandbox)
    await harness.install_cli(sandbox)
    look = ("agent", f"command -v {harness.executable}")
    assert sandbox.commands == [look, ("root", wanted), look, look]
    with pytest.raises(SandboxError, match=f"{harness.name}: no {harness.executable} in .*no such version"):
        await harness.install_cli(Recorder(installs=False))


async def test_files_are_written_where_nobody_else_can_read_them():
    """The folder is shut before there is anything in it, and given to the agent's user at the end."""
    sandbox = Recorder()
    await CODEX.write_config(sandbox, CONTEXT)
    (first_user, first), (_, last) = sandbox.commands
    assert (first_user, first) == ("root", "mkdir -p /tmp/slime-codex && chmod 700 /tmp/slime-codex")
    assert "chmod -R go= /tmp/slime-codex" in last and "chown -R agent /tmp/slime-codex" in last
    assert list(sandbox.files) == ["/tmp/slime-codex/config.toml"]
    assert not [text for text in sandbox.files.values() if KEY in text]


async def test_only_ports_that_were_asked_for_are_reached(enter, engine):
    other = type(engine)(engine.tokenizer).start()
    try:
        code = """
import socket, sys
for port in map(int, sys.argv[1:]):
    with socket.socket() as client:
        client.settimeout(60)
        print(client.connect_ex(("127.0.0.1", port)) == 0)
"""
        for ports, expected in ([engine.port], "True\nFalse\n"), ([], "False\nFalse\n"):
            sandbox = await enter(ports=ports)
            await sandbox.write_file("code.py", code)
            found = await sandbox.exec(f"python code.py {engine.port} {other.port}")
            assert found == (0, expected)
            assert "network" in sandbox.held
    finally:
        other.stop()


async def test_long_bodies_and_many_connections_pass_through_a_port(enter):
    """A server that says how much it was sent, once the sender has said all."""
    sizes = []

    async def count(reader, writer):
        sizes.append(len(await reader.read(-1)))
        writer.write(b"x" * sizes[-1])
        writer.close()

    server = await asyncio.start_server(count, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = f"""
import socket
clients = [socket.create_connection(("127.0.0.1", {port})) for _ in range(5)]
for client in clients:
    client.sendall(bytes(3 << 20))
    client.shutdown(socket.SHUT_WR)
for client in clients:
    got = 0
    while chunk := client.recv(1 << 20):
        got += len(chunk)
    print(got)
"""
    async with server:
        sandbox = await enter(ports=[port])
        await sandbox.write_file("code.py", code)
        assert await sandbox.exec("python code.py") == (0, f"{3 << 20}\n" * 5)
    assert sizes == [3 << 20] * 5


async def test_ports_need_a_network_of_their_own():
    with pytest.raises(
        SandboxError, match=r"ports \[8000\] cannot be reached from inside \(no network of its"
    ):
        async with LocalSandbox(ports=[8000], namespaces=False, allow_weaker=True):
            pass
    with pytest.raises(ValueError, match=r"ports \[0, 70000\]: wanted numbers from 1 to 65535"):
        LocalSandbox(ports=[0, 70000])
