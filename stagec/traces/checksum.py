"""The manifest's checksum of itself: its last entry, over all bytes before the digits.

The manifest has the checksums of all other files, so with its own no byte of a folder can change
unseen.
"""

import hashlib
import json
from collections.abc import Mapping

CHECKSUM = "sha256"
#: Manifests of this version and later ones have it.
CHECKSUM_VERSION = 2
_DIGITS = 64
_HEAD, _TAIL = f'"{CHECKSUM}": "'.encode(), b'"\n}\n'


def with_checksum(manifest: Mapping[str, object]) -> bytes:
    """The bytes of a manifest, with its checksum."""
    text = json.dumps({**manifest, CHECKSUM: ""}, indent=1).encode() + b"\n"
    head = text[: -len(_TAIL)]
    return head + hashlib.sha256(head).hexdigest().encode() + _TAIL


def is_intact(data: bytes) -> bool:
    """Whether these are the bytes of a manifest that `with_checksum` gave."""
    end = len(data) - len(_TAIL)
    head, digits = data[: max(0, end - _DIGITS)], data[max(0, end - _DIGITS) : end]
    whole = head.endswith(_HEAD) and data.endswith(_TAIL)
    return whole and digits == hashlib.sha256(head).hexdigest().encode()
