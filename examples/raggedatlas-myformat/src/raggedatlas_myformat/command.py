"""The command ``raggedatlas top-guides``."""

from typing import Annotated

import typer

import raggedatlas as ra


def top_guides(
    atlas: Annotated[str, typer.Argument(help="Path or URI of the atlas.")],
    n: Annotated[int, typer.Option(help="How many guides to print.")] = 10,
) -> None:
    """Print the guides with the most counts in the newest snapshot."""
    view = ra.RaggedAtlas.checkout_latest(atlas)
    adata = view.query().spaces("guide_counts").to_anndata()
    totals = adata.to_df().sum().sort_values(ascending=False)
    for guide, total in totals.head(n).items():
        typer.echo(f"{guide}\t{total:.0f}")
