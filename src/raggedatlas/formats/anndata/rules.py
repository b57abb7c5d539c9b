"""The numbered rules of AnnData's on-disk format."""

from raggedatlas.model import validation
from raggedatlas.model.validation import Rule

_REWRITE = "Write the file again from its source; the values cannot be guessed."
_SHAPE = "Write the element again with the size of its axis, or remove it."
_TYPED = "Convert it to a dense or sparse matrix, or move it to uns."
_AGAIN = "Write the element again."
_ENCODED = "Set the attributes encoding-type and encoding-version."

_GENERAL = (
    Rule("A00", "must", "Every element can be opened and decoded: nothing is damaged, truncated, stored in other files, or compressed by a filter that is not installed.", "Fetch or write the file again; install raggedatlas[plugins] for a missing filter.", stated=False, refused=True),
    Rule("A01", "must", "Every element has a text attribute encoding-type.", _ENCODED, fixed=True),
    Rule("A02", "must", "Every element has a text attribute encoding-version that reads as a version.", _ENCODED, fixed=True),
    Rule("A03", "must", "The pair of type and version is registered.", "Write the element in a registered encoding, or remove it.", stated=False, refused=True),
    Rule("A04", "practice", "Encoding attributes are text, not bytes.", "Write them as UTF-8 text.", fixed=True, stated=False),
)  # fmt: skip

_ANNDATA = (
    Rule("A10", "must", "An AnnData is a group.", "Pass the folder or file whose root has obs and var.", refused=True),
    Rule("A11", "must", "Its encoding is anndata 0.1.0.", _ENCODED, fixed=True),
    Rule("A12", "must", "It has obs and var.", "Write the table, with at least its index.", fixed=True, refused=True),
    Rule("A13", "must", "Both are dataframes, which may have no columns.", "Write the table as a dataframe.", refused=True),
    Rule("A14", "must", "X is a dense or sparse array, if there is one.", _TYPED, refused=True),
    Rule("A15", "must", "X has the shape (n_obs, n_var).", _SHAPE, refused=True),
    Rule("A16", "must", "Entries of layers are dense or sparse arrays.", _TYPED, refused=True),
    Rule("A17", "must", "They have the shape (n_obs, n_var).", _SHAPE, refused=True),
    Rule("A18", "must", "Entries of obsm are sparse or dense arrays, dataframes or awkward arrays, of two axes or more.", _TYPED, fixed=True),
    Rule("A19", "must", "They have n_obs rows; rows of a dataframe have the names that obs has.", _SHAPE, refused=True),
    Rule("A20", "must", "Entries of varm are sparse or dense arrays, dataframes or awkward arrays, of two axes or more.", _TYPED, fixed=True),
    Rule("A21", "must", "They have n_var rows; rows of a dataframe have the names that var has.", _SHAPE, refused=True),
    Rule("A22", "must", "Entries of obsp are sparse or dense arrays.", _TYPED, refused=True),
    Rule("A23", "must", "They begin with two axes of n_obs.", _SHAPE, refused=True),
    Rule("A24", "must", "Entries of varp are sparse or dense arrays.", _TYPED, refused=True),
    Rule("A25", "must", "They begin with two axes of n_var.", _SHAPE, refused=True),
    Rule("A26", "must", "Every entry of uns, at any depth, is an encoded element.", _ENCODED, fixed=True),
    Rule("A27", "must", "raw is a group of encoding raw 0.1.0 with X, var and, maybe, varm; X has n_obs rows and a column for each row of raw/var.", "Write raw again, or remove it.", stated=False, fixed=True, refused=True),
    Rule("A28", "must", "An HDF5 file has no other members at its root; anndata refuses to read a file that has.", "Move the member into uns.", fixed=True, stated=False),
    Rule("A29", "practice", "Names of cells and of features are unique.", "Make them unique, e.g. by adata.obs_names_make_unique().", depth="full", stated=False),
    Rule("A30", "must", "X is numbers or booleans on two axes.", _TYPED, stated=False, refused=True),
)  # fmt: skip

_MATRICES = (
    Rule("A40", "must", "A dense array is stored as an array.", _AGAIN, refused=True),
    Rule("A41", "must", "Its encoding is array 0.2.0.", _ENCODED, fixed=True),
    Rule("A50", "must", "A sparse array is a group.", _AGAIN, refused=True),
    Rule("A51", "must", "It has the arrays indices, indptr and data, each of one axis; data are numbers or booleans.", _REWRITE, refused=True),
    Rule("A52", "must", "Its encoding-type is csr_matrix or csc_matrix.", "Set encoding-type according to its pointers.", fixed=True, refused=True),
    Rule("A53", "must", "Its encoding-version is 0.1.0.", _ENCODED, fixed=True),
    Rule("A54", "must", "Its attribute shape is two integers: the sizes of its axes.", _REWRITE, refused=True),
    Rule("A55", "must", "There is one pointer more than rows (CSR) or columns (CSC).", _REWRITE, stated=False, refused=True),
    Rule("A56", "must", "Pointers start at 0 and never decrease.", _REWRITE, depth="full", stated=False, refused=True),
    Rule("A57", "must", "The last pointer is the number of indices and of values.", _REWRITE, stated=False, refused=True),
    Rule("A58", "must", "Indices are within the other axis.", _REWRITE, depth="full", stated=False, refused=True),
    Rule("A59", "practice", "Indices ascend within a row (CSR) or column (CSC), without duplicates.", "Sort them and sum duplicates, e.g. by X.sum_duplicates().", depth="full", fixed=True, stated=False),
    Rule("A60", "must", "Pointers and indices are integers, signed and of at most 64 bits; unsigned ones are a matter of practice.", "Cast them to int64.", fixed=True, stated=False, refused=True),
    Rule("A61", "must", "Values are of a type that SciPy's sparse matrices support: not float16, and in the machine's byte order.", "Cast them, float16 to float32.", fixed=True, stated=False),
)  # fmt: skip

_FRAMES = (
    Rule("A70", "must", "A dataframe is a group.", _AGAIN, refused=True),
    Rule("A71", "must", "Its attribute _index names one of its members.", "Set _index to the member with the names.", fixed=True, refused=True),
    Rule("A72", "must", "Its encoding is dataframe 0.2.0.", _ENCODED, fixed=True, refused=True),
    Rule("A73", "must", "Its attribute column-order is an array of text, naming members, each once.", "List the existing columns.", fixed=True, refused=True),
    Rule("A74", "must", "The member that is the index is an array, or a nullable-string-array.", "Write the index again as a string-array.", refused=True),
    Rule("A75", "must", "All members have the same number of rows, on one axis; members not in column-order are a matter of practice.", _REWRITE, refused=True),
    Rule("A76", "should", "Chunked members share one chunk size.", "Write the columns again with one chunk size.", fixed=True),
    Rule("A77", "practice", "column-order lists every member but the index; no name has a slash.", "List every column.", fixed=True, stated=False),
    Rule("A78", "must", "No column is called _index.", "Rename the column.", stated=False, refused=True),
    Rule("A80", "must", "A mapping is a group.", _AGAIN),
    Rule("A81", "must", "Its encoding is dict 0.1.0.", _ENCODED, fixed=True),
)  # fmt: skip

_SCALARS = (
    Rule("A90", "must", "A scalar is an array without axes.", "Write it without axes.", fixed=True),
    Rule("A91", "must", "The encoding of a number is numeric-scalar 0.2.0.", _ENCODED, fixed=True),
    Rule("A92", "must", "A numeric-scalar is one boolean, integer, real or complex number.", _AGAIN),
    Rule("A93", "must", "The encoding of a text is string 0.2.0.", _ENCODED, fixed=True),
    Rule("A94", "must", "In Zarr a text is of fixed-length unicode, or of variable length as all writers store it.", "Write it as text.", fixed=True),
    Rule("A95", "must", "In HDF5 a text is of variable length, in UTF-8.", "Write it as text of variable length.", fixed=True),
    Rule("A96", "practice", "Scalars are in uns only.", "Move it into uns."),
)  # fmt: skip

_COLUMNS = (
    Rule("A100", "must", "A categorical is a group.", _AGAIN, refused=True),
    Rule("A101", "must", "Its encoding is categorical 0.2.0.", _ENCODED, fixed=True, refused=True),
    Rule("A102", "must", "Its attribute ordered is a boolean; a number in its place is a matter of practice.", "Set ordered to true or false.", fixed=True),
    Rule("A103", "must", "Its member codes is an array of integers, of one axis.", _REWRITE, refused=True),
    Rule("A104", "must", "No code exceeds the last category.", _REWRITE, depth="full", refused=True),
    Rule("A105", "must", "The code of a missing value is -1; no code is lower.", _REWRITE, depth="full", refused=True),
    Rule("A106", "must", "Its member categories is an array, of one axis.", _REWRITE, refused=True),
    Rule("A107", "must", "Categories are unique and none is missing.", "Merge equal categories; code missing values as -1.", depth="full", fixed=True, stated=False, refused=True),
    Rule("A110", "must", "A string array is stored as an array.", _AGAIN, refused=True),
    Rule("A111", "must", "Its encoding is string-array 0.2.0.", _ENCODED, fixed=True),
    Rule("A112", "must", "In Zarr it is of variable-length UTF-8 text.", "Write it as text of variable length.", fixed=True),
    Rule("A113", "must", "In HDF5 it is of variable-length UTF-8 text; fixed lengths and ASCII are a matter of practice.", "Write it as UTF-8 text of variable length.", depth="full", fixed=True, refused=True),
    Rule("A120", "must", "A nullable integer array is a group.", _AGAIN, refused=True),
    Rule("A121", "must", "Its encoding is nullable-integer 0.1.0.", _ENCODED, fixed=True, refused=True),
    Rule("A122", "must", "Its member values is an array of integers.", _REWRITE, refused=True),
    Rule("A123", "must", "Its member mask is an array of booleans, of the shape of values.", "Write a mask of booleans, one for each value.", fixed=True, refused=True),
    Rule("A130", "must", "A nullable boolean array is a group.", _AGAIN, refused=True),
    Rule("A131", "must", "Its encoding is nullable-boolean 0.1.0.", _ENCODED, fixed=True, refused=True),
    Rule("A132", "must", "Its member values is an array of booleans.", "Write the values as booleans.", fixed=True, refused=True),
    Rule("A133", "must", "Its member mask is an array of booleans.", "Write the mask as booleans.", fixed=True, refused=True),
    Rule("A134", "must", "Both have one shape.", _REWRITE, refused=True),
    Rule("A140", "must", "A nullable string array is a group.", _AGAIN, refused=True),
    Rule("A141", "must", "Its encoding is nullable-string-array 0.1.0.", _ENCODED, fixed=True, refused=True),
    Rule("A142", "practice", "Its attribute na-value is text, if there is one.", "Set na-value to NA or NaN.", fixed=True),
    Rule("A143", "must", "Its member values is an array of text.", _REWRITE, refused=True),
    Rule("A144", "must", "Its member mask is an array of booleans.", "Write the mask as booleans.", fixed=True, refused=True),
    Rule("A145", "must", "Both have one shape.", _REWRITE, refused=True),
    Rule("A146", "should", "na-value is NA or NaN; anything else is read as NA.", "Set na-value to NA or NaN.", fixed=True),
    Rule("A150", "must", "An awkward array is a group of encoding awkward-array 0.1.0 with attributes form, a JSON text, and length; it has an array, long enough, for each buffer of the form.", _REWRITE, stated=False, refused=True),
    Rule("A151", "must", "Its length is the size of its axis.", _SHAPE, stated=False, refused=True),
    Rule("A152", "practice", "Awkward arrays are experimental; readers other than anndata may not know them.", "Store it in a second form if other tools read the file."),
)  # fmt: skip

RULES: dict[str, Rule] = {rule.id: rule for rule in (*_GENERAL, *_ANNDATA, *_MATRICES, *_FRAMES, *_SCALARS, *_COLUMNS)}
"""Id -> rule, in order."""

_HEAD = """# The rules of an AnnData file

`raggedatlas validate FILE` and `raggedatlas.formats.anndata.validate(path, level)` check these rules; ids are stable. A file that breaks a
**must** cannot be read, or not as intended; the command then exits with code 1. **should** is what the format
recommends. **practice** is what readers tolerate, some with a warning. A single problem can be milder than its rule, never more severe.
Rules marked with \\* are not in AnnData's description of the format; they follow from what its readers and writers do.

Level `metadata` reads attributes, shapes and types; `full` reads every value too, block by block. `--fix COPY` writes a copy in
which everything that needs no guessing is fixed; the file itself is never changed.
Files of anndata 0.5 to 0.7 are reported as such (A11, practice); their encodings need not be declared.
"""


def rules_page() -> str:
    """Return the reference page of all rules, as Markdown."""
    # A test compares docs/reference/anndata-rules.md with this page.
    columns = {
        "needs": lambda rule: rule.depth,
        "fixed in a copy": lambda rule: "yes" if rule.fixed else "",
        "refused by add": lambda rule: "yes" if rule.refused else "",
    }
    return validation.rules_page(_HEAD, RULES.values(), columns)
