"""Which sessions of agents are open, from their first turn to the samples that come of them."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from slime.agent.adapters.policies import Policies, part_of
from slime.agent.adapters.session import Refused, Session
from slime.agent.trajectory import TrajectoryManager
from slime.utils.http_utils import asked_adapter
from slime.utils.types import Sample

_FORK_THRESHOLD = 1024
_ENDED_KEPT = 10_000
_POLL_S = 0.02


class OpenSessions:
    """Sessions by their ids, which agents send as keys.

    Args:
        max_turns_per_sid: more are refused with 429.
        fork_threshold_tokens: see `TrajectoryManager`.
    """

    def __init__(
        self, max_turns_per_sid: int | None, fork_threshold_tokens: int | None, policies: Policies
    ) -> None:
        self._max_turns, self.policies = max_turns_per_sid, policies
        threshold = _FORK_THRESHOLD if fork_threshold_tokens is None else fork_threshold_tokens
        self.trajectories = TrajectoryManager(fork_threshold_tokens=threshold)
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, None] = {}  # in the order of their ends

    def open_session(
        self,
        sid: str,
        *,
        sampling_defaults: Mapping[str, Any] | None = None,
        max_context_tokens: int = 0,
        policy: str | None = None,
    ) -> None:
        """Requests with this id are answered from now on.

        Args:
            sampling_defaults: parameters of every turn. A request adds to them and changes none, or an
                agent's temperature would make it sample from another distribution than is trained; the
                smaller ``max_new_tokens`` counts.
            max_context_tokens: of prompt and answer together; 0 for any number.
            policy: that answers, whatever model requests name; else they name one, where there are several.

        Raises:
            ValueError: it is open already, or there is no such policy.
        """
        self.policies.check(policy)
        if sid in self._sessions:
            raise ValueError(f"session {sid!r} is open already")
        self._ended.pop(sid, None)
        self._sessions[sid] = Session(
            dict(sampling_defaults or {}), max_context_tokens, asked_adapter(), policy
        )

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Sample]:
        """Closes a session and returns its samples; none if it had no turn, or was finished before.

        No turn begins from now on. Those under way are part of it if they end in time.

        A session that an abort cut through gives ``base_sample`` back, ABORTED. An update of the weights does
        not: its turns go on.

        Args:
            wait_timeout: seconds that turns under way have; what ends later is not recorded.
        """
        session = self._sessions.get(sid)
        if session is None:
            return []
        session.closed = True
        deadline = time.monotonic() + wait_timeout
        while session.running and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        samples = []
        for policy, part in self._parts(sid):
            made = self.trajectories.get_trajectory(
                part,
                base_sample=base_sample,
                reward=reward,
                extra_metadata=extra_metadata,
                max_sample_tokens=session.max_context_tokens,
            )
            for sample in made:
                sample.policy = base_sample.policy if policy is None else policy
            samples += made
        self.drop_session(sid)
        if session.aborted:
            base_sample.status = Sample.Status.ABORTED
            return [base_sample]
        return samples

    def drop_session(self, sid: str) -> None:
        """Forgets a session with all that was said; turns under way are not recorded."""
        session = self._sessions.pop(sid, None)
        if session is not None:
            session.closed = session.dropped = True
            self._ended[sid] = None
            if len(self._ended) > _ENDED_KEPT:
                del self._ended[next(iter(self._ended))]
        for _, part in self._parts(sid):
            self.trajectories.drop_session(part)

    def _parts(self, sid: str) -> list[tuple[str | None, str]]:
        """Policies, and under which names there is what a session has said to them."""
        return [(policy, part_of(sid, policy)) for policy in self.policies.urls or (None,)]

    def open_session_of(self, sid: str, takes_turn: bool = True) -> Session:
        """Known from the head of a request, before its body is read.

        Raises:
            Refused: it is not open, or has had its turns and shall take one.
        """
        session = self._sessions.get(sid)
        if session is None and sid not in self._ended:
            raise Refused(401, "no session has this key (wanted: the id of one that is open)")
        if session is None or session.closed:
            raise Refused(503, f"session {sid!r} is closed")
        taken = sum(self.trajectories.turn_count(part) for _, part in self._parts(sid)) + session.running
        if takes_turn and self._max_turns is not None and taken >= self._max_turns:
            raise Refused(429, f"session {sid!r} has had its {self._max_turns} turns")
        return session
