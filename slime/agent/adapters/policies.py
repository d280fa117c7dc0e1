"""Which of several models answers a turn, where a run trains more than one."""

from collections.abc import Mapping

from slime.agent.adapters.session import Refused, Session


class Policies:
    """Models by their names, as ``--policies`` has them, and the one of a run that has no names.

    Args:
        urls: addresses of ``/generate``, by name; none where there is one model.
    """

    def __init__(self, urls: Mapping[str, str] | None = None) -> None:
        self.urls = dict(urls or {})

    def check(self, name: str | None) -> None:
        """Refuses a policy of a session that is not there.

        Raises:
            ValueError: it is not.
        """
        if name is not None and name not in self.urls:
            wanted = " or ".join(self.urls) or "none, without policies"
            raise ValueError(f"policy {name!r} (wanted: {wanted})")

    def of(self, session: Session, model: str | None) -> str | None:
        """The policy of a turn: the session's, else the one that the request names; None without several.

        Raises:
            Refused: it names none of them.
        """
        if not self.urls or session.policy is not None:
            return session.policy
        if model not in self.urls:
            told = "missing" if model is None else repr(model)[:200]
            raise Refused(400 if model is None else 404, f"model {told} (wanted: {' or '.join(self.urls)})")
        return model


def part_of(sid: str, policy: str | None) -> str:
    """The name of what a session has said to a policy: no policy goes on with the tokens of another."""
    return sid if policy is None else f"{sid}\n{policy}"
