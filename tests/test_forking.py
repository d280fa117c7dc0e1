"""What is forked in tests is as a process that has imported everything itself."""

import gc
from multiprocessing.connection import Connection

from tests.forking import forking


def tell(sender: Connection) -> None:
    sender.send((gc.isenabled(), gc.get_freeze_count()))


def test_garbage_is_collected_in_what_is_forked_and_nothing_looked_for_in_what_was_preloaded() -> None:
    receiver, sender = forking().Pipe(duplex=False)
    process = forking().Process(target=tell, args=(sender,))
    process.start()
    sender.close()
    collects, passed_over = receiver.recv()
    process.join()
    assert collects and passed_over > 100_000
