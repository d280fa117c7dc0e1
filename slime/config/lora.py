"""Low-rank adapters (LoRA, Hu et al. 2021) on a base that does not train."""

import math
from dataclasses import dataclass

from slime.config.flag import flag, place_flag

ALL_LINEAR = "all-linear"
"""The target that stands for every linear layer of the decoder."""
SERVED_ADAPTER = "slime"
"""The name that engines know the adapter by, where they get it beside the base."""
ADAPTERS_AT_ONCE = 8
"""How many SGLang computes at once unless told otherwise, of which the base is one."""
_NEEDED = "--lora-rank"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (LoRA) on a base that does not train."""

    lora_rank: int = flag(
        0,
        names=("--lora-rank", "--lora-r"),
        at_least=0,
        help="rank of adapters, which train in the place of all weights; 0: none",
    )
    lora_alpha: float = flag(
        32.0, above=0, help="what an adapter gives counts alpha / rank times", idle_without=_NEEDED
    )
    lora_dropout: float = flag(
        0.0, at_least=0, below=1, help="dropout of an adapter's input in training", idle_without=_NEEDED
    )
    lora_use_rslora: bool = flag(
        False,
        names=("--lora-use-rslora", "--use-rslora"),
        help="alpha / sqrt(rank) in the place of alpha / rank",
        idle_without=_NEEDED,
    )
    lora_target_modules: list[str] = flag(
        [ALL_LINEAR],
        names=("--lora-target-modules", "--target-modules"),
        help="Hugging Face names of linear layers, their ends (q_proj), or regexes of whole names; "
        f"{ALL_LINEAR}: each of the decoder's but experts",
        idle_without=_NEEDED,
    )
    lora_exclude_modules: list[str] = flag(
        [],
        names=("--lora-exclude-modules", "--exclude-modules"),
        help="linear layers, named likewise, that get no adapter",
        idle_without=_NEEDED,
    )
    lora_merge: bool = flag(
        True,
        names=("--no-lora-merge",),
        help="engines get the base once, then adapters alone, which they compute beside it, in the place "
        "of merged weights",
        idle_without=_NEEDED,
    )
    lora_save_merged: bool = flag(
        False,
        help="--save-hf writes the whole model with what adapters add, and the adapter under adapter/ there",
        idle_without=_NEEDED,
    )
    lora_adapter_path: str | None = place_flag(
        help="directory of an adapter in PEFT's format to start from; with --lora-adapters also one of "
        "directories by their names",
        idle_without=_NEEDED,
    )
    lora_adapters: list[str] = flag(
        [],
        help="names of several adapters on the one base, each of which trains on its own samples; without "
        "names there is one, of all samples",
        idle_without=_NEEDED,
    )
    lora_adapter_key: str = flag(
        "lora_adapter",
        help="what in a sample's metadata names its adapter; source_name: the source of its prompt",
        idle_without="--lora-adapters",
    )

    @property
    def adapts(self) -> bool:
        """Whether adapters train, and nothing else does."""
        return self.lora_rank > 0

    @property
    def serves_adapter(self) -> bool:
        """Whether engines have the adapter beside the base, so that requests have to name it."""
        return self.adapts and not self.lora_merge

    @property
    def named_adapters(self) -> list[str]:
        """The names of all adapters; none where there is one for all samples."""
        return self.lora_adapters if self.adapts else []

    @property
    def each_adapter(self) -> list[str] | list[None]:
        """The names of all adapters; None alone where there is one without a name."""
        return self.named_adapters or [None]

    @property
    def served_adapters(self) -> tuple[str, ...]:
        """The names by which requests ask for the adapters that engines have beside the base."""
        if not self.serves_adapter:
            return ()
        return tuple(self.named_adapters) or (SERVED_ADAPTER,)

    @property
    def adapters_at_once(self) -> int:
        """How many engines are to compute at once, of which the base is one."""
        return max(ADAPTERS_AT_ONCE, len(self.named_adapters) + 1)

    @property
    def lora_scale(self) -> float:
        """The factor of what an adapter gives."""
        rank = math.sqrt(self.lora_rank) if self.lora_use_rslora else self.lora_rank
        return self.lora_alpha / rank
