"""Filling a slot in place."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpuworker._native import lib
from gpuworker.client import remedies
from gpuworker.client.link import Draft
from gpuworker.client.pending import Pending
from gpuworker.client.steps import run
from gpuworker.errors import SegmentError
from gpuworker.payload import array_layout

if TYPE_CHECKING:
    from gpuworker.client.client import Client


class Reservation:
    """A claimed slot seen as an array; made by `Client.reserve`."""

    def __init__(self, client: Client, shape: int | tuple[int, ...], dtype: DTypeLike, deadline_ns: int) -> None:
        self._array: NDArray[Any] | None = None
        self._client, self._deadline_ns = client, deadline_ns
        self._shape, self._dtype = shape, np.dtype(dtype)
        self._meta, self._start, self._total = array_layout(shape, self._dtype)
        self._draft: Draft | None = None

    def __enter__(self) -> NDArray[Any]:
        client = self._client
        link = client._live_link(self._deadline_ns)
        try:
            draft = link.draft(self._total)
            while isinstance(draft, int):
                link, ticket = run(client._claim(draft, self._deadline_ns))
                draft = link.draft(self._total, ticket)
            draft.area[: len(self._meta)] = self._meta
            self._draft = draft
            array: NDArray[Any] = np.ndarray(self._shape, self._dtype, draft.area, self._start)
            self._array = array
            client._reserved[id(array)] = weakref.ref(self)
        except BaseException:
            (client._link or link).undo()
            raise
        link.settle()
        return array

    def enqueue(self, deadline_ns: int, terms: int) -> Pending:
        """Sends the array where it lies."""
        draft, array = self._draft, self._array
        if draft is None or array is None:
            raise RuntimeError("this reserved array was sent already; reserve another one")
        array.flags.writeable = False  # it is the owner's now
        problem = draft.publish(lib.GW_KIND_ARRAY, len(self._meta), deadline_ns, terms)
        pending = Pending(draft.link, draft.ticket, deadline_ns)
        draft.keep()  # from here on the slot is the Pending's; until here it was the draft's
        self._draft = None
        if problem < 0:
            raise SegmentError(remedies.explain(problem, "the array was reserved before a fork"))
        return pending

    def __exit__(self, *_: object) -> None:
        self._draft = None  # dropped: if it was not sent, its slot goes back
        if self._array is not None:
            self._array.flags.writeable = False
            self._client._reserved.pop(id(self._array), None)
            self._array = None

    def __del__(self) -> None:
        if self._array is not None:  # the block was left by an interrupt between its lines
            self._client._reserved.pop(id(self._array), None)
