# Sourced by the other scripts: goes to the project's root, makes the virtual environment if it is not
# there or not current, and defines `py`, its interpreter. Variables one may set:
#   PYTHON     an interpreter to build with (default: the first suitable one found)
#   VENV       path of the environment (default: .venv)
#   LOCK       which versions to install (default: the lock of the interpreter's version)
#   FIND_ONLY  when set, only the functions are defined
#   SERIES     the versions of Python that will do (default: 3.11 3.12 3.13 3.14)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
VENV="${VENV:-.venv}"
SERIES="${SERIES:-3.11 3.12 3.13 3.14}"
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONDONTWRITEBYTECODE # without compiled files every fresh process of the tests pays for the imports again

version_of() { # prints e.g. 3.11, or nothing when the command is not a working interpreter
    "$1" -c 'import sys, ensurepip, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

find_python() { # prints the first interpreter of a wanted version
    local wanted candidate version
    local -a candidates
    for wanted in $SERIES; do
        candidates=("${PYTHON:-}")
        if [ -z "${PYTHON:-}" ]; then
            candidates=("python$wanted" python3 python)
            if command -v pyenv >/dev/null 2>&1; then
                candidates+=("$(pyenv root)/versions/$wanted".*/bin/python)
            fi
        fi
        for candidate in "${candidates[@]}"; do
            version="$(version_of "$candidate")"
            if [ "$version" = "$wanted" ]; then
                echo "$candidate"
                return
            fi
        done
    done
    return 1
}

fast_installer() { # uv, where it is on the path and works; the environment needs nothing but pip
    uv --version >/dev/null 2>&1
}

install() {
    if fast_installer; then
        uv pip install --quiet --python "$py" "$@"
    else
        "$py" -m pip install --quiet --quiet --no-compile "$@"
    fi
}

lock_for() { # the lock whose generation of libraries suits an interpreter
    case "$(version_of "$1")" in
        3.11 | 3.12) echo requirements/lock-3.11.txt ;;
        *) echo requirements/lock-3.13.txt ;;
    esac
}

make_environment() {
    local base stamp
    if [ -x "$VENV/bin/python" ]; then
        base="$VENV/bin/python"
    elif ! base="$(find_python)"; then
        echo "No Python of version ${SERIES// /, } was found; install one or name it: PYTHON=/path/to/python" >&2
        return 1
    fi
    LOCK="${LOCK:-$(lock_for "$base")}"
    py="$PWD/$VENV/bin/python"
    # Sources of the compiled library are not counted: it is compiled again when it is next loaded.
    stamp="$(cat "$LOCK" pyproject.toml hatch_build.py native/compile.py | cksum)"
    if [ -x "$py" ] && [ "$(cat "$VENV/raggedatlas.stamp" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    echo "Preparing $VENV (versions of $LOCK); the first time takes some minutes." >&2
    [ -x "$py" ] || "$base" -m venv "$VENV"
    install --no-deps --requirement "$LOCK"
    if [ -z "${CC:-}" ] && ! command -v cc gcc clang >/dev/null; then
        install ziglang # a C compiler for the library in native/
    fi
    install --no-deps --no-build-isolation --editable .
    echo "$stamp" >"$VENV/raggedatlas.stamp"
}

if [ -z "${FIND_ONLY:-}" ]; then
    make_environment
fi
