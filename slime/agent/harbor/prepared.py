"""Images of tasks in which something has been prepared, once for each: an agent is installed, say."""

from collections.abc import Awaitable, Callable
from typing import Any

from slime.agent.harbor.task import HarborTask, TaskError
from slime.agent.sandbox import Sandbox
from slime.agent.sandbox.snapshots import Prepared, has_snapshots


class PreparedImages:
    """Prepares a snapshot of each image, from which sandboxes of its tasks start. Those that grade do not.

    Args:
        prepare: prepares a sandbox, and raises where it cannot.
        network: the engine's, which is there meanwhile.
        make: makes a sandbox of a task, an image and a network.
    """

    def __init__(
        self,
        prepare: Callable[[Any], Awaitable[None]],
        network: str,
        make: Callable[[HarborTask, str, str], Sandbox],
    ) -> None:
        self._prepare, self._network, self._make = prepare, network, make
        self._prepared: dict[str, Prepared[Any]] = {}

    async def of(self, task: HarborTask, image: str) -> str:
        """The image that is made of the task's.

        Raises:
            TaskError: the sandbox has no snapshots.
            SandboxError: it cannot be prepared.
        """
        if image not in self._prepared:
            new = lambda: self._make(task, image, self._network)
            one = new()
            if not has_snapshots(one):
                raise TaskError(
                    f"task {task.folder}: {type(one).__name__} has no snapshots, and is to be prepared once "
                    "(wanted: a sandbox such as ContainerSandbox)"
                )
            self._prepared[image] = Prepared(new, self._prepare)
        return (await self._prepared[image].snapshot()).source
