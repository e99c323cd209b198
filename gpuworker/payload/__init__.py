"""How a Python value becomes bytes in a slot and back, without pickle and without torch.

An area starts on a cache line and holds `meta`, padding to the next multiple of 64, `data`. What the two are depends on the kind:

    GW_KIND_BYTES   meta empty                     data = the bytes
    GW_KIND_STR     meta empty                     data = UTF-8 (lone surrogates pass)
    GW_KIND_ARRAY   meta = dtype, shape, order     data = the elements                         arrays.py
    GW_KIND_TREE    meta = msgpack                 data = its arrays, each on a cache line     tree.py
    GW_KIND_PICKLE  meta empty                     data = a pickle; only where both sides asked for it
    GW_KIND_ERROR   responses only: an exception                                               failure.py

Whatever lies in an area is untrusted: descriptions are copied out once, checked against the area's size, then used.
"""

from gpuworker.payload.arrays import Data, Layout, Parts, array_in, contiguous, parse_layout, view_array, write_data
from gpuworker.payload.codec import array_layout, decode, encode
from gpuworker.payload.failure import decode_error, encode_error

__all__ = [
    "Data",
    "Layout",
    "Parts",
    "array_in",
    "array_layout",
    "contiguous",
    "decode",
    "decode_error",
    "encode",
    "encode_error",
    "parse_layout",
    "view_array",
    "write_data",
]
