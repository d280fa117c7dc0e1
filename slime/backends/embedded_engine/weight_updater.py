"""Weight updates: the session, and the ways weights come in. Runs on the engine thread."""

from pathlib import Path

import torch

from slime.backends.embedded_engine.checkpoint import TornWeights, load_checkpoint
from slime.backends.embedded_engine.engine import Engine
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.kept_memory import KeptMemory
from slime.backends.embedded_engine.named_weights import NamedWeights
from slime.backends.embedded_engine.rank_messages import Planned, RankMessages
from slime.backends.embedded_engine.remote_weights import RemoteWeights
from slime.backends.embedded_engine.served_shards import ServedShards
from slime.backends.embedded_engine.tensor_ranks import Named, joined, named_tensors, refused, tensors_of
from slime.backends.embedded_engine.weight_groups import WeightGroups
from slime.models.checkpoint.stored_format import StoredFormat
from slime.utils.accelerator import synchronize
from slime.utils.tensor_bucket import Opened, deserialize_tensors, layout
from slime.weight_sync.remote_memory import RemoteSpan
from slime.weight_sync.versions.live import ChangedBucket, HeldState, equal_bytes

_LOAD_FORMATS = (None, "auto", "direct", "flattened_bucket")


class WeightUpdater:
    """Changes the weights in place. While a session is open the engine computes nothing.

    Tensor and distributed updates need an open session, as in SGLang 0.5.23; one from disk does not.

    Args:
        stored: the format of a quantised checkpoint, in which updates of its weights have to come; all
            tensors of a weight in the same request.
        tp_size: the tensor-parallel ranks that weights are sent to.
    """

    def __init__(
        self,
        engine: Engine,
        parameters: NamedWeights,
        stored: StoredFormat | None = None,
        tp_size: int = 1,
    ) -> None:
        self._engine = engine
        self._tp_size = tp_size
        self._parameters = parameters
        self._stored = stored
        self.groups = WeightGroups(parameters.config.device, tp_size)
        self.base = HeldState()
        self.sessions = RemoteWeights(parameters.config.device, tp_size)
        self.session: str | None = None
        self._shards = ServedShards(parameters, tp_size)
        self.messages = RankMessages(parameters, self.groups, tp_size)
        self._memory = KeptMemory()
        self._torn: set[str] = set()
        """Weights that a checkpoint which broke off may have changed, and no update has brought since."""

    def take(self, writer: str) -> bool:
        """Has this trainer alone change the weights; whether it finds an update open, which is closed.

        Nothing is computed after that until an update has ended.
        """
        if self._engine.fence.take(writer):
            self.groups.leave_all()  # of trainers before it
            self.sessions.leave()
        was_open, self.session = self.session is not None, None
        return was_open

    def begin(self, selector: str) -> None:
        if self.session is not None:
            raise BadRequest("a weight update is open already: /end_weight_update comes first")
        if selector not in ("all", "target"):
            raise BadRequest(f"selector {selector!r}: the embedded engine has no draft model")
        self.session = selector
        self._engine.updating = True

    def end(self) -> None:
        if self.session is None:
            raise BadRequest("no weight update is open: /begin_weight_update comes first")
        self.session = None
        if self._torn:
            raise BadRequest(
                f"weight {min(self._torn)!r}: may be of a checkpoint that broke off (wanted: an update with "
                f"it and {len(self._torn) - 1} others); nothing is computed until it comes"
            )
        self._engine.updating = False

    def from_tensors(
        self, payloads: list[str], load_format: str | None, version: str | None, flush: bool
    ) -> None:
        """Loads a payload for each tensor-parallel rank: all weights, or "direct" what the rank keeps."""
        self._require_session(load_format)
        try:
            if load_format == "direct":
                self._load_shards(self._of_each_rank(payloads, None, self._memory.storage))
            else:
                self._load(self.of_ranks(payloads, load_format, self._memory.storage))
        finally:
            self._memory.forget_others()
        self._complete(version, flush)

    def of_ranks(self, payloads: list[str], load_format: str | None, opened: Opened | None = None) -> Named:
        """Reads the tensors of a request, which has a payload for each tensor-parallel rank.

        Args:
            opened: what stands for shared memory of theirs; by default a mapping that lasts as long as they.

        Raises:
            BadRequest: it has not, or they are none.
        """
        return joined(self._of_each_rank(payloads, load_format, opened or KeptMemory().storage))

    def _of_each_rank(
        self, payloads: list[str], load_format: str | None, opened: Opened | None
    ) -> list[Named]:
        if len(payloads) != self._tp_size:
            raise BadRequest(
                f"serialized_named_tensors: {len(payloads)} payloads "
                f"(wanted: {self._tp_size}, one per TP rank)"
            )
        try:
            return [named_tensors(deserialize_tensors(payload, opened), load_format) for payload in payloads]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadRequest(f"serialized_named_tensors: {error}") from error

    def from_group(
        self,
        name: str,
        specs: list[tuple[str, torch.dtype, tuple[int, ...]]],
        load_format: str | None,
        version: str | None,
        flush: bool,
    ) -> None:
        """Receives (name, dtype, shape) tensors that rank 0 of a group broadcasts.

        Raises:
            BadRequest: a tensor does not fit, or there is no such group; nothing is changed. When the group
                breaks some weights may have changed, and parts of one.
        """
        self._require_session(load_format)
        device = self.groups.device(name)
        for weight, dtype, shape in specs:
            self._check(weight, dtype, shape)
        if load_format == "flattened_bucket":
            entries = layout(specs)
            size = entries[-1].end_idx if entries else 0
            row = self._row(specs, device)
            flats = self.groups.buffers(name, size) if row is None else [row]
            self.groups.receive(name, [[flat] for flat in flats])
            ranks = [tensors_of(flat, entries) for flat in flats] if row is None else [[]]
            self._torn -= {weight for weight, *_ in specs} if row is not None else set()
        else:
            places = self._places(specs, device)
            rest = [spec for spec in specs if spec[0] not in places]
            ranks = [
                [(weight, torch.empty(shape, dtype=dtype, device=device)) for weight, dtype, shape in rest]
                for _ in range(self._tp_size)
            ]
            whole = [{**places, **dict(named)} for named in ranks]
            self.groups.receive(name, [[held[weight] for weight, *_ in specs] for held in whole])
            self._torn -= places.keys()
        self._load(joined(ranks))
        self._complete(version, flush)

    def from_session(
        self,
        name: str,
        specs: list[tuple[str, torch.dtype, tuple[int, ...]]],
        source: RemoteSpan,
        version: str | None,
        flush: bool,
    ) -> None:
        """Reads a bucket of (name, dtype, shape) tensors, back to back, out of a trainer's memory.

        Raises:
            BadRequest: a tensor does not fit, there is no such session, or the trainer cannot be read;
                nothing is changed.
        """
        self._require_session(None)
        for weight, dtype, shape in specs:
            self._check(weight, dtype, shape)
        entries = layout(specs)
        if (size := entries[-1].end_idx if entries else 0) != source.size:
            raise BadRequest(f"a bucket of {source.size} bytes (wanted: {size}, by its tensors)")
        ranks = [tensors_of(flat, entries) for flat in self.sessions.receive(name, source)]
        self._load(joined(ranks))
        self._complete(version, flush)

    def from_changes(self, name: str, bucket: ChangedBucket, version: str | None, flush: bool) -> None:
        """Receives changes of what the last such update brought, or whole tensors, from rank 0 of a group.

        Raises:
            BadRequest: they are changes of other weights than are held, or damaged; the next update has to be
                a whole one. See `from_group` too.
        """
        self._require_session(None)
        self.groups.device(name)
        with refused():
            for tensor in bucket.tensors:
                self._check(tensor.name, tensor.entry.torch_dtype, tensor.shape)
            self.base.begin(bucket)
        flats = self.groups.buffers(name, bucket.size)
        if bucket.size:
            self.groups.receive(name, [[flat] for flat in flats])
        with refused():
            named = self.base.take(bucket, equal_bytes(flats))
            self._load([(weight, tensor.to(self._parameters.config.device)) for weight, tensor in named])
            if bucket.state is not None:
                self.base.finish(bucket.state)
        self._complete(version, flush)

    def plan_from_ranks(self, name: str, ranks: Planned) -> None:
        """Takes note of what trainer ranks will send over a group.

        Raises:
            BadRequest: that is not all weights of this engine.
        """
        self._require_plain("messages of trainer ranks")
        self.messages.plan(name, ranks)

    def from_ranks(self, name: str, version: str | None, flush: bool) -> None:
        """Receives all weights, of each rank of this engine what it keeps; see `RankMessages.receive`."""
        self._require_session(None)
        for names in self.messages.receive(name):
            self._torn -= names
        self._complete(version, flush)

    def from_disk(self, path: str, version: str | None, flush: bool) -> None:
        """Loads an HF checkpoint; the old weights are kept if it does not fit or is not whole.

        Where one breaks off while it is read, nothing is computed until an update has brought all weights.
        """
        self._require_memory()
        if not Path(path).is_dir():
            raise BadRequest(f"model_path {path!r}: no such directory on the engine's machine")
        try:
            load_checkpoint(self._parameters, path)
        except TornWeights as error:
            self._torn, self._engine.updating = set(self._parameters.named), True
            message = f"model_path {path!r}: {error}; nothing is computed until all weights come anew"
            raise BadRequest(message) from error
        except Exception as error:  # a damaged file raises whatever its reader raises
            raise BadRequest(f"model_path {path!r}: {error}; the old weights are kept") from error
        self._torn, self._engine.updating = set(), self.session is not None
        self._complete(version, flush)

    def set_version(self, version: str) -> None:
        self._engine.fence.note(version)
        self._engine.scheduler.weight_version = version

    def _require_session(self, load_format: str | None) -> None:
        self._require_memory()
        if self.session is None:
            raise BadRequest("weights are updated between /begin_weight_update and /end_weight_update")
        if load_format not in _LOAD_FORMATS:
            raise BadRequest(f"load_format {load_format!r}: wanted one of {_LOAD_FORMATS}")

    def _require_memory(self) -> None:
        if "weights" in self._engine.released:
            raise BadRequest("the memory of the weights is released: /resume_memory_occupation comes first")

    def _load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """Raises BadRequest, and changes nothing, if a tensor does not fit."""
        if self._stored is None:
            self._replace(named)
            return
        try:
            given, dtype = dict(named), self._parameters.config.dtype
            # What is not quantised stays as it came: biases of experts are float32 in any model.
            plain = [
                (name, tensor if given.get(name) is tensor else tensor.to(dtype))
                for name, tensor in self._stored.decode(named)
            ]
        except ValueError as error:
            raise BadRequest(str(error)) from error
        self._replace(plain)

    def _load_shards(self, ranks: list[Named]) -> None:
        """Raises BadRequest, and changes nothing, if a tensor does not fit."""
        self._require_plain("load_format 'direct'")
        self._torn -= self._shards.update(ranks)

    def _require_plain(self, what: str) -> None:
        if self._stored is not None:
            raise BadRequest(f"{what}: the checkpoint is quantised (wanted: whole weights)")

    def _replace(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self._parameters.update(named)
        self._torn.difference_update(name for name, _ in named)

    def _places(
        self, specs: list[tuple[str, torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Weights that tensors of these specs can be received into, without a copy."""
        if self._stored is not None or self._tp_size > 1:
            return {}
        found = {}
        for weight, dtype, shape in specs:
            place = self._parameters.destination(weight, shape, dtype)
            if place is not None and (place.dtype, place.device) == (dtype, device) and place.is_contiguous():
                found[weight] = place
        return found

    def _row(
        self, specs: list[tuple[str, torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> torch.Tensor | None:
        """The bytes of the weights of these specs, where they lie in this order without a gap."""
        places = self._places(specs, device)
        if not specs or len(places) < len(specs):
            return None
        flat = self._parameters.flat.view(torch.uint8)
        first = end = places[specs[0][0]].data_ptr() - flat.data_ptr()
        for weight, *_ in specs:
            if places[weight].data_ptr() - flat.data_ptr() != end:
                return None
            end += places[weight].nbytes
        return flat[first:end] if 0 <= first < end <= flat.numel() else None

    def _check(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Raises BadRequest if a tensor that is to be received does not fit."""
        try:
            spec = self._stored.spec(name) if self._stored is not None else None
        except ValueError as error:
            raise BadRequest(str(error)) from error
        if spec is not None:
            if (dtype, shape) != spec:
                raise BadRequest(
                    f"weight {name!r}: {dtype} {list(shape)} (wanted: {spec[0]} {list(spec[1])})"
                )
        elif self._parameters.destination(name, shape, dtype) is None:
            self._check_ignored(name, shape)

    def _check_ignored(self, name: str, shape: tuple[int, ...]) -> None:
        """A tensor without a place here is received all the same, so its size must be plausible."""
        if torch.Size(shape).numel() > 2 * self._parameters.embedding.numel():
            raise BadRequest(f"weight {name!r}: shape {list(shape)} does not belong to this model")

    def _complete(self, version: str | None, flush: bool) -> None:
        # whoever sent the tensors may reuse their memory once it is answered
        synchronize(self._parameters.config.device)
        if version is not None:
            self.set_version(version)
        self._engine.scheduler.forget_shared()
        if flush and not self._engine.flush():
            raise BadRequest("the weights are updated, but flushing the cache failed: requests are running")
