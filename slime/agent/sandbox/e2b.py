"""A sandbox at E2B (https://e2b.dev) or a server that speaks its protocol. Needs ``pip install e2b``."""

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self, TypeVar

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential

from slime.agent.sandbox.protocol import EXIT_TIME_BUDGET_EXCEEDED, ExecResult, SandboxError
from slime.agent.sandbox.snapshots import Snapshot

T = TypeVar("T")
_LIFETIME_S, _RETRIES, _SIZE = 3600, 6, "md"
_LONGEST_PAUSE_S = 10
_MAY_PASS = ("TimeoutException", "RateLimitException", "TransportError", "ConnectError", "ReadError")


class E2BSandbox:
    """Runs commands in a virtual machine of an E2B server; E2B_API_KEY and E2B_DOMAIN say which.

    With an ``image_metadata_key``, as servers of one's own may want it, the image is metadata of a sandbox of
    the template ``size``; without, the image is the template.
    """

    def __init__(
        self,
        image: str,
        *,
        timeout: int | None = None,
        image_metadata_key: str | None = None,
        rpc_retries: int | None = None,
        size: str | None = None,
    ) -> None:
        """
        Args:
            timeout: seconds that the sandbox lives; default SLIME_AGENT_SANDBOX_LIFETIME_SEC or 3600.
            image_metadata_key: default SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY; "" for none.
            rpc_retries: default SLIME_AGENT_SANDBOX_RPC_RETRIES or 6.
            size: default SLIME_AGENT_E2B_SANDBOX_SIZE or md.
        """
        env = os.environ
        self.image = image
        self._lifetime_s = timeout or int(env.get("SLIME_AGENT_SANDBOX_LIFETIME_SEC", _LIFETIME_S))
        key = env.get("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY")
        self._key = key if image_metadata_key is None else image_metadata_key
        given = env.get("SLIME_AGENT_SANDBOX_RPC_RETRIES", _RETRIES) if rpc_retries is None else rpc_retries
        self._retries = int(given)
        self._size = size or env.get("SLIME_AGENT_E2B_SANDBOX_SIZE", _SIZE)
        self._sandbox: Any = None

    async def __aenter__(self) -> Self:
        """
        Raises:
            SandboxError: the package e2b is not installed.
        """
        try:
            from e2b import AsyncSandbox
        except ImportError as error:
            raise SandboxError("E2BSandbox: needs the package e2b (pip install e2b)") from error
        template, metadata = (self._size, {self._key: self.image}) if self._key else (self.image, {})
        self._sandbox = await self._again(
            lambda: AsyncSandbox.create(template=template, timeout=self._lifetime_s, metadata=metadata)
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._sandbox is not None:
            sandbox, self._sandbox = self._sandbox, None
            await sandbox.kill()

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        timeout: float = 60,
    ) -> ExecResult:
        """Run a line of shell. Not tried again, since it may have run."""
        from e2b import CommandExitException, TimeoutException

        commands = self._open().commands
        try:
            done = await commands.run(cmd, user=user, envs=dict(env or {}), cwd=workdir, timeout=timeout)
        except CommandExitException as ended:
            done = ended
        except TimeoutException:
            return ExecResult(EXIT_TIME_BUDGET_EXCEEDED, "")
        return ExecResult(done.exit_code, done.stdout + done.stderr)

    async def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file as root."""
        files = self._open().files
        await self._again(lambda: files.write(path, content, user="root"))

    async def read_file(self, path: str) -> str:
        """The text of a file, read as root."""
        files = self._open().files
        return await self._again(lambda: files.read(path, user="root"))

    async def snapshot(self) -> Snapshot["E2BSandbox"]:
        """Files and memory as they are now, kept by the server; the sandbox pauses meanwhile.

        Raises:
            SandboxError: the package e2b has no snapshots.
        """
        sandbox = self._open()
        if not hasattr(sandbox, "create_snapshot"):
            raise SandboxError("E2BSandbox: this package e2b has no snapshots (wanted: 2.63 or later)")
        source = (await sandbox.create_snapshot()).snapshot_id
        own: dict[str, Any] = {"timeout": self._lifetime_s, "rpc_retries": self._retries}
        remove = lambda: self._again(lambda: type(sandbox).delete_snapshot(source))
        return Snapshot(source, lambda: E2BSandbox(source, **own, image_metadata_key=""), remove)

    def _open(self) -> Any:
        if self._sandbox is None:
            raise SandboxError("E2BSandbox: is not open (wanted: async with)")
        return self._sandbox

    async def _again(self, call: Callable[[], Awaitable[T]]) -> T:
        async for attempt in AsyncRetrying(
            stop=stop_after_attempt(self._retries + 1),
            wait=wait_exponential(max=_LONGEST_PAUSE_S),
            retry=retry_if_exception(lambda error: type(error).__name__ in _MAY_PASS),
            reraise=True,
        ):
            with attempt:
                return await call()
        raise AssertionError("unreachable: tenacity re-raises the last error")
