"""The R package, tested with R where it is installed: `scripts/test-r` says what that needs."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import raggedatlas as ra
from raggedatlas.query.tables_server import ARROW, TablesServer, encode
from support.object_store import WebServer

PACKAGE = Path(__file__).parents[2] / "r" / "raggedatlas"
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> ra.RaggedAtlas:
    made = ra.RaggedAtlas.create(tmp_path_factory.mktemp("r") / "a.atlas")
    made.add(DATA / "lung_C144.h5")
    made.add(DATA / "pbmc_5k_protein_v3.h5ad", organism="human")
    made.snapshot("v1")
    return made


def ask(server: TablesServer, name: str, body: Any = None, **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
    request = urllib.request.Request(server.url + name, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request) as answer:
        return bytes(answer.read())


def refusal(server: TablesServer, name: str, body: Any = None, **headers: str) -> tuple[int, str]:
    with pytest.raises(HTTPError) as refused:
        ask(server, name, body, **headers)
    return refused.value.code, refused.value.read().decode()


def test_tables_are_served_in_arrow_and_in_columns(atlas: ra.RaggedAtlas) -> None:
    view = atlas.checkout("v1")
    with TablesServer(view) as server:
        info = json.loads(ask(server, "info"))
        assert (info["snapshot"], info["n_cells"]) == (1, view.query().count())
        stream = ask(server, "cells", {"where": "n_genes > 1000", "limit": 7}, Accept=ARROW)
        table = pa.ipc.open_stream(stream).read_all()
        expected = view.query().where("n_genes > 1000").limit(7).to_pandas()
        assert table.column("uid").to_pylist() == expected.index.tolist()
        np.testing.assert_array_equal(table.column("n_genes").to_numpy(), expected["n_genes"])
        head, columns = read(ask(server, "cells", {"where": "n_genes > 1000", "limit": 7}))
        assert head["frame"]["n_rows"] == 7
        np.testing.assert_array_equal(columns["frame"]["n_genes"], expected["n_genes"])
        _, found = read(ask(server, "expression", {"features": ["SFTPC", "LYZ"]}))
        data = view.query().features(["SFTPC", "LYZ"]).to_anndata()
        np.testing.assert_array_equal(found["matrix"]["x"], data.X.data)
        np.testing.assert_array_equal(found["matrix"]["p"], data.X.indptr)
        assert read(ask(server, "features"))[0]["frame"]["n_rows"] == len(view.features())
        assert read(ask(server, "datasets"))[0]["frame"]["n_rows"] == 2


def test_whole_numbers_without_a_sign_stay_large() -> None:
    """Those beyond 32 bits are sent as doubles, also where as int64 they would be small."""
    _, columns = read(encode({"frame": pd.DataFrame({"n": np.array([2**64 - 1, 3], np.uint64)})}))
    assert columns["frame"]["n"].tolist() == [2.0**64, 3.0]
    _, columns = read(encode({"frame": pd.DataFrame({"n": np.array([2**31 - 1, 0], np.uint64)})}))
    assert columns["frame"]["n"].tolist() == [2**31 - 1, 0]


def read(answer: bytes) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read what the server sends without Arrow, as R does."""
    n = int.from_bytes(answer[:4], "little")
    head, at, parts = json.loads(answer[4 : 4 + n]), 4 + n, {}
    for name, part in head.items():
        parts[name] = {}
        for column in part["columns"]:
            dtype = np.dtype("<f8" if column["type"] == "double" else "<i4")
            parts[name][column["name"]] = np.frombuffer(answer, dtype, column["n"], at)
            at += dtype.itemsize * column["n"]
    assert at == len(answer)
    return head, parts


def test_what_is_no_request_is_refused(atlas: ra.RaggedAtlas) -> None:
    with TablesServer(atlas.checkout("v1")) as server:
        assert refusal(server, "nothing")[0] == 404
        assert "JSON" in refusal(server, "cells", [1])[1]
        assert "JSON" in refusal(server, "cells", **{"Content-Type": "text/plain"})[1]
        assert "'colour'" in refusal(server, "cells", {"colour": 1})[1]
        code, text = refusal(server, "cells", {"where": "nothing = 1"})
        assert code == 400
        assert "nothing" in text
        for limit in ([], {"a": 1}, 2.5, float("inf"), "5"):
            code, text = refusal(server, "cells", {"limit": limit})
            assert (code, "limit" in text) == (400, True)
        assert read(ask(server, "cells", {"limit": 5.0}))[0]["frame"]["n_rows"] == 5
        assert refusal(server, "cells", b"[" * 100_000)[0] == 400
        for path in ("", "x/cells", f"{server.token[:-1]}/cells"):
            with pytest.raises(HTTPError, match="403"):
                urllib.request.urlopen(
                    urllib.request.Request(
                        f"http://127.0.0.1:{server.port}/{path}", b"{}", {"Content-Type": "application/json"}
                    )
                )
        ask(server, "close")
        server._thread.join(10)
        assert not server._thread.is_alive()


def has_r() -> bool:
    packages = "Matrix jsonlite curl testthat knitr rmarkdown"
    check = f"stopifnot(all(sapply(strsplit('{packages}', ' ')[[1]], requireNamespace, quietly = TRUE)))"
    return (
        shutil.which("Rscript") is not None
        and subprocess.run(["Rscript", "-e", check], capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not has_r(), reason="R with the packages that scripts/test-r names is not installed")
def test_the_r_package(atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """Installed, its tests on a published atlas and on an atlas, and its vignette built."""
    view = atlas.checkout("v1")
    atlas.publish(tmp_path / "web")
    features = ["SFTPC", "LYZ", "CD79A"]
    data, cells = view.query().features(features).to_anndata(), view.query().to_pandas()
    facts = {
        "datasets": view.list_datasets()["name"].tolist(),
        "n_cells": len(cells),
        "n_counts": float(cells["n_counts"].sum()),
        "n_missing": int(cells["n_counts"].isna().sum()),
        "first_datasets": cells["dataset"].astype(str).tolist()[:3],
        "n_features": len(view.features()),
    }
    values = {
        "features": features, "values": data.X.toarray().tolist(), "cells": data.obs_names.tolist(), "embeddings": [*data.obsm],
        "measured": data.varm["measured"].to_numpy().tolist(),
    }  # fmt: skip
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    (tmp_path / "values.json").write_text(json.dumps(values))
    library = tmp_path / "library"
    library.mkdir()
    command = Path(sys.executable).with_name("raggedatlas")
    subprocess.run(["R", "CMD", "INSTALL", f"--library={library}", PACKAGE], check=True, capture_output=True, text=True)
    render = (
        f"rmarkdown::render('{PACKAGE / 'vignettes' / 'raggedatlas.Rmd'}', output_dir = '{tmp_path}', intermediates_dir = '{tmp_path}', "
        "output_format = rmarkdown::md_document(), quiet = TRUE)"
    )
    tests = f"testthat::test_dir('{PACKAGE / 'tests' / 'testthat'}', package = 'raggedatlas', load_package = 'installed', stop_on_failure = TRUE)"
    with WebServer(tmp_path / "web") as server:
        for address, script in ((server.address, tests), (f"{atlas.uri}", tests), (f"{server.address}@v1", render)):
            environment = os.environ | {
                "R_LIBS": str(library), "RAGGEDATLAS": str(command), "RAGGEDATLAS_TEST_ATLAS": address,
                "RAGGEDATLAS_TEST_EXPECTED": str(tmp_path),
            }  # fmt: skip
            made = subprocess.run(
                ["Rscript", "-e", script], env=environment, capture_output=True, text=True, timeout=300, check=False
            )
            assert made.returncode == 0, made.stdout + made.stderr
    assert "dgCMatrix" in (tmp_path / "raggedatlas.md").read_text()
