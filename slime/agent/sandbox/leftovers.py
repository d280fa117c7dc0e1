"""Removal of a folder in which somebody hostile has worked."""

import logging
import os
import shutil
import subprocess

logger = logging.getLogger(__name__)


def remove_tree(folder: str) -> None:
    """Remove a folder, however deep it is and though its owner may not look into parts of it.

    What cannot be removed is named in a warning.
    """
    try:
        shutil.rmtree(folder)
        return
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        # Both walk without recursion, and neither follows a link.
        for command in (("chmod", "-R", "u+rwX"), ("rm", "-rf")):
            subprocess.run(
                [*command, "--", folder], stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
    if os.path.lexists(folder):
        logger.warning("%s: a sandbox left it behind, and it cannot be removed", folder)
