"""Faults between and within the processes of a run, by name; ``planted_faults.py`` tries them.

Tests are named by file and ``-k`` expression, so that other parameters of a test change nothing here: the
smallest set that has to notice.
"""

from benchmarks.process_faults import books, engines, processes, trainers, training
from benchmarks.process_faults.fault import Fault

__all__ = ["FAULTS", "Fault"]

FAULTS: dict[str, Fault] = {
    **engines.FAULTS,
    **training.FAULTS,
    **trainers.FAULTS,
    **books.FAULTS,
    **processes.FAULTS,
}
