"""Runs a CUDA compiler, and fails where ptxas merely mentions that it undid a kernel's pipeline.

    python scripts/strict_nvcc.py nvcc ARGUMENTS...

When something stands between asynchronous warpgroup products that should not, ptxas waits for each
of them before the next. The code stays right and becomes slow, and what ptxas says about it (C7510
to C7519) counts as information, which no option turns into an error.
"""

import re
import subprocess
import sys

ADVICE = re.compile(rb"\(C751\d\)")


def main(command: list[str]) -> int:
    serialised = False
    with subprocess.Popen(command, stderr=subprocess.PIPE) as compiler:
        assert compiler.stderr is not None
        for line in compiler.stderr:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            serialised |= ADVICE.search(line) is not None
    if compiler.returncode == 0 and serialised:
        print("error: ptxas serialises warpgroup products, see above", file=sys.stderr)
        return 1
    return compiler.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
