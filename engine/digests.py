"""Digests of a prompt's pages, by which a cached prefix is found: in an engine's index, and by whoever chooses one."""

from __future__ import annotations

import hashlib

import numpy as np


def root_digest(cache_salt: str | None, adapter: str | None) -> bytes:
    """Digest of no tokens: prompts share pages only under the same salt and adapter."""
    return hashlib.blake2b(repr((cache_salt, adapter)).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def extend_digests(digests: list[bytes], tokens: np.ndarray, page_size: int) -> None:
    """Add to a chain of digests, root first, those of further full pages of int32 `tokens`."""
    for start in range((len(digests) - 1) * page_size, len(tokens) - page_size + 1, page_size):
        data = digests[-1] + tokens[start : start + page_size].tobytes()
        digests.append(hashlib.blake2b(data, digest_size=16).digest())


def short_digests(digests: list[bytes]) -> np.ndarray:
    """Their first 8 bytes, int64 [n]: enough for a guess of what is cached where."""
    return np.frombuffer(b"".join(digests), dtype=np.int64)[::2]
