"""A rollout function that makes nothing: engines and router stay up, to be looked at by hand.

``--rollout-function-path slime.rollout.sleep_rollout.sleep --debug-rollout-only``
"""

import logging
import threading
from typing import Any

from slime.config.cluster import ClusterConfig
from slime.config.run import filled
from slime.rollout.generation import get_model_url

logger = logging.getLogger(__name__)


def sleep(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> None:
    """Blocks until the run is stopped, or until ``--rollout-timeout`` ends it."""
    url, seconds = get_model_url(args, endpoint=""), filled(ClusterConfig, args).rollout_timeout
    logger.warning("rollout %d sleeps for up to %g s; the router is %s", rollout_id, seconds, url)
    threading.Event().wait()
