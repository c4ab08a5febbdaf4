"""The JSON files beside a checkpoint's weights."""

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises FileNotFoundError where there is no such file, ValueError naming it where it holds
    something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: corrupt: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found
