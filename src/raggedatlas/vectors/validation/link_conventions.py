"""Checks of what a geometry type asks of the links that are stored."""

from raggedatlas.vectors.validation.context import CheckLocation, LevelSummary, ValidationContext

_ENDS = {"mesh": 3, "graph": 2, "skeleton": 1}


def check_kind(checking: ValidationContext, seen: LevelSummary) -> None:
    """Check the links of a level against type and convention."""
    root = checking.root
    if root is None:
        return
    inner, cross = CheckLocation(seen.number, "links/0"), CheckLocation(seen.number, "cross_chunk_links/0")
    n_inner = int(seen.links.clip(0).sum())
    blocks = [checking.block(place) for place in (inner, cross) if checking.node(place) is not None]
    widths = [block["link_width"] for block in blocks if isinstance(block.get("link_width"), int)]
    for kind in root.types:
        for width in widths:
            if width < _ENDS.get(kind, 0) and len(root.types) == 1:
                checking.report(
                    "V056", inner, f"its links have {width} ends; those of a {kind} have {_ENDS[kind]} or more."
                )
    if root.types == ("point_cloud",) and n_inner:
        checking.report("V056", inner, f"a point cloud has {n_inner:,} links.", "practice")
    if root.links_convention == "implicit_sequential" and n_inner and set(root.types) != {"point_cloud"}:
        checking.report("V060", inner, f"{n_inner:,} links are stored, though they follow from the order of vertices.")
    linked = {"mesh", "graph"} & set(root.types)
    if root.links_convention == "explicit" and linked and not blocks and not n_inner and seen.widest > 1:
        text = f"no links are stored, though they are explicit and a {min(linked)} has fragments of {seen.widest} vertices."
        checking.report("V049", CheckLocation(seen.number), text)
