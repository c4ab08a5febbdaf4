#!/usr/bin/env bash
# Prints the first Python that runs, is 3.12 or newer and can make a virtual environment:
# $PYTHON, then what PATH offers, then pyenv's versions, oldest first. That a name exists proves
# nothing: a pyenv shim can exist and refuse to run.
set -euo pipefail

check='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))'
candidates=(${PYTHON:+"$PYTHON"} python3.13 python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python)

for candidate in "${candidates[@]}"; do
  if "$candidate" -c "$check" >/dev/null 2>&1; then
    command -v "$candidate"
    exit
  fi
done

{
  echo "No usable Python 3.12 or newer was found; tried:"
  printf '  %s\n' "${candidates[@]}"
  echo "Install one with its venv module (Debian, Ubuntu: apt install python3-venv python3-dev),"
  echo "or name one: make PYTHON=/path/to/python ..."
} >&2
exit 1
