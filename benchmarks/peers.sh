#!/usr/bin/env bash
# Makes the environments of the systems that the benchmarks measure beside us, one by one; what cannot be
# installed is skipped with the reason, which is also kept in the environment's missing.txt.
#   benchmarks/peers.sh         .venv-peers with homeobox, for compare.py
#   benchmarks/peers.sh loader  also annbatch and cellstream there, torch in .venv-peers-torch (5.5 GB with what it
#                               asks for; PEERS_TORCH=no leaves it out), tiledbsoma-ml, slafdb, scDataset and bionemo-scdl
#                               in .venv-peers-3.11
#   benchmarks/peers.sh results only hyrax 0.13, and 0.6.10 to 0.12 beside it, in .venv-peers-hyrax, for results.py and tests -m peers
#   benchmarks/peers.sh vectors only zarr-vectors 0.2.0 and 0.9.2 in .venv-peers-vectors-*, for vectors.py and tests -m peers
#   benchmarks/peers.sh converters only spatialdata, in .venv-peers-spatialdata, for tests -m peers
#   benchmarks/peers.sh anndata only anndata 0.8 and 0.10, in .venv-peers-anndata-*, for tests -m peers
#   benchmarks/peers.sh explorer only cellxgene 0.16.8 (CELLxGENE Explorer), in .venv-explorer, for raggedatlas serve, cxg.py and tests -m peers
#   benchmarks/peers.sh viewers only Embedding Atlas 0.26.0 and 0.22.0, and Vitessce 4.0.8 (needs npm), in .venv-peers-viewers, for tests -m peers
#   benchmarks/peers.sh icechunk only icechunk, in .venv-peers-icechunk, for stores.py --commits
# PEERS_PYTHON names the interpreter of .venv-peers (>= 3.12), PEERS_PYTHON_311 the one of .venv-peers-3.11.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
what="${1:-compare}"
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONDONTWRITEBYTECODE PYTHONPATH

note() { # folder system reason: remembered for the benchmark, told to the person
    mkdir -p "$1"
    touch "$1/missing.txt"
    sed -i "/^$2:/d" "$1/missing.txt"
    if [ -n "$3" ]; then
        echo "$2: $3" >>"$1/missing.txt"
        echo "$2 skipped: $3"
    fi
}

candidates() { # the named interpreter, then every one of the wanted minor versions, best first
    local minor
    [ -n "$1" ] && echo "$1"
    for minor in $2; do
        command -v "python3.$minor"
        ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python 2>/dev/null
        command -v uv >/dev/null && uv python find --no-python-downloads "3.$minor" 2>/dev/null
    done
}

# A pyenv shim exists for versions that are not switched on, so each candidate is run.
usable() { # python, wanted minor versions
    "$1" -c 'import sys, venv, ensurepip; sys.exit(str(sys.version_info[1]) not in sys.argv[1].split())' "$2" >/dev/null 2>&1
}

environment() { # folder, pins, named interpreter, wanted minor versions; false, with the reason told, where it cannot be made
    local venv=$1 pins=$2 python
    if [ -x "$venv/bin/python" ] && cmp -s "$pins" "$venv/pins.txt"; then
        return 0
    fi
    rm -rf "$venv"
    while read -r python; do
        if usable "$python" "$4"; then
            "$python" -m venv "$venv" && cp "$pins" "$venv/pins.txt" && return 0
            rm -rf "$venv"
        fi
    done < <(candidates "$3" "$4")
    return 1
}

peer() { # folder, pins, system, module, requirements...
    local venv=$1 pins=$2 system=$3 module=$4
    shift 4
    if ! [ -x "$venv/bin/python" ]; then
        note "$venv" "$system" "no Python with venv found for ${venv#.}; set PEERS_PYTHON or PEERS_PYTHON_311"
    elif grep -q "^$system$" "$venv/ready.txt" 2>/dev/null; then
        echo "$system is ready in $venv"
    elif ! "$venv/bin/python" -m pip install --quiet --constraint "$pins" "$@" 2>"$venv/pip.log"; then
        note "$venv" "$system" "$(grep -m1 '^ERROR' "$venv/pip.log" | cut -c1-200 || echo "pip could not install it")"
    elif ! "$venv/bin/python" -W ignore -c "import $module" 2>"$venv/pip.log"; then
        note "$venv" "$system" "it does not import: $(tail -1 "$venv/pip.log" | cut -c1-200)"
    else
        note "$venv" "$system" ""
        echo "$system" >>"$venv/ready.txt"
        echo "$system is ready in $venv ($("$venv/bin/python" --version))"
    fi
}

# Beside the environment and not in it: homeobox imports torch where it finds it, which compare.py would then time.
torch() { # folder, pins
    local folder=$1 pins=$2 free
    cmp -s "$pins" "$folder/pins.txt" && return
    free=$(df --output=avail -BG . | tail -1 | tr -dc 0-9)
    if [ "${PEERS_TORCH:-yes}" = no ]; then
        echo "torch left out; homeobox's datasets are driven without its DataLoader"
    elif [ "$free" -lt 14 ]; then
        echo "torch left out: it needs 14 GB to install, $free GB are free; homeobox's datasets are driven without its DataLoader"
    elif rm -rf "$folder" && .venv-peers/bin/python -m pip install --quiet --target "$folder" --constraint "$pins" torch; then
        cp "$pins" "$folder/pins.txt"
        echo "torch is ready in $folder"
    else
        rm -rf "$folder"
        echo "torch could not be installed; homeobox's datasets are driven without its DataLoader"
    fi
}

hyrax() { # folder, pins
    environment "$1" "$2" "${PEERS_PYTHON_311:-}" 11
    peer "$1" "$2" hyrax torch hyrax torch # torch is imported in its place: torchvision may lack operators that nobody calls here
    local version
    for version in 0.6.10 0.7.0 0.8.3 0.9.0 0.10 0.11 0.12; do # each with what 0.13 needs
        if [ -x "$1/bin/python" ] && ! [ -d "$1/hyrax-$version" ]; then
            "$1/bin/python" -m pip install --quiet --no-deps --target "$1/hyrax-$version" "hyrax==$version" ||
                note "$1" "hyrax-${version/0.6.10/npy}" "pip could not install $version"
        fi
    done
}

if [ "$what" = results ]; then
    hyrax .venv-peers-hyrax requirements/peers-hyrax-3.11.txt
    exit 0
fi
if [ "$what" = converters ]; then
    environment .venv-peers-spatialdata requirements/peers-spatialdata.txt "${PEERS_PYTHON:-}" "13 12 14"
    peer .venv-peers-spatialdata requirements/peers-spatialdata.txt spatialdata spatialdata spatialdata
    exit 0
fi
if [ "$what" = anndata ]; then
    environment .venv-peers-anndata-0.8 requirements/peers-anndata-0.8.txt "" "9 8"
    peer .venv-peers-anndata-0.8 requirements/peers-anndata-0.8.txt anndata anndata anndata zarr
    environment .venv-peers-anndata-0.10 requirements/peers-anndata-0.10.txt "${PEERS_PYTHON_311:-}" "11 12 10"
    peer .venv-peers-anndata-0.10 requirements/peers-anndata-0.10.txt anndata anndata anndata zarr
    exit 0
fi
if [ "$what" = explorer ]; then
    # Its requirements name releases that no longer work together, so all of them are pinned and none is resolved.
    environment .venv-explorer src/raggedatlas/wings/cxg/explorer-requirements.txt "${PEERS_PYTHON_311:-}" 11
    peer .venv-explorer src/raggedatlas/wings/cxg/explorer-requirements.txt cellxgene server.cli.launch \
        --no-deps --requirement src/raggedatlas/wings/cxg/explorer-requirements.txt
    exit 0
fi
# Vitessce names hundreds of packages that its own file holds already, so that file is taken alone, checked, and bundled.
vitessce() { # folder, pins
    local folder=$1/vitessce pins=$2 program=tests/wings/viewer/peer_vitessce.js archive
    cat "$pins"/* "$program" | cmp -s - "$folder/made-of.txt" && echo "vitessce is ready in $folder" && return
    command -v npm >/dev/null || { note "$1" vitessce "npm is not installed"; return; }
    rm -rf "$folder" && mkdir -p "$folder/built" && cp "$pins"/* "$folder" && cp "$program" "$folder/main.js"
    archive=$(cut -d' ' -f3 "$folder/vitessce.sha256")
    if ! (cd "$folder" && npm ci --ignore-scripts --no-audit --no-fund --silent &&
        npm pack --silent "vitessce@$(echo "${archive%.tgz}" | cut -d- -f2)" && sha256sum --check --quiet vitessce.sha256 &&
        tar xzf "$archive" && mv package node_modules/vitessce && rm "$archive" &&
        node node_modules/esbuild/bin/esbuild main.js --bundle --format=esm --splitting --outdir=built --log-level=error \
            --external:three '--external:three/*' '--external:@react-three/*' --external:d3-zoom --external:@luma.gl/debug \
            '--define:process.env.NODE_ENV="production"' --define:global=globalThis) >"$1/npm.log" 2>&1; then
        note "$1" vitessce "$(grep -v '^npm warn' "$1/npm.log" | tail -1 | cut -c1-200)"
        return
    fi
    note "$1" vitessce ""
    cat "$pins"/* "$program" >"$folder/made-of.txt"
    echo "vitessce is ready in $folder"
}

if [ "$what" = viewers ]; then
    # Its models of texts and pictures are not asked here; they would bring torch, so what its server imports is pinned and none resolved.
    pins=requirements/peers-viewers.txt
    environment .venv-peers-viewers "$pins" "${PEERS_PYTHON:-}" "13 14 12"
    peer .venv-peers-viewers "$pins" embedding-atlas embedding_atlas.cli --no-deps --requirement "$pins"
    old=.venv-peers-viewers/embedding-atlas-0.22.0 # the last that draws by WebGL, which Chromium's software renderer has
    if [ -x .venv-peers-viewers/bin/python ] && ! [ -d "$old" ]; then
        .venv-peers-viewers/bin/python -m pip install --quiet --no-deps --target "$old" embedding-atlas==0.22.0 ||
            note .venv-peers-viewers embedding-atlas-webgl "pip could not install 0.22.0"
    fi
    vitessce .venv-peers-viewers requirements/peers-vitessce
    exit 0
fi
if [ "$what" = vectors ]; then
    for version in 0.2 0.9; do # 0.2.0 writes layout 0.7, 0.9.2 layout 0.9; both need Python 3.12
        environment ".venv-peers-vectors-$version" "requirements/peers-vectors-$version.txt" "${PEERS_PYTHON:-}" "13 12 14"
        peer ".venv-peers-vectors-$version" "requirements/peers-vectors-$version.txt" zarr-vectors zarr_vectors zarr-vectors
    done
    exit 0
fi
if [ "$what" = icechunk ]; then
    environment .venv-peers-icechunk requirements/peers-icechunk.txt "${PEERS_PYTHON:-}" "13 12 14"
    peer .venv-peers-icechunk requirements/peers-icechunk.txt icechunk icechunk icechunk
    exit 0
fi
pins=requirements/peers-3.13.txt
environment .venv-peers "$pins" "${PEERS_PYTHON:-}" "13 14 12"
peer .venv-peers "$pins" homeobox homeobox homeobox
if [ "$what" = loader ]; then
    peer .venv-peers "$pins" annbatch "annbatch, zarrs" annbatch zarrs
    peer .venv-peers "$pins" cellstream cellstream cellstream
    [ -x .venv-peers/bin/python ] && torch .venv-peers-torch requirements/peers-torch-3.13.txt
    pins=requirements/peers-3.11.txt
    environment .venv-peers-3.11 "$pins" "${PEERS_PYTHON_311:-}" 11
    peer .venv-peers-3.11 "$pins" tiledbsoma-ml tiledbsoma_ml tiledbsoma-ml torch
    peer .venv-peers-3.11 "$pins" slafdb slaf.ml.dataloaders slafdb torch psutil # which its loader needs and does not ask for
    peer .venv-peers-3.11 "$pins" scdataset scdataset scDataset
    peer .venv-peers-3.11 "$pins" bionemo-scdl bionemo.scdl.io.single_cell_memmap_dataset bionemo-scdl
fi
exit 0
