"""A publisher of weights that change, and what readers made of them."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from slime.weight_sync.versions.codec import bytes_in, checksum, difference
from slime.weight_sync.versions.manifest import Entry, VersionManifest, directory_of
from slime.weight_sync.versions.staged import StagedChanges, StagedVersion

SPECS = {
    "wide": (torch.float32, (5, 3)),
    "brain": (torch.bfloat16, (7, 2)),
    "eighth": (torch.float8_e4m3fn, (9,)),
    "packed": (torch.int32, (4,)),
    "scalar": (torch.float32, ()),
    "empty": (torch.float32, (0, 4)),
}


def random_bytes(rng, size):
    return rng.integers(0, 256, size, dtype=np.uint8)


class Publisher:
    """What a trainer writes: weights that change a little from version to version."""

    def __init__(self, root, encoding="xor", algorithm="xxh3-128", place=None):
        self.root, self.encoding, self.algorithm = root, encoding, algorithm
        self.place = root if place is None else place
        self.assets = root.parent / "assets"
        self.assets.mkdir(exist_ok=True)
        (self.assets / "config.json").write_text("{}")
        self.rng = np.random.default_rng(2)
        self.version = 0
        self.weights = {name: self.tensor(*spec) for name, spec in SPECS.items()}
        self.kept = {}
        self.manifest = None

    def tensor(self, dtype, shape):
        count = torch.Size(shape).numel() * dtype.itemsize
        data = torch.from_numpy(random_bytes(self.rng, count))
        return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)

    def train(self, names=tuple(SPECS)):
        for name in names:
            tensor = self.weights[name].clone().contiguous()
            data = tensor.view(-1).view(torch.uint8)
            if data.numel():
                data[int(self.rng.integers(data.numel()))] ^= int(self.rng.integers(1, 256))
            self.weights[name] = tensor

    def whole(self):
        self.version += 1
        staged = StagedVersion(self.place, self.version, self.algorithm)
        for name, tensor in self.weights.items():
            staged.write([(name, tensor)])
        self.manifest = staged.publish(self.assets)
        self._keep()

    def changes(self):
        self.version += 1
        before = self.kept[self.version - 1]
        staged = StagedChanges(self.place, self.version, self.manifest, self.encoding)
        for name, tensor in self.weights.items():
            found = difference(bytes_in(tensor), bytes_in(before[name]), self.encoding)
            if found:
                dtype = str(tensor.dtype).removeprefix("torch.")
                digest = checksum(self.algorithm, bytes_in(tensor))
                staged.write_changes({name: (Entry(tuple(tensor.shape), dtype, "", digest), found.payload)})
        published = staged.publish(self.assets)
        tensors = {**self.manifest.tensors, **published.tensors}
        self.manifest = VersionManifest(self.version, published.state, self.algorithm, tensors)
        self._keep()

    def _keep(self):
        self.kept[self.version] = dict(self.weights)

    def publish(self, count, whole=(1,)):
        for _ in range(count):
            self.train()
            self.whole() if self.version + 1 in whole else self.changes()

    def directory(self, version):
        return directory_of(self.root, version)


def read(path):
    files = sorted(Path(path).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def require_equal(path, weights):
    """Bit for bit, NaN included."""
    found = read(path)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        same = found[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
        assert same, name
