#!/usr/bin/env bash
# Runs compute-sanitizer's tools over the checks of programs of `make kernel-tests`: memcheck over
# all of them, racecheck over `check races`, what it can judge (each program says what that leaves
# out), the others over the small ones.
#   scripts/gpu_sanitize.sh PROGRAM...
# TOOLS names others than all four, SECONDS_EACH how long one may take (a tool that hangs has found
# nothing), JOBS how many run at a time: a tool mostly waits for its one small kernel, so all that
# the cores allow share the GPU. The last lines say how each ended; the exit status is 1 unless all
# passed. Warnings of racecheck, which tell of no wrong order that it has seen, are counted there:
# docs/kernel_notes.md says what each known one is.
set -uo pipefail

tools=${TOOLS:-memcheck racecheck synccheck initcheck}
limit=${SECONDS_EACH:-300}
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN)}
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$logs"' EXIT

if [[ $# -eq 0 || ! -e $1 ]]; then
  echo "no programs: make kernel-tests builds dist/kernel_tests/*" >&2
  exit 2
fi

# sanitize TOOL PROGRAM NAME: the output goes to $logs/NAME, the verdict to $logs/NAME.verdict.
sanitize() {
  local checks=(check) start=$SECONDS status verdict
  case $1 in
    memcheck) ;;
    racecheck) checks+=(races) ;;
    *) checks+=(small) ;;
  esac
  timeout --kill-after=10 "$limit" \
    compute-sanitizer --tool "$1" --error-exitcode 3 "$2" "${checks[@]}" >"$logs/$3" 2>&1
  status=$?
  case $status in
    0) verdict=passed ;;
    124 | 137) verdict="TIMED OUT" ;;
    3)
      verdict="FOUND ERRORS"
      [[ $(cat "$logs/$3") =~ RACECHECK\ SUMMARY:.*\(0\ errors,\ ([0-9]+)\ warnings\) ]] &&
        verdict="passed with ${BASH_REMATCH[1]} warnings"
      ;;
    *) verdict="FAILED with status $status" ;;
  esac
  printf '%-10s %-20s %s, %d s\n' "$1" "$(basename "$2")" "$verdict" $((SECONDS - start)) \
    >"$logs/$3.verdict"
  echo "== $(cat "$logs/$3.verdict")"
  tail -n 20 "$logs/$3"
}

number=0
for program in "$@"; do
  for tool in $tools; do
    while (($(jobs -rp | wc -l) >= jobs)); do wait -n; done
    sanitize "$tool" "$program" "$(printf '%03d' "$number")" &
    number=$((number + 1))
  done
done
wait

echo "== verdicts"
cat "$logs"/*.verdict
! grep -qvE ' passed( with [0-9]+ warnings)?, [0-9]+ s$' "$logs"/*.verdict --no-filename
