#!/bin/sh
# Builds the image without a daemon and without a registry: the base from Debian's packages, the rest by the
# Dockerfile. As root; apt-get install buildah podman runc mmdebstrap. Prints the seconds each part took.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
wheels=${PIP_FIND_LINKS:-/var/empty}
if ! podman image exists localhost/headway-base:bookworm; then
  mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$scratch/base.tar"
  podman import --quiet "$scratch/base.tar" localhost/headway-base:bookworm
fi
started=$(date +%s)
# chroot isolation and the host's network, so that it also runs inside a container.
buildah bud --layers --isolation chroot --network host --format docker \
  --volume /etc/ssl/certs:/etc/ssl/certs:ro --volume "$wheels:$wheels:ro" \
  --build-arg BASE_IMAGE=localhost/headway-base:bookworm \
  --build-arg PIP_CERT="${PIP_CERT:-}" --build-arg PIP_FIND_LINKS="${PIP_FIND_LINKS:-}" \
  --tag localhost/headway:test "$root"
echo "built in $(($(date +%s) - started)) s"
podman images localhost/headway:test
