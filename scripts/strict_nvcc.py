"""Runs a CUDA compiler, and fails where ptxas merely mentions that it undid a kernel's pipeline.

    python scripts/strict_nvcc.py nvcc ARGUMENTS...

When something stands between asynchronous warpgroup products that should not, ptxas waits for each
of them before the next. The code stays right and becomes slow, and what ptxas says about it (C7510
to C7519) counts as information, which no option turns into an error.
"""

import re
import subprocess
import sys

ADVICE = re.compile(r"\(C751\d\)")


def main(command: list[str]) -> int:
    done = subprocess.run(command, stderr=subprocess.PIPE)
    sys.stderr.buffer.write(done.stderr)
    lines = done.stderr.decode(errors="replace").splitlines()
    if done.returncode == 0 and any(ADVICE.search(line) for line in lines):
        print("error: ptxas serialises warpgroup products, see above", file=sys.stderr)
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
