"""Generate functions of eval sets whose outcome is known, whatever a random model says."""

import os
from pathlib import Path

from slime.agent.sandbox.engine import ENGINE
from slime.rollout.harbor import HarborAgents, harbor_shell
from slime.rollout.verifiers_episodes import VerifiersEpisodes
from tests.agent.harbor_tasks import agent_harness

CONTAINERS = "SLIME_TEST_CONTAINERS"
"""The folder of a `StandIn`."""

if folder := os.environ.get(CONTAINERS):
    os.environ |= {"STAND_IN_ENGINE_FOLDER": folder, ENGINE: str(Path(folder) / "docker")}

works = HarborAgents(agent_harness(), network="agents", adapter_host="127.0.0.1")
shell = harbor_shell(max_turns=2)
plays = VerifiersEpisodes("tests.environments.verifiers_games", {"on_a_is_worth": 1.0})
