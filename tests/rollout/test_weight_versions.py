import pytest

from slime.rollout.base_types import RolloutError
from slime.rollout.weight_versions import check_weight_versions
from slime.utils.types import Sample


def test_the_expected_version_passes_and_older_ones_only_if_allowed():
    check_weight_versions([Sample(weight_versions=["3", "3"]), Sample()], "3", allow_older=False)
    check_weight_versions([Sample(weight_versions=["2", "3"])], "3", allow_older=True)
    with pytest.raises(
        RolloutError, match=r"sample 7 .*version '2', but the trainer's last sync was version '3'"
    ):
        check_weight_versions([Sample(index=7, weight_versions=["2", "3"])], "3", allow_older=False)


@pytest.mark.parametrize("version", ["4", "default"])
def test_a_version_that_was_never_sent_is_refused_always(version):
    with pytest.raises(RolloutError, match=f"version '{version}'"):
        check_weight_versions([Sample(weight_versions=[version])], "3", allow_older=True)
