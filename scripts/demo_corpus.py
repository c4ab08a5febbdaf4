"""The demo checkpoint's text: English that ships with Python itself.

Sources are `pydoc_data.topics` (the language reference as `help()` shows it) and the standard
library's docstrings and longer comments, its tests' too. Wrapped plain text becomes flowing
markdown: headings, paragraphs on one line, fenced code. The corpus depends on the Python version
that runs this; its hash is recorded.

    python scripts/demo_corpus.py corpus.json    # to train elsewhere on this Python's text
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

HELD_OUT_TOPICS = ("identifiers", "raise", "with", "booleans", "numeric-types", "typesmodules")
HELD_OUT_MODULES = ("shlex", "statistics", "zipfile", "graphlib", "wave")
SKIPPED_PACKAGES = ("test", "idlelib", "lib2to3", "turtledemo", "site-packages", "ensurepip")
SKIPPED_PACKAGES += ("pydoc_data", "encodings", "__phello__", "tkinter", "idle_test")
EXTENSION_MODULES = ("builtins", "math", "cmath", "itertools", "time", "sys", "gc", "zlib")
EXTENSION_MODULES += ("operator", "functools", "collections", "array", "select", "posix", "_io")
ANSWER_CHARACTERS = 1400
HEADING_MARKS = {"*": "#", "=": "##", "-": "###", "~": "####", "^": "####"}
ASCII = str.maketrans(
    {"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\u00a0": " "}
)


@dataclass(frozen=True)
class Entry:
    """One piece of text: a topic, one section of a topic, or one docstring."""

    kind: str  # "topic", "section", "docstring" (public), "prose" (other docstrings, comments)
    name: str  # what a person would ask about
    text: str
    held_out: bool


def _is_rule(line: str) -> bool:
    return len(line) >= 3 and line[0] in HEADING_MARKS and set(line) == {line[0]}


def _is_code(block: list[str], after_colon: bool) -> bool:
    """An indented block is code unless it reads like a sentence."""
    text = " ".join(line.strip() for line in block)
    columns = sum(bool(re.search(r"[^\s.?!:] {2,}\S", line.strip())) for line in block)
    if not all(line.startswith("  ") for line in block):
        return text.startswith((">>>", "$ ")) or "::=" in text or columns > 0.5 * len(block) > 0.5
    if text.startswith((">>>", "$ ", "...")) or "::=" in text or "def " in text:
        return True
    wordy = sum(c.isalpha() or c == " " for c in text) / len(text)
    sentence = bool(re.match(r"[A-Z\"*`(]", text)) and text.rstrip().endswith((".", ":", ".)"))
    return not (sentence and wordy > 0.8) and (after_colon or wordy < 0.85)


def _prose(block: list[str], topic: bool) -> str:
    """Joins wrapped lines; a line that starts a list item stays on its own line."""
    if topic and len(block) > 1 and re.match(r"[^\s*\-]", block[0]) and block[1].startswith("   "):
        block = [block[0].rstrip(":") + ":", *block[1:]]  # a term and its definition
    items: list[str] = []
    for line in (raw.strip() for raw in block):
        bullet = re.match(r"[*\-o•] +(?=\S)", line)
        if bullet and not (items and items[-1].endswith(("-", "*"))):
            items.append("- " + line[bullet.end() :])
        elif items and items[-1].endswith("-") and items[-1][-2:-1].isalpha():
            items[-1] += line
        elif items:
            items[-1] += " " + line
        else:
            items.append(line)
    text = re.sub(r"([.?!:]) {2,}", r"\1 ", "\n".join(items))
    if topic:
        text = re.sub(r'"([^"\n]{1,60})"', r"`\1`", text)
        text = re.sub(r" \[\d+\]", "", text)
    return text


def _split(block: list[str]) -> Iterator[list[str]]:
    """A leading call signature and a trailing interpreter session are blocks of their own."""
    if len(block) > 1 and re.fullmatch(r"[\w.]+\(.*\)( -> .*)?", block[0].strip()):
        yield block[:1]
        block = block[1:]
    starts = [i for i, line in enumerate(block) if line.lstrip().startswith(">>>")]
    cut = starts[0] if starts else len(block)
    yield from (part for part in (block[:cut], block[cut:]) if part)


def to_markdown(text: str, topic: bool = False) -> str:
    """Turns wrapped plain text into markdown with whole paragraphs on one line."""
    out: list[str] = []
    code: list[str] = []

    def flush_code() -> None:
        while code and not code[-1].strip():
            code.pop()
        if code:
            out.append("```\n" + inspect.cleandoc("\n".join(["", *code])) + "\n```")
            code.clear()

    blocks = re.split(r"\n[ \t]*\n", text.translate(ASCII).expandtabs().strip("\n"))
    for raw in blocks:
        block = [line.rstrip() for line in raw.split("\n") if line.strip()]
        if not block or any(line.lstrip().startswith(("+--", "|--", "===")) for line in block[:1]):
            continue
        if len(block) >= 2 and _is_rule(block[1]) and len(block[0]) <= len(block[1]) + 2:
            flush_code()
            title = _prose(block[:1], topic)
            out.append(f"{HEADING_MARKS[block[1][0]]} {title}")
            block = block[2:]
            if not block:
                continue
        for part in _split(block):
            after_colon = bool(code) or (bool(out) and out[-1].endswith(":"))
            if _is_code(part, after_colon):
                code.extend([*part, ""])
                continue
            flush_code()
            out.append(_prose(part, topic))
    flush_code()
    return "\n\n".join(out).replace("::\n", ":\n")


def _sections(markdown: str) -> Iterator[tuple[str, str]]:
    """(heading, text) of each headed part, cut at a paragraph so that an answer stays short."""
    for part in re.split(r"(?m)^(?=#{1,4} )", markdown):
        head, _, body = part.partition("\n\n")
        if head.startswith("#") and len(body) > 80:
            yield head.lstrip("# "), shorten(body)


def shorten(text: str, limit: int = ANSWER_CHARACTERS) -> str:
    """The leading paragraphs of `text` that fit in `limit` characters (at least one)."""
    kept: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        if kept and sum(map(len, kept)) + len(paragraph) > limit:
            break
        kept.append(paragraph)
    while len(kept) > 1 and (kept[-1].endswith(":") or kept[-1].startswith("#")):
        kept.pop()
    return "\n\n".join(kept)


def _topic_entries() -> Iterator[Entry]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    seen: set[str] = set()
    for key in sorted(topics):
        markdown = to_markdown(topics[key], topic=True)
        held_out = key in HELD_OUT_TOPICS
        yield Entry("topic", key, markdown, held_out)
        for heading, body in _sections(markdown):
            if body not in seen:
                seen.add(body)
                yield Entry("section", heading, body, held_out)


def _docstrings(tree: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    """(qualified name, docstring) of a module and its public classes and functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(tree, documented) and (text := ast.get_docstring(tree)):
        yield prefix, text
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, documented[1:]) and not node.name.startswith("_"):
            yield from _docstrings(node, f"{prefix}.{node.name}")


def _library_docstrings() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(part in SKIPPED_PACKAGES or part.startswith("_") for part in parts[:-1]):
            continue
        if parts[0] in SKIPPED_PACKAGES or parts[-1].startswith("_") and parts[-1] != "__init__":
            continue
        module = ".".join(part for part in parts if part != "__init__")
        yield from _docstrings(ast.parse(path.read_text(encoding="utf-8")), module)


def _extension_docstrings() -> Iterator[tuple[str, str]]:
    """Docstrings of what is written in C, which no source file in the library holds."""
    for module_name in EXTENSION_MODULES:
        module = importlib.import_module(module_name)
        for name, member in sorted(vars(module).items()):
            if name.startswith("_") or inspect.ismodule(member) or not callable(member):
                continue
            public = name if module_name == "builtins" else f"{module_name.strip('_')}.{name}"
            yield public, str(member.__doc__ or "")
            if isinstance(member, type):
                for method, value in sorted(vars(member).items()):
                    if not method.startswith("_") and callable(value):
                        yield f"{public}.{method}", str(value.__doc__ or "")


def _is_english(text: str) -> bool:
    """Long enough, mostly letters, and no legal notice."""
    letters = sum(c.isalpha() and c.isascii() or c.isspace() for c in text)
    legal = re.search(r"(?i)copyright|licen[cs]e|warrant", text)
    return len(text) >= 60 and letters >= 0.75 * len(text) and not legal


def _docstring_entries(seen: set[str]) -> Iterator[Entry]:
    for name, raw in [*_library_docstrings(), *_extension_docstrings()]:
        text = to_markdown(inspect.cleandoc(raw))
        if not _is_english(text) or text in seen:
            continue
        seen.add(text)
        yield Entry("docstring", name, text, name.split(".")[0] in HELD_OUT_MODULES)


def _is_held_out(path: str) -> bool:
    return any(part.removeprefix("test_") in HELD_OUT_MODULES for part in path.split("."))


def _comments(source: str) -> Iterator[str]:
    """Blocks of comment lines that read like English."""
    block: list[str] = []
    for line in [*source.split("\n"), ""]:
        match = re.match(r"\s*#\s?(.*)", line)
        if match:
            block.append(match[1])
        elif block:
            yield "\n".join(block)
            block.clear()


def _prose_entries(seen: set[str]) -> Iterator[Entry]:
    """What `_docstring_entries` leaves out: one entry per source file with its other texts."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        if name.startswith("site-packages") or _is_held_out(name):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, UnicodeDecodeError):
            continue  # some of the tests' files are broken on purpose
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        raw = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
        texts = [to_markdown(text) for text in [*raw, *_comments(source)]]
        kept = [text for text in dict.fromkeys(texts) if _is_english(text) and text not in seen]
        seen.update(kept)
        if kept:
            yield Entry("prose", name, "\n\n".join(kept), False)


def load_entries() -> list[Entry]:
    """All entries; training text repeats no held-out paragraph of 60 characters or more."""
    seen: set[str] = set()
    entries = [*_topic_entries(), *_docstring_entries(seen), *_prose_entries(seen)]
    unseen = {
        paragraph
        for entry in entries
        if entry.held_out
        for paragraph in entry.text.split("\n\n")
        if len(paragraph) >= 60
    }
    cleaned: list[Entry] = []
    for entry in entries:
        text = entry.text
        if not entry.held_out:
            text = "\n\n".join(p for p in text.split("\n\n") if p not in unseen)
        if len(text) >= 60:
            cleaned.append(Entry(entry.kind, entry.name, text, entry.held_out))
    return cleaned


@dataclass(frozen=True)
class Corpus:
    """All entries and the version of the Python that they came with."""

    python: str
    entries: list[Entry]

    @property
    def digest(self) -> str:
        """SHA-256 over every entry in order."""
        digest = hashlib.sha256()
        for entry in self.entries:
            digest.update(repr(astuple(entry)).encode())
        return digest.hexdigest()


def load_corpus(path: Path | None = None) -> Corpus:
    """The corpus of the running Python, or the one that `save_corpus` wrote to `path`."""
    if path is None:
        return Corpus(platform.python_version(), load_entries())
    content = json.loads(path.read_text(encoding="utf-8"))
    return Corpus(content["python"], [Entry(*entry) for entry in content["entries"]])


def save_corpus(path: Path) -> None:
    """Writes the running Python's corpus as JSON."""
    corpus = load_corpus()
    content = {"python": corpus.python, "entries": [astuple(entry) for entry in corpus.entries]}
    path.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    save_corpus(Path(sys.argv[1]))
