"""A trainer that ends while engines generate (``--release-train``), in place of one that is offloaded."""

from slime.ray.train_group import RayTrainGroup
from slime.ray.whole_checkpoint import resumed


class ReleasedTrainGroup(RayTrainGroup):
    """Has ranks from `onload` to `offload` alone.

    They start from the run's own latest save, as a resumed run does; before its first one from where the run
    began. `offload` loses what was not saved.
    """

    def onload(self) -> None:
        """Starts the ranks, unless they are there."""
        if self._actors or not self._has_ranks:
            return
        unproven = self._unproven
        with self._log.phase("create_train", role=self._role):
            self._launch(self._launched)
            self._unproven = unproven  # the way of the weights is the same
            self._first_rollout("starting again with what was saved last")
            self.call_all("going on from the version of the engines", "go_on", self._version, self._torn)

    def offload_training_state(self) -> None:
        """Makes room for the weights of engines on the same GPUs."""
        if self._config.cluster.colocate:
            with self._log.phase("sleep", role=self._role):
                self.call_all("offloading the optimizer", "offload_training_state")

    def offload(self) -> None:
        """Ends the ranks, and waits until they hold no memory."""
        if not self._actors:
            return
        with self._log.phase("release_train", role=self._role):
            self._take_spans()
            self._end_ranks()
            self._actors = []

    def try_to_save(
        self, rollout_id: int, force_sync: bool = False, memory: str | None = None
    ) -> list[str | None]:
        """Saves, waits for it, and starts from it the next time."""
        outcomes = super().try_to_save(rollout_id, force_sync=True)
        if outcomes and not any(outcomes):
            self._launched = resumed(self._config, self.checkpoints or "", rollout_id)
        return outcomes
