"""``--check``: a run on paper.

    found = report(run_config(args))
    print(page(found))
    found.misfits        # what does not fit, one line each

Reads flags and config.json; starts nothing.
"""

from slime.check.page import page, totals
from slime.check.report import Report, report
from slime.check.snapshots import snapshots_lack_room

__all__ = ["Report", "page", "report", "snapshots_lack_room", "totals"]
