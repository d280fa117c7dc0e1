"""What a planted fault is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """``before``, which is once in the file ``path``, is replaced by ``after``.

    ``tests`` are files, of which ``choose`` (pytest's ``-k``) names the tests.
    """

    path: str
    before: str
    after: str
    tests: tuple[str, ...]
    choose: str = ""


LAYOUTS = ("tests/e2e/test_layouts.py",)
DP_2 = "trainer_and_engine_agree and DP"
"""The run on two trainer ranks and two engines, in which trainer and engines have to agree."""
