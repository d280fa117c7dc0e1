"""DAPO's overlong filtering: what was cut off at its limit is not trained on."""

from typing import Any

from slime.utils.types import Sample


def leave_out_truncated(args: Any, groups: list[Any]) -> None:
    """A ``--rollout-sample-filter-path``: masks the loss of truncated samples (arXiv 2503.14476, sec. 3.4).

    Their rewards still count in the group's baseline.
    """
    for item in groups:
        if isinstance(item, list):
            leave_out_truncated(args, item)
        elif item.status == Sample.Status.TRUNCATED:
            item.remove_sample = True
