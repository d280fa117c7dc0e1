"""Faults of engines and of what sends requests to them."""

from benchmarks.process_faults.fault import DP_2, LAYOUTS, Fault

_ENGINE = "slime/backends/embedded_engine"
_FRONT = ("tests/router/test_front.py",)

_OF_ENGINES: dict[str, Fault] = {
    "an engine never answers": Fault(
        f"{_ENGINE}/engine.py",
        "callback = sequence.on_finish if sequence.finished else",
        "callback = None if sequence.finished else",
        ("tests/backends/embedded_engine/test_generate.py",),
        "test_greedy_is_the_likeliest_token",
    ),
    "an engine that hangs is not given up": Fault(
        "slime/ray/engine_watch.py",
        "if silent < self._times.hang:",
        "if silent < math.inf:",
        ("tests/ray/test_engine_watch.py",),
        "an_engine_that_hangs_ends_the_run",
    ),
    "an engine answers with the version of older weights": Fault(
        f"{_ENGINE}/weight_updater.py",
        "        self._engine.scheduler.weight_version = version",
        '        if self._engine.scheduler.weight_version == "default":\n'
        "            self._engine.scheduler.weight_version = version",
        LAYOUTS,
        "test_async_training_is_one_rollout_ahead",
    ),
    "an engine gives the log-prob of another token": Fault(
        f"{_ENGINE}/scheduler.py",
        "found.of_tokens.append(tokens.logprobs[index])",
        "found.of_tokens.append(tokens.logprobs[index - 1])",
        LAYOUTS,
        DP_2,
    ),
    "an engine ignores aborts": Fault(
        f"{_ENGINE}/engine.py",
        "            self._abort([s for s in live if everything or s.rid.startswith(rid)])",
        "            return",
        ("tests/backends/embedded_engine/test_control.py",),
        "test_abort_all_reaches_the_queue",
    ),
    "an engine computes while an update is open": Fault(
        f"{_ENGINE}/weight_updater.py",
        "        self.session = selector\n        self._engine.updating = True",
        "        self.session = selector",
        ("tests/backends/embedded_engine/test_weight_updates.py",),
        "test_nothing_is_computed_while_an_update_is_open",
    ),
    "a prompt that older weights computed is shared": Fault(
        f"{_ENGINE}/scheduler.py",
        "        for sequence in self.running:\n            sequence.prompt_hidden = None\n",
        "",
        ("tests/backends/embedded_engine/test_scheduler.py",),
        "test_prompts_are_shared_until_the_weights_change",
    ),
    "a killed engine is not replaced": Fault(
        "slime/ray/engine_group.py",
        " and self._source.can_fill(place):\n",
        " and not self._source.can_fill(place):\n",
        ("tests/e2e/test_recovery.py",),
        "colocated and generating",
    ),
}

_OF_ROUTERS: dict[str, Fault] = {
    "the router does not strike a dead worker": Fault(
        "slime/router/pool.py",
        "worker.state = WorkerState.QUARANTINED",
        "worker.reason = failure",
        ("tests/router/test_pool.py",),
    ),
    "the router loses bodies": Fault(
        "slime/router/upstream.py",
        "worker.url, method, target, own, body)",
        'worker.url, method, target, own, b"")',
        _FRONT,
        "test_bodies_of_any_size_pass_in_both_directions",
    ),
    "the router sends an answer that broke off to another worker": Fault(
        "slime/router/upstream.py",
        "            except CannotConnect:",
        "            except (CannotConnect, OSError):",
        _FRONT,
        "test_an_answer_that_was_begun_is_not_asked_for_again",
    ),
    "an engine whose actor died stays in the router": Fault(
        "slime/ray/served_model.py",
        "        try:\n            router.remove_worker(engine.url)",
        "        try:\n            router.list_workers()",
        ("tests/ray/test_fleet.py",),
        "test_an_engine_whose_actor_is_gone_leaves_the_router",
    ),
}

FAULTS = {**_OF_ENGINES, **_OF_ROUTERS}
