#!/usr/bin/env bash
# Runs compute-sanitizer's tools over the checks of programs of `make kernel-tests`: memcheck over
# all of them, the slower tools over the small ones.
#   scripts/gpu_sanitize.sh PROGRAM...
# TOOLS names others than all four, SECONDS_EACH how long one may take (a tool that hangs has found
# nothing). The last lines say how each ended; the exit status is 1 unless all passed.
set -uo pipefail

tools=${TOOLS:-memcheck racecheck synccheck initcheck}
limit=${SECONDS_EACH:-150}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
verdicts=() failures=0

if [[ $# -eq 0 || ! -e $1 ]]; then
  echo "no programs: make kernel-tests builds dist/kernel_tests/*" >&2
  exit 2
fi

for program in "$@"; do
  for tool in $tools; do
    echo "== $tool $program"
    start=$SECONDS
    checks=(check)
    if [[ $tool != memcheck ]]; then checks+=(small); fi
    timeout --kill-after=10 "$limit" \
      compute-sanitizer --tool "$tool" --error-exitcode 3 "$program" "${checks[@]}" >"$log" 2>&1
    status=$?
    tail -n 20 "$log"
    case $status in
      0) verdict=passed ;;
      124 | 137) verdict="TIMED OUT" ;;
      3) verdict="FOUND ERRORS" ;;
      *) verdict="FAILED with status $status" ;;
    esac
    if [[ $status -ne 0 ]]; then failures=$((failures + 1)); fi
    verdicts+=("$(printf '%-10s %-20s %s, %d s' "$tool" "$(basename "$program")" "$verdict" $((SECONDS - start)))")
  done
done

echo "== verdicts"
printf '%s\n' "${verdicts[@]}"
exit $((failures > 0))
