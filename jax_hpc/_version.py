"""The version of the installed distribution; pyproject.toml is where it is stated."""

import importlib.metadata

__version__ = importlib.metadata.version("jax-hpc")
