"""``python -m benchmarks``: measure rows."""

from benchmarks.runner import main

main()
