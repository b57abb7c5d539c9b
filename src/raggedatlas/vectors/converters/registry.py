"""Which converter belongs to what: one dictionary, by ending, by what a folder is, or by name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from raggedatlas.vectors.converters import (
    boundaries,
    graphs,
    ply,
    precomputed_annotations,
    precomputed_draco,
    precomputed_meshes,
    precomputed_skeletons,
    spatialdata,
    stl,
    swc,
    tables,
    tractograms,
    trx,
    wavefront,
)
from raggedatlas.vectors.converters.content import Capabilities, Content
from raggedatlas.vectors.shapes import Shapes

Losses = Callable[[Shapes], Iterable[str]]


@dataclass(frozen=True)
class Converter:
    """A file format of geometry.

    Parameters
    ----------
    what : str
        In a few words.
    endings : tuple of str
        Of its files; none for folders that are told by what is in them.
    read : callable
        ``read(path, **options) -> Content``.
    write : callable
        ``write(content, path, **options)``, to a path where nothing is.
    holding : Holding
        What it can hold.
    losses : callable
        What else is lost of shapes.
    """

    what: str
    endings: tuple[str, ...]
    read: Callable[..., Content]
    write: Callable[..., None]
    holding: Capabilities
    losses: Losses = lambda shapes: ()


CONVERTERS: dict[str, Converter] = {
    "csv": Converter(
        "points as a table with a header",
        (".csv", ".tsv"),
        tables.read_table,
        tables.write_table,
        tables.TABLE_HOLDING,
        tables.channel_losses,
    ),
    "parquet": Converter(
        "points as Parquet",
        (".parquet",),
        tables.read_table,
        tables.write_table,
        tables.TABLE_HOLDING,
        tables.channel_losses,
    ),
    "xyz": Converter(
        "points as lines of numbers",
        (".xyz",),
        tables.read_xyz,
        tables.write_xyz,
        tables.XYZ_HOLDING,
        tables.channel_losses,
    ),
    "swc": Converter("a neuron as SWC", (".swc",), swc.read_swc, swc.write_swc, swc.SWC_HOLDING),
    "swc-folder": Converter(
        "neurons as a folder of SWC files", (), swc.read_swc, swc.write_swc_folder, swc.SWC_FOLDER_HOLDING
    ),
    "obj": Converter(
        "meshes as Wavefront OBJ", (".obj",), wavefront.read_obj, wavefront.write_obj, wavefront.OBJ_HOLDING
    ),
    "ply": Converter(
        "points, meshes or graphs as PLY",
        (".ply",),
        ply.read_ply,
        ply.write_ply,
        ply.PLY_HOLDING,
        ply.ply_losses,
    ),
    "stl": Converter("meshes as STL", (".stl",), stl.read_stl, stl.write_stl, stl.STL_HOLDING, stl.stl_losses),
    "trx": Converter("streamlines as TRX", (".trx",), trx.read_trx, trx.write_trx, trx.TRX_HOLDING, trx.trx_losses),
    "trk": Converter(
        "streamlines of TrackVis",
        (".trk",),
        tractograms.read_tractogram,
        tractograms.write_tractogram,
        tractograms.TRK_HOLDING,
        tractograms.trk_losses,
    ),
    "tck": Converter(
        "streamlines of MRtrix",
        (".tck",),
        tractograms.read_tractogram,
        tractograms.write_tractogram,
        tractograms.TCK_HOLDING,
        tractograms.tck_losses,
    ),
    "graphml": Converter(
        "a graph as GraphML",
        (".graphml",),
        graphs.read_graphml,
        graphs.write_graphml,
        graphs.GRAPHML_HOLDING,
        graphs.graph_losses,
    ),
    "edgelist": Converter(
        "a graph as an edge list and a table of nodes",
        (".edgelist",),
        graphs.read_edges,
        graphs.write_edges,
        graphs.GRAPHML_HOLDING,
        graphs.graph_losses,
    ),
    "geojson": Converter(
        "boundaries, lines or points as GeoJSON",
        (".geojson",),
        boundaries.read_geojson,
        boundaries.write_geojson,
        boundaries.BOUNDARY_HOLDING,
        boundaries.boundary_losses,
    ),
    "geoparquet": Converter(
        "boundaries, lines or points as GeoParquet",
        (".geoparquet",),
        boundaries.read_geoparquet,
        boundaries.write_geoparquet,
        boundaries.BOUNDARY_HOLDING,
        boundaries.boundary_losses,
    ),
    "precomputed-skeletons": Converter(
        "Neuroglancer skeletons",
        (),
        precomputed_skeletons.read_skeletons,
        precomputed_skeletons.write_skeletons,
        precomputed_skeletons.SKELETON_HOLDING,
        precomputed_skeletons.skeleton_losses,
    ),
    "precomputed-meshes": Converter(
        "Neuroglancer meshes",
        (),
        precomputed_meshes.read_meshes,
        precomputed_meshes.write_meshes,
        precomputed_meshes.MESH_HOLDING,
        precomputed_meshes.mesh_losses,
    ),
    "precomputed-draco": Converter(
        "Neuroglancer meshes of several levels of detail, in Draco",
        (),
        precomputed_meshes.read_meshes,
        precomputed_draco.write_draco_meshes,
        precomputed_draco.DRACO_HOLDING,
        precomputed_draco.draco_losses,
    ),
    "precomputed-annotations": Converter(
        "Neuroglancer annotations",
        (),
        precomputed_annotations.read_annotations,
        precomputed_annotations.write_annotations,
        precomputed_annotations.ANNOTATION_HOLDING,
        precomputed_annotations.annotation_losses,
    ),
    "spatialdata": Converter(
        "points or shapes of a SpatialData store",
        (),
        spatialdata.read_spatialdata,
        spatialdata.write_spatialdata,
        spatialdata.SPATIALDATA_HOLDING,
        spatialdata.spatialdata_losses,
    ),
}
"""Name -> converter."""

ENDINGS = {ending: name for name, converter in CONVERTERS.items() for ending in converter.endings}
"""Ending -> name."""
