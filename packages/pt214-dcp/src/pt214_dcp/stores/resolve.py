"""From a name to the store that it means.

s3:// gs:// az:// abfs:// memory://     obstore       pip install "pt214-dcp[objects]"
any other scheme                        fsspec        pip install "pt214-dcp[fsspec]"
no scheme, or file://                   a folder
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pt214_dcp.errors import BadPath, CheckpointError
from pt214_dcp.stores.base import Store
from pt214_dcp.stores.local import Folder
from pt214_dcp.stores.options import StoreOptions
from pt214_dcp.stores.place import Place, Where

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PathLike = str | os.PathLike[str] | Place
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)://(.*)", re.DOTALL)
_OBJECTS = {"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "memory"}
_ENDPOINTS = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url")
_memory: dict[str, ObjectStore] = {}
_lock = threading.Lock()


def where(path: PathLike) -> Where:
    """What a caller's path means: a folder's absolute path, or a place in a store.

    Raises:
        CheckpointError: it is no path at all.
        BadPath: a store can't be opened under that name.
    """
    if isinstance(path, Place):
        return path
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"path is {path!r}; the name of a folder is needed")
    found = _SCHEME.fullmatch(text)
    if found is None:
        return Path(text).absolute()
    if found[1].lower() == "file":
        return Path(found[2]).absolute()
    return Place(open_store(text))


def open_store(url: str | os.PathLike[str], options: StoreOptions | None = None) -> Store:
    """The store at ``url``; nothing is read or written yet.

    Args:
        url: such as ``s3://bucket/prefix``, or a folder's path.
        options: how to talk to it.

    Raises:
        BadPath: the URL or ``options.config`` is not what the store takes.
        ModuleNotFoundError: the package for this kind of store is not installed.

    >>> store = open_store("memory://example")
    >>> store.write_new("greeting", [memoryview(b"hello")], lambda: None)
    5
    >>> store.read("greeting", 1, 3)
    b'ell'
    """
    chosen, text = options or StoreOptions(), os.fspath(url)
    found = _SCHEME.fullmatch(text)
    scheme = found[1].lower() if found else "file"
    if scheme == "file":
        return Folder(Path(found[2] if found else text).absolute())
    if scheme not in _OBJECTS:
        from pt214_dcp.stores.by_fsspec import open_fsspec

        return open_fsspec(text, chosen)
    return _open_objects(scheme, text, chosen)


def _open_objects(scheme: str, url: str, options: StoreOptions) -> Store:
    try:
        from obstore import exceptions
        from obstore.store import MemoryStore, from_url
    except ImportError as error:
        raise ModuleNotFoundError(
            f'{url}: object stores need obstore: pip install "pt214-dcp[objects]"'
        ) from error
    from pt214_dcp.stores.objects import Objects

    if scheme == "memory":
        with _lock:  # the same name is the same store, as with all others
            raw: ObjectStore = _memory.setdefault(url.rstrip("/"), MemoryStore())
        return Objects(raw, url, options)
    client: Any = {"timeout": f"{options.timeout_s:g}s"}
    if _plain_http(options.config):
        client["allow_http"] = True
    retry: Any = {
        "max_retries": options.max_retries,
        "retry_timeout": timedelta(seconds=options.retry_s),
    }
    try:
        raw = from_url(url, config=dict(options.config), client_options=client, retry_config=retry)  # type: ignore[call-overload]  # one overload a store; the URL decides
    except (exceptions.BaseError, ValueError) as error:
        text = str(error).partition("\n\nDebug source")[0]
        raise BadPath(f"{url}: no store can be opened: {text}") from error
    return Objects(raw, url, options)


def _plain_http(config: Mapping[str, Any]) -> bool:
    """Whether the caller named an endpoint without TLS, which he then means."""
    named = [config.get(name) for name in _ENDPOINTS]
    named += [os.environ.get(name) for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")]
    return any(str(endpoint).startswith("http://") for endpoint in named if endpoint)
