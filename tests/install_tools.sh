#!/bin/sh
# The programs beside Python that the tests run, and the Debian packages that have them. As root on Debian this script
# installs what is missing; elsewhere it says what to install.
#   tests/install_tools.sh venv      Python's venv module, without which nothing can be installed
#   tests/install_tools.sh test      for `make test`: tests of a program that is missing are skipped by name
#   tests/install_tools.sh clients   for `make test-clients`
set -eu
group=${1:?venv, test or clients}
python=${PY:-python3}

missing=""
# need PACKAGES COMMAND...: PACKAGES are missing unless the command succeeds.
need() {
  packages=$1
  shift
  "$@" >/dev/null 2>&1 || missing="$missing $packages"
}

has_library() {
  /sbin/ldconfig -p | /bin/grep -q "$1"
}

case $group in
  venv) need python3-venv "$python" -c "import ensurepip" ;;
  test)
    need prometheus command -v promtool
    need "chromium fonts-dejavu-core" command -v chromium
    need kubernetes-client command -v kubectl
    need systemd command -v systemd-analyze
    need libatomic1 has_library libatomic.so.1  # of the browser's driver
    need curl command -v curl
    ;;
  clients)
    need curl command -v curl
    need "chromium fonts-dejavu-core" command -v chromium
    need libatomic1 has_library libatomic.so.1  # of the browser's driver
    need nodejs command -v node
    need npm command -v npm
    need default-jdk-headless command -v java
    ;;
  *) echo "the group is '$group', it must be venv, test or clients" >&2; exit 2 ;;
esac
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  echo "installing what is missing:$missing"
  export DEBIAN_FRONTEND=noninteractive
  # shellcheck disable=SC2086  # names of packages, a word each
  if apt-get update -q && apt-get install -y -q --no-install-recommends $missing; then
    exit 0
  fi
  echo "apt-get could not install:$missing" >&2
else
  echo "these Debian packages, or what your system has in their place, are missing:$missing" >&2
  echo "on Debian or Ubuntu: sudo apt-get install --no-install-recommends$missing" >&2
fi
# Tests can do without; a virtual environment cannot be made without its module, and a client's test is the client.
[ "$group" = test ]
