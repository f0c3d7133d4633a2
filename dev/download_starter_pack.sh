#!/usr/bin/env bash
# Fetches llm.c's starter pack: GPT-2 124M, a debug state to check it with, its tokenizer, and tiny Shakespeare.
#
#   bash dev/download_starter_pack.sh
#
# About 1.05 GB. Models go to the repository's root, tokens to data/. A file grows as NAME.part and gets its name only
# when its magic number is right and its size is the one that its own header asks for; run this again to go on after an
# interruption. Exit status: 0 all files are there, 1 one could not be fetched, 2 wrong usage.
# LLMC_STARTER_PACK_URL names another place to fetch from.

set -euo pipefail

url=${LLMC_STARTER_PACK_URL:-https://huggingface.co/datasets/karpathy/llmc-starter-pack/resolve/main}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "error: $1" >&2
    exit "${2:-1}"
}

# read_header FILE: the first eight integers of a file into header[0..7], 0 where the file is shorter.
read_header() {
    header=($(od -An -v -t d4 -N 32 "$1") 0 0 0 0 0 0 0 0)
}

# num_parameters: of the model whose header was read. See llmc/files/checkpoint.py.
num_parameters() {
    local max_seq_len=${header[2]} layers=${header[4]} C=${header[6]} padded_vocab_size=${header[7]}
    echo $(((padded_vocab_size + max_seq_len) * C + layers * (12 * C * C + 13 * C) + 2 * C))
}

# problem_with FILE KIND: what is wrong with a file, or nothing.
problem_with() {
    local file=$1 kind=$2 size expected=0 magic version B T V
    size=$(wc -c <"$file" | tr -d ' ')
    read_header "$file"
    case $kind in
        model) magic=20240326 version=3 ;;
        debug_state) magic=20240327 version=2 ;;
        tokenizer) magic=20240328 version=${header[1]} ;;
        tokens) magic=20240520 version=1 ;;
    esac
    if [ "${header[0]}" != $magic ] || [ "${header[1]}" != "$version" ]; then
        echo "not a ${kind/_/ } file"
        return
    fi
    case $kind in
        model) expected=$((1024 + 4 * $(num_parameters))) ;;
        tokens) expected=$((1024 + 2 * header[2])) ;;
        tokenizer) expected=$(tokenizer_size "$file" "${header[2]}") ;;
        debug_state)
            B=${header[2]} T=${header[3]}
            read_header "$root/gpt2_124M.bin"
            V=${header[3]}
            expected=$((1024 + 4 * (B * T * (2 + V) + 1 + $(num_parameters))))
            ;;
    esac
    if [ "$size" != "$expected" ]; then
        echo "$size bytes, but its header asks for $expected"
    fi
}

# tokenizer_size FILE VOCAB_SIZE: where the last token ends, going from one length byte to the next.
tokenizer_size() {
    od -An -v -t u1 -j 1024 "$1" | awk -v vocab_size="$2" '
        {
            for (i = 1; i <= NF; i++)
                if (left > 0) left--
                else if (tokens++ < vocab_size) { left = $i; size += 1 + $i }
        }
        END { print (tokens < vocab_size) ? "more" : 1024 + size }'
}

# fetch FOLDER NAME KIND
fetch() {
    local file=$1/$2 kind=$3 part=$1/$2.part resumed problem status code
    if [ -f "$file" ] && [ -z "$(problem_with "$file" "$kind")" ]; then
        echo "$file is there already"
        return
    fi
    mkdir -p "$1" || fail "$1: cannot be made"
    while true; do
        resumed=no
        if [ -s "$part" ]; then
            resumed=yes
            problem=$(problem_with "$part" "$kind")
            case $problem in
                "") break ;;
                not*) rm -f "$part" && continue ;;
            esac
        fi
        echo "fetching $file"
        status=0
        code=$(curl --fail --location --progress-bar --retry 2 --connect-timeout 20 --speed-limit 1000 --speed-time 60 \
            --continue-at - --write-out '%{http_code}' --output "$part" "$url/$2") || status=$?
        case $status in
            0)
                problem=empty
                [ ! -s "$part" ] || problem=$(problem_with "$part" "$kind")
                [ -n "$problem" ] || break
                rm -f "$part"
                [ $resumed = yes ] || fail "$url/$2: what the server sent is bad ($problem); try again later"
                ;; # what was there before did not belong to this file: fetch all of it
            22 | 33 | 36) # refused; no ranges; cannot resume
                [ "$code" = 416 ] || [ $status != 22 ] || fail "$url/$2: the server answered $code; try again later"
                rm -f "$part"
                [ $resumed = yes ] || fail "$url/$2: cannot be fetched (curl exit status $status); try again later"
                ;;
            18 | 28 | 56) fail "$url/$2: stopped before its end (curl exit status $status); run this again to go on" ;;
            23) fail "$part: cannot be written; make room or mend permissions, and run this again" ;;
            *) fail "$url/$2: cannot be fetched (curl exit status $status); check the connection and run this again" ;;
        esac
    done
    mv "$part" "$file"
    echo "$file: $(wc -c <"$file" | tr -d ' ') bytes"
}

case ${1-} in
    -h | --help)
        echo "usage: bash dev/download_starter_pack.sh    fetch GPT-2 124M and tiny Shakespeare (1.05 GB)"
        exit
        ;;
esac
[ $# = 0 ] || fail "no such argument: $1; usage: bash dev/download_starter_pack.sh" 2
command -v curl >/dev/null || fail "curl is not installed; install it with the system's package manager"

fetch "$root/data" tiny_shakespeare_val.bin tokens
fetch "$root/data" tiny_shakespeare_train.bin tokens
fetch "$root" gpt2_tokenizer.bin tokenizer
fetch "$root" gpt2_124M.bin model
fetch "$root" gpt2_124M_debug_state.bin debug_state
