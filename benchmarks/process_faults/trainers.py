"""Faults of what keeps out trainers in whose place another one has come."""

from benchmarks.process_faults.fault import Fault

_FENCE = "slime/backends/embedded_engine/weights_fence.py"
_SESSION = "slime/weight_sync/transports/session.py"
_OWNER = "slime/weight_sync/versions/owner.py"
_OF_FENCE = ("tests/backends/embedded_engine/test_weights_fence.py",)
_OF_WRITERS = ("tests/weight_sync/test_writers.py",)

_OF_ENGINES: dict[str, Fault] = {
    "an engine takes weights of a trainer that was replaced": Fault(
        _FENCE,
        "        if name is None or name == self.holder:\n            return\n        if name in self._gone:",
        "        if name is None or name == self.holder or name in self._gone:\n            return\n"
        "        if name in self._gone:",
        _OF_FENCE,
        "what_a_replaced_trainer_sends",
    ),
    "a trainer that was replaced takes its engine back": Fault(
        _FENCE,
        "            self._gone.add(self.holder)\n",
        "            pass\n",
        _OF_FENCE,
        "what_a_replaced",
    ),
    "an engine does what a trainer that was replaced had waiting there": Fault(
        "slime/backends/embedded_engine/engine.py",
        "self.fence.admit(command.writer)",
        "self.fence.speaker = command.writer",
        _OF_FENCE,
        "what_waited_in_the_engine",
    ),
    "anybody lets an engine go on in the midst of an update": Fault(
        _FENCE,
        "if self.is_held and self.speaker is None:",
        "if self.is_held and self.holder is None:",
        _OF_FENCE,
        "nobody_but_a_trainer",
    ),
    "an engine computes with the half of an update that a lost trainer left": Fault(
        "slime/backends/embedded_engine/weight_updater.py",
        "        was_open, self.session = self.session is not None, None\n",
        "        was_open, self.session = self.session is not None, None\n"
        "        self._engine.updating = False\n",
        _OF_FENCE,
        "an_update_that_was_left_open",
    ),
    "an engine stays in the groups of a trainer that was replaced": Fault(
        "slime/backends/embedded_engine/weight_updater.py",
        "            self.groups.leave_all()  # of trainers before it\n",
        "",
        _OF_FENCE,
        "connections_of_a_replaced_trainer",
    ),
    "versions of a trainer fall": Fault(
        _FENCE, "        if number < self._version:", "        if number < 0:", _OF_FENCE, "never_fall"
    ),
}

_OF_TRAINERS: dict[str, Fault] = {
    "a trainer does not say who it is": Fault(
        _SESSION,
        "            self._headers.append((HEADER.encode(), writer.encode()))\n",
        "            pass\n",
        _OF_WRITERS,
        "names_are_told",
    ),
    "a trainer goes on after a pause, whatever version an engine has": Fault(
        _SESSION,
        "time.monotonic() - self._asked_at < _STOPPED_S:",
        "time.monotonic() - self._asked_at >= _STOPPED_S:",
        _OF_WRITERS,
        "who_comes_back",
    ),
    "an engine of another trainer counts as one without an update": Fault(
        _SESSION,
        "            if error.status in (None, CONFLICT):\n                raise\n            return False",
        "            if error.status is None:\n                raise\n            return False",
        ("tests/weight_sync/test_session.py",),
        "an_engine_of_another_trainer",
    ),
}

_OF_DIRECTORIES: dict[str, Fault] = {
    "two trainers write into a directory": Fault(
        _OWNER,
        "elif known[-1] != writer:",
        "elif writer not in known:",
        _OF_WRITERS,
        "that_of_who_came_last",
    ),
    "a trainer that was replaced takes its directory back": Fault(
        _OWNER,
        "    if writer in _writers(root):\n        require_directory(root, writer)\n        return\n",
        "",
        _OF_WRITERS,
        "that_of_who_came_last",
    ),
    "two trainers write into a folder of an object store": Fault(
        "slime/weight_sync/versions/remote.py",
        'mine = [f"trainer_{number:06d}_{_as_name(writer)}"]',
        'mine = ["trainer_000001_all"]',
        ("tests/weight_sync/test_remote.py",),
        "changes_nothing_that_is_read",
    ),
    "a version is there before its files are": Fault(
        "slime/weight_sync/versions/remote.py",
        '    store.remove(f"{path}/{MANIFEST}")\n',
        "",
        ("tests/weight_sync/test_remote.py",),
        "comes_last_and_goes_first",
    ),
    "a trainer writes versions without looking whose directory it is": Fault(
        "slime/weight_sync/transports/disk.py",
        "                self._storage.require(self.writer)\n",
        "                pass\n",
        ("tests/weight_sync/test_delta.py",),
        "writes_nothing_more",
    ),
    "ranks write changes of different versions": Fault(
        "slime/weight_sync/transports/delta.py",
        "        if len({*links}) > 1:\n",
        "        if False:\n",
        ("tests/weight_sync/test_shared_delta.py",),
        "that_hold_different_versions",
    ),
    "a trainer that was replaced writes a whole version instead": Fault(
        "slime/weight_sync/transports/delta.py",
        "unread = error.status not in (None, CONFLICT)",
        "unread = error.status is not None",
        ("tests/weight_sync/test_delta.py",),
        "a_replaced_trainer_is_told_so",
    ),
}

FAULTS = {**_OF_ENGINES, **_OF_TRAINERS, **_OF_DIRECTORIES}
