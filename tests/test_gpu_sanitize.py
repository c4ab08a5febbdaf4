"""scripts/gpu_sanitize.sh: a verdict for every tool and program, and a status that tells."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "gpu_sanitize.sh"

# Takes the sanitizer's place: "--tool NAME --error-exitcode 3 PROGRAM check [small | races]".
TOOL = """#!/bin/sh
case "$2" in memcheck) checks=;; racecheck) checks=races;; *) checks=small;; esac
test "$3 $4 $6 $7" = "--error-exitcode 3 check $checks" || exit 8
case "$2" in
  memcheck) test -z "$WARNINGS" || { echo "RACECHECK SUMMARY: 9 hazards ($WARNINGS)"; exit 3; } ;;
  racecheck) sleep 60 ;;
  synccheck) echo "hazard"; exit 3 ;;
  *) exit 9 ;;
esac
"""


def sanitize(folder: Path, *programs: str, **variables: str) -> subprocess.CompletedProcess[str]:
    tool = folder / "compute-sanitizer"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(SCRIPT), *programs],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PATH": path} | variables,
    )


def test_every_tool_has_a_verdict(tmp_path: Path) -> None:
    programs = [tmp_path / "one", tmp_path / "two"]
    for program in programs:
        program.write_text("")
    done = sanitize(tmp_path, *map(str, programs), SECONDS_EACH="1")
    verdicts = done.stdout.split("== verdicts\n")[1].splitlines()
    assert [line.rsplit(",", 1)[0].split(maxsplit=2) for line in verdicts] == [
        [tool, program.name, verdict]
        for program in programs
        for tool, verdict in [
            ("memcheck", "passed"),
            ("racecheck", "TIMED OUT"),
            ("synccheck", "FOUND ERRORS"),
            ("initcheck", "FAILED with status 9"),
        ]
    ]
    assert done.returncode == 1 and "hazard" in done.stdout


def test_status_when_all_pass_and_when_nothing_runs(tmp_path: Path) -> None:
    program = tmp_path / "one"
    program.write_text("")
    assert sanitize(tmp_path, str(program), TOOLS="memcheck").returncode == 0
    nothing = sanitize(tmp_path, str(tmp_path / "missing"))
    assert nothing.returncode == 2 and "make kernel-tests" in nothing.stderr


@pytest.mark.parametrize(
    ("found", "verdict", "status"),
    [
        ("0 errors, 2 warnings", "passed with 2 warnings", 0),
        ("1 errors, 2 warnings", "FOUND ERRORS", 1),
        ("10 errors, 0 warnings", "FOUND ERRORS", 1),
    ],
)
def test_warnings_are_counted_and_are_no_errors(
    tmp_path: Path, found: str, verdict: str, status: int
) -> None:
    program = tmp_path / "one"
    program.write_text("")
    done = sanitize(tmp_path, str(program), TOOLS="memcheck", WARNINGS=found)
    assert done.returncode == status and f" {verdict}, " in done.stdout.split("== verdicts\n")[1]


def test_make_passes_on_what_it_is_given_and_nothing_else(tmp_path: Path) -> None:
    """Make's JOBS is the number of test processes: as a default it is not the sanitizer's."""
    script = tmp_path / "scripts" / "gpu_sanitize.sh"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\necho "tools $TOOLS, seconds $SECONDS_EACH, jobs $JOBS"\n')
    script.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME")}

    def make(*variables: str) -> str:
        command = ["make", "-f", str(ROOT / "Makefile"), "gpu-sanitize", *variables]
        done = subprocess.run(
            command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert make() == "tools , seconds , jobs"
    given = make("TOOLS=memcheck racecheck", "SECONDS_EACH=60", "JOBS=3")
    assert given == "tools memcheck racecheck, seconds 60, jobs 3"
