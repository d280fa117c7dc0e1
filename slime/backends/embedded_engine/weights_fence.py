"""Which trainer may change the weights, and whether it has left them whole."""

from contextvars import ContextVar

from slime.backends.embedded_engine.errors import BadRequest
from slime.weight_sync.writer import replaced

CONFLICT = 409

writer: ContextVar[str | None] = ContextVar("writer", default=None)
"""Who sends the request that is worked on, where that is told."""


class WeightsFence:
    """Keeps out trainers in whose place another one has come, and answers in while one is at work.

    Clients that do not say who they are pass: the owner of the server has its key.

    Attributes:
        holder: who has taken the weights last; None before anybody has.
        is_held: whether a trainer has paused the engine, and none has let it go on since. It may have given a
            part of its weights, whatever becomes of it.
        speaker: the trainer that wants what is done now; None if it is somebody else.
    """

    def __init__(self) -> None:
        self.holder: str | None = None
        self.is_held = False
        self.speaker: str | None = None
        self._gone: set[str] = set()
        self._version = 0

    def take(self, name: str) -> bool:
        """Whether this trainer is another one than before.

        Raises:
            BadRequest: one has come after it.
        """
        if name == self.holder:
            return False
        if name in self._gone:
            raise BadRequest(replaced(name, str(self.holder)), CONFLICT)
        if self.holder is not None:
            self._gone.add(self.holder)
        self.holder, self._version = name, 0
        return True

    def require(self, name: str | None) -> None:
        """
        Raises:
            BadRequest: this is a trainer, and not the one that has taken the weights last.
        """
        if name is None or name == self.holder:
            return
        if name in self._gone:
            raise BadRequest(replaced(name, str(self.holder)), CONFLICT)
        told = f"{name} sends weights: {self.holder} has taken them (wanted: /take_weights before)"
        raise BadRequest(told, CONFLICT)

    def admit(self, name: str | None) -> None:
        """What is done next is what this trainer wants, if it may; see `require`."""
        self.require(name)
        self.speaker = name

    def pause(self) -> None:
        self.is_held |= self.speaker is not None

    def resume(self) -> None:
        """
        Raises:
            BadRequest: a trainer has paused the engine, and none lets it go on.
        """
        if self.is_held and self.speaker is None:
            raise BadRequest(
                f"{self.holder} has not ended its update: a part of the weights may be of another version "
                "(wanted: an update by it, or by the trainer that takes its place)",
                CONFLICT,
            )
        self.is_held = False

    def note(self, version: str) -> None:
        """
        Raises:
            BadRequest: the trainer that sends it has sent a newer one.
        """
        if self.speaker is None:
            return
        number = int(version) if version.isdecimal() else self._version
        if number < self._version:
            raise BadRequest(f"weight version {version} (wanted: at least {self._version}, as before)")
        self._version = number
