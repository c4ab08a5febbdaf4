"""``python -m jax_hpc`` is the same as ``jax-hpc``."""

from jax_hpc.cli import main

raise SystemExit(main())
