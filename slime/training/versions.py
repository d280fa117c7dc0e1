"""The versions of a model's weights, each of which a forward pass may enter."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from slime.utils.tensor_backper import TensorBackuper

TRAINED = "actor"
"""The tag of the weights that are trained."""
REFERENCE = "ref"
TEACHER = "teacher"
OLD_ACTOR = "old_actor"
"""What the engines had when they made the rollout that is trained next, with ``--keep-old-actor``."""
ROLLOUT_ACTOR = "rollout_actor"
"""What the engines have been sent last."""


class WeightVersions(TensorBackuper):
    """Copies of weights under tags, beside the trained ones that a model holds."""

    def entered(self, tag: str) -> AbstractContextManager[None]:
        """A context in which the model computes with the weights of ``tag``.

        The copy under `TRAINED` has to be current: the model gets that back.
        """
        return nullcontext() if tag == TRAINED else self._restored(tag)

    @contextmanager
    def _restored(self, tag: str) -> Iterator[None]:
        self.restore(tag)
        try:
            yield
        finally:
            self.restore(TRAINED)
