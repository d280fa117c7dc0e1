"""Command-line agents: Claude Code, Codex, and any other that a command starts."""

import json
import shlex
from collections.abc import Mapping

from slime.agent.harness.common import BaseHarness, HarnessContext
from slime.agent.sandbox.protocol import AGENT_USER

_KEY = "SLIME_SESSION_KEY"
_PLACEHOLDERS = ("{session_id}", "{adapter_url}", "{workdir}", "{folder}")


class ClaudeCodeHarness(BaseHarness):
    """Anthropic's Claude Code, which speaks to an `AnthropicAdapter`.

    Args:
        executable: its program in the sandbox, by name or path.
        version: of the npm package, where it has to be installed.
        model: the name that its requests have.
    """

    name = "claude-code"

    def __init__(
        self, executable: str = "claude", *, version: str = "latest", model: str = "default"
    ) -> None:
        super().__init__(executable)
        self._version, self._model = version, model

    def install_command(self) -> str:
        return f"npm install -g {shlex.quote(f'@anthropic-ai/claude-code@{self._version}')}"

    def config_files(self, ctx: HarnessContext) -> Mapping[str, str]:
        settings = {"permissions": {"defaultMode": "bypassPermissions"}, "includeCoAuthoredBy": False}
        return {"settings.json": json.dumps(settings, indent=2)}

    def environment(self, ctx: HarnessContext) -> Mapping[str, str]:
        return {
            "ANTHROPIC_BASE_URL": ctx.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": self._model,
            "ANTHROPIC_SMALL_FAST_MODEL": self._model,
            "CLAUDE_CONFIG_DIR": self.folder,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "MAX_THINKING_TOKENS": "0",  # the model's chat template says whether it thinks
            "IS_SANDBOX": "1",  # else it refuses to skip permissions as root
        }

    def start_command(self) -> str:
        program = shlex.quote(self.executable)
        how = "--print --output-format stream-json --verbose --dangerously-skip-permissions"
        return f'{program} {how} < "$SLIME_PROMPT_FILE"'


class CodexHarness(BaseHarness):
    """OpenAI's Codex, which speaks to an `OpenAIAdapter`.

    Args:
        executable: its program in the sandbox, by name or path.
        version: of the npm package, where it has to be installed.
        model: the name that its requests have.
        wire_api: ``responses``, or ``chat`` for versions up to 0.63.0 that shall ask for chat completions.
    """

    name = "codex"

    def __init__(
        self,
        executable: str = "codex",
        *,
        version: str = "0.171.0",
        model: str = "default",
        wire_api: str = "responses",
    ) -> None:
        super().__init__(executable)
        self._version, self._model, self._wire_api = version, model, wire_api

    def install_command(self) -> str:
        return f"npm install -g {shlex.quote(f'@openai/codex@{self._version}')}"

    def config_files(self, ctx: HarnessContext) -> Mapping[str, str]:
        provider = {
            "name": "slime",
            "base_url": f"{ctx.adapter_url}/v1",
            "env_key": _KEY,
            "wire_api": self._wire_api,
        }
        # tools that are no functions, and summaries of thoughts, which no adapter makes
        without = {"web_search": "disabled", "model_reasoning_summary": "none"}
        lines = [_toml({"model": self._model, "model_provider": "slime", **without})]
        lines += ["[agents]", "enabled = false\n"]
        lines += ["[model_providers.slime]", _toml(provider)]
        lines += [f"[projects.{json.dumps(ctx.workdir)}]", _toml({"trust_level": "trusted"})]
        return {"config.toml": "\n".join(lines)}

    def environment(self, ctx: HarnessContext) -> Mapping[str, str]:
        return {"CODEX_HOME": self.folder, _KEY: ctx.session_id}

    def start_command(self) -> str:
        program = shlex.quote(self.executable)
        how = "exec --json --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -"
        return f'{program} {how} < "$SLIME_PROMPT_FILE"'


class CommandHarness(BaseHarness):
    """An agent that a command starts, whatever it is written in.

    CommandHarness(
        "mini", 'mini --yolo --exit-immediately --task "$(cat "$SLIME_PROMPT_FILE")"',
        env={"OPENAI_BASE_URL": "{adapter_url}/v1", "OPENAI_API_KEY": "{session_id}"},
    )

    Args:
        name: of the agent; its folder in the sandbox has it.
        command: a line of shell, run in the working directory.
        env: its environment. In values ``{session_id}``, ``{adapter_url}``, ``{workdir}`` and ``{folder}``
            stand for those of the task.
        files: its configuration by paths below ``folder``, with the same placeholders.
        install: a line of shell that installs it where it is not there.
        executable: what is looked for; default the first word of the command.

    Raises:
        ValueError: the command has a placeholder: other processes see command lines, keys among them.
    """

    def __init__(
        self,
        name: str,
        command: str,
        *,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        install: str = "",
        executable: str = "",
        user: str = AGENT_USER,
    ) -> None:
        if found := [text for text in _PLACEHOLDERS if text in command]:
            raise ValueError(f"{name}: {found[0]} in the command (wanted: in env or files alone)")
        super().__init__(executable or shlex.split(command)[0])
        self.name, self.user, self._command, self._install = name, user, command, install
        self._env, self._files = dict(env or {}), dict(files or {})

    def install_command(self) -> str:
        return self._install

    def config_files(self, ctx: HarnessContext) -> Mapping[str, str]:
        return self._filled(self._files, ctx)

    def environment(self, ctx: HarnessContext) -> Mapping[str, str]:
        return self._filled(self._env, ctx)

    def start_command(self) -> str:
        return self._command

    def _filled(self, texts: Mapping[str, str], ctx: HarnessContext) -> dict[str, str]:
        return {name: self._fill(text, ctx) for name, text in texts.items()}

    def _fill(self, text: str, ctx: HarnessContext) -> str:
        values = (ctx.session_id, ctx.adapter_url, ctx.workdir, self.folder)
        for placeholder, value in zip(_PLACEHOLDERS, values, strict=True):
            text = text.replace(placeholder, value)
        return text


def _toml(values: Mapping[str, str]) -> str:
    """Strings of JSON are strings of TOML."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
