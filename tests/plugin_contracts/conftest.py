# The engine, the tokenizer and the args of the rollout tests.
from tests.rollout.conftest import *  # noqa: F403
