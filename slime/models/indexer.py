"""Which parameters are those of indexers, as ``--freeze-indexer`` freezes them."""

import re

_NAME = re.compile(r"\bself_att(?:ention|n)\.indexer\.")


def is_of_indexer(name: str) -> bool:
    """Tells whether a parameter, by megatron-core's name or Hugging Face's, belongs to an indexer."""
    return _NAME.search(name) is not None
