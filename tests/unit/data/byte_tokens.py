"""A tokenizer made on the spot, for the tests beside it."""

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(template: str | None = None, merges: list[tuple[str, str]] | None = None) -> PreTrainedTokenizerFast:
    """Bytes, a few merges, and specials: <eos> ends texts, <|end|> ends turns."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [a + b for a, b in merges or []]
    core = Tokenizer(BPE(vocab={t: i for i, t in enumerate([*letters, *merged])}, merges=merges or []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<eos>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<bos>"])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", bos_token="<bos>")
    made.chat_template = template
    return made
