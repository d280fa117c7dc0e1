"""Who writes a save: of each place one writer, made when its first save begins."""

from slime.config.checkpoints import CheckpointConfig
from slime.config.run import run_config
from slime.training.save_attempts import SaveAttempts, Writers
from tests.run_args import run_args


class Writer:
    """Is done once it is waited for."""

    def __init__(self, flags: CheckpointConfig) -> None:
        self.flags = flags
        self.attempts = SaveAttempts(flags.save or "")

    def finish(self) -> None:
        self.attempts.complete()

    def poll(self) -> None:
        return


def test_checkpoints_and_snapshots_have_writers_of_their_own() -> None:
    made: list[str | None] = []
    begun: list[str | None] = []

    def make(flags: CheckpointConfig) -> Writer:
        made.append(flags.save)
        return Writer(flags)

    flags = run_config(run_args(save="/checkpoints", async_save=True, no_save_optim=True)).checkpoints
    writers = Writers(flags, make)
    assert made == ["/checkpoints"]
    places = (None, "/memory", None, "/memory", "/other")
    outcomes = [
        writers.save(place, place is not None, lambda own: begun.append(own.flags.save)) for place in places
    ]
    assert begun == ["/checkpoints", "/memory", "/checkpoints", "/memory", "/other"]
    assert made == ["/checkpoints", "/memory", "/other"]
    assert outcomes == [[], [None], [], [None], [None]]
    of_memory = writers._snapshots["/memory"].flags
    assert (of_memory.async_save, of_memory.no_save_optim) == (False, None)
