"""Deterministic simulation of the control plane.

The product's own driver, trainer groups, rollout manager, fleet, watch, weight update, rollout function,
ledger and data source run in one process, under a clock that jumps and a network, Ray and engines that a seed
decides about::

    python benchmarks/simulate.py --seed 17          # one history, with its trace
    python benchmarks/simulate.py --histories 10000

``kernel.py`` has threads and time, ``stand_ins.py`` the modules that product code finds in place of
``threading``, ``time``, ``concurrent.futures`` and ``asyncio``, ``actors.py`` Ray, ``network.py`` HTTP,
``engines.py`` engine servers and the router, ``trainers.py`` trainer ranks, ``seams.py`` where each is put,
``history.py`` a whole life of a run, ``faults.py`` what befalls it, ``operators.py`` who has engines leave,
``invariants.py`` what must hold after each event, and ``bugs.py``
mutations of the product that a simulator which is worth anything finds.
"""
