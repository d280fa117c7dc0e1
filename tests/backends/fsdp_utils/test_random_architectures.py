"""Random configurations of architectures: logits are those of each sequence alone, or there is a refusal."""

import random
from collections.abc import Iterable

import pytest

from tests.backends.fsdp_utils.random_models import NoModel, agrees, compared, others, random_model
from tests.each import hold_each
from tests.families import ALL

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_group")]

SEED, SAMPLE, LEAST = 20, 12, 11
# A second or more each, many because no model can be built with the defaults of their configs.
DEAR = {
    *("marian", "mbart", "mvp", "pegasus", "prophetnet", "trocr", "cohere_compass_text", "xlm"),
    *("zamba", "zamba2", "nemotron", "dbrx", "xlnet", "xmod", "xlstm", "rwkv", "reformer", "codegen"),
    *("emu3", "ministral", "dots1", "dots3_note", "gemma3n", "gemma4_assistant"),
    *("gemma4_unified_assistant", "qwen4_exp", "qwen4_exp_text", "musicgen", "musicgen_melody"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "falcon_h1", "bailing_hybrid", "hrm_text", "kimi_linear"),
    *("inkling_text", "inkling2_text", "plbart", "xglm", "blenderbot", "blenderbot-small", "blt"),
    *("dots3_note_text", "deepseek_v4", "bart", "bigbird_pegasus", "gemma3n_text", "gemma4"),
    *("gemma4_text", "gemma4_unified", "gemma4_unified_text", "hy_v4"),
}


def _hold(names: Iterable[str], seeds: Iterable[int], least: int, computed: int) -> None:
    """Holds models to what ``transformers`` computes.

    Args:
        least: how many architectures have to give one.
        computed: how many models must not be refused.
    """
    told, count = set(), 0

    def check(case: tuple[str, int]) -> None:
        nonlocal count
        name, seed = case
        try:
            model = random_model(name, seed)
        except NoModel:
            return
        found = compared(model)
        if "refused" in found:
            assert type(model).__name__ in found["refused"]
        else:
            assert agrees(found), found
            count += 1
        told.add(name)

    hold_each([(name, seed) for name in names for seed in seeds], check)
    assert len(told) >= least, f"{len(told)} architectures, wanted {least}: {sorted(told)}"
    assert count >= computed, f"{count} models are computed, wanted {computed}"


def test_every_family_computes_each_sequence_as_transformers_does_alone():
    _hold(ALL, [SEED], least=len(ALL), computed=len(ALL) - 2)


def test_so_do_other_architectures_or_they_are_refused_by_name():
    drawn = random.Random(SEED).sample(sorted({*others()} - DEAR), SAMPLE)
    _hold(drawn, [SEED], least=LEAST, computed=8)


@pytest.mark.nightly
def test_so_do_all_architectures_with_more_configurations():
    _hold([*ALL, *others()], range(3), least=len(ALL) + 100, computed=2 * len(ALL) + 100)
