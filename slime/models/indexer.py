"""Which parameters are those of indexers, as ``--freeze-indexer`` freezes them."""

import re

_NAME = re.compile(r"\bself_att(?:ention|n)\.indexer\.")


def is_of_indexer(name: str) -> bool:
    """Of the name of a parameter, megatron-core's or that of Hugging Face."""
    return _NAME.search(name) is not None
