#!/usr/bin/env bash
# Fetches llm.c's starter pack: GPT-2 124M, a debug state to check it with, its tokenizer, and tiny Shakespeare.
#
#   bash dev/download_starter_pack.sh
#
# About 1.05 GB. Models go to the repository's root, tokens to data/. A file grows as NAME.part and gets its name only
# when it has come whole and its magic number is right; run this again to go on after an interruption. Exit status: 0 all
# files are there, 1 one could not be fetched. LLMC_STARTER_PACK_URL names another place to fetch from.

set -euo pipefail

url=${LLMC_STARTER_PACK_URL:-https://huggingface.co/datasets/karpathy/llmc-starter-pack/resolve/main}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "error: $1" >&2
    exit 1
}

# begins_with FILE MAGIC: whether this is a file's first integer.
begins_with() {
    [ "$(od -An -v -t d4 -N 4 "$1" | tr -d ' ')" = "$2" ]
}

# fetch FOLDER NAME MAGIC
fetch() {
    local file=$1/$2 part=$1/$2.part status=0 code
    if [ -f "$file" ]; then
        echo "$file is there already; to fetch it anew, remove it"
        return
    fi
    mkdir -p "$1" || fail "$1: cannot be made"
    [ ! -s "$part" ] || begins_with "$part" "$3" || rm -f "$part"
    echo "fetching $file"
    code=$(curl --fail --location --progress-bar --retry 2 --connect-timeout 20 --speed-limit 1000 --speed-time 60 \
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
    begins_with "$part" "$3" || { rm -f "$part" && fail "$url/$2: what the server sent is bad; try again later"; }
    mv "$part" "$file"
    echo "$file: $(wc -c <"$file" | tr -d ' ') bytes"
}

command -v curl >/dev/null || fail "curl is not installed; install it with the system's package manager"

fetch "$root/data" tiny_shakespeare_val.bin 20240520
fetch "$root/data" tiny_shakespeare_train.bin 20240520
fetch "$root" gpt2_tokenizer.bin 20240328
fetch "$root" gpt2_124M.bin 20240326
fetch "$root" gpt2_124M_debug_state.bin 20240327
