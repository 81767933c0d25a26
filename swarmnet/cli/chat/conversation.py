"""The turns of a chat, and the tokens that the model reads for them."""

from dataclasses import dataclass, field
from typing import Any

from swarmnet_protocols.errors import ConfigError


@dataclass
class Turn:
    question: str
    answer: str = ""


@dataclass
class Conversation:
    """The turns of a chat after an optional system message.

    ``context``: length of the model's context in tokens. Without a chat template, or with ``raw``,
    the model continues the text of all turns.
    """

    tokenizer: Any
    context: int
    raw: bool = False
    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """True if the model continues the text of all turns, without a chat template."""
        return self.raw or not self.tokenizer.chat_template

    def encode(self) -> list[int]:
        """Return the tokens that the model reads before its next answer. Raises ``ConfigError`` if
        its template fails."""
        if self.is_plain:
            text = self.system + "".join(turn.question + turn.answer for turn in self.turns)
        else:
            text = self._as_dialogue()
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=self.is_plain)
        return ids

    def prompt(self, answer_tokens: int) -> tuple[list[int], int]:
        """Return the tokens of :meth:`encode`, and the number of oldest turns dropped so that
        ``answer_tokens`` fit after them.

        After each drop, the hosts compute all remaining turns again. To make drops rare, half the
        context is freed at once.
        """
        ids, dropped = self.encode(), 0
        limit = self.context - min(answer_tokens, self.context // 4)
        while len(ids) > limit and len(self.turns) > 1:
            limit = self.context // 2
            del self.turns[0]
            dropped += 1
            ids = self.encode()
        return ids, dropped

    def messages(self) -> list[dict[str, str]]:
        """Return the messages as chat templates and the OpenAI API take them; the last one is a
        question if it has no answer yet."""
        told = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            told.append({"role": "user", "content": turn.question})
            told.append({"role": "assistant", "content": turn.answer})
        return told if not self.turns or self.turns[-1].answer else told[:-1]

    def _as_dialogue(self) -> str:
        from swarmnet_protocols.models.text.chat_template import TemplateFailed, render_chat

        try:
            return render_chat(self.tokenizer, self.messages(), add_generation_prompt=True)
        except TemplateFailed as error:
            raise ConfigError(
                str(error), hint=error.hint or "leave out the system text, or use --raw"
            ) from error
