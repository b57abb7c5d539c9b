"""The numbered rules of a CXG; what it is to break one is told as for AnnData files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from raggedatlas.errors import AtlasError
from raggedatlas.formats.cxg.inspection import Kind, list_members
from raggedatlas.formats.cxg.schema import EMB, GROUP_METADATA, OBS, SHIFT, UNNAMED, UNS, VAR, XC, XR, X
from raggedatlas.formats.cxg.tiledb_arrays import ArrayInfo, read_array_info
from raggedatlas.formats.cxg.unstructured import parse_json
from raggedatlas.model import validation
from raggedatlas.model.validation import Checker, Rule

_AGAIN = "Write the CXG again from its source."
_CONVERT = "Write it again, e.g. by raggedatlas convert."
_TYPED = "Write the column again as float32, int32, uint8 for booleans, or text."
_JSON = "Write it as JSON text."

_GENERAL = (
    Rule("C00", "must", "Every array can be opened and every value decoded: nothing is damaged or cut short.", "Fetch or write the CXG again.", stated=False),
    Rule("C01", "must", "A CXG is a TileDB group.", "Give the folder that holds obs, var and X; where its mark was lost in copying, copy it again with hidden and empty files."),
    Rule("C02", "must", "Every dimension is uint32 and begins at 0; the one cell of cxg_group_metadata and uns may be uint64, as in all real files.", _AGAIN),
    Rule("C03", "should", "Expression values and embeddings are float32; embeddings of float64 are a matter of practice.", "Write them as float32."),
    Rule("C04", "must", "Expression values and embeddings are numbers.", _AGAIN),
    Rule("C05", "practice", "Readers take any filter, order and tile; a tile is no larger than 128 MiB, and no more than 4 Mi cells are one tile of a sparse array, so that a part can be read.", "Write it again with smaller tiles, e.g. by raggedatlas convert."),
    Rule("C06", "should", "The matrix is dense or sparse as its values are: dense from 5 % of non-zero values on, sparse up to 60 %.", "Write it in the other form; raggedatlas convert chooses by itself.", depth="full"),
    Rule("C07", "practice", "Expression values are finite: viewers compute no differences of features with NaN or infinite values.", "Replace them, or leave the features out.", depth="full", stated=False),
)  # fmt: skip

_ARRAYS = (
    Rule("C10", "must", "obs is a dense array of one axis, the cells, and all of it is written.", _AGAIN),
    Rule("C11", "must", "var is a dense array of one axis, the features, and all of it is written.", _AGAIN),
    Rule("C12", "must", "Each attribute of obs and var is one named column with one value per row.", "Write each column as an attribute of its own."),
    Rule("C13", "must", "A column of obs that is stored as codes has its categories in cxg_schema; before 0.3.0, and in var, codes are not known.", "List the categories in cxg_schema, or write the column as text."),
    Rule("C14", "must", "X has two axes, cells and features; where it is dense, all of it is written.", _AGAIN),
    Rule("C15", "must", "Xr is a sparse array of one axis, the cells, with the attributes '' and var, an integer.", _AGAIN),
    Rule("C16", "must", "Xc is a sparse array of one axis, the features, with the attributes '' and obs, an integer.", _AGAIN),
    Rule("C17", "must", "There is either X, or Xr and Xc.", _AGAIN),
    Rule("C18", "practice", "In version 0.3.0 a sparse matrix is Xr and Xc; X with two sparse axes is what newer writers make, and readers know it.", "Write it again as Xr and Xc where an older reader of 0.3.0 is to take it.", stated=False),
    Rule("C19", "must", "Xr and Xc hold the same values.", _AGAIN, depth="full", stated=False),
    Rule("C20", "must", "Each value stands within both axes and once; a stored zero is a matter of practice.", _AGAIN, depth="full", stated=False),
    Rule("C21", "must", "emb is a group.", "Make a group emb with at least one embedding."),
    Rule("C22", "must", "There is at least one embedding.", "Compute one, e.g. by raggedatlas convert --compute-embedding pca."),
    Rule("C23", "must", "An embedding is a dense array of all cells and two or more coordinates, with one anonymous attribute.", "Write the embedding again, or remove it."),
    Rule("C24", "practice", "No coordinate is infinite, and not all of them are missing: what that means is not defined.", "Write the embedding again with numbers.", depth="full"),
    Rule("C25", "practice", "Names of embeddings do not begin with X_.", "Rename the array."),
    Rule("C26", "must", "cxg_group_metadata is an array; without it a CXG is of the unnamed version, which is told as a matter of practice.", "Write the array with a cxg_version."),
    Rule("C27", "must", "uns is an array whose metadata are JSON texts; bytes are never read, since they would have to be unpickled. A group, as the text of the format has it, is a matter of practice.", "Write its entries as JSON texts in the metadata of an array."),
    Rule("C28", "must", "Columns hold text, 32-bit numbers, codes, or booleans as uint8.", _TYPED),
    Rule("C29", "practice", "spatial in uns is a JSON object of libraries, each with image_properties (resolution, crop_coords, width, height) and scalefactors (spot_diameter_fullres, tissue_hires_scalef), and {} where there is no image: the Explorer of today opens no CXG with anything else there.", _CONVERT, stated=False),
)  # fmt: skip

_HINTS = (
    Rule("C30", "must", "cxg_schema is a JSON object; index names a column; types are known; categories are unique texts. That it is absent, that a column is not in it, or something in it is no column, is a matter of practice.", "Write cxg_schema as {\"index\": column, column: {\"type\": ...}}."),
    Rule("C31", "must", "Codes lie between -1, which is missing, and the last category.", _AGAIN, depth="full"),
    Rule("C32", "practice", "Names in the index of obs and var are unique: of several features of one name, viewers show one.", "Make them unique, or name another column as the index.", depth="full", stated=False),
)  # fmt: skip

_MATRIX = (
    Rule("C40", "must", "X has one attribute, which is anonymous.", _AGAIN),
    Rule("C41", "practice", "Only X with two sparse axes, before 0.3.0, has X_col_shift: the Explorer of today does not add it and shows other values.", _CONVERT),
    Rule("C42", "must", "Beside a dense X there is no X_col_shift.", _CONVERT),
    Rule("C43", "must", "X_col_shift has one axis, all features, and one anonymous numeric attribute of the type of X; another type is a matter of practice.", _CONVERT),
    Rule("C44", "must", "Each value is what is stored plus the shift of its column, so every shift is finite.", _AGAIN, depth="full"),
    Rule("C45", "practice", "No X_col_shift is the same as zero for every column, so there is none where all are zero.", "Remove X_col_shift.", depth="full"),
)  # fmt: skip

_METADATA = (
    Rule("C50", "must", "cxg_version is there, is a version, and one of 0.1, 0.2.0 and 0.3.0.", "Set cxg_version to the version that it is."),
    Rule("C51", "must", "cxg_properties is a JSON object. title is text and about an http or https address, or null; that it is there is what the Explorer needs.", _JSON),
    Rule("C52", "practice", "Readers ignore metadata that they do not know; names that begin with cxg_ are the format's own.", "Rename the key, if it is not misspelt."),
    Rule("C53", "must", "cxg_category_colors is a JSON object of tables, one for each category, from labels to #RRGGBB. Real files name a table after its column; with _colors at the end, as the text of the format has it, no colour is found.", _JSON),
    Rule("C60", "must", "corpora is a JSON object, with schema_version and title.", _JSON),
    Rule("C61", "practice", "Where corpora and cxg_properties say different titles or addresses, corpora is right, and in version 0.1 cxg_properties.", "Make the two say the same."),
    Rule("C70", "practice", "The version fits what is there: Xr and Xc since 0.3.0, corpora since 0.2.0.", "Set cxg_version to the version that it is.", stated=False),
    Rule("C71", "must", "All arrays agree on the number of cells and features.", _AGAIN, stated=False),
)  # fmt: skip

RULES: dict[str, Rule] = {rule.id: rule for rule in (*_GENERAL, *_ARRAYS, *_HINTS, *_MATRIX, *_METADATA)}
"""Id -> rule, in order."""

_HEAD = """# The rules of a CXG

`raggedatlas validate FOLDER.cxg` and `raggedatlas.formats.cxg.validate(path, level)` look for these; ids are stable. A CXG that breaks a
**must** cannot be read, or not as it was meant; the command then ends with exit code 1. **should** is what the format
recommends. **practice** is what readers cope with, some of them badly. A single finding can be milder than its rule, never worse.
Rules marked with \\* are not in the description of the format; they follow from what its readers and writers do.

Level `metadata` reads schemas and metadata; `full` reads every value too, block by block.
"""


def rules_page() -> str:
    """Return the reference page of all rules, as Markdown."""
    return validation.rules_page(_HEAD, RULES.values(), {"needs": lambda rule: rule.depth})


_KNOWN = {OBS, VAR, X, XR, XC, SHIFT, GROUP_METADATA, UNS}


@dataclass
class CxgChecker(Checker[str]):
    """Checker of one CXG.

    Parameters
    ----------
    path : Path
        Its folder.
    full : bool
        Whether values are read.
    members : mapping of str to str
        Name at its root -> ``"array"`` or ``"group"``.
    arrays : dict of str to StoredArray
        Those that could be opened, embeddings as ``"emb/NAME"``.
    version : str
        What it says, `UNNAMED` where it says nothing.
    """

    rules: ClassVar[Mapping[str, Rule]] = RULES
    damage: ClassVar[str] = "C00"

    path: Path
    full: bool
    members: Mapping[str, Kind]
    arrays: dict[str, ArrayInfo] = field(default_factory=dict)
    version: str = UNNAMED

    def reason(self, error: AtlasError) -> str:
        """Return the first part of the message, without the rule id."""
        return f"{str(error).removeprefix('C00: ').partition('; ')[0]}."

    def open_arrays(self) -> None:
        """Read schema and metadata of every known array and embedding; report those that cannot be opened."""
        inner = list_members(self.path / EMB) if self.members.get(EMB) == "group" else {}
        kinds = {name: kind for name, kind in self.members.items() if name in _KNOWN}
        kinds |= {f"{EMB}/{name}": kind for name, kind in inner.items()}
        for name in (name for name, kind in kinds.items() if kind == "array"):
            with self.guarded(name):
                self.arrays[name] = read_array_info(self.path / name)

    def read_json(self, where: str, key: str, rule: str) -> Any:  # noqa: ANN401  (any JSON)
        """Read a JSON object from the metadata of an array.

        Returns
        -------
        dict or None
            None where there is none, or where it is none, which is told by `rule`.
        """
        stored = self.arrays[where].metadata.get(key)
        if stored is None:
            return None
        try:
            found = parse_json(stored)
        except (TypeError, ValueError) as error:
            self.report(rule, where, f"{key} is no JSON: {error}.")
            return None
        if not isinstance(found, dict):
            self.report(rule, where, f"{key} is {type(found).__name__} {found!r:.40}, where a JSON object belongs.")
            return None
        return found

    @property
    def is_old(self) -> bool:
        """Whether it is of a version before 0.3.0, and known to be."""
        return self.version in ("0.1", "0.2.0") or (self.version == UNNAMED and GROUP_METADATA not in self.members)

    @property
    def embeddings(self) -> tuple[str, ...]:
        """Names of the arrays in ``emb`` that could be opened, as ``"emb/NAME"``."""
        return tuple(name for name in self.arrays if name.startswith(f"{EMB}/"))

    @property
    def n_obs(self) -> int | None:
        """Number of cells by ``obs``; None where that cannot be told."""
        return self._size(OBS)

    @property
    def n_var(self) -> int | None:
        """Number of features by ``var``; None where that cannot be told."""
        return self._size(VAR)

    def _size(self, name: str) -> int | None:
        found = self.arrays.get(name)
        return found.shape[0] if found is not None and len(found.axes) == 1 and found.shape[0] else None
