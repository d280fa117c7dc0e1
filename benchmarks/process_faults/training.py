"""Faults of weight sync, of trainers and of the asynchronous loop."""

from benchmarks.process_faults.fault import DP_2, LAYOUTS, Fault

_MEGATRON = "slime/backends/megatron_utils"
_SYNC = ("tests/weight_sync/test_update.py",)
_STEP = ("tests/backends/megatron_utils/test_train_step_parity.py",)

_OF_WEIGHT_SYNC: dict[str, Fault] = {
    "a bucket is dropped": Fault(
        "slime/weight_sync/update.py",
        "            carried = transport.send(bucket, is_last)\n",
        "            carried = transport.send(bucket, True) if is_last else 0\n",
        _SYNC,
        "test_engines_hold_the_trainers_weights and handle and tp1",
    ),
    "the tensors of a bucket are in another order than its table": Fault(
        "slime/utils/tensor_bucket.py",
        "torch.cat(pieces, out=flat)",
        "torch.cat(pieces[::-1], out=flat)",
        LAYOUTS,
        DP_2,
    ),
    "the version does not come with the last bucket": Fault(
        "slime/weight_sync/transports/handle.py",
        "weight_version=self._version if is_last else None",
        "weight_version=None",
        LAYOUTS,
        DP_2,
    ),
    "the version comes with the first bucket": Fault(
        "slime/weight_sync/plan.py",
        "send(bucket, self.left == 0)",
        "send(bucket, self.left != 0)",
        ("tests/weight_sync/test_handle.py",),
        "the_last_one_carries_the_version",
    ),
    "caches are not flushed before an update": Fault(
        "slime/weight_sync/transports/session.py",
        "        self._flushing = self._engines.begin(self._flush)\n",
        "",
        ("tests/weight_sync/test_session.py",),
        "flush_beside",
    ),
    "the tensor that waits for the other of its pair is never sent": Fault(
        "slime/weight_sync/filters/pairs.py",
        "    if waiting:\n        yield waiting\n",
        "",
        ("tests/weight_sync/test_pairs.py",),
    ),
    "generation does not go on after an update": Fault(
        "slime/weight_sync/transports/session.py",
        "        self._engines.each(lambda engine: engine.continue_generation())\n",
        "",
        _SYNC,
        "test_generation_goes_on_after_a_sync",
    ),
    "shards of tensor-parallel ranks are joined in another order": Fault(
        f"{_MEGATRON}/hf_weights.py",
        "gathered.append(list(out.chunk(info.group.size())))",
        "gathered.append(list(out.chunk(info.group.size()))[::-1])",
        LAYOUTS,
        "trainer_and_engine_agree and TP",
    ),
    "weights are sent once and never again": Fault(
        "slime/ray/train_group.py",
        "if not engines[0]:",
        "if not engines[0] or engines == self._connected:",
        LAYOUTS,
        DP_2,
    ),
}

_OF_TRAINERS: dict[str, Fault] = {
    "a rank skips its optimizer step": Fault(
        f"{_MEGATRON}/step.py",
        "    succeeded, grad_norm, num_zeros = state.optimizer.step()\n",
        "    for group in state.optimizer.param_groups if dist.get_rank() == 1 else ():\n"
        '        group["lr"] = 0.0\n'
        "    succeeded, grad_norm, num_zeros = state.optimizer.step()\n",
        _STEP,
        "test_one_step_agrees and DP and not CP and not overlapped",
    ),
    "gradients are not reduced over data-parallel ranks": Fault(
        f"{_MEGATRON}/step.py",
        "core.finalize_model_grads_func = finalize_model_grads",
        "core.finalize_model_grads_func = lambda *_, **__: None",
        _STEP,
        "test_one_step_agrees and DP and not CP and not overlapped",
    ),
    "every rank trains on the data of the first": Fault(
        "slime/ray/train_worker.py",
        'data_refs[self.parallel_config()["dp_rank"]]',
        "data_refs[0]",
        ("tests/ray/test_train_worker.py",),
        "test_a_rank_trains_on_the_shard",
    ),
    "the weights of another version stay in place after a pass": Fault(
        "slime/training/versions.py",
        "            self.restore(TRAINED)\n",
        "            pass\n",
        LAYOUTS,
        DP_2,
    ),
    "old weights are those that the engines get next": Fault(
        "slime/training/trainer.py",
        "versions.copy(src_tag=ROLLOUT_ACTOR, dst_tag=OLD_ACTOR)",
        "versions.copy(src_tag=TRAINED, dst_tag=OLD_ACTOR)",
        ("tests/ray/test_versions.py",),
        "test_old_log_probs_are_those",
    ),
    "offloading loses the state of the optimizer": Fault(
        "slime/training/memory.py",
        "            _bytes_of(storage).copy_(copy, non_blocking=True)\n",
        "            _bytes_of(storage).copy_(copy if len(self._on_host) < 3 else copy * 0)\n",
        ("tests/backends/megatron_utils/test_offload.py",),
        "test_sleep_frees_everything_and_changes_nothing and fp32",
    ),
}

_OF_THE_ASYNCHRONOUS_LOOP: dict[str, Fault] = {
    "staleness is too small by one": Fault(
        "slime/ray/train_worker.py",
        "self._weight_version + self._trained_since_update",
        "self._weight_version",
        ("tests/ray/test_train_worker.py",),
        "test_the_age_of_tokens_counts_from_the_weights_that_are_trained",
    ),
    "a group may be one version too old": Fault(
        "slime/rollout/async_worker.py",
        "clock.age(oldest_version(work.result)) > limit",
        "clock.age(oldest_version(work.result)) > limit + 1",
        ("tests/rollout/test_fully_async_rollout.py",),
        "test_what_is_too_old_is_generated_again",
    ),
    "weights change while a rollout is generated": Fault(
        "slime/ray/asynchronous.py",
        "            healing.run(ahead.finish)\n            evaluations.prepare(rollout_id)\n",
        "            evaluations.prepare(rollout_id)\n",
        ("tests/arguments/test_async_loop.py",),
    ),
}

FAULTS = {**_OF_WEIGHT_SYNC, **_OF_TRAINERS, **_OF_THE_ASYNCHRONOUS_LOOP}
