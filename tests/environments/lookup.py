"""A text environment of Gymnasium: say a word backwards."""

import gymnasium

WORDS = ("stop", "live", "drawer")


class Backwards(gymnasium.Env):
    observation_space = gymnasium.spaces.Text(16)
    action_space = gymnasium.spaces.Text(16)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = (options or {}).get("word") or WORDS[self.np_random.integers(len(WORDS))]
        return self.word, {}

    def step(self, action):
        right = action == self.word[::-1]
        return "yes" if right else "no", float(right), right, False, {}


gymnasium.register("Backwards-v0", Backwards)
