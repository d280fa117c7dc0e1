"""What a process group says of itself whose connections have ended."""

import re
from collections.abc import Sequence

# Of gloo and NCCL, as trainers and engines tell it. Nothing of it is said where an engine refuses weights.
_ENDED = re.compile(
    r"connection (closed|reset) by|broken pipe|pair closure|remote process exited|communicator was aborted",
    re.IGNORECASE,
)
GROUP_BROKE = "connections of its group have ended"


class GroupBroken(RuntimeError):
    """Connections between members of a weight group have ended, while all of them may live.

    Engines hold parts of an update then, and another group is needed for it to begin again.
    """

    @classmethod
    def of(cls, group: str, reason: Exception, members: Sequence[str] = ()) -> "GroupBroken":
        """
        Args:
            members: all that say so.
        """
        others = f" (so say {', '.join(members)})" if len(members) > 1 else ""
        return cls(f"weight group {group}: {GROUP_BROKE}: {reason}{others}")


def of_broken_group(error: Exception) -> bool:
    """Whether a member failed for want of its connections; not if it gave no answer, which says it all."""
    if isinstance(error, GroupBroken) or not isinstance(error, RuntimeError):
        return isinstance(error, GroupBroken)
    has_answered = getattr(error, "status", 0) is not None
    return has_answered and _ENDED.search(str(error)) is not None
