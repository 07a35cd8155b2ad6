from pathlib import Path

import pytest
import torch
from byte_tokens import TEMPLATE, byte_tokenizer
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lockstep.config import ConfigError
from lockstep.data.chat import Conversation, end_tokens, render_demonstration, render_prompt, response_text, turn_end
from lockstep.types import Completion, Message, StopReason, Verdict

QWEN3 = Path(__file__).parents[4] / "shared/tokenizers/qwen3"  # beside the repository, where there is one
QUESTION = (Message("system", "Be brief."), Message("user", "1+1="))


def special(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def test_prompt_follows_the_template() -> None:
    tokenizer = byte_tokenizer(TEMPLATE)
    prompt = render_prompt(tokenizer, QUESTION)
    assert tokenizer.decode(prompt) == "<|system|>Be brief.<|end|>\n<|user|>1+1=<|end|>\n<|assistant|>"


def test_without_a_template_contents_are_joined() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(render_prompt(tokenizer, QUESTION)) == "Be brief.\n1+1="


def test_plain_prompt_keeps_a_start_token_but_never_ends_itself() -> None:
    tokenizer = byte_tokenizer()
    ids = [(token, special(tokenizer, token)) for token in ("<bos>", "<eos>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=ids
    )
    assert tokenizer.decode(render_prompt(tokenizer, QUESTION[1:])) == "<bos>1+1="


def test_a_template_that_refuses_is_told_with_its_turns() -> None:
    tokenizer = byte_tokenizer("{% for message in messages %}{{ raise_exception('system first') }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"cannot render turns of system, user: system first"):
        render_prompt(tokenizer, QUESTION)
    with pytest.raises(ConfigError, match=r"cannot render turns of user, assistant: system first"):
        turn_end(tokenizer)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty prompt"):
        render_prompt(byte_tokenizer(), [Message("user", "")])


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_demonstration_keeps_the_prompts_tokens(template: str | None) -> None:
    """'=2' is one token when tokenised together; here the prompt ends in '=' and the solution starts with '2'."""
    tokenizer = byte_tokenizer(template, merges=[("=", "2")])
    tokens, mask = render_demonstration(tokenizer, QUESTION, "2;#2", turn_end(tokenizer))
    prompt = render_prompt(tokenizer, QUESTION)
    assert tokens[: len(prompt)] == prompt
    assert mask == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))
    assert tokenizer.decode(tokens[len(prompt) : -1]) == "2;#2"
    assert tokens[-1] == turn_end(tokenizer)


def test_turn_end_is_the_templates_else_eos() -> None:
    plain, chat = byte_tokenizer(), byte_tokenizer(TEMPLATE)
    bare = byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert turn_end(plain) == special(plain, "<eos>")
    assert turn_end(chat) == special(chat, "<|end|>")
    assert turn_end(bare) == special(bare, "<eos>")


def test_end_tokens_are_all_of_them_once() -> None:
    chat = byte_tokenizer(TEMPLATE)
    eos, end = special(chat, "<eos>"), special(chat, "<|end|>")
    assert end_tokens(chat, None) == (eos, end)
    assert end_tokens(chat, end) == (end, eos)
    assert end_tokens(chat, [7, eos]) == (7, eos, end)


def test_no_end_token_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no EOS"):
        turn_end(tokenizer)


def test_response_text_drops_special_tokens_only() -> None:
    tokenizer = byte_tokenizer(TEMPLATE)
    tokens = [*tokenizer.encode("a , b .", add_special_tokens=False), special(tokenizer, "<|end|>")]
    assert response_text(tokenizer, tokens) == "a , b ."


@pytest.mark.skipif(not QWEN3.exists(), reason="no Qwen3 tokenizer here")
def test_qwen3() -> None:
    tokenizer = AutoTokenizer.from_pretrained(QWEN3)
    prompt = render_prompt(tokenizer, QUESTION[1:])
    assert tokenizer.decode(prompt) == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    tokens, mask = render_demonstration(tokenizer, QUESTION[1:], "two", turn_end(tokenizer))
    assert tokens[: len(prompt)] == prompt
    assert sum(mask) == len(tokens) - len(prompt)
    im_end, endoftext = special(tokenizer, "<|im_end|>"), special(tokenizer, "<|endoftext|>")
    assert tokens[-1] == im_end
    assert end_tokens(tokenizer, [im_end, endoftext]) == (im_end, endoftext)
    tokenizer.eos_token = "<|endoftext|>"  # as in the base models, whose template ends turns with <|im_end|> still
    assert turn_end(tokenizer) == im_end
    assert end_tokens(tokenizer, None) == (endoftext, im_end)


def completion(tokens: list[int], version: int, stop: StopReason = StopReason.EOS) -> Completion:
    logp = [-0.5 * t for t in tokens]
    return Completion(uid="0/0", tokens=tokens, logp=logp, versions=[version] * len(tokens), stop_reason=stop)


def test_conversation_appends_observed_and_sampled_tokens() -> None:
    conversation = Conversation()
    conversation.observe([1, 2])
    conversation.sampled(completion([3, 4], version=7))
    conversation.observe([5])
    conversation.sampled(completion([6], version=8, stop=StopReason.LENGTH))
    made = conversation.trajectory(uid="0/0", text="hi", verdict=Verdict(value=1.0), temperature=0.7)
    assert made.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert made.mask.tolist() == [False, False, True, True, False, True]
    assert made.logp_behav.tolist() == [0.0, 0.0, -1.5, -2.0, 0.0, -3.0]
    assert made.versions.tolist() == [-1, -1, 7, 7, -1, 8]
    assert (made.tokens.dtype, made.mask.dtype) == (torch.int64, torch.bool)
    assert (made.logp_behav.dtype, made.versions.dtype) == (torch.float32, torch.int32)
    assert made.truncated
    assert made.num_sampled == 3


def test_conversation_without_an_answer_is_no_trajectory() -> None:
    conversation = Conversation()
    conversation.observe([1])
    with pytest.raises(AssertionError, match="nothing was sampled"):
        conversation.trajectory(uid="0/0", text="", verdict=Verdict(value=0.0), temperature=1.0)
