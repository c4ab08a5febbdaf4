"""Text in and out of a model: tokenizer, chat template, generation settings, streaming
detokenizer.

Needs the packages of the `models` extra, imported where they are first used.
"""

import datetime
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jax_hpc._json import read_object

Message = Mapping[str, Any]

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")
_TOKEN_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
_SPECIAL = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


def _extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} is needed here and is not installed: pip install jax-hpc[models]"
        ) from error


def _settings(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty where there is no such file."""
    return read_object(path) if path.is_file() else {}


class Tokenizer:
    """A Hugging Face tokenizer.json with the settings of tokenizer_config.json beside it."""

    def __init__(
        self, backend: Any, settings: Mapping[str, Any] | None = None, template: str | None = None
    ):
        """backend: a `tokenizers.Tokenizer`; template: a chat template, before the settings'."""
        self._backend = backend
        self._settings = dict(settings or {})
        self._template = template
        self.special_tokens = _special_tokens(self._settings)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_directory(cls, directory: str | Path) -> Self:
        """Reads the tokenizer of a checkpoint's directory.

        Raises FileNotFoundError where it has none, ValueError where a file is damaged, ImportError
        where `tokenizers` is not installed.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{directory}: no tokenizer.json there")
        tokenizers = _extra("tokenizers")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises a bare Exception
            raise ValueError(f"{path}: corrupt: {error}") from error
        template = directory / "chat_template.jinja"
        return cls(
            backend,
            _settings(directory / "tokenizer_config.json"),
            template.read_text(encoding="utf-8") if template.is_file() else None,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, or None."""
        return self.token_id(self.special_tokens.get("bos_token"))

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, or None."""
        return self.token_id(self.special_tokens.get("eos_token"))

    def token_id(self, token: str | None) -> int | None:
        """Id of a token, or None where there is no such token."""
        return None if token is None else self._backend.token_to_id(token)

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token is one raw byte of a byte-fallback vocabulary, such as ``<0xE2>``."""
        return bool(_BYTE_TOKEN.match(self._backend.id_to_token(token_id) or ""))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens (a leading bos) that the settings want."""
        ids = list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        bos = self.bos_token_id
        if add_special_tokens and self._settings.get("add_bos_token") and bos is not None:
            ids = ids if ids[:1] == [bos] else [bos, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation, by the checkpoint's own template.

        messages: mappings with "role" and "content"; variables: what else the template knows, such
        as `tools` or `enable_thinking`. Raises ValueError where there is no template, where it
        refuses the messages, or where it is broken.
        """
        jinja2 = _extra("jinja2")
        template = self._template or _choose_template(self._settings, bool(variables.get("tools")))
        values = {"tools": None, "documents": None} | self.special_tokens | variables
        try:
            return (
                _environment()
                .from_string(template)
                .render(
                    messages=[dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    **values,
                )
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error}") from error

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of `render_chat`, whose template writes the special tokens itself."""
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)


class StreamingDetokenizer:
    """Turns tokens into text as they come, never half a character.

    The pieces joined are exactly the one-shot decode of all tokens. Text is held back while it
    ends in an incomplete character, and through a run of byte-fallback tokens, since one bad byte
    changes the decoding of the whole run.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []  # tokens of the last piece, then those held back
        self._context = 0  # how many of them belong to the last piece

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that is now certain (possibly none)."""
        return "".join([self._push(int(token_id)) for token_id in ids])

    def _push(self, token_id: int) -> str:
        if self._skip and token_id in self._tokenizer.special_ids:
            return ""  # it has no text, and does not end a run of byte tokens either
        self._ids.append(token_id)
        if self._tokenizer.is_byte_token(token_id):
            return ""
        before, text = self._texts()
        if text.endswith(_REPLACEMENT) or not text.startswith(before) or text == before:
            return ""
        # The last piece's tokens stay as context: decoders treat the first word of a text in
        # their own way.
        self._ids = self._ids[self._context :]
        self._context = len(self._ids)
        return text[len(before) :]

    def finish(self) -> str:
        """Returns what was held back, incomplete characters as U+FFFD, and starts anew."""
        before, text = self._texts()
        self._ids, self._context = [], 0
        return text[len(before) :]

    def _texts(self) -> tuple[str, str]:
        def decode(ids: list[int]) -> str:
            return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

        return decode(self._ids[: self._context]), decode(self._ids)


@dataclass(frozen=True)
class GenerationConfig:
    """How a checkpoint wants to be sampled: generation_config.json.

    Token ids that it leaves out come from config.json; the other settings do not, since model
    configurations use names such as top_k for other things. `do_sample` False means greedy. top_k
    0, top_p 1, min_p 0 and repetition_penalty 1 are off; max_new_tokens None leaves it to the
    caller.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None

    @classmethod
    def from_directory(cls, directory: str | Path, *, tokenizer: Tokenizer | None = None) -> Self:
        """Reads a checkpoint's directory; a tokenizer's eos is the last resort.

        Raises ValueError where a file is damaged or a value is of the wrong type.
        """
        directory = Path(directory)
        model = _settings(directory / "config.json")
        found = {name: model[name] for name in _TOKEN_IDS if name in model} | {
            name: value
            for name, value in _settings(directory / "generation_config.json").items()
            if value is not None
        }
        eos = found.get("eos_token_id")
        if eos is None and tokenizer is not None:
            eos = tokenizer.eos_token_id
        kinds = {
            "bos_token_id": int,
            "pad_token_id": int,
            "do_sample": bool,
            "temperature": float,
            "top_k": int,
            "top_p": float,
            "min_p": float,
            "repetition_penalty": float,
            "max_new_tokens": int,
        }
        values: dict[str, Any] = {}
        for name, kind in kinds.items():
            if found.get(name) is not None:
                values[name] = _number(directory, name, found[name], kind)
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        eos_ids = tuple(_number(directory, "eos_token_id", i, int) for i in ids)
        return cls(eos_token_ids=eos_ids, **values)


def _number(directory: Path, name: str, value: Any, kind: type) -> Any:
    fits = isinstance(value, bool) if kind is bool else isinstance(value, (int, float))
    if not fits or (kind is int and int(value) != value):
        raise ValueError(
            f"{directory}: generation setting {name!r} must be {kind.__name__}, got {value!r}"
        )
    return kind(value)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by name; a setting is the token itself or a mapping with its content."""
    found = {}
    for name in _SPECIAL:
        token = settings.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _choose_template(settings: Mapping[str, Any], with_tools: bool) -> str:
    template = settings.get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        wanted = "tool_use" if with_tools and "tool_use" in by_name else "default"
        if wanted not in by_name:
            raise ValueError(
                f"chat template: none of the checkpoint's is named {wanted!r}; "
                f"it has: {', '.join(by_name)}"
            )
        return by_name[wanted]
    if not isinstance(template, str):
        raise ValueError(
            "chat template: the checkpoint has none (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); give it plain prompts"
        )
    return template


def _environment() -> Any:
    """Jinja as transformers sets it up, which is what the templates are written for."""
    jinja2, ext, nodes = _extra("jinja2"), _extra("jinja2.ext"), _extra("jinja2.nodes")
    sandbox = _extra("jinja2.sandbox")

    class Generation(ext.Extension):
        """``{% generation %}`` marks the assistant's part for training; here it is plain text."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
