"""The demo checkpoint's tokenizer, chat template and training documents."""

from __future__ import annotations

import json
import random
from pathlib import Path

from demo_corpus import Entry, shorten
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 2048
END_OF_TEXT, IM_START, IM_END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SYSTEM_PROMPT = "You are a helpful assistant."
# The split pattern of the Qwen2 and Qwen3 tokenizers.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TOPIC_QUESTIONS = (
    "{}",
    "What is {}?",
    "Explain {}.",
    "Tell me about {}.",
    "How does {} work in Python?",
    "Describe {} in Python.",
)
DOCSTRING_QUESTIONS = ("What does {} do?", "What is {}?", "{}", "Explain {}.", "Describe {}.")


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the vocabulary must have."""
    index = tokenizer.token_to_id(token)
    if index is None:
        raise KeyError(f"{token!r} is not in the vocabulary")
    return index


def train_tokenizer(entries: list[Entry]) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE tokens, special ones last, trained on the training text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [split, byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    kinds = ("topic", "docstring", "prose")
    texts = [entry.text for entry in entries if entry.kind in kinds and not entry.held_out]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"expected {VOCAB_SIZE} tokens, got {tokenizer.get_vocab_size()}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path, context: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokenizer.save(str(out / "tokenizer.json"))
    ids = {token: token_id(tokenizer, token) for token in SPECIALS}
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(index): {"content": token, **special, "special": True}
            for token, index in ids.items()
        },
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": context,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    generation = {
        "do_sample": False,
        "eos_token_id": [ids[IM_END], ids[END_OF_TEXT]],
        "pad_token_id": ids[END_OF_TEXT],
    }
    for name, content in (("tokenizer_config", config), ("generation_config", generation)):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def chat(turns: list[tuple[str, str]]) -> str:
    """The chat template's text for (role, content) turns."""
    return "".join(f"{IM_START}{role}\n{content}{IM_END}\n" for role, content in turns)


def _question(entry: Entry, rng: random.Random) -> str:
    if entry.kind == "docstring":
        return rng.choice(DOCSTRING_QUESTIONS).format(entry.name)
    name = entry.name.replace("`", "") if rng.random() < 0.5 else entry.name
    start = name[:4].lower()
    if start == "the ":
        name = rng.choice(("the ", "the ", "")) + name[4:]
    elif name[:2].istitle() and rng.random() < 0.5:
        name = name[0].lower() + name[1:]
    question = rng.choice(TOPIC_QUESTIONS).format(name)
    return question[0].upper() + question[1:] if rng.random() < 0.7 else question


def _chats(entries: list[Entry], rng: random.Random) -> list[str]:
    """Conversations of one to three questions, a few of them with a system message."""
    entries = list(entries)
    rng.shuffle(entries)
    conversations = []
    while entries:
        turns = [("system", SYSTEM_PROMPT)] if rng.random() < 0.15 else []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if entries:
                entry = entries.pop()
                turns += [("user", _question(entry, rng)), ("assistant", shorten(entry.text))]
        conversations.append(chat(turns))
    return conversations


def training_documents(entries: list[Entry], seed: int) -> list[str]:
    """One epoch of documents in random order: raw text and chats, topics more often than rest."""
    rng = random.Random(seed)
    entries = [entry for entry in entries if not entry.held_out]
    topics = [entry for entry in entries if entry.kind == "topic"]
    sections = [entry for entry in entries if entry.kind == "section"]
    docstrings = [entry for entry in entries if entry.kind == "docstring"]
    documents = [entry.text for entry in topics * 3]
    documents += [entry.text for entry in entries if entry.kind == "prose"]
    documents += [f"# {entry.name}\n\n{entry.text}" for entry in [*sections, *docstrings]]
    documents += _chats(sections * 10 + docstrings, rng)
    rng.shuffle(documents)
    return documents


def held_out_documents(entries: list[Entry]) -> list[str]:
    """The held-out text in its raw form: whole topics and whole modules' docstrings."""
    kinds = ("topic", "docstring")
    return [entry.text for entry in entries if entry.held_out and entry.kind in kinds]
