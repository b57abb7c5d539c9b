"""The numbered rules of a CXG, and the checker of a CXG."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from raggedatlas.errors import AtlasError
from raggedatlas.formats.cxg.inspection import Kind, list_members
from raggedatlas.formats.cxg.options import EMB, GROUP_METADATA, OBS, SHIFT, UNNAMED, UNS, VAR, XC, XR, X
from raggedatlas.formats.cxg.tiledb_arrays import ArrayInfo, read_array_info
from raggedatlas.formats.cxg.unstructured import parse_json
from raggedatlas.model import validation
from raggedatlas.model.validation import Checker, Rule

_AGAIN = "Write the CXG again from its source."
_CONVERT = "Write it again, e.g. by raggedatlas convert."
_TYPED = "Write the column again as float32, int32, uint8 for booleans, or text."
_JSON = "Write it as JSON text."

_GENERAL = (
    Rule("C00", "must", "Every array can be opened and every value decoded: nothing is damaged or truncated.", "Fetch or write the CXG again.", stated=False),
    Rule("C01", "must", "A CXG is a TileDB group.", "Pass the folder with obs, var and X; if the mark of the group was lost in copying, copy it again with hidden and empty files."),
    Rule("C02", "must", "Every dimension is uint32 and begins at 0; the one cell of cxg_group_metadata and uns may be uint64, as in all real files.", _AGAIN),
    Rule("C03", "should", "Expression values and embeddings are float32; embeddings of float64 are a matter of practice.", "Write them as float32."),
    Rule("C04", "must", "Expression values and embeddings are numbers.", _AGAIN),
    Rule("C05", "practice", "Readers take any filter, order and tile; a tile is no larger than 128 MiB, and no more than 4 Mi cells are one tile of a sparse array, so that parts can be read.", "Write it again with smaller tiles, e.g. by raggedatlas convert."),
    Rule("C06", "should", "The matrix is dense or sparse as its values are: dense from 5 % of non-zero values on, sparse up to 60 %.", "Write it in the other form; raggedatlas convert chooses automatically.", depth="full"),
    Rule("C07", "practice", "Expression values are finite: viewers compute no differences of features with NaN or infinite values.", "Replace them, or leave the features out.", depth="full", stated=False),
)  # fmt: skip

_ARRAYS = (
    Rule("C10", "must", "obs is a dense array of one axis, the cells, and is completely written.", _AGAIN),
    Rule("C11", "must", "var is a dense array of one axis, the features, and is completely written.", _AGAIN),
    Rule("C12", "must", "Each attribute of obs and var is one named column with one value per row.", "Write each column as an attribute of its own."),
    Rule("C13", "must", "A column of obs that is stored as codes has its categories in cxg_schema; before 0.3.0, and in var, codes are not known.", "List the categories in cxg_schema, or write the column as text."),
    Rule("C14", "must", "X has two axes, cells and features; if it is dense, it is completely written.", _AGAIN),
    Rule("C15", "must", "Xr is a sparse array of one axis, the cells, with the attributes '' and var, an integer.", _AGAIN),
    Rule("C16", "must", "Xc is a sparse array of one axis, the features, with the attributes '' and obs, an integer.", _AGAIN),
    Rule("C17", "must", "There is either X, or Xr and Xc.", _AGAIN),
    Rule("C18", "practice", "In version 0.3.0 a sparse matrix is Xr and Xc; X with two sparse axes is what newer writers produce, and readers support it.", "Write it again as Xr and Xc if an older reader of 0.3.0 must read it.", stated=False),
    Rule("C19", "must", "Xr and Xc have the same values.", _AGAIN, depth="full", stated=False),
    Rule("C20", "must", "Each value is within both axes and occurs once; stored zeros are a matter of practice.", _AGAIN, depth="full", stated=False),
    Rule("C21", "must", "emb is a group.", "Create a group emb with at least one embedding."),
    Rule("C22", "must", "There is at least one embedding.", "Compute one, e.g. by raggedatlas convert --compute-embedding pca."),
    Rule("C23", "must", "An embedding is a dense array of all cells and two or more coordinates, with one anonymous attribute.", "Write the embedding again, or remove it."),
    Rule("C24", "practice", "No coordinate is infinite, and not all of them are missing; their meaning would be undefined.", "Write the embedding again with numbers.", depth="full"),
    Rule("C25", "practice", "Names of embeddings do not begin with X_.", "Rename the array."),
    Rule("C26", "must", "cxg_group_metadata is an array; without it a CXG is of the unnamed version, which is a matter of practice.", "Write the array with a cxg_version."),
    Rule("C27", "must", "uns is an array whose metadata are JSON texts; bytes are never read, since they would have to be unpickled. A group, as in the description of the format, is a matter of practice.", "Write its entries as JSON texts in the metadata of an array."),
    Rule("C28", "must", "Columns are text, 32-bit numbers, codes, or booleans as uint8.", _TYPED),
    Rule("C29", "practice", "spatial in uns is a JSON object of libraries, each with image_properties (resolution, crop_coords, width, height) and scalefactors (spot_diameter_fullres, tissue_hires_scalef), and {} if there is no image: the current Explorer cannot open a CXG with anything else.", _CONVERT, stated=False),
)  # fmt: skip

_HINTS = (
    Rule("C30", "must", "cxg_schema is a JSON object; index names a column; types are known; categories are unique texts. It is a matter of practice if it is missing, lacks a column, or describes something that is not a column.", "Write cxg_schema as {\"index\": column, column: {\"type\": ...}}."),
    Rule("C31", "must", "Codes are between -1, which is missing, and the last category.", _AGAIN, depth="full"),
    Rule("C32", "practice", "Names in the index of obs and var are unique: of several features with the same name, viewers show one.", "Make them unique, or name another column as the index.", depth="full", stated=False),
)  # fmt: skip

_MATRIX = (
    Rule("C40", "must", "X has one attribute, which is anonymous.", _AGAIN),
    Rule("C41", "practice", "Only X with two sparse axes, before 0.3.0, has X_col_shift: the current Explorer does not add it and shows other values.", _CONVERT),
    Rule("C42", "must", "There is no X_col_shift with a dense X.", _CONVERT),
    Rule("C43", "must", "X_col_shift has one axis, all features, and one anonymous numeric attribute of the type of X; another type is a matter of practice.", _CONVERT),
    Rule("C44", "must", "Each value is the stored value plus the shift of its column, so every shift is finite.", _AGAIN, depth="full"),
    Rule("C45", "practice", "No X_col_shift is the same as zero for every column, so it does not exist if all are zero.", "Remove X_col_shift.", depth="full"),
)  # fmt: skip

_METADATA = (
    Rule("C50", "must", "cxg_version exists, is a version, and one of 0.1, 0.2.0 and 0.3.0.", "Set cxg_version to the actual version."),
    Rule("C51", "must", "cxg_properties is a JSON object. title is text and about an http or https address, or null; the Explorer needs them.", _JSON),
    Rule("C52", "practice", "Readers ignore unknown metadata; names that begin with cxg_ are the format's own.", "Rename the key, or correct its spelling."),
    Rule("C53", "must", "cxg_category_colors is a JSON object of tables, one for each category, from labels to #RRGGBB. Real files name a table after its column; with the suffix _colors of the description of the format, viewers find no colour.", _JSON),
    Rule("C60", "must", "corpora is a JSON object, with schema_version and title.", _JSON),
    Rule("C61", "practice", "If titles or addresses differ, corpora takes precedence over cxg_properties, in version 0.1 the reverse.", "Set both to the same value."),
    Rule("C70", "practice", "The version fits the arrays and metadata: Xr and Xc since 0.3.0, corpora since 0.2.0.", "Set cxg_version to the actual version.", stated=False),
    Rule("C71", "must", "All arrays agree on the number of cells and features.", _AGAIN, stated=False),
)  # fmt: skip

# Problems are sorted in this order (`Checker.by_rule`), and docs/reference/cxg-rules.md has one row each.
RULES: dict[str, Rule] = {rule.id: rule for rule in (*_GENERAL, *_ARRAYS, *_HINTS, *_MATRIX, *_METADATA)}
"""Id -> rule, in order."""

_HEAD = """# The rules of a CXG

`raggedatlas validate FOLDER.cxg` and `raggedatlas.formats.cxg.validate(path, level)` check these rules; ids are stable. A CXG that breaks a
**must** cannot be read, or not as intended; the command then exits with code 1. **should** is what the format
recommends. **practice** is what readers tolerate, some of them badly. A single problem can be milder than its rule, never more severe.
Rules marked with \\* are not in the description of the format; they follow from what its readers and writers do.

Level `metadata` reads schemas and metadata; `full` reads every value too, block by block.
"""


def rules_page() -> str:
    """Return the reference page of all rules, as Markdown."""
    return validation.rules_page(_HEAD, RULES.values(), {"needs": lambda rule: rule.depth})


# `coverage` and unknown arrays are not opened: no rule is about them.
_KNOWN = {OBS, VAR, X, XR, XC, SHIFT, GROUP_METADATA, UNS}


@dataclass
class CxgChecker(Checker[str]):
    """Checker of one CXG.

    Parameters
    ----------
    path : Path
        Path of the folder.
    full : bool
        Whether values are read.
    members : mapping of str to str
        Name of each member of the root -> ``"array"`` or ``"group"``.
    arrays : dict of str to ArrayInfo
        The arrays that could be opened, embeddings as ``"emb/NAME"``.
    version : str
        The declared version, `UNNAMED` if there is none.
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
        # Messages of readers end in `; ` and the fix, which a problem has as a field of its own.
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
            None if it is missing, or not a JSON object, which is reported by `rule`.
        """
        stored = self.arrays[where].metadata.get(key)
        if stored is None:
            return None
        try:
            value = parse_json(stored)
        except (TypeError, ValueError) as error:
            self.report(rule, where, f"{key} is not JSON: {error}.")
            return None
        if not isinstance(value, dict):
            self.report(rule, where, f"{key} is {type(value).__name__} {value!r:.40}; expected a JSON object.")
            return None
        return value

    @property
    def is_old(self) -> bool:
        """Whether its version is known and before 0.3.0."""
        # A damaged `cxg_group_metadata` also leaves `UNNAMED`; only a missing one means the oldest version.
        return self.version in ("0.1", "0.2.0") or (self.version == UNNAMED and GROUP_METADATA not in self.members)

    @property
    def embeddings(self) -> tuple[str, ...]:
        """Names of the arrays in ``emb`` that could be opened, as ``"emb/NAME"``."""
        return tuple(name for name in self.arrays if name.startswith(f"{EMB}/"))

    @property
    def n_obs(self) -> int | None:
        """Number of cells according to ``obs``; None if unknown."""
        return self._size(OBS)

    @property
    def n_var(self) -> int | None:
        """Number of features according to ``var``; None if unknown."""
        return self._size(VAR)

    def _size(self, name: str) -> int | None:
        info = self.arrays.get(name)
        # An axis of text has the size 0, since it is not counted.
        return info.shape[0] if info is not None and len(info.axes) == 1 and info.shape[0] else None
