"""Faults of checkpoints, of the ledger and of the data source."""

from benchmarks.process_faults.fault import Fault

_MEGATRON = "slime/backends/megatron_utils"
_CHECKPOINT = ("tests/backends/megatron_utils/test_checkpoint.py",)
_DATA = ("tests/rollout/test_data_source.py",)
_LEDGER = ("tests/rollout/test_ledger.py",)
_ROLLOUT = ("tests/rollout/test_sglang_rollout.py",)

_OF_CHECKPOINTS: dict[str, Fault] = {
    "a checkpoint gets no marker": Fault(
        "slime/training/checkpoint_dir.py",
        "    new_marker.replace(marker)\n",
        "",
        _CHECKPOINT,
        "test_publishing_replaces",
    ),
    "the marker is written before the checkpoint": Fault(
        f"{_MEGATRON}/checkpoint.py",
        "        on_first_rank(lambda: fresh_directory(temporary, subdirectories=places))\n",
        "        on_first_rank(lambda: fresh_directory(temporary, subdirectories=places))\n"
        "        (final.parent / MARKER).write_text(str(iteration))\n",
        _CHECKPOINT,
        "test_a_save_killed_half_way_is_not_chosen",
    ),
    "a checkpoint is the latest before its files are whole": Fault(
        f"{_MEGATRON}/checkpoint.py",
        "            request.add_finalize_fn(make_latest)\n",
        "            make_latest()\n",
        _CHECKPOINT,
        "test_resume_is_bit_exact and async",
    ),
    "random state is not saved": Fault(
        f"{_MEGATRON}/sharded_state.py",
        "with_rng = not config.no_save_rng",
        "with_rng = False",
        _CHECKPOINT,
        "test_random_state_goes_on",
    ),
    "the learning-rate schedule is not restored": Fault(
        f"{_MEGATRON}/sharded_state.py",
        "        load_schedule(state, dict(schedule), root)\n",
        "",
        _CHECKPOINT,
        "test_resume_is_bit_exact and process",
    ),
    "a resumed run leaves a prompt out": Fault(
        "slime/rollout/data_source.py",
        'self.sample_offset = state["sample_offset"]',
        'self.sample_offset = state["sample_offset"] + 1',
        ("tests/e2e/test_resume.py",),
        "two and trainer and processes",
    ),
    "the state of the data is saved for the first checkpoint alone": Fault(
        "slime/ray/rollout_manager.py",
        "            self._data_source.save(rollout_id)",
        "            self._data_source.save(0)",
        ("tests/e2e/test_rollout_functions.py",),
        "test_what_a_generator_writes_to_the_rollout_buffer",
    ),
}

_OF_BOOKS: dict[str, Fault] = {
    "a group that was handed out is lost from the ledger": Fault(
        "slime/rollout/ledger.py",
        "            self._ledger.trained += 1",
        "            self._ledger.trained += self._ledger.trained < 20",
        ("tests/e2e/test_rollout_functions.py",),
        "test_fully_async_with_evaluation",
    ),
    "groups that are out are not saved": Fault(
        "slime/rollout/data_source.py",
        "[to_plain(group) for group in [*self.ledger.records.values(), *self._returned]]",
        "[to_plain(group) for group in self._returned]",
        _LEDGER,
        "test_what_is_leased_at_a_save",
    ),
    "a group is trained on twice": Fault(
        "slime/rollout/sglang_rollout.py",
        "            self.kept.append(group)",
        "            self.kept += [group] * (1 + (not self.kept))",
        _ROLLOUT,
        "test_collects_the_groups_in_order",
    ),
    "an aborted group is lost": Fault(
        "slime/rollout/sglang_rollout.py",
        "            elif not self.config.rollout.partial_rollout:\n",
        "            elif not is_finished(group):\n",
        _ROLLOUT,
        "test_partial_rollout_goes_on_where_it_was_aborted",
    ),
    "the buffer is not saved": Fault(
        "slime/rollout/data_source.py",
        "[to_plain(group) for group in self.buffer]",
        "[]",
        _DATA,
        "buffer",
    ),
    "a filtered group counts as trained": Fault(
        "slime/rollout/ledger.py",
        "self._ledger.filtered += 1",
        "self._ledger.trained += 1",
        _LEDGER,
        "test_every_fate_is_booked",
    ),
    "every epoch has the order of the first": Fault(
        "slime/rollout/data_source.py",
        "            self.epoch_id += 1\n",
        "",
        _DATA,
        "test_every_epoch_is_a_new_permutation",
    ),
}

FAULTS = {**_OF_CHECKPOINTS, **_OF_BOOKS}
