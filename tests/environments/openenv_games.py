"""An environment of OpenEnv, as its users write them."""

from fastapi import FastAPI
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str
    loud: bool


class Heard(Observation):
    said: str
    tries: int


class Words(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, prefix="", **_):
        self._word, self._tries = f"word{seed}", 0
        return Heard(said=f"{prefix}A word of {seed}.", tries=0)

    def step(self, action, timeout_s=None, **_):
        self._tries += 1
        if action.message == "raise":
            raise RuntimeError("out of words")
        is_right = action.message == self._word
        said = "right" if is_right else f"{action.message} is wrong"
        said = said.upper() if action.loud else said
        return Heard(said=said, tries=self._tries, reward=1.0 if is_right else None, done=is_right)

    @property
    def state(self):
        return State(step_count=self._tries)


def guessing(max_sessions: int) -> FastAPI:
    return create_fastapi_app(Words, Guess, Heard, max_concurrent_envs=max_sessions)
