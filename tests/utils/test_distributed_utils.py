import pytest
import torch

from slime.utils.distributed_utils import distributed_masked_whiten


def test_whitening_uses_masked_entries_and_the_unbiased_variance():
    values, mask = torch.tensor([1.0, 2.0, 3.0, 100.0]), torch.tensor([1, 1, 1, 0])
    whitened = distributed_masked_whiten(values, mask)
    assert whitened[:3].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)
    assert distributed_masked_whiten(values, mask, shift_mean=False)[1] == pytest.approx(2.0, abs=1e-6)


def test_whitening_equal_values_gives_zeros():
    whitened = distributed_masked_whiten(torch.full((5000,), 0.7), torch.ones(5000))
    assert whitened.abs().max() < 1e-3


def test_whitening_nothing_is_an_error():
    with pytest.raises(ValueError, match="mask is zero"):
        distributed_masked_whiten(torch.ones(2), torch.zeros(2))
