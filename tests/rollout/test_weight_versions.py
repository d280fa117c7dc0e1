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


def test_every_token_is_checked_not_only_the_last_of_an_answer():
    mixed = Sample(index=7, response_length=3, weight_versions=["3"], version_spans=[("2", 1), ("3", 2)])
    check_weight_versions([mixed], "3", allow_older=True)
    with pytest.raises(
        RolloutError, match=r"sample 7 .*version '2', but the trainer's last sync was version '3'"
    ):
        check_weight_versions([mixed], "3", allow_older=False)
    unsent = Sample(index=7, response_length=3, weight_versions=["3"], version_spans=[("4", 1), ("3", 2)])
    with pytest.raises(RolloutError, match="version '4'"):
        check_weight_versions([unsent], "3", allow_older=True)


def test_tokens_that_no_engine_made_need_no_version():
    check_weight_versions([Sample(response_length=3, version_spans=[(None, 1), ("3", 1)])], "3", False)


@pytest.mark.parametrize("version", ["4", "default"])
def test_a_version_that_was_never_sent_is_refused_always(version):
    with pytest.raises(RolloutError, match=f"version '{version}'"):
        check_weight_versions([Sample(weight_versions=[version])], "3", allow_older=True)
