"""``--custom-generate-function-path examples.environment.lake.generate``: FrozenLake in words.

user       Walk from S to G over ice (F), not into a hole (H). You are at []. Say left, down, right or up.
           [S]FF
           FHF
           FFG
assistant  right
user         (Right)
           S[F]F
           ...
"""

from slime.rollout.episodes import Episodes

ACTIONS = ("left", "down", "right", "up")
INSTRUCTIONS = (
    "Walk from S to G over ice (F), not into a hole (H). You are at []. Say left, down, right or up."
)

generate = Episodes(
    "slime.environments.gymnasium_text.GymnasiumText",
    {
        "id": "FrozenLake-v1",
        "options": {"render_mode": "ansi", "is_slippery": False, "desc": ["SFF", "FHF", "FFG"]},
        "actions": ACTIONS,
        "instructions": INSTRUCTIONS,
    },
    max_turns=8,
    processes=4,
)
