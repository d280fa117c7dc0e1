"""What an engine is given for a turn: the tokens of a conversation, those of earlier answers as they were."""

from transformers import PreTrainedTokenizerBase

from slime.agent.adapters.rendering import Rendering, Tools, with_text
from slime.agent.adapters.session import Messages, Prompt, TurnRequest, hashes_of
from slime.agent.trajectory import Chain, TrajectoryManager

_SWITCH = "enable_thinking"
"""By which chat templates are told whether the model shall think, as those of Qwen3 and GLM-4.5 are."""


class Prompts:
    """Prompts of turns, by a chat template and what sessions hold.

    Attributes:
        switches_thoughts: the template can be told whether the model shall think.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, trajectories: TrajectoryManager) -> None:
        self._trajectories = trajectories
        self.switches_thoughts = _SWITCH in str(tokenizer.chat_template or "")
        plain = Rendering(tokenizer)
        self._renderings: dict[bool | None, Rendering] = {None: plain}
        for thinks in (True, False) if self.switches_thoughts else ():
            self._renderings[thinks] = plain.with_options({_SWITCH: thinks})

    def of(self, asked: TurnRequest) -> Prompt:
        """The prompt of a turn.

        Raises:
            Refused: the template fails on the messages, or they hold what is no text.
        """
        messages = [with_text(message) for message in asked.messages]
        chain = self._trajectories.continued(asked.sid, messages)
        heard = messages[len(chain.messages) if chain else 0 :]
        tools = hashes_of(asked.tools or ())
        tells_them = chain is not None and tools <= chain.tools
        rendering = self._renderings.get(asked.thinks, self._renderings[None])
        held = _held_ids(rendering, chain, messages, asked.tools) if chain and tells_them else None
        ids = rendering.tokens(messages, asked.tools) if held is None else held
        return Prompt(ids, messages, heard, (chain, chain.turns) if chain and held else None, tools)


def _held_ids(rendering: Rendering, chain: Chain, messages: Messages, tools: Tools) -> list[int] | None:
    """A conversation that goes on as tokens: those that are held, then new ones; None if it cannot be."""
    at, last = len(chain.messages) - 1, chain.tokens[-1]
    after = rendering.tokens_after(messages, at, tools, last)
    return None if after is None else chain.tokens + after
