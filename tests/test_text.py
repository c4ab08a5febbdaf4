"""Text: tokenizer files, chat templates, generation settings, and the detokenizer's exactness."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from jax_hpc.text import GenerationConfig, StreamingDetokenizer, Tokenizer

TEXT = "The quick brown fox, naïve façade: 東京の天気 🙂👩‍👩‍👧 fine."
REPEATABLE = settings(max_examples=300, deadline=None, derandomize=True, database=None)
MESSAGES = [{"role": "user", "content": "Hi"}]


def byte_level() -> tokenizers.Tokenizer:
    """All bytes, a few merges, two special tokens: the kind that Qwen3 uses."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "f"), ("ã", "ģ"), ("ðŁ", "Ļ"), ("ð", "Ł")]
    for left, right in sorted(merges, key=lambda pair: len(pair[0])):
        vocab.setdefault(left + right, len(vocab))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=sorted(merges, key=lambda p: len(p[0])))
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|start|>"])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """Words with a leading mark, and raw bytes for the rest: the kind that Llama 2 uses."""
    words = ["<s>", "</s>", "▁the", "▁fox", "▁", "th", "e", "é", "\n"]
    vocab = {token: i for i, token in enumerate(words + [f"<0x{i:02X}>" for i in range(256)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


TOKENIZERS = {"byte-level": Tokenizer(byte_level()), "byte-fallback": Tokenizer(byte_fallback())}


def write(directory: Path, name: str, content: object) -> None:
    (directory / name).write_text(json.dumps(content), encoding="utf-8")


def tokenizer_in(directory: Path, **config: Any) -> Tokenizer:
    byte_level().save(str(directory / "tokenizer.json"))
    write(directory, "tokenizer_config.json", config)
    return Tokenizer.from_directory(directory)


# Detokenizer


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> list[str]:
    detokenizer = StreamingDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
    pieces.append(detokenizer.push(ids[start:]))
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@REPEATABLE
@given(
    ids=st.lists(st.integers(0, 263), max_size=40),
    sizes=st.lists(st.integers(0, 4), max_size=40),
    skip=st.booleans(),
)
@example(ids=[203, 137, 0, 137], sizes=[], skip=True)  # a special token within a run of bytes
def test_pieces_join_to_the_one_shot_decode(
    kind: str, ids: list[int], sizes: list[int], skip: bool
) -> None:
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.vocab_size in (264, 265)
    pieces = stream(tokenizer, ids, sizes, skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@REPEATABLE
@given(text=st.text(max_size=30))
def test_valid_text_streams_whole_characters(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    pieces = stream(tokenizer, tokenizer.encode(text), [1] * 200, skip=True)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert pieces[-1] == "" or text.endswith("\ufffd")  # nothing of valid text is held to the end


def test_incomplete_character_is_held_back_until_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("a🙂")
    detokenizer = StreamingDetokenizer(tokenizer)
    pieces = [detokenizer.push([i]) for i in ids]
    assert pieces[0] == "a" and pieces[-1] == "🙂" and not any(pieces[1:-1]) and len(ids) > 2
    detokenizer.push(ids[:2])
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.push(ids[:1]) == "a"  # finish starts anew


# Tokenizer


def test_tokenizer_reads_a_checkpoint_directory(tmp_path: Path) -> None:
    tokenizer = tokenizer_in(
        tmp_path, bos_token="<|start|>", eos_token={"content": "<|end|>", "special": True}
    )
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.eos_token_id == tokenizer.token_id("<|end|>") is not None
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    ids = tokenizer.encode("<|start|>the")
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>the"
    assert tokenizer.vocab_size == byte_level().get_vocab_size(with_added_tokens=True)


def test_bos_is_added_once_where_the_settings_want_it(tmp_path: Path) -> None:
    plain = tokenizer_in(tmp_path, bos_token="<|start|>")
    wanting = tokenizer_in(tmp_path, bos_token="<|start|>", add_bos_token=True)
    bos, body = wanting.bos_token_id, plain.encode("the")
    assert wanting.encode("the") == [bos, *body]
    assert wanting.encode("the", add_special_tokens=False) == body
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", bos)]
    )
    both = Tokenizer(backend, {"bos_token": "<|start|>", "add_bos_token": True})
    assert both.encode("the") == [bos, *body]


def test_missing_and_corrupt_tokenizer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no tokenizer.json there"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json: corrupt"):
        Tokenizer.from_directory(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer_config.json: corrupt"):
        Tokenizer.from_directory(tmp_path)
    write(tmp_path, "tokenizer_config.json", [])
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_missing_package_names_the_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_in(tmp_path, chat_template="x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package} is needed.* pip install jax-hpc\[models\]"):
        Tokenizer.from_directory(tmp_path) if package == "tokenizers" else tokenizer.render_chat(
            []
        )


# Chat templates

QWEN_LIKE = """\
{%- if tools %}
    {{- 'tools: ' + tools | tojson }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def test_template_renders_as_transformers_does(tmp_path: Path) -> None:
    tokenizer = tokenizer_in(tmp_path, chat_template=QWEN_LIKE)
    messages = [{"role": "skip", "content": "x"}, *MESSAGES]
    text = "<|start|>user\nHi<|end|>\n"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == text
    assert tokenizer.render_chat(messages) == text + "<|start|>assistant\n"
    thinking = tokenizer.render_chat(messages, enable_thinking=False)
    assert thinking == text + "<|start|>assistant\n<think>\n\n</think>\n\n"
    tools = tokenizer.render_chat(messages, tools=[{"name": "é<"}], add_generation_prompt=False)
    assert tools == 'tools: [{"name": "é<"}]' + text
    assert tokenizer.encode_chat(messages)[0] == tokenizer.token_id("<|start|>")


def test_template_file_wins_and_lists_are_chosen_from(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    tokenizer = tokenizer_in(tmp_path, chat_template=named)
    assert tokenizer.render_chat(MESSAGES) == "d"
    assert tokenizer.render_chat(MESSAGES, tools=[{}]) == "t"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(tmp_path).render_chat(MESSAGES) == "file"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<|start|><|end|>"),
        ("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}\n", "x\n"),
        ("{% generation %}x{% endgeneration %}y", "xy"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{{ {'b': 1, 'a': 'é'} | tojson(indent=1) }}", '{\n "b": 1,\n "a": "é"\n}'),
    ],
)
def test_template_helpers(template: str, text: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_in(
        tmp_path, bos_token="<|start|>", eos_token="<|end|>", chat_template=template
    )
    assert tokenizer.render_chat(MESSAGES) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "chat template: the checkpoint has none"),
        ([{"name": "rag", "template": "x"}], "none of .* named 'default'; it has: rag"),
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("{% if %}", "chat template: Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", "chat template: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "chat template: .*append"),
    ],
)
def test_template_errors_are_value_errors(template: Any, message: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_in(tmp_path, chat_template=template)
    with pytest.raises(ValueError, match=message):
        tokenizer.render_chat(MESSAGES)


# Generation settings


def test_generation_settings_come_from_their_file(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"eos_token_id": 1, "bos_token_id": 2, "top_k": 8})
    stated = {"eos_token_id": [5, 6], "do_sample": True, "temperature": 0.6, "top_k": 20}
    write(tmp_path, "generation_config.json", stated | {"top_p": 0.95, "min_p": None})
    got = GenerationConfig.from_directory(tmp_path)
    want = GenerationConfig((5, 6), bos_token_id=2, do_sample=True, temperature=0.6, top_k=20)
    assert got == GenerationConfig(**{**vars(want), "top_p": 0.95})


def test_generation_settings_fall_back(tmp_path: Path) -> None:
    assert GenerationConfig.from_directory(tmp_path) == GenerationConfig()
    tokenizer = tokenizer_in(tmp_path, eos_token="<|end|>")
    end = tokenizer.token_id("<|end|>")
    assert GenerationConfig.from_directory(tmp_path, tokenizer=tokenizer).eos_token_ids == (end,)
    write(tmp_path, "config.json", {"eos_token_id": 7, "top_k": 8})
    got = GenerationConfig.from_directory(tmp_path, tokenizer=tokenizer)
    assert got == GenerationConfig(eos_token_ids=(7,))  # a model's top_k counts experts


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"temperature": "hot"}, "setting 'temperature' must be float, got 'hot'"),
        ({"top_k": 1.5}, "setting 'top_k' must be int, got 1.5"),
        ({"eos_token_id": ["</s>"]}, "setting 'eos_token_id' must be int, got '</s>'"),
        ({"do_sample": 1}, "setting 'do_sample' must be bool, got 1"),
    ],
)
def test_generation_settings_of_the_wrong_type_are_named(
    stated: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, "generation_config.json", stated)
    with pytest.raises(ValueError, match=message):
        GenerationConfig.from_directory(tmp_path)


def test_importing_needs_no_extra() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys("
        "['tokenizers', 'jinja2', 'safetensors', 'transformers'])); "
        "import jax_hpc.cli, jax_hpc.loading, jax_hpc.text, jax_hpc.progress"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
