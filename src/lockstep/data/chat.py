"""Messages into tokens, and which of those tokens the model is trained on: the one place that knows both.

Text is tokenised once. A conversation then grows by appending tokens, because text that is joined and tokenised
again may come out as other tokens than the ones the model sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from lockstep.config import ConfigError
from lockstep.types import Completion, Message, Routes, StopReason, Trajectory, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "lockstep"  # stands for an answer when a template is asked what it writes after one


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Everything before the first sampled token.

    With a chat template: the template, up to and including the opening of the assistant's turn. Without one: the
    contents alone, joined by newlines, with the tokenizer's own start token if it adds one.
    """
    _require_unicode(messages)
    if tokenizer.chat_template:
        return _not_empty(_rendered(tokenizer, messages, add_generation_prompt=True, return_dict=False))
    tokens = tokenizer.encode("\n".join(m.content for m in messages))
    if tokens and tokens[-1] == tokenizer.eos_token_id:  # some tokenizers close what they encode
        tokens.pop()
    return _not_empty(tokens)


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> Any:
    turns = [{"role": m.role, "content": m.content} for m in messages]
    try:
        return tokenizer.apply_chat_template(turns, **options)
    except (TemplateError, ValueError) as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise ConfigError(f"the tokenizer's chat template cannot render turns of {roles}: {error}") from error


def _require_unicode(messages: Sequence[Message]) -> None:
    """Half a surrogate pair, as Python makes of a byte that is not UTF-8, is a character to no tokenizer."""
    for message in messages:
        try:
            message.content.encode()
        except UnicodeEncodeError as error:
            start = max(0, error.start - 20)
            near = message.content[start : error.start + 20]
            raise ConfigError(f"a prompt is not valid Unicode, at {near!r}") from None


def _not_empty(tokens: list[int]) -> list[int]:
    if not tokens:
        raise ConfigError("an empty prompt: there is no token to continue from")
    return tokens


def render_demonstration(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], solution: str, end: int
) -> tuple[list[int], list[bool]]:
    """A worked answer as tokens and loss mask. Its prompt is exactly `render_prompt`'s; the mask covers the solution
    and `end`, which is the tokenizer's `turn_end`, so a model warmed up on it also learns to stop."""
    prompt = render_prompt(tokenizer, messages)
    answer = [*tokenizer.encode(solution, add_special_tokens=False), end]
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends an assistant's turn: the special token its template writes there, else EOS."""
    if tokenizer.chat_template:
        end = _template_end(tokenizer)
        if end is not None:
            return end
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer has no EOS token and its template none that ends a turn: answers could not end"
        )
    return cast(int, tokenizer.eos_token_id)


def _template_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    text = cast(str, _rendered(tokenizer, (Message("user", "?"), Message("assistant", _PROBE)), tokenize=False))
    after = tokenizer.encode(text.rpartition(_PROBE)[2].lstrip(), add_special_tokens=False)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return after[0] if after and after[0] in special else None


def end_tokens(
    tokenizer: PreTrainedTokenizerBase, generation_config_eos: int | Sequence[int] | None
) -> tuple[int, ...]:
    """All ids that end an answer: those of the generation config, the tokenizer's EOS, the template's end of turn."""
    listed = (generation_config_eos,) if isinstance(generation_config_eos, int) else (generation_config_eos or ())
    eos = () if tokenizer.eos_token_id is None else (cast(int, tokenizer.eos_token_id),)
    return tuple(dict.fromkeys((*listed, *eos, turn_end(tokenizer))))


def response_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Sampled tokens as the reward reads them: without EOS and other special tokens, spaces untouched."""
    options: dict[str, Any] = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return cast(str, tokenizer.decode(list(tokens), **options))


@dataclass(slots=True)
class Conversation:
    """One answer while it grows: observed tokens (prompt, tool output) and sampled ones, in order, never changed."""

    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logp_behav: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None  # of the last sampled turn
    routes: list[Routes] = field(default_factory=list)  # of the turns, each from where the one before ended

    @property
    def num_routed(self) -> int:
        """Leading tokens whose routes are here: a later turn need not bring them again."""
        return sum(len(part.ids) for part in self.routes)

    def observe(self, tokens: Sequence[int]) -> None:
        """Appends what the model reads but did not write."""
        self.tokens.extend(tokens)
        self.mask.extend([False] * len(tokens))
        self.logp_behav.extend([0.0] * len(tokens))
        self.versions.extend([-1] * len(tokens))

    def sampled(self, completion: Completion) -> None:
        """Appends a turn the engine sampled as the continuation of `tokens`."""
        self.tokens.extend(completion.tokens)
        self.mask.extend([True] * len(completion.tokens))
        self.logp_behav.extend(completion.logp)
        self.versions.extend(completion.versions)
        self.stop_reason = completion.stop_reason
        if completion.routes is not None:
            self.routes.append(completion.routes)
        assert len(self.tokens) == len(self.logp_behav) == len(self.versions), completion.uid

    def trajectory(
        self, *, uid: str, text: str, verdict: Verdict, temperature: float, flaws: tuple[str, ...] = ()
    ) -> Trajectory:
        """The finished answer as tensors."""
        import torch  # here, because whatever only reads messages must start without it

        assert self.stop_reason is not None, f"{uid}: nothing was sampled"
        return Trajectory(
            uid=uid,
            tokens=torch.tensor(self.tokens, dtype=torch.int64),
            mask=torch.tensor(self.mask, dtype=torch.bool),
            logp_behav=torch.tensor(self.logp_behav, dtype=torch.float32),
            versions=torch.tensor(self.versions, dtype=torch.int32),
            temperature=temperature,
            stop_reason=self.stop_reason,
            verdict=verdict,
            text=text,
            flaws=flaws,
            routes=self._joined_routes(),
        )

    def _joined_routes(self) -> Routes | None:
        import torch  # as above

        if not self.routes:
            return None
        ids, versions = zip(*((part.ids, part.versions) for part in self.routes), strict=True)
        return Routes(torch.cat(ids), torch.cat(versions))
