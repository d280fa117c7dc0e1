"""The sources of rewards."""

from dataclasses import dataclass

from slime.config.flag import flag, path_flag


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The sources of rewards."""

    rm_type: str | None = flag(help="built-in reward: math, f1, ...; a boxed_ prefix grades the boxed answer")
    reward_key: str | None = flag(help="key of the reward to train on, when rewards are mappings")
    eval_reward_key: str | None = flag(help="the same for evaluation; default --reward-key")
    group_rm: bool = flag(False, help="score a whole group in one call")
    rm_url: str | None = flag(help="address of the remote reward model (rm_type remote_rm)")
    allowed_hosts: list[str] | None = flag(
        help="hosts that --rm-url, and URLs of images and videos in prompts, may lead to: HOST, HOST:PORT or "
        "*.DOMAIN; default: whatever --rm-url names, and public addresses for what prompts name",
    )
    custom_rm_path: str | None = path_flag("async fn(args, sample) that returns the reward", awaited=True)
    overlong_buffer_len: int | None = flag(
        above=0, help="tokens before --rollout-max-response-len on which a response begins to lose reward"
    )
    overlong_penalty_factor: float = flag(
        1.0, at_least=0, help="reward that a response of full length loses by --overlong-buffer-len"
    )
    custom_reward_post_process_path: str | None = path_flag("fn(args, samples) -> (raw, rewards)")
