"""Arrays in files outside of the atlas: ranges of bytes of the recorded files, checked, and the chunks that they hold."""

from dataclasses import dataclass

from raggedatlas.store.location import Location


@dataclass(frozen=True)
class LinkedSource:
    """The file or Zarr folder that a dataset is linked to, as this process reaches it.

    Parameters
    ----------
    location : Location
        The file or folder.
    dataset : str
        Name of the dataset, for messages.
    """

    location: Location
    dataset: str
