"""Data modules for PyTorch Lightning and scvi-tools, over the loader."""

from typing import TYPE_CHECKING

from raggedatlas.model.wings import Wing, lazy_attributes

if TYPE_CHECKING:
    from raggedatlas.wings.trainers.lightning import AtlasDataModule, EpochBatches, split_loader
    from raggedatlas.wings.trainers.scvi import ScviDataModule

WING = Wing(name="trainers")

_HOMES = {
    "AtlasDataModule": "raggedatlas.wings.trainers.lightning",
    "EpochBatches": "raggedatlas.wings.trainers.lightning",
    "ScviDataModule": "raggedatlas.wings.trainers.scvi",
    "split_loader": "raggedatlas.wings.trainers.lightning",
}

__all__ = [
    "WING",
    "AtlasDataModule",
    "EpochBatches",
    "ScviDataModule",
    "split_loader",
]

__getattr__ = lazy_attributes(__name__, _HOMES)
