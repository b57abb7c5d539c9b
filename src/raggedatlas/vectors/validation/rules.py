"""The numbered rules of a geometry store: seed 002 §7, and what the rest of its specification says of root and levels.

A rule has the number of the item of seed 002 that it looks after; rules from V110 on follow from what readers do.
"""

from raggedatlas.model.problems import Rule

LEVELS = ("structure", "metadata", "consistency", "conformance", "pyramid")
"""Levels of validation, each with all before it."""

_REWRITE = "Write the store again from its source."
_RESTORE = "Restore it from a copy, or write the store again."
_ROWS = "Write the array again with one row for each."
_META = "Correct the attributes in zarr.json."

_STRUCTURE = (
    Rule("V000", "must", "Every node, chunk and blob can be opened and decoded: nothing is missing, damaged or cut short.", _RESTORE, stated=False),
    Rule("V001", "must", "Every node is Zarr v3: a zarr.json that is read, and no .zattrs, .zgroup or .zarray.", "Write the store again as Zarr v3."),
    Rule("V002", "must", "Each family names itself in zv_array as its place asks; the older key zvf_array is a matter of practice.", _META),
    Rule("V003", "must", "Values are of a standard numeric type that dtype declares; text stands beside objects and groups only.", _REWRITE),
    Rule("V004", "must", "Fragment indexes, manifests and groups are uint8 or byte strings.", _REWRITE),
    Rule("V007", "must", "A store is of one generation that is known, 0.7 or 0.9, in its version and in its arrays.", _REWRITE, stated=False),
    Rule("V009", "must", "A chunk key is as many whole numbers as there are axes, inside the grid; a chunk that is listed but empty is a matter of practice.", "Write the family again, one key for each chunk with data."),
    Rule("V040", "must", "There is no vertex_group_offsets: stores before 0.6 are not read.", _REWRITE, stated=False),
    Rule("V048", "must", "Differences of levels are spelled 0, +N or -N; in 0.9 links lie in arrays named by their offsets.", "Rename the folder."),
)  # fmt: skip

_METADATA = (
    Rule("V005", "must", "The attributes of vertex_fragments hold no count that the blobs have themselves.", "Remove the key."),
    Rule("V012", "must", "vertices declares zv_array, dtype, and the encoding raw or draco; further keys are a matter of practice.", _META),
    Rule("V021", "must", "An attribute declares zv_array, its name, dtype, and the shape of a row.", _META),
    Rule("V022", "must", "channel_names has as many names as a row has values.", "Name each channel once."),
    Rule("V036", "practice", "vertex_fragments declares nothing but zv_array and encoding.", "Remove the key."),
    Rule("V043", "must", "groups declares num_groups, which is how many there are.", _META),
    Rule("V044", "must", "A group attribute names itself groupings_attribute, and has one row for each group.", _ROWS),
    Rule("V050", "must", "Links across levels are there only if cross_level_storage is not none.", "Set cross_level_storage to implicit or explicit, or remove them."),
    Rule("V055", "must", "links declares level_delta, link_width, dtype and num_links, which is how many there are.", _META),
    Rule("V057", "must", "link_fragments belong to links within chunks; there are none without those, nor for other levels.", "Remove them."),
    Rule("V076", "must", "cross_chunk_links declares level_delta, link_width, num_links and sid_ndim, and has so many bytes.", _RESTORE),
    Rule("V079", "must", "Where links go across levels, format_capabilities has multiscale_links.", "Add the token."),
    Rule("V096", "must", "The root declares zv_version, chunk_shape, bounds and geometry_types, and words that are known; axes, chunks, bins and bounds agree.", _META),
    Rule("V097", "must", "A level declares level, vertex_count and arrays_present; above 0 also bin_shape and parent_level, which level 0 has not.", _META),
    Rule("V099", "should", "Tokens of format_capabilities are known; one in required_capabilities that is not known is refused.", "Read it with a release that knows the token."),
)  # fmt: skip

_CONSISTENCY = (
    Rule("V010", "must", "A chunk of vertices is whole rows of as many values as there are axes.", _RESTORE),
    Rule("V011", "must", "Positions are float16 to float64, or integers of 8 to 64 bits.", _REWRITE),
    Rule("V014", "must", "Draco is for meshes only.", _REWRITE),
    Rule("V016", "should", "A vertex lies in the box of its chunk, unless a boundary policy repeats vertices.", "Cut the store again."),
    Rule("V018", "should", "Positions are finite.", "Remove the vertices, or write their positions again."),
    Rule("V019", "must", "A vertex attribute has one row for each vertex of the chunk.", _ROWS),
    Rule("V026", "must", "A fragment index begins with its magic number, version 1 and flags 0.", _RESTORE),
    Rule("V027", "must", "A fragment index has as many runs as bits of its bitmap are set, and no more than fragments.", _RESTORE),
    Rule("V028", "must", "The bits of the bitmap behind the last fragment are 0.", _RESTORE),
    Rule("V030", "must", "Offsets of explicit fragments begin at 0 and do not fall.", _RESTORE),
    Rule("V031", "must", "A fragment index without fragments is 16 bytes.", _RESTORE),
    Rule("V034", "must", "Fragments name rows that the chunk has.", _RESTORE),
    Rule("V041", "must", "A fragment index has the bytes that its head asks for.", _RESTORE),
    Rule("V042", "must", "groups holds int64 object ids, cut by ascending offsets.", _RESTORE),
    Rule("V047", "must", "Groups name objects that there are.", "Remove the ids from the group."),
    Rule("V051", "must", "Links are whole rows of link_width integers, each a row of the chunk's vertices.", _RESTORE),
    Rule("V052", "should", "Links are of the narrowest type that holds the rows of a chunk.", "Write the store again."),
    Rule("V054", "must", "link_fragments have one fragment for each vertex fragment, which together hold every link once.", "Write link_fragments again."),
    Rule("V058", "must", "Links across levels go to a level that there is.", _REWRITE),
    Rule("V064", "must", "Links across chunks or levels decode as inline streams or as records.", _RESTORE, stated=False),
    Rule("V065", "must", "The object index is its manifests by ascending id with nothing between; offsets, where there are, agree.", _RESTORE),
    Rule("V066", "must", "A manifest decodes: modes 0, 1 or 2, not cut short, nothing behind its end.", _RESTORE),
    Rule("V067", "must", "Manifests name chunks and fragments that there are.", _RESTORE),
    Rule("V068", "must", "The object index declares num_objects and sid_ndim, has so many manifests, and ids are different; num_present is a matter of practice.", _RESTORE),
    Rule("V080", "must", "Links across chunks name chunks and rows that there are.", _RESTORE),
    Rule("V081", "should", "The ends of a link across chunks lie in different chunks.", "Store it with the links within the chunk."),
    Rule("V082", "must", "A link attribute has one row for each link of the chunk.", _ROWS),
    Rule("V088", "must", "An attribute of links across chunks has one row for each of them.", _ROWS),
    Rule("V090", "must", "An object attribute has one row for each object.", _ROWS),
    Rule("V092", "must", "A fragment attribute has one row for each fragment of the chunk.", _ROWS),
    Rule("V098", "must", "vertex_count is how many vertices the chunks of the level hold.", _META),
    Rule("V110", "must", "A level that says fragments_tile has fragments that are the rows of each chunk in order.", "Remove fragments_tile from the level.", stated=False),
    Rule("V112", "should", "Vertices lie within the bounds of the root.", "Widen bounds.", stated=False),
    Rule("V113", "should", "A chunk of points without objects that is cut into bins has no more fragments than bins.", "Write the store again, with one fragment for each bin.", stated=False),
)  # fmt: skip

_CONFORMANCE = (
    Rule("V049", "must", "Where links are explicit, a mesh or graph with fragments of several vertices has links.", "Write the links."),
    Rule("V056", "must", "A link of a mesh has 3 ends or more, of a graph or skeleton 2, and a point cloud has none (which is a matter of practice).", _REWRITE),
    Rule("V060", "must", "Where links are implicit_sequential, no links within chunks are stored.", "Remove links/0, or set links_convention."),
    Rule("V062", "must", "The convention goes with the type: explicit for meshes and graphs, implicit_sequential for lines, explicit or with branches for skeletons.", _META),
    Rule("V070", "must", "Under the identity convention there is one chunk and no object index.", "Write an object index."),
    Rule("V071", "must", "Objects with attributes or groups have an object index, unless under the identity convention.", "Write an object index."),
    Rule("V114", "should", "Fragments of points without objects that are cut into bins are the bins in order, last axis fastest, and hold their vertices; the first 64 chunks are looked into.", "Write the store again, with one fragment for each bin.", stated=False),
)  # fmt: skip

_PYRAMID = (
    Rule("V100", "must", "Levels nest: chunks of a level are whole multiples of the root's, its bins divide its chunks, and bin_ratio is what bins say.", _META),
    Rule("V101", "must", "A level that preserves ids has parent_level, inherited_num_objects as its parent has objects, and ids of its parent; that a level has more vertices than its parent is a matter of practice.", _REWRITE),
)  # fmt: skip

_ALL = (_STRUCTURE, _METADATA, _CONSISTENCY, _CONFORMANCE, _PYRAMID)
DEPTH_OF: dict[str, int] = {rule.id: depth for depth, rules in enumerate(_ALL, 1) for rule in rules}
"""Id -> number of the level that looks for it, from 1."""

RULES: dict[str, Rule] = {
    rule.id: rule for rule in sorted((rule for rules in _ALL for rule in rules), key=lambda r: r.id)
}
"""Id -> rule, in order."""

_HEAD = """# The rules of a geometry store

`raggedatlas validate STORE` and `raggedatlas.vectors.validate(location, level)` look for these in both layouts; ids are stable. A store
that breaks a **must** cannot be read, or not as it was meant; the command then ends with exit code 1. **should** is what the format
recommends. **practice** is what readers cope with. A single finding can be milder than its rule, never worse.
Rules marked with \\* are not in the description of the format; they follow from what its readers and writers do.

Levels are those of the public specification, each with all before it: 1 `structure` (nodes, names, keys), 2 `metadata` (root, levels, arrays),
3 `consistency` (every value, a few chunks at a time), 4 `conformance` (what a geometry type asks), 5 `pyramid` (levels together).
Memory is bounded by the chunks of one step (64), and by the object index and what counts the chunks: some tens of bytes for each of them.
"""


def rules_page() -> str:
    """Write the page of the reference that lists all rules, as Markdown."""
    lines = [_HEAD, "| rule | severity | level | what holds, and the way out |", "|---|---|---|---|"]
    for rule in RULES.values():
        severity = rule.level if rule.stated else f"{rule.level} \\*"
        text = f"{rule.sentence} {rule.mend}".replace("|", "\\|")
        lines.append(f"| {rule.id} | {severity} | {DEPTH_OF[rule.id]} {LEVELS[DEPTH_OF[rule.id] - 1]} | {text} |")
    return "\n".join(lines) + "\n"
