#!/usr/bin/env bash
# Fetches llm.c's starter pack: GPT-2 124M, a debug state to check it with, its tokenizer, and tiny Shakespeare.
#
#   bash dev/download_starter_pack.sh
#
# About 1.05 GB. Models go to the repository's root, tokens to data/. A file grows as NAME.part and gets its name only
# when its SHA-256 is the one below; run this again to go on after an interruption. Exit status: 0 all files are there, 1
# one could not be fetched. LLMC_STARTER_PACK_URL names another place to fetch from. Only https is used, also after a
# redirect, unless that other place begins with http:.

set -euo pipefail

url=${LLMC_STARTER_PACK_URL:-https://huggingface.co/datasets/karpathy/llmc-starter-pack/resolve/main}
schemes=https
case $url in http:*) schemes=http,https ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "error: $1" >&2
    exit 1
}

# sha256 FILE
sha256() {
    if command -v sha256sum >/dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d ' ' -f 1
}

# fetch FOLDER NAME SHA256
fetch() {
    local file=$1/$2 part=$1/$2.part status=0 code resumed
    if [ -f "$file" ]; then
        echo "$file is there already; to fetch it anew, remove it"
        return
    fi
    mkdir -p "$1" || fail "$1: cannot be made"
    resumed=$([ -s "$part" ] && echo yes || true)
    echo "fetching $file"
    code=$(curl --fail --location --proto "=$schemes" --proto-redir "=$schemes" --progress-bar --retry 2 --connect-timeout 20 --speed-limit 1000 --speed-time 60 \
        --continue-at - --write-out '%{http_code}' --output "$part" "$url/$2") || status=$?
    case $status in
        0) ;;
        18 | 28 | 56) fail "$url/$2: stopped before its end (curl exit status $status); run this again to go on" ;;
        23) fail "$part: cannot be written; make room or mend permissions, and run this again" ;;
        22 | 33 | 36) # refused; no ranges; cannot resume
            [ "$code" = 416 ] || [ $status != 22 ] || fail "$url/$2: the server answered $code; try again later"
            [ -s "$part" ] || fail "$url/$2: cannot be fetched (curl exit status $status); try again later"
            rm -f "$part" && fetch "$@"
            return
            ;;
        *) fail "$url/$2: cannot be fetched (curl exit status $status); check the connection and run this again" ;;
    esac
    if [ "$(sha256 "$part")" != "$3" ]; then
        rm -f "$part"
        [ "$resumed" ] || fail "$url/$2: what the server sent is bad: its SHA-256 is not $3; try again later"
        echo "$part was of another file or version: fetching all of it again"
        fetch "$@"
        return
    fi
    mv "$part" "$file"
    echo "$file: $(wc -c <"$file" | tr -d ' ') bytes"
}

command -v curl >/dev/null || fail "curl is not installed; install it with the system's package manager"

fetch "$root/data" tiny_shakespeare_val.bin fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62
fetch "$root/data" tiny_shakespeare_train.bin 8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8
fetch "$root" gpt2_tokenizer.bin 6f3abc21e444e4e8300e225f4e03da48ea121cf17e30f67009b8dad7a66c2f13
fetch "$root" gpt2_124M.bin 3da8b207584030bcdcd207cf7a99952e3421dce92da218b351071857511bf162
fetch "$root" gpt2_124M_debug_state.bin a80c4448eed47c561314a2189e62c49b2c7477c265fc2f15c8470d18401693d9
