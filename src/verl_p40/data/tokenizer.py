"""The demo's tokenizer: byte-level BPE as Qwen2 has it, trained on the demo's own text.

Runs in a stack environment (needs tokenizers and transformers).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from verl_p40.data.rows import INSTRUCTION

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY: Final = 448
"""256 bytes, 3 special tokens, and merges for the words of the stories. The instruction, which
ends every question, is one more token: prompts stay near 32 tokens and steps short."""

PAD: Final = "<|endoftext|>"
START: Final = "<|im_start|>"
END: Final = "<|im_end|>"

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, the format of Qwen2, without its default system message."""

_PIECES: Final = r"####|\d| ?[A-Za-z']+|\s|[^\sA-Za-z\d]+"
"""What BPE never merges across. Digits stay single, as in Qwen2."""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train on ``texts`` (without the instruction); the same texts give the same tokenizer."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
    from tokenizers import pre_tokenizers as pre
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre.Sequence(
        [
            pre.Split(Regex(_PIECES), "isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = list(texts)
    # The roles come once a prompt; without the weight their letters would stay separate tokens.
    bpe.train_from_iterator([*texts, *["user", "assistant", "system"] * len(texts)], trainer)
    bpe.add_tokens([AddedToken(f" {INSTRUCTION}", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
