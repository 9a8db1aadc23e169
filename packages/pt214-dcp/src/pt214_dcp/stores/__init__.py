"""Where checkpoints are kept besides folders: object stores, and what fsspec knows."""

from pt214_dcp.stores.base import Entry, Store
from pt214_dcp.stores.options import StoreOptions
from pt214_dcp.stores.place import Place
from pt214_dcp.stores.resolve import open_store

__all__ = ["Entry", "Place", "Store", "StoreOptions", "open_store"]
