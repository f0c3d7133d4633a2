#!/usr/bin/env bash
# Runs the CPU device's tests on aarch64, emulated by qemu-user on another machine: before a release, on Debian or Ubuntu.
#
#   bash dev/test_aarch64.sh                                          # the kernels' and the CPU device's, the microscope
#   bash dev/test_aarch64.sh python3 -m pytest tests/test_rope.py     # or another command, in the repository's root
#
# The first call makes a root of Debian's arm64 packages in a folder among the user's caches, with NumPy and PyTorch for
# aarch64: about 1.2 GB. Nothing is installed or configured on the machine, and none of it needs root: what has to be
# mounted is mounted in namespaces of this script's own. On two cores the first call takes some minutes for that, and the
# tests take 24.

set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
root=${XDG_CACHE_HOME:-$HOME/.cache}/llm.cupy/aarch64
format=/usr/lib/binfmt.d/qemu-aarch64.conf      # how the kernel recognises an aarch64 program, and what is to run it
certificates=etc/ssl/certs/ca-certificates.crt
# These versions' wheels for aarch64 bring nothing of CUDA, which would be several GB.
packages=(numpy pytest pytest-xdist hypothesis safetensors tiktoken 'torch<2.10' 'transformers>=5,<6')

fail() {
    echo "error: $1" >&2
    exit 1
}

needs() {
    command -v "$1" >/dev/null ||
        fail "$1 is missing: on Debian or Ubuntu, apt-get install debootstrap debian-archive-keyring qemu-user-static"
}

# in_root COMMAND...: on aarch64, in the repository, as the root's owner.
in_root() {
    mkdir -p "$root/repository" "$root/proc" "$root/dev"
    unshare --user --map-root-user --mount bash -c '
        set -e
        root=$1 repository=$2 format=$3
        shift 3
        if [ ! -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]; then  # no one has: from Linux 6.7 on, a namespace may for itself
            mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
            cat "$format" >/proc/sys/fs/binfmt_misc/register
        fi
        mount --rbind /proc "$root/proc"
        mount --rbind /dev "$root/dev"
        mount --rbind "$repository" "$root/repository"
        mount --bind "$root/cpuinfo" "$root/proc/cpuinfo"
        exec chroot "$root" /usr/bin/env -i -C /repository PATH=/usr/local/bin:/usr/bin:/bin HOME=/root \
            PYTHONDONTWRITEBYTECODE=1 "$@"' in_root "$root" "$repository" "$format" "$@"
}

# What Linux says of an Apple chip in a virtual machine: -mcpu=native reads it. Qemu would leave the host's there.
write_cpuinfo() {
    local features="fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop"
    features+=" sha3 asimddp sha512 asimdfhm dit uscat ilrcpc flagm sb paca pacg dcpodp flagm2 frint"
    printf '%s\t: %s\n' processor 0 BogoMIPS 48.00 Features "$features" "CPU implementer" 0x61 "CPU architecture" 8 \
        "CPU variant" 0x0 "CPU part" 0x000 "CPU revision" 0
}

# Debian's packages are unpacked only: to configure them takes root, and g++ and Python do without.
make_root() {
    rm -rf "$root"
    mkdir -p "$root"
    unshare --user --map-root-user debootstrap --download-only --arch=arm64 --variant=minbase \
        --include=g++,make,python3,python3-pip bookworm "$root"
    for package in "$root"/var/cache/apt/archives/*.deb; do
        dpkg-deb --extract "$package" "$root"
    done
    rm -r "$root"/var/cache/apt/archives
    write_cpuinfo >"$root/cpuinfo"
    cp /etc/resolv.conf "$root/etc/"
    cp "/$certificates" "$root/$certificates"
    in_root python3 -m pip install --break-system-packages --no-compile --no-cache-dir --root-user-action ignore \
        "${packages[@]}"
    touch "$root/.ready"
}

needs qemu-aarch64-static
PATH=$PATH:/usr/sbin
needs debootstrap
unshare --user --map-root-user true || fail "no user namespace can be made here: run this as root"
test -f "$root/.ready" || make_root
if [ $# -gt 0 ]; then
    in_root "$@"
    exit
fi
cd "$repository"
tests=(tests/test_{cpu_device,thread_order,determinism}.py)
for kernels in kernels/*.cu; do
    test=tests/test_$(basename "$kernels" .cu).py
    if [ -f "$test" ]; then tests+=("$test"); fi
done
in_root python3 -m pytest -p no:cacheprovider -n auto --dist loadfile "${tests[@]}"
in_root python3 dev/microscope.py layernorm_backward
