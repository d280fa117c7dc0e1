"""Which view of a buffer something is, found by putting indices in the place of values."""

import torch


def view_at(flat: torch.Tensor, indices: torch.Tensor, what: str) -> torch.Tensor:
    """The view of ``flat`` whose elements are at ``indices``.

    Raises:
        ValueError: no view has them.
    """
    first = (0,) * indices.dim()
    start = int(indices[first])
    strides = []
    for dim, size in enumerate(indices.shape):
        second = tuple(int(at == dim) for at in range(indices.dim()))
        strides.append(int(indices[second]) - start if size > 1 else 1)
    expected = torch.tensor(start)
    for size, stride in zip(indices.shape, strides, strict=True):
        expected = expected[..., None] + torch.arange(size) * stride
    if not torch.equal(expected, indices):
        raise ValueError(f"{what}: transformers keeps it in a form that cannot be written to in place")
    return flat.as_strided(indices.shape, strides, start)
